"""The process of the rollout worker: ``python -m agentrl.training.worker.process CALLS CONTROL LISTENER``.

The arguments are file descriptors that rank 0 passes. CALLS and CONTROL are pipes for calls and for control messages
(heartbeats and interrupts). LISTENER is the socket on which every other rank opens two connections for the same
purposes. The process exits when any rank exits or is stuck. It ignores signals, because launchers send them to every
process. Ranks request a stop over their control connections.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait

from agentrl.cluster.launchers import count_local_ranks
from agentrl.cluster.processes import set_tcp_timeout
from agentrl.errors import SettingsError, WorldError, reported_exit_code
from agentrl.training.engine.determinism import count_computing_processes, set_determinism, set_threads
from agentrl.training.engine.heartbeat import INTERVAL, HeartbeatMonitor
from agentrl.training.worker.local import LocalRolloutService
from agentrl.training.worker.service import (
    CallReply,
    InterruptedRunError,
    RankConnectionMessage,
    StuckRanks,
    WorkerLostError,
    WorkerRequest,
    WorkerStartup,
)
from agentrl_envs.registry import load_plugins

_CONNECT_SECONDS = 600.0  # seconds to wait for all ranks to connect
_EXIT_SECONDS = 20.0  # seconds that this process may take to exit cleanly after a rank has exited


class _RankLostError(Exception):
    """A rank's connection closed, or its main thread is stuck."""


