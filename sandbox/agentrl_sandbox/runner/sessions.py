"""Server-side sessions: open, run, fork and end sessions.

A session's interpreter runs untrusted code. The only message that the server accepts from it reports that the current
program has ended. The message is accepted once, and only with the program's serial number. Any other message ends the
session. The server itself enforces deadlines and the limits of output and memory. The session init reports exits that
the kernel confirms, and stops the interpreter between programs.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import secrets
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from agentrl_sandbox.call import ExecutionHeader, Frame
from agentrl_sandbox.runner.child import programs_can_signal_init
from agentrl_sandbox.runner.config import ProcessMessage, RunnerConfig, ServerRequest
from agentrl_sandbox.runner.program import (
    Ending,
    LimitChecker,
    Program,
    RequestedRun,
    ZygoteHandle,
    ending_of_exit_code,
    prepare_program,
)
from agentrl_sandbox.runner.session_process import DONE
from agentrl_sandbox.runner.usage import Usage, child_pids, measure_usage
from agentrl_sandbox.types import Outcome


class SessionState(Enum):
    """State of a session."""

    OPENING = "opening"  # its PID is unknown
    IDLE = "idle"  # stopped
    RUNNING = "running"  # a program runs in it
    FORKING = "forking"  # a fork was requested
    STOPPING = "stopping"  # the program has ended; the session init stops the session and kills leftover processes
    ENDING = "ending"  # it was killed


@dataclass(kw_only=True, slots=True, eq=False)
class SessionFamily:
    """A session and its forks: one session init, one slot, one PID namespace."""

    identifier: int  # negative, to differ from the identifiers of programs
    slot: int
    init: socket.socket
    pid: int = 0
    timed_out: bool = False  # the session init did not respond, so the server killed it
    sessions: dict[int, ServerSession] = field(default_factory=dict)
    unsent: deque[tuple[bytes, tuple[int, ...]]] = field(default_factory=deque)  # commands with their descriptors

    def send_command(self, operation: str, session: int, descriptors: tuple[int, ...] = ()) -> None:
        """Send a command to the session init. Ignored if the session init has exited; its zygote reports the exit."""
        message = json.dumps({"op": operation, "id": session}).encode()
        self.unsent.append((message, tuple(map(os.dup, descriptors))))
        self.send_queued_commands()

    def send_queued_commands(self) -> None:
        """Send commands in order until the socket's buffer of about 280 commands is full."""
        while self.unsent:
            message, descriptors = self.unsent[0]
            try:
                socket.send_fds(self.init, [message], descriptors)
            except BlockingIOError:
                return
            except OSError:  # the session init has exited
                pass
            self.unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)

    def usage_by_session(self, baseline: int) -> tuple[dict[int, Usage], Usage]:
        """Return the usage of each session, and the usage of stray processes."""
        by_pid = {session.pid: session.identifier for session in self.sessions.values()}
        known: dict[int, Usage] = {}
        stray = Usage()
        for pid in child_pids(self.pid):
            used = measure_usage(pid, baseline)
            session = by_pid.get(_pid_in_namespace(pid))
            if session is None:
                stray = stray.add(used)
            else:
                known[session] = used
        return known, stray


@dataclass(kw_only=True, slots=True, eq=False)
class PendingFork:
    """A requested fork. The session init reports the new process, and the origin reports its own result."""

    request: int
    child: ServerSession
    error: int | None = None  # the session init's report; 0: the new process exists
    origin_error: int | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self.origin_error) or (self.origin_error is not None and self.error is not None)


@dataclass(kw_only=True, slots=True, eq=False)
class ServerSession:
    """The server's record of a session's interpreter."""

    identifier: int
    family: SessionFamily
    control: socket.socket
    state: SessionState = SessionState.OPENING
    deadline: float = math.inf  # time at which the current state times out
    request: int = 0  # the request that opened the session, until it is answered
    pid: int = 0  # process id inside its PID namespace
    serial: int = 0  # random number of the request that the interpreter must answer
    program: Program | None = None
    fork: PendingFork | None = None
    held_answer: Frame[Mapping[str, object]] | None = None  # sent to the client when the session is idle
    why: str = ""  # reason for the session's end
    closers: list[int] = field(default_factory=list)  # requests to close the session

    def enter_state(self, state: SessionState, seconds: float) -> None:
        """Enter a state that may last for ``seconds``."""
        self.state, self.deadline = state, time.monotonic() + seconds

    def enter_state_until_init_acts(self, state: SessionState) -> None:
        """Enter a state that lasts until the session's init process stops or kills the interpreter. Does not block."""
        self.enter_state(state, END_SECONDS + SECONDS_PER_SESSION * len(self.family.sessions))


