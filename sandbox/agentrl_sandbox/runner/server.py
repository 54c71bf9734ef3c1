"""The single-threaded fork server: reads programs from the client, runs them in forks of zygotes, and watches them.

The server stores the texts and outputs of programs and never forks. Zygotes store neither and fork the children.

    client -> server   {"op": "run", "id", "number", ...CallHeader} program stdin file...
                       {"op": "cancel", "id"} · {"op": "open", "id", "number"}
                       {"op": "fork", "id", "number", "fork"} · {"op": "close", "id", "number"}
    server -> client   {"op": "hello", "why", "layers"} · {"op": "ready"}
                       {"op": "done", "id", ...ExecutionHeader} stdout stderr file...
                       {"op": "opened", "id"} · {"op": "closed", "id"} · {"op": "refused", "id", "kind", "why"}
                       {"op": "ended", "number", "why"}; a session has a number
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping

from agentrl_sandbox.call import ExecutionHeader, Frame, FrameBuffer, build_execution_frame, pack_frame
from agentrl_sandbox.runner import cleanup, kernel
from agentrl_sandbox.runner.child import (
    detect_available_layers,
    enter_namespaces,
    enter_user_namespace_as_root,
    has_separate_users,
)
from agentrl_sandbox.runner.config import (
    SCRATCH_VARIABLE,
    ProcessMessage,
    RunnerConfig,
    ServerRequest,
    needs_science_interpreter,
)
from agentrl_sandbox.runner.program import (
    Ending,
    LimitChecker,
    OutputCapture,
    Program,
    RequestedRun,
    ZygoteHandle,
    determine_ending,
    prepare_program,
)
from agentrl_sandbox.runner.sessions import SESSION_ZYGOTE, SessionManager
from agentrl_sandbox.runner.usage import measure_usage
from agentrl_sandbox.types import Outcome

_CHECK_SECONDS = 0.1  # seconds between checks of resource usage
_MAX_READ_BYTES = 1 << 20  # bytes read from one stream before other streams get a turn
_ZYGOTE_KINDS = ("bare", "science")


def main() -> None:
    """Entry point: ``main CONFIG SOCKET_DESCRIPTOR``."""
    config = RunnerConfig.from_json(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    why = ""
    try:
        if config.isolate == "none":
            cleanup.fork_and_return_in_server(config, int(sys.argv[2]))
        else:
            if config.isolate == "user":
                _continue_as_namespace_init(config, int(sys.argv[2]))
            enter_namespaces(config.readable)
    except OSError as error:
        why = str(error) or type(error).__name__
    client = socket.socket(fileno=int(sys.argv[2]))
    client.sendall(pack_frame({"op": "hello", "why": why, "layers": detect_available_layers(config)}))
    if why:
        return
    server = ForkServer(config, client)
    try:
        server.serve()
    finally:
        server.close()


def _continue_as_namespace_init(config: RunnerConfig, descriptor: int) -> None:
    """Continue as the first process of a new user and PID namespace. Only that process returns.

    Without root, a zygote can return from a program's PID namespace only to a PID namespace that it owns.
    """
    enter_user_namespace_as_root(extra_flags=kernel.CLONE_NEWPID)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return
    os.close(descriptor)
    while os.getppid() == config.client_pid:
        if signal.sigtimedwait({signal.SIGCHLD}, 1.0) is not None:
            break
    os._exit(0)


class ForkServer:
    """Event loop that runs programs and sessions in forks of its zygotes, and stores their state."""

    def __init__(self, config: RunnerConfig, client: socket.socket) -> None:
        self._config = config
        self._client = client
        self._client.setblocking(False)
        self._frames = FrameBuffer[ServerRequest]()
        self._outgoing = bytearray()
        self._epoll = select.epoll()
        self._epoll.register(client.fileno(), select.EPOLLIN)
        self._programs: dict[int, Program] = {}
        self._captures: dict[int, tuple[Program, OutputCapture]] = {}
        self._free_slots = list(range(config.workers))
        self._unclean_slots: dict[int, str] = {}  # slot -> the zygote that cleans it
        self._queues: dict[str, deque[RequestedRun]] = {kind: deque() for kind in _ZYGOTE_KINDS}
        self._zygotes: dict[str, ZygoteHandle] = {}
        self._zygotes_by_descriptor: dict[int, ZygoteHandle] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._sessions = SessionManager(config, self)
        self._next_check = time.monotonic() + _CHECK_SECONDS
        self._parent = os.getppid()
        self._without_namespaces = config.isolate == "none"
        self._scratch = os.environ.get(SCRATCH_VARIABLE, "")
        # Computed once, because has_separate_users returns False within kernel.file_access_as: the kernel withdraws
        # CAP_CHOWN while files are accessed with another user's rights. LimitChecker needs the user there.
        self._separate_users = has_separate_users(config)
        self._limit_checker = LimitChecker(config, self.user_of_slot, self._scratch)
        for kind in _ZYGOTE_KINDS:
            self._start_zygote(kind)

    def serve(self) -> None:
        while True:
            for descriptor, events in self._epoll.poll(self._wait_seconds()):
                if descriptor == self._client.fileno():
                    if not self._on_client(events):
                        return
                elif descriptor in self._zygotes_by_descriptor:
                    self._on_zygote(self._zygotes_by_descriptor[descriptor])
                elif descriptor in self._captures:
                    self._on_output(*self._captures[descriptor])
                elif descriptor in self._handlers:
                    self._handlers[descriptor]()
            self._enforce_limits(time.monotonic())
            if os.getppid() != self._parent:
                return

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.kill_and_reap()
        if self._without_namespaces:
            cleanup.clean_up_server(self._config, self._scratch)

    # -- client ---------------------------------------------------------------------------------------------------

    def _on_client(self, events: int) -> bool:
        """Send and receive frames. Returns False if the client has disconnected."""
        if events & select.EPOLLOUT:
            self._flush()
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = self._client.recv(1 << 20)
            except BlockingIOError:
                return True
            except ConnectionResetError:
                return False
            if not data:
                return False
            for header, blobs in self._frames.feed(data):
                self._on_frame(header, blobs)
        return True

    def _on_frame(self, header: ServerRequest, blobs: list[bytes]) -> None:
        if header["op"] == "run":
            order = RequestedRun.from_frame(header, blobs)
            if order.session is not None:
                self._sessions.run_in_session(order)
                return
            kind = "science" if needs_science_interpreter(order.call.program) else "bare"
            self._queues[kind].append(order)
            self._start_queued()
        elif header["op"] == "cancel":
            self._cancel(header["id"])
        else:
            self._sessions.handle_request(header)

    def _cancel(self, identifier: int) -> None:
        program = self._programs.get(identifier)
        if program is not None:
            self.kill(program, Outcome.KILLED)
        for kind, queue in self._queues.items():
            self._queues[kind] = deque(order for order in queue if order.identifier != identifier)

    def reply(self, header: Mapping[str, object], *blobs: bytes) -> None:
        self._outgoing += pack_frame(header, *blobs)
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._client.send(self._outgoing) if self._outgoing else 0
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            return  # the next read reports that the client has disconnected
        del self._outgoing[:sent]
        self._epoll.modify(self._client.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._outgoing else 0))

    # -- programs -------------------------------------------------------------------------------------------------

    def _start_queued(self) -> None:
        for kind, queue in self._queues.items():
            while queue and self._free_slots and self._zygotes[kind].ready:
                self._start_program(queue.popleft(), kind)

    def _start_program(self, order: RequestedRun, kind: str) -> None:
        program, descriptors = prepare_program(order, self._config, kind, self._free_slots.pop())
        self.watch_program(program)
        try:
            message: ProcessMessage = {"op": "spawn", "id": order.identifier, "slot": program.slot}
            self._zygotes[kind].request_child({**message, "cpu": program.cpu_limit}, descriptors)
        except OSError as error:
            self._finish_and_reply(
                program, Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=str(error))
            )
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def watch_program(self, program: Program) -> None:
        """Watch a program's output and deadline."""
        self._programs[program.identifier] = program
        for capture in (program.stdout, program.stderr):
            self._captures[capture.descriptor] = (program, capture)
            self._epoll.register(capture.descriptor, select.EPOLLIN)

    def drain_output(self, program: Program) -> None:
        for capture in (program.stdout, program.stderr):
            if capture.open and not capture.read_and_check_open(self._config.flood_limit):
                self._epoll.unregister(capture.descriptor)

    def finish_program(self, program: Program, ending: Ending) -> Frame[ExecutionHeader]:
        """Stop watching a program, release its resources and return the message about its end."""
        del self._programs[program.identifier]
        for capture in (program.stdout, program.stderr):
            if self._captures.pop(capture.descriptor, None) is not None and capture.open:
                self._epoll.unregister(capture.descriptor)
        frame = build_execution_frame("done", program.identifier, program.to_execution(ending))
        program.close()
        return frame

    def _finish_and_reply(self, program: Program, ending: Ending) -> None:
        header, blobs = self.finish_program(program, ending)
        self.release_slot(program.slot, program.zygote)
        self.reply(header, *blobs)
        self._start_queued()

    def kill(self, program: Program, reason: Outcome) -> None:
        """Kill a program; ``reason`` becomes its outcome. Only the first reason counts."""
        if program.reason is not None:
            return
        program.reason = reason
        if program.session is not None:
            self._sessions.kill_interpreter(program.session)
        else:
            self._zygotes[program.zygote].send_command("kill", program.identifier)

    def _on_output(self, program: Program, capture: OutputCapture) -> None:
        if not capture.read_and_check_open(_MAX_READ_BYTES):
            self._epoll.unregister(capture.descriptor)
        if program.stdout.total + program.stderr.total > self._config.flood_limit:
            self.kill(program, Outcome.OUTPUT_LIMIT)

    # -- callbacks of sessions ------------------------------------------------------------------------------------

    def add_reader(self, descriptor: int, handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever the descriptor is readable."""
        self._handlers[descriptor] = handler
        self._epoll.register(descriptor, select.EPOLLIN)

    def remove_reader(self, descriptor: int) -> None:
        """Remove the handler of a descriptor. No effect if it has none."""
        if self._handlers.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def zygote_of_kind(self, kind: str) -> ZygoteHandle:
        return self._zygotes[kind]

    def release_slot(self, slot: int, kind: str) -> None:
        """Free a slot. A slot with leftover files becomes free after the zygote has cleaned it."""
        scratch, user = f"{self._scratch}/{slot}", self.user_of_slot(slot)
        if not self._without_namespaces or cleanup.has_no_leftover_files(scratch, user):
            self._return_slot(slot)
            return
        self._unclean_slots[slot] = kind
        if self._zygotes[kind].ready:
            self._zygotes[kind].send_command("clean", slot)

    def user_of_slot(self, slot: int) -> int | None:
        """Return the user id of a slot's programs, or None if they run as this process's user."""
        return self._config.first_user + slot if self._separate_users else None

    def _return_slot(self, slot: int) -> None:
        if slot < self._config.workers:
            self._free_slots.append(slot)
        else:
            self._sessions.release_slot(slot)

    # -- zygotes --------------------------------------------------------------------------------------------------

    def _start_zygote(self, kind: str) -> None:
        zygote = ZygoteHandle(kind, self._config)
        self._zygotes[kind] = zygote
        self._zygotes_by_descriptor[zygote.fileno()] = zygote
        self._epoll.register(zygote.fileno(), select.EPOLLIN)

    def _on_zygote(self, zygote: ZygoteHandle) -> None:
        message = zygote.receive()
        if message is None:
            self._replace_zygote(zygote)
        elif message["op"] == "ready":
            zygote.set_ready()
            self.reply({"op": "ready", "kind": zygote.kind})
            for slot, kind in self._unclean_slots.items():
                if kind == zygote.kind:
                    zygote.send_command("clean", slot)
            self._start_queued()
        elif message["op"] == "clean":
            del self._unclean_slots[message["id"]]
            self._return_slot(message["id"])
            self._start_queued()
        elif message["id"] < 0:
            self._sessions.handle_zygote_report(message)
        elif message["id"] in self._programs:
            self._on_program_report(self._programs[message["id"]], message)

    def _on_program_report(self, program: Program, message: ProcessMessage) -> None:
        if message["op"] == "located":
            program.pid = message["pid"]
            return
        if message["op"] == "failed":
            ending = Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=message["why"])
        else:
            self.drain_output(program)
            assert program.status is not None
            program.status.read_and_check_open(_MAX_READ_BYTES)
            ending = determine_ending(program, message["status"], message["cpu"])
        self._finish_and_reply(program, ending)

    def _replace_zygote(self, zygote: ZygoteHandle) -> None:
        """Replace a dead zygote. Its programs died with it. Raises RuntimeError if the zygote never became ready."""
        self._epoll.unregister(zygote.fileno())
        del self._zygotes_by_descriptor[zygote.fileno()]
        status = zygote.kill_and_reap()
        why = f"the {zygote.kind} interpreter exited with status {status}"
        if not zygote.ready:
            raise RuntimeError(f"{why} before it was ready")
        if self._without_namespaces:
            cleanup.kill_leftover_processes([other.pid for other in self._zygotes.values() if other is not zygote])
        self._start_zygote(zygote.kind)
        if zygote.kind == SESSION_ZYGOTE:
            self._sessions.end_all_sessions(why)
        for program in [program for program in self._programs.values() if program.zygote == zygote.kind]:
            self._finish_and_reply(program, Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why))

    # -- limits ---------------------------------------------------------------------------------------------------

    def _wait_seconds(self) -> float:
        now = time.monotonic()
        nearest = min((program.deadline for program in self._programs.values()), default=now + 1.0)
        nearest = min(nearest, self._sessions.next_deadline())
        if self._programs:
            nearest = min(nearest, self._next_check)
        return max(0.0, nearest - now)

    def _enforce_limits(self, now: float) -> None:
        for program in list(self._programs.values()):
            if now >= program.deadline:
                self.kill(program, Outcome.TIMEOUT)
                program.deadline = now + 1.0  # kill requested; check again later
        self._sessions.end_overdue(now)
        if not self._programs or now < self._next_check:
            return
        self._next_check = now + _CHECK_SECONDS
        self._sessions.enforce_usage_limits(count_tasks=not self._separate_users)
        for program in list(self._programs.values()):
            if self._limit_checker.exceeds_scratch(program):
                self.kill(program, Outcome.OUTPUT_LIMIT)
            if program.session is not None:
                continue
            if program.pid:
                self._enforce_usage_limits(program)
            elif now - program.started > _CHECK_SECONDS:
                self._zygotes[program.zygote].send_command("locate", program.identifier)

    def _enforce_usage_limits(self, program: Program) -> None:
        used = measure_usage(program.pid, self._zygotes[program.zygote].resident)
        # Check the number of tasks first, because measuring the memory of a fork bomb takes too long.
        if not self._separate_users and used.tasks > self._config.max_processes:
            self.kill(program, Outcome.KILLED)
        elif self._limit_checker.exceeds_memory(program, used, self._zygotes[program.zygote].resident):
            self.kill(program, Outcome.MEMORY_LIMIT)