class WorkerServer:
    """Receives requests on one thread, and executes each on the main thread once all ranks have sent it."""

    def __init__(self, rank_zero: Connection, control: Connection, listener: socket.socket) -> None:
        """``rank_zero`` and ``control`` are rank 0's connections; the other ranks connect at ``listener``."""
        self._connections = {0: rank_zero}
        self._controls = {0: control}
        self._listener = listener
        self._requests: queue.Queue[tuple[int, WorkerRequest] | None] = queue.Queue()
        self._interrupt: Callable[[], None] | None = None
        self._interrupted = False
        self._lost: str | None = None
        self._lock = threading.Lock()

    # -- connections ----------------------------------------------------------------------------------------------

    def accept_ranks_and_listen(self, startup: WorkerStartup) -> None:
        """Accept the other ranks' connections, then listen to all ranks."""
        arrived: queue.Queue[tuple[RankConnectionMessage, Connection]] = queue.Queue()
        threading.Thread(target=_accept, args=(self._listener, startup, arrived), daemon=True, name="accept").start()
        deadline = time.monotonic() + _CONNECT_SECONDS
        while len(self._connections) + len(self._controls) < 2 * startup.ranks:
            try:
                caller, connection = arrived.get(timeout=max(0.0, min(1.0, deadline - time.monotonic())))
                (self._controls if caller.control else self._connections)[caller.rank] = connection
            except queue.Empty:
                if self._connections[0].poll():  # rank 0 sends nothing before the first reply, so it has exited
                    sys.exit(1)  # no message: the launcher of rank 0 reports the failure
                if time.monotonic() >= deadline:
                    missing = sorted(set(range(startup.ranks)) - set(self._connections))
                    raise _RankLostError(f"ranks {missing} did not connect") from None
        monitor = HeartbeatMonitor(startup.ranks, deadline=startup.settings.cluster.deadline)
        threading.Thread(target=self._receive_messages, args=(monitor,), daemon=True, name="receive").start()

    def _receive_messages(self, monitor: HeartbeatMonitor) -> None:
        """Queue requests, record heartbeats and cancel on interrupts, until a rank exits or is stuck."""
        calls = {connection: rank for rank, connection in self._connections.items()}
        controls = {connection: rank for rank, connection in self._controls.items()}
        while True:
            for ready in wait([*calls, *controls], timeout=INTERVAL):
                if not isinstance(ready, Connection):
                    raise TypeError(f"expected a connection, got {ready!r}")
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    rank = {**calls, **controls}[ready]
                    self._shut_down(f"training rank {rank} disconnected")
                    return
                if ready in calls:
                    self._requests.put((calls[ready], message))
                elif message is None:
                    self._cancel()
                else:
                    monitor.record_heartbeat(controls[ready], message, time.monotonic())
            now = time.monotonic()
            if ranks := monitor.stuck_ranks(now):
                text = "; ".join(monitor.describe_stuck_rank(rank, now) for rank in ranks)
                self._report_stuck_ranks_and_shut_down(ranks, text)
                return

    def _report_stuck_ranks_and_shut_down(self, ranks: list[int], message: str) -> None:
        """Report stuck ranks on the console and to all ranks, and shut down."""
        print(f"rollout worker: {message}", file=sys.stderr, flush=True)
        for control in self._controls.values():
            with contextlib.suppress(OSError):  # a rank that has exited needs no message
                control.send(StuckRanks(ranks=ranks, message=message))
        self._shut_down(message)

    def _shut_down(self, why: str) -> None:
        """Wake the main thread because a rank is lost, and end the process if shutting down takes too long."""
        self._lost = why
        timer = threading.Timer(_EXIT_SECONDS, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        self._cancel()
        self._requests.put(None)

    def _cancel(self) -> None:
        with self._lock:
            self._interrupted = True
            if self._interrupt is not None:
                self._interrupt()

    # -- requests -------------------------------------------------------------------------------------------------

    def serve(self, startup: WorkerStartup) -> None:
        """Create the service, then execute requests until a rank exits or a request fails."""
        service: LocalRolloutService | None = None
        try:
            load_plugins(startup.settings.plugins)
            service = LocalRolloutService(startup.settings, startup.policy_path, ranks=startup.ranks)
            with self._lock:
                self._interrupt = service.cancel_interruptible_calls
                if self._interrupted:
                    service.cancel_interruptible_calls()
            self._reply_to_all(CallReply())
            self._execute_requests(service)
        except _RankLostError as error:
            self._reply_to_all(CallReply(error=WorkerLostError(str(error))))
        except Exception as error:
            code = reported_exit_code(error)
            if code is None:
                raise
            kind = SettingsError if code == SettingsError.exit_code else WorldError
            self._reply_to_all(CallReply(error=kind(str(error))))
        finally:
            if service is not None:
                service.close()

    def _execute_requests(self, service: LocalRolloutService) -> None:
        """Execute each request once all ranks have sent it. Raises _RankLostError once a rank is lost."""
        waiting: dict[int, WorkerRequest] = {}
        while True:
            received = self._requests.get()
            if received is None:
                raise _RankLostError(self._lost)
            rank, request = received
            waiting[rank] = request
            if len(waiting) < len(self._connections):
                continue
            if len({(request.name, request.waiting_for) for request in waiting.values()}) > 1:
                raise RuntimeError(f"the ranks made different calls: {waiting}")
            self._execute_and_reply(service, waiting[0])
            waiting.clear()

    def _execute_and_reply(self, service: LocalRolloutService, request: WorkerRequest) -> None:
        """Execute a request and reply to every rank."""
        try:
            values: list[object]
            if request.name == "roll_out_and_plan_rank":  # each rank receives its own plan
                values = [*service.roll_out_and_plan(**request.arguments)]
            else:
                values = [getattr(service, request.name)(**request.arguments)] * len(self._connections)
        except InterruptedRunError:
            if self._lost is not None:
                raise _RankLostError(self._lost) from None
            self._reply_to_all(CallReply(error=InterruptedRunError()))
            return
        for rank, value in enumerate(values):
            self._send(rank, CallReply(value=value))

    def _reply_to_all(self, reply: CallReply) -> None:
        for rank in self._connections:
            self._send(rank, reply)

    def _send(self, rank: int, reply: CallReply) -> None:
        with contextlib.suppress(OSError):  # the receiving thread detects that a rank has exited
            self._connections[rank].send(reply)


def _accept(
    listener: socket.socket, startup: WorkerStartup, arrived: queue.Queue[tuple[RankConnectionMessage, Connection]]
) -> None:
    while True:
        with contextlib.suppress(AuthenticationError, OSError, EOFError):  # the client is not a rank of this run
            connection = Connection(listener.accept()[0].detach())
            set_tcp_timeout(connection, startup.settings.cluster.deadline)
            deliver_challenge(connection, startup.key)
            answer_challenge(connection, startup.key)
            arrived.put((connection.recv(), connection))


def serve_ranks() -> None:
    """Serve requests until a rank exits."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    calls, control = (Connection(int(handle)) for handle in sys.argv[1:3])
    listener = socket.socket(fileno=int(sys.argv[3]))
    try:
        startup: WorkerStartup = calls.recv()
    except EOFError:  # rank 0 has exited, for example because of a stop signal
        sys.exit(1)
    set_determinism(startup.settings.training)
    # A synchronous worker may use every core, because the ranks wait for it.
    processes = 1
    if startup.settings.rollout.schedule != "synchronous":
        processes = count_computing_processes(startup.settings, ranks=count_local_ranks(startup.ranks))
    set_threads(startup.settings, processes=processes)
    server = WorkerServer(calls, control, listener)
    try:
        server.accept_ranks_and_listen(startup)
    except _RankLostError as error:
        print(f"rollout worker: {error}", file=sys.stderr)
        sys.exit(1)
    server.serve(startup)


if __name__ == "__main__":
    serve_ranks()