def _pid_in_namespace(pid: int) -> int:
    """Return the PID of a process inside its PID namespace, or 0 if it has exited."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("NSpid:"):
                    return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0


SESSION_ZYGOTE = "science"
"""Sessions are forked from this kind of interpreter, because their imports are unknown when they open."""

END_SECONDS = 5.0
"""Seconds for the session init to stop or kill a process. After that, the session init is killed."""

SECONDS_PER_SESSION = 0.05
"""Seconds added to END_SECONDS for each session of the family, because all sessions may be closed at once."""


class ServerCallbacks(Protocol):
    """Operations of the server that sessions use."""

    def add_reader(self, descriptor: int, handler: Callable[[], None]) -> None: ...
    def remove_reader(self, descriptor: int) -> None: ...
    def reply(self, header: Mapping[str, object], *blobs: bytes) -> None: ...
    def watch_program(self, program: Program) -> None: ...
    def drain_output(self, program: Program) -> None: ...
    def finish_program(self, program: Program, ending: Ending) -> Frame[ExecutionHeader]: ...
    def kill(self, program: Program, reason: Outcome) -> None: ...
    def zygote_of_kind(self, kind: str) -> ZygoteHandle: ...
    def user_of_slot(self, slot: int) -> int | None: ...
    def release_slot(self, slot: int, kind: str) -> None: ...


_OPEN_SECONDS = 60.0
_FORK_SECONDS = 30.0
_MAX_MESSAGE = 4096


class SessionManager:
    """All sessions of a server, keyed by session numbers that the client assigns."""

    def __init__(self, config: RunnerConfig, server: ServerCallbacks) -> None:
        self._config = config
        self._server = server
        self._limit_checker = LimitChecker(config, server.user_of_slot)
        self._sessions: dict[int, ServerSession] = {}
        self._families: dict[int, SessionFamily] = {}
        self._free_slots = list(range(config.workers, config.slots))
        self._queued_opens: deque[tuple[int, int]] = deque()  # requests to open a session, with their session numbers
        self._identifiers = itertools.count(-1, -1)
        self._programs_can_signal_init = programs_can_signal_init(config)

    # -- requests of the client -----------------------------------------------------------------------------------

    def handle_request(self, header: ServerRequest) -> None:
        request, session = header["id"], header["number"]
        assert session is not None
        if header["op"] == "open":
            self._open(request, session)
        elif header["op"] == "fork":
            self._fork_session(request, session, header["fork"])
        else:
            self._close(request, session)

    def run_in_session(self, order: RequestedRun) -> None:
        """Run a program in an idle session."""
        assert order.session is not None
        session = self._idle_session_or_refuse(order.identifier, order.session)
        if session is None:
            return
        program, descriptors = prepare_program(order, self._config, SESSION_ZYGOTE, session.family.slot)
        program.pid = session.family.pid
        self._server.watch_program(program)
        session.program = program
        session.enter_state(SessionState.RUNNING, math.inf)
        self._send_to_interpreter(session, {"op": "run"}, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _open(self, request: int, number: int) -> None:
        if self._refuse_if_full(request):
            return
        if not self._free_slots:  # some slots are still being cleaned
            self._queued_opens.append((request, number))
            return
        control, childs_control = _socket_pair()
        init, childs_init = _socket_pair()
        family = SessionFamily(identifier=next(self._identifiers), slot=self._free_slots.pop(), init=init)
        session = ServerSession(identifier=number, family=family, control=control, request=request)
        session.enter_state(SessionState.OPENING, _OPEN_SECONDS)
        self._families[family.identifier] = family
        self._add_session(session)
        self._server.add_reader(init.fileno(), lambda: self._on_init_message(family))
        zygote = self._server.zygote_of_kind(SESSION_ZYGOTE)
        with childs_control, childs_init:
            try:
                message: ProcessMessage = {"op": "init", "id": family.identifier, "slot": family.slot}
                zygote.request_child({**message, "session": number}, [childs_init.fileno(), childs_control.fileno()])
            except OSError as error:
                self._handle_family_end(family, str(error))
                return
        zygote.send_command("locate", family.identifier)

    def _fork_session(self, request: int, number: int, fork: int) -> None:
        if self._refuse_if_full(request):
            return
        origin = self._idle_session_or_refuse(request, number)
        if origin is None:
            return
        control, childs_control = _socket_pair()
        announcement, childs_announcement = _socket_pair()
        child = ServerSession(identifier=fork, family=origin.family, control=control)
        self._add_session(child)
        origin.fork = PendingFork(request=request, child=child)
        origin.enter_state(SessionState.FORKING, _FORK_SECONDS)
        with childs_control, announcement, childs_announcement:
            announcement.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            origin.family.send_command("expect", fork, (announcement.fileno(),))
            descriptors = [childs_control.fileno(), childs_announcement.fileno()]
            self._send_to_interpreter(origin, {"op": "fork", "directory": str(fork)}, descriptors)

    def _add_session(self, session: ServerSession) -> None:
        self._sessions[session.identifier] = session
        session.family.sessions[session.identifier] = session
        self._server.add_reader(session.control.fileno(), lambda: self._on_interpreter_message(session))

    def _close(self, request: int, number: int) -> None:
        session = self._sessions.get(number)
        if session is None:
            self._queued_opens = deque(waiting for waiting in self._queued_opens if waiting[1] != number)
            self._server.reply({"op": "closed", "id": request})
            return
        session.closers.append(request)
        self._end_session(session, "it was closed")

    def _refuse_if_full(self, request: int) -> bool:
        """If no session is available, refuse the request and return True."""
        count = len(self._sessions) + len(self._queued_opens)
        full = count >= self._config.max_sessions
        if full:
            why = f"{count} sessions are open; max_sessions={self._config.max_sessions}"
            self._server.reply({"op": "refused", "id": request, "kind": "limit", "why": why})
        return full

    def _idle_session_or_refuse(self, request: int, number: int) -> ServerSession | None:
        """Return the session if it is idle. Otherwise refuse the request and return None."""
        session = self._sessions.get(number)
        if session is None or session.state is not SessionState.IDLE:
            why = "it has ended" if session is None else session.why or f"it is {session.state.value}"
            self._server.reply({"op": "refused", "id": request, "kind": "unknown", "why": why})
            return None
        return session

    def release_slot(self, slot: int) -> None:
        self._free_slots.append(slot)
        if self._queued_opens:
            self._open(*self._queued_opens.popleft())

    # Messages of session processes.

    def _send_to_interpreter(
        self, session: ServerSession, message: Mapping[str, object], descriptors: list[int]
    ) -> None:
        """Send the interpreter a request and resume it."""
        session.serial = secrets.randbits(64)
        text = json.dumps({**message, "serial": session.serial}).encode()
        try:
            socket.send_fds(session.control, [text], descriptors)
        except OSError:
            self._end_session(session, "its interpreter closed the socket")
            return
        session.family.send_command("resume", session.identifier)

    def _on_interpreter_message(self, session: ServerSession) -> None:
        try:
            data = session.control.recv(DONE.size + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the session init reports the exit
            self._server.remove_reader(session.control.fileno())
            return
        serial, exit_code, out_of_memory, error = DONE.unpack(data) if len(data) == DONE.size else (None, 0, False, 0)
        if serial != session.serial or session.state not in (SessionState.RUNNING, SessionState.FORKING):
            self._server.remove_reader(session.control.fileno())
            self._end_session(session, "its interpreter sent an unexpected message")
        elif session.fork is not None:
            session.fork.origin_error = error
            self._answer_fork_when_complete(session, session.fork)
        elif session.program is not None and session.program.reason is None:
            self._server.drain_output(session.program)
            ending = ending_of_exit_code(session.program, exit_code, out_of_memory=out_of_memory)
            session.held_answer = self._server.finish_program(session.program, ending)
            session.program = None
            self._stop_interpreter(session)

    def _stop_interpreter(self, session: ServerSession) -> None:
        session.enter_state_until_init_acts(SessionState.STOPPING)
        session.family.send_command("stop", session.identifier)

    def _answer_fork_when_complete(self, origin: ServerSession, fork: PendingFork) -> None:
        if not fork.is_complete:
            return
        origin.fork = None
        code = fork.origin_error or fork.error
        if code or fork.child.why or fork.child.identifier not in self._sessions:
            self._discard_fork(fork.child, origin)
            why = os.strerror(code) if code is not None and code in errno.errorcode else "it exited immediately"
            origin.held_answer = {"op": "refused", "id": fork.request, "kind": "fork", "why": why}, []
        else:
            fork.child.enter_state(SessionState.IDLE, self._config.session_idle_timeout)
            origin.held_answer = {"op": "opened", "id": fork.request}, []
        self._stop_interpreter(origin)

    def _discard_fork(self, child: ServerSession, origin: ServerSession) -> None:
        origin.family.send_command("forget", child.identifier)
        if child.pid:
            origin.family.send_command("kill", child.identifier)
        self._remove_session(child)

    # Messages of session inits and zygotes.

    def _on_init_message(self, family: SessionFamily) -> None:
        try:
            data = family.init.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the zygote reports the exit
            self._server.remove_reader(family.init.fileno())
            return
        family.send_queued_commands()
        message: ProcessMessage = json.loads(data)
        if message["op"] == "failed":
            self._end_processes(family, message["why"])
        elif message["id"] in family.sessions:
            session = family.sessions[message["id"]]
            if message["op"] == "started":
                self._on_process_started(session, message["pid"], message["error"])
            elif message["op"] == "stopped" and session.state is SessionState.STOPPING:
                self._send_held_answer(session)
                session.enter_state(SessionState.IDLE, self._config.session_idle_timeout)
            elif message["op"] == "exit":
                self._on_process_exit(session, os.waitstatus_to_exitcode(message["status"]))

    def _on_process_started(self, session: ServerSession, pid: int, error: int) -> None:
        session.pid = pid
        if session.why and pid:  # the session was closed before its process had started
            self.kill_interpreter(session.identifier)
        if session.request:
            self._server.reply({"op": "opened", "id": session.request})
            session.request = 0
            if session.state is SessionState.OPENING:
                session.enter_state(SessionState.IDLE, self._config.session_idle_timeout)
            return
        for origin in session.family.sessions.values():
            if origin.fork is not None and origin.fork.child is session:
                origin.fork.error = error
                self._answer_fork_when_complete(origin, origin.fork)
                return

    def _on_process_exit(self, session: ServerSession, exit_code: int) -> None:
        end = f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"
        program = session.program
        if program is not None:
            self._server.drain_output(program)
            session.held_answer = self._server.finish_program(
                program, ending_of_exit_code(program, exit_code, out_of_memory=False)
            )
        self._remove_ended(session, session.why or f"its interpreter exited with {end}")

    def handle_zygote_report(self, message: ProcessMessage) -> None:
        """Handle a report about a session init."""
        family = self._families.get(message["id"])
        if family is None:
            return
        if message["op"] == "located":
            family.pid = message["pid"]
            for session in family.sessions.values():
                if session.program is not None:  # the program started before its session init was located
                    session.program.pid = family.pid
        else:
            while family.identifier in self._families and self._has_message(family):
                self._on_init_message(family)
            killed_by_program = (
                self._programs_can_signal_init and not family.timed_out and os.WIFSIGNALED(message.get("status", 0))
            )
            why = message.get("why", "its session init exited")
            self._handle_family_end(family, why, killed_by_program=killed_by_program)

    def _has_message(self, family: SessionFamily) -> bool:
        try:
            return bool(family.init.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    # -- exits and limits -----------------------------------------------------------------------------------------

    def kill_interpreter(self, number: int) -> None:
        """Kill an interpreter. Its exit triggers the cleanup."""
        session = self._sessions[number]
        if session.program is not None and session.program.reason is not None and not session.why:
            session.why = f"its program was killed: {session.program.reason.value}"
        if session.pid == 0:
            return  # the interpreter is killed once its process has started
        session.enter_state_until_init_acts(SessionState.ENDING)
        session.family.send_command("kill", number)

    def _end_session(self, session: ServerSession, why: str) -> None:
        """Kill a session and its program. Only the first reason is kept."""
        if session.why:
            return
        session.why = why
        if session.program is not None:
            self._server.kill(session.program, Outcome.KILLED)
        else:
            self.kill_interpreter(session.identifier)

    def _remove_ended(self, session: ServerSession, why: str) -> None:
        """Remove a session whose process has ended, and answer all waiting requests."""
        if session.fork is not None:
            fork, session.fork = session.fork, None
            self._discard_fork(fork.child, session)
            self._server.reply({"op": "refused", "id": fork.request, "kind": "unknown", "why": why})
        if session.request:
            self._server.reply({"op": "refused", "id": session.request, "kind": "start", "why": why})
        session.program = None
        self._server.reply({"op": "ended", "number": session.identifier, "why": why})
        if session.held_answer is not None:  # the result of the program that ended the session
            header, blobs = session.held_answer
            session.held_answer = {**header, "session_ended": True}, blobs
        self._send_held_answer(session)
        self._remove_session(session)

    def _remove_session(self, session: ServerSession) -> None:
        if self._sessions.pop(session.identifier, None) is not None:
            del session.family.sessions[session.identifier]
            self._server.remove_reader(session.control.fileno())
            session.control.close()
            for request in session.closers:
                self._server.reply({"op": "closed", "id": request})

    def _send_held_answer(self, session: ServerSession) -> None:
        """Send the client the answer that was held back until the session was idle."""
        if session.held_answer is not None:
            header, blobs = session.held_answer
            session.held_answer = None
            self._server.reply(header, *blobs)

    def _handle_family_end(self, family: SessionFamily, why: str, *, killed_by_program: bool = False) -> None:
        """Handle the end of a session init and its processes. ``killed_by_program`` is true if a program killed it."""
        self._end_processes(family, why, killed_by_program=killed_by_program)
        if self._families.pop(family.identifier, None) is not None:
            self._server.remove_reader(family.init.fileno())
            family.init.close()
            family.send_queued_commands()  # discards the commands
            self._server.release_slot(family.slot, SESSION_ZYGOTE)

    def _end_processes(self, family: SessionFamily, why: str, *, killed_by_program: bool = False) -> None:
        for session in list(family.sessions.values()):
            if session.program is not None:
                if session.program.reason is None and not killed_by_program:
                    ending = Ending(outcome=Outcome.INFRASTRUCTURE_FAILURE, exit_code=None, why=why)
                else:
                    ending = ending_of_exit_code(session.program, -signal.SIGKILL, out_of_memory=False)
                session.held_answer = self._server.finish_program(session.program, ending)
            self._remove_ended(session, session.why or why)

    def end_all_sessions(self, why: str) -> None:
        for family in list(self._families.values()):
            self._handle_family_end(family, why)

    def next_deadline(self) -> float:
        return min((session.deadline for session in self._sessions.values()), default=math.inf)

    def end_overdue(self, now: float) -> None:
        """End sessions that have exceeded the deadline of their state."""
        for family in self._families.values():
            family.send_queued_commands()
        for session in list(self._sessions.values()):
            if now < session.deadline:
                continue
            session.deadline = now + END_SECONDS
            if session.state is SessionState.IDLE:
                self._end_session(session, f"it was idle for {self._config.session_idle_timeout:g} s")
            elif session.state is SessionState.FORKING:
                self._end_session(session, "it did not fork in time")
            else:  # the session init does not respond
                session.family.timed_out = True
                self._server.zygote_of_kind(SESSION_ZYGOTE).send_command("kill", session.family.identifier)

    def enforce_usage_limits(self, *, count_tasks: bool) -> None:
        """Kill programs whose session, including its family's stray processes, exceeds a limit."""
        baseline = self._server.zygote_of_kind(SESSION_ZYGOTE).resident
        for family in self._families.values():
            running = [session for session in family.sessions.values() if session.program is not None]
            if not running or not family.pid:
                continue
            known, stray = family.usage_by_session(baseline)
            for session in running:
                used = known.get(session.identifier, Usage()).add(stray)
                assert session.program is not None
                if count_tasks and used.tasks > self._config.max_processes:
                    self._server.kill(session.program, Outcome.KILLED)
                elif self._limit_checker.exceeds_memory(session.program, used, baseline):
                    self._server.kill(session.program, Outcome.MEMORY_LIMIT)


def _socket_pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs
