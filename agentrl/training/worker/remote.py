"""Client of a rollout worker in a separate process, for training ranks.

Rank 0 starts the worker and communicates over inherited pipes. The other ranks connect over TCP with a random key that
rank 0 broadcasts. The worker exits when any rank exits or is stuck, and the ranks exit when the worker does.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any, cast

from torch._dynamo.callback import callback_handler

from agentrl.cluster.launchers import listen_for_ranks
from agentrl.cluster.local import THIS_MACHINE, LocalProcess, log_file
from agentrl.cluster.processes import ProcessSpec, set_tcp_timeout
from agentrl.errors import SettingsError, WorldError
from agentrl.rollout.engines.base import engine_facts
from agentrl.training.engine.deepspeed_engine import run_on_rank_zero
from agentrl.training.engine.heartbeat import INTERVAL, Heartbeat
from agentrl.training.worker.service import (
    EXIT_PEER_LOST,
    EXIT_STUCK,
    WORKER_CALLS,
    CallFailure,
    CallReply,
    InterruptedRunError,
    RankConnection,
    RolloutService,
    StuckRanks,
    WorkerLostError,
    WorkerRequest,
    WorkerStartup,
    receive_message,
)

if TYPE_CHECKING:
    from agentrl.config import Settings

# Seconds for the worker to start and for ranks to connect; models may be on slow disks.
_START = 600.0
# Seconds for the worker to release its engine and environment after its connection has ended.
_END = 30.0
# Seconds for a rank to report its own error and exit after the worker has exited.
_LAST_WORDS = 30.0
# Seconds to wait for a rank to exit when a stuck rank is the known cause: no other report is expected.
_FEW_WORDS = 5.0


def open_remote_service(
    settings: Settings, policy_path: str, *, rank: int, ranks: int, heartbeat: Heartbeat
) -> RolloutService:
    """Open a worker in a separate process. Collective. Raises WorldError if the worker does not start.

    ``heartbeat`` contains the marks of this rank's main thread, which the worker monitors.
    """
    return cast("RolloutService", RemoteService(settings, policy_path, rank=rank, ranks=ranks, heartbeat=heartbeat))


@dataclass(frozen=True, kw_only=True)
class _Endpoint:
    """The address at which the worker listens."""

    address: tuple[str, int]
    key: bytes


class RemoteService:
    """One rank's connections to the worker's process. Create it with :func:`open_remote_service`."""

    def __init__(self, settings: Settings, policy_path: str, *, rank: int, ranks: int, heartbeat: Heartbeat) -> None:
        self._rank = rank
        self._heartbeat = heartbeat
        self._sending = threading.Lock()  # of the control connection, on which two threads send
        self._seconds = settings.training.worker_timeout
        self._process: LocalProcess | None = None
        self._interrupted = threading.Event()
        self._closed = threading.Event()
        door: socket.socket | None = None

        def open_door() -> _Endpoint:
            nonlocal door
            door, address = listen_for_ranks(ranks)
            return _Endpoint(address=address, key=secrets.token_bytes(32))

        # The worker takes seconds to minutes to start: ranks receive its address first and wait outside collectives.
        place = run_on_rank_zero(open_door)
        if door is not None:
            startup = WorkerStartup(settings=settings, policy_path=policy_path, ranks=ranks, key=place.key)
            self._connection, self._control = self._start(startup, door)
        else:
            silence = settings.cluster.deadline
            self._connection = _connect(place, RankConnection(rank=rank, control=False), silence)
            self._control = _connect(place, RankConnection(rank=rank, control=True), silence)
        heartbeat.shortened = self._send_beat
        callback_handler.register_start_callback(heartbeat.allow_compilation)
        threading.Thread(target=self._beat_and_end_with_worker, daemon=True, name="beat").start()
        self._answer("the rollout worker's set-up", _START + engine_facts(settings.rollout).start_seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that calls a method of :data:`CALLS` in the worker."""
        if name not in WORKER_CALLS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        return partial(self._request, name)

    def interrupt(self) -> None:
        """Make the worker cancel its rollouts. Callable from any thread; a call by one rank is enough."""
        self._interrupted.set()
        with contextlib.suppress(OSError), self._sending:  # without a worker there is nothing to cancel
            self._control.send(None)

    def close(self) -> None:
        """Close this rank's connection, which ends the worker."""
        self._closed.set()  # first, because a slow exit of the worker must not count as a stuck rank
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed it
            callback_handler.remove_start_callback(self._heartbeat.allow_compilation)
        self._connection.close()
        if self._process is not None:
            self._process.wait_or_kill(_END)

    # -- communication --------------------------------------------------------------------------------------------

    def _start(self, startup: WorkerStartup, door: socket.socket) -> tuple[Connection, Connection]:
        (talk, their_talk), (control, their_control) = Pipe(), Pipe()
        handles = (their_talk.fileno(), their_control.fileno(), door.fileno())
        spec = ProcessSpec(
            role="worker",
            number=0,
            arguments=("-m", "agentrl.training.worker.process", *map(str, handles)),
            environment={"RANK": None, "WORLD_SIZE": None},
            log=log_file(startup.settings.run_path.absolute(), THIS_MACHINE.node, "worker", 0),
        )
        self._process = LocalProcess(spec, THIS_MACHINE, handles)
        for theirs in (their_talk, their_control, door):
            theirs.close()
        talk.send(startup)
        return talk, control

    def _request(self, name: str, *args: object, **kwargs: object) -> object:
        call = WORKER_CALLS[name]
        arguments = call.bind_arguments(*args, **kwargs)
        waiting_for = call.waiting_for.format(**arguments)
        with contextlib.suppress(OSError):  # the worker is gone, but its last message may still be unread
            if not self._connection.poll():
                own = arguments if self._rank == 0 else {}
                self._connection.send(WorkerRequest(name=name, waiting_for=waiting_for, arguments=own))
        return self._answer(waiting_for, self._seconds, self._interrupted if call.interruptible else None)

    def _answer(self, waiting_for: str, seconds: float, stops: threading.Event | None = None) -> object:
        self._heartbeat.start_waiting(waiting_for)
        try:
            reply: CallReply = receive_message(
                self._connection,
                seconds=seconds,
                waiting_for=waiting_for,
                stop_requested=stops,
                while_waiting=self._heartbeat.refresh,
            )
        except WorkerLostError as error:
            raise WorkerLostError(f"rollout worker: {error}{self._how_it_ended()}") from error
        self._heartbeat.start_work(f"the work after waiting for {waiting_for}")
        if reply.failure is not None:
            raise _error_of(reply.failure)
        return reply.value

    def _beat_and_end_with_worker(self) -> None:
        """Send a heartbeat every second. Exit soon after the worker, because a rank in a collective may not notice."""
        stuck = StuckRanks(ranks=[], message="the rollout worker or another rank has exited")
        patience, code = _LAST_WORDS, EXIT_PEER_LOST
        with contextlib.suppress(EOFError, OSError):
            while not self._control.poll(INTERVAL):
                self._send_beat()
            stuck, patience = self._control.recv(), _FEW_WORDS
        if self._rank in stuck.ranks:
            patience, code = 0.0, EXIT_STUCK
        if not self._closed.wait(patience):
            print(f"rank {self._rank}: {stuck.message}", file=sys.stderr, flush=True)
            os._exit(code)
        self._control.close()

    def _send_beat(self) -> None:
        """Send the latest heartbeat, unless the connection is full and sending would block."""
        writable = select.poll()
        with contextlib.suppress(OSError), self._sending:  # the worker is gone, but its last message may be unread
            writable.register(self._control.fileno(), select.POLLOUT)
            if writable.poll(0):
                self._control.send(self._heartbeat.beat)

    def _how_it_ended(self) -> str:
        if self._process is None:
            return ""
        code = self._process.wait(1.0)
        if code is None:
            return ""
        if code >= 0:
            return f" (it exited with code {code})"
        return f" (it was killed by {signal.Signals(-code).name}, which the system sends when memory runs out)"


def _error_of(failure: CallFailure) -> Exception:
    if failure.interrupted:
        return InterruptedRunError()
    if failure.lost:
        return WorkerLostError(failure.message)
    kind = SettingsError if failure.exit_code == SettingsError.exit_code else WorldError
    return kind(failure.message)


def _connect(place: _Endpoint, caller: RankConnection, silence: float) -> Connection:
    """Connect to the worker in a thread, because neither the connection nor the handshake has a deadline."""
    done: queue.Queue[Connection | Exception] = queue.Queue()

    def work() -> None:
        try:
            connection = Client(place.address, authkey=place.key)
            set_tcp_timeout(connection, silence)
            connection.send(caller)
            done.put(connection)
        except (OSError, EOFError) as error:
            done.put(error)

    threading.Thread(target=work, daemon=True, name="connect-to-worker").start()
    try:
        outcome = done.get(timeout=_START)
    except queue.Empty:
        raise WorkerLostError(f"could not reach the rollout worker at {place.address} within {_START:g} s") from None
    if isinstance(outcome, Exception):
        raise WorkerLostError(f"cannot reach the rollout worker at {place.address}: {outcome}") from outcome
    return outcome
