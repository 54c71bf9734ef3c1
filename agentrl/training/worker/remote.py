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
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from torch._dynamo.callback import callback_handler

from agentrl.cluster.launchers import listen_for_ranks
from agentrl.cluster.local import THIS_MACHINE, LocalProcess, log_file
from agentrl.cluster.processes import ProcessSpec, set_tcp_timeout
from agentrl.errors import EXIT_PEER_LOST, EXIT_STUCK
from agentrl.rollout.engines.base import engine_facts
from agentrl.training.engine.collectives import run_on_rank_zero
from agentrl.training.engine.heartbeat import INTERVAL, Heartbeat
from agentrl.training.worker.service import (
    WORKER_CALLS,
    CallReply,
    RankConnectionMessage,
    StuckRanks,
    WorkerLostError,
    WorkerRequest,
    WorkerStartup,
    receive_message,
)

if TYPE_CHECKING:
    from agentrl.config import Settings

# Seconds to wait for the worker to start and for ranks to connect. Models may be on slow disks.
_START_SECONDS = 600.0
# Seconds to wait for the worker to release its engine and environment after its connection has ended.
_CLOSE_SECONDS = 30.0
# Seconds to wait for a rank to report its own error and exit after the worker has exited.
_REPORT_SECONDS = 30.0
# Seconds to wait for a rank to exit after the worker has reported a stuck rank. The cause is then known.
_REPORT_SECONDS_AFTER_STUCK = 5.0


class RemoteRolloutService:
    """One rank's connections to the worker's process. Has the methods of :class:`.RolloutService`."""

    def __init__(self, settings: Settings, policy_path: str, *, rank: int, ranks: int, heartbeat: Heartbeat) -> None:
        """Start the worker on rank 0 and connect to it. Collective. Raises WorldError if the worker does not start.

        ``heartbeat`` contains the marks of this rank's main thread, which the worker monitors.
        """
        self._rank = rank
        self._heartbeat = heartbeat
        self._sending = threading.Lock()  # two threads send on the control connection
        self._timeout = settings.training.worker_timeout
        self._process: LocalProcess | None = None
        self._interrupted = threading.Event()
        self._closed = threading.Event()
        listener: socket.socket | None = None

        def listen() -> tuple[tuple[str, int], bytes]:
            nonlocal listener
            listener, address = listen_for_ranks(ranks)
            return address, secrets.token_bytes(32)

        # The worker takes seconds to minutes to start, so ranks receive its address first and wait outside collectives.
        address, key = run_on_rank_zero(listen)
        if listener is not None:
            startup = WorkerStartup(settings=settings, policy_path=policy_path, ranks=ranks, key=key)
            self._connection, self._control = self._start_worker(startup, listener)
        else:
            connect = partial(_connect_to_worker, address, key, settings.cluster.deadline)
            self._connection = connect(RankConnectionMessage(rank=rank, control=False))
            self._control = connect(RankConnectionMessage(rank=rank, control=True))
        heartbeat.shortened = self._send_beat
        callback_handler.register_start_callback(heartbeat.allow_compilation_time)
        threading.Thread(target=self._send_beats_until_worker_exits, daemon=True, name="beat").start()
        self._await_reply("the rollout worker's set-up", _START_SECONDS + engine_facts(settings.rollout).start_seconds)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a function that calls a method of :data:`.WORKER_CALLS` in the worker."""
        if name not in WORKER_CALLS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}", name=name, obj=self)
        return partial(self._request, name)

    def cancel_interruptible_calls(self) -> None:
        """Make the worker cancel its rollouts. Callable from any thread; a call by one rank is enough."""
        self._interrupted.set()
        with contextlib.suppress(OSError), self._sending:  # without a worker there is nothing to cancel
            self._control.send(None)

    def close(self) -> None:
        """Close this rank's connection, which ends the worker."""
        self._closed.set()  # first, because a slow exit of the worker must not count as a stuck rank
        with contextlib.suppress(ValueError):  # torch._dynamo.reset() has removed it
            callback_handler.remove_start_callback(self._heartbeat.allow_compilation_time)
        self._connection.close()
        if self._process is not None:
            self._process.wait_or_kill(_CLOSE_SECONDS)

    # -- communication --------------------------------------------------------------------------------------------

    def _start_worker(self, startup: WorkerStartup, listener: socket.socket) -> tuple[Connection, Connection]:
        """Start the worker's process, and return the connections for calls and for control messages."""
        (calls, worker_calls), (control, worker_control) = Pipe(), Pipe()
        handles = (worker_calls.fileno(), worker_control.fileno(), listener.fileno())
        spec = ProcessSpec(
            role="worker",
            number=0,
            arguments=("-m", "agentrl.training.worker.process", *map(str, handles)),
            environment={"RANK": None, "WORLD_SIZE": None},
            log=log_file(startup.settings.run_path.absolute(), THIS_MACHINE.node, "worker", 0),
        )
        self._process = LocalProcess(spec, THIS_MACHINE, handles)
        for inherited in (worker_calls, worker_control, listener):
            inherited.close()
        calls.send(startup)
        return calls, control

    def _request(self, name: str, *args: object, **kwargs: object) -> object:
        call = WORKER_CALLS[name]
        arguments = call.bind_arguments(*args, **kwargs)
        waiting_for = call.waiting_for.format(**arguments)
        with contextlib.suppress(OSError):  # the worker has exited, but its last message may be unread
            if not self._connection.poll():
                sent = arguments if self._rank == 0 else {}
                self._connection.send(WorkerRequest(name=name, waiting_for=waiting_for, arguments=sent))
        return self._await_reply(waiting_for, self._timeout, self._interrupted if call.interruptible else None)

    def _await_reply(self, waiting_for: str, seconds: float, stops: threading.Event | None = None) -> object:
        """Return the value of the next reply, or raise the error that it reports."""
        self._heartbeat.mark_wait_start(waiting_for)
        try:
            reply: CallReply = receive_message(
                self._connection,
                seconds=seconds,
                waiting_for=waiting_for,
                stop_requested=stops,
                while_waiting=self._heartbeat.repeat_mark,
            )
        except WorkerLostError as error:
            raise WorkerLostError(f"rollout worker: {error}{self._describe_exit()}") from error
        self._heartbeat.mark_work_start(f"the work after waiting for {waiting_for}")
        if reply.error is not None:
            raise reply.error
        return reply.value

    def _send_beats_until_worker_exits(self) -> None:
        """Send a heartbeat every second until the worker exits or reports stuck ranks, then end this process.

        The main thread first gets some seconds to exit by itself, unless this rank is stuck. The main thread may be
        blocked in a collective.
        """
        stuck = StuckRanks(ranks=[], message="the rollout worker or another rank has exited")
        seconds, code = _REPORT_SECONDS, EXIT_PEER_LOST
        with contextlib.suppress(EOFError, OSError):
            while not self._control.poll(INTERVAL):
                self._send_beat()
            stuck, seconds = self._control.recv(), _REPORT_SECONDS_AFTER_STUCK
        if self._rank in stuck.ranks:
            seconds, code = 0.0, EXIT_STUCK
        if not self._closed.wait(seconds):
            print(f"rank {self._rank}: {stuck.message}", file=sys.stderr, flush=True)
            os._exit(code)
        self._control.close()

    def _send_beat(self) -> None:
        """Send the latest heartbeat, unless the connection is full and sending would block."""
        writable = select.poll()
        with contextlib.suppress(OSError), self._sending:  # the worker has exited, but its last message may be unread
            writable.register(self._control.fileno(), select.POLLOUT)
            if writable.poll(0):
                self._control.send(self._heartbeat.beat)

    def _describe_exit(self) -> str:
        if self._process is None:
            return ""
        code = self._process.wait(1.0)
        if code is None:
            return ""
        if code >= 0:
            return f" (it exited with code {code})"
        return f" (it was killed by {signal.Signals(-code).name}; the system sends SIGKILL when memory runs out)"


def _connect_to_worker(
    address: tuple[str, int], key: bytes, tcp_timeout: float, caller: RankConnectionMessage
) -> Connection:
    """Connect to the worker in a thread, because neither the connection nor the handshake has a deadline."""
    outcomes: queue.Queue[Connection | Exception] = queue.Queue()

    def work() -> None:
        try:
            connection = Client(address, authkey=key)
            set_tcp_timeout(connection, tcp_timeout)
            connection.send(caller)
            outcomes.put(connection)
        except (OSError, EOFError) as error:
            outcomes.put(error)

    threading.Thread(target=work, daemon=True, name="connect-to-worker").start()
    try:
        outcome = outcomes.get(timeout=_START_SECONDS)
    except queue.Empty:
        raise WorkerLostError(f"could not reach the rollout worker at {address} within {_START_SECONDS:g} s") from None
    if isinstance(outcome, Exception):
        raise WorkerLostError(f"cannot reach the rollout worker at {address}: {outcome}") from outcome
    return outcome
