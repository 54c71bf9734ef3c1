"""The init process of a session and its forks: their parent, which stops, kills and reaps them.

It is forked from a warm interpreter, isolates itself like a program, and runs no untrusted code. The programs have the
same user, so it forbids tracing; the kernel blocks signals from its own namespace. Its reports about processes come
from the kernel.

    server -> init   {"op": "wake", "id"} · {"op": "rest", "id"} · {"op": "kill", "id"}
                       {"op": "expect", "id"} with a socket (SO_PASSCRED) on which a fork will announce itself
                       {"op": "forget", "id"}: stop waiting for that fork
    init -> server   {"op": "born", "id", "pid", "error"} · {"op": "rested", "id"} · {"op": "exit", "id", "status"}
                       {"op": "failed", "why"}
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from typing import NoReturn

from agentrl_sandbox.runner import kernel
from agentrl_sandbox.runner.child import ChildLimits, close_descriptors_but, isolate
from agentrl_sandbox.runner.config import ProcessMessage
from agentrl_sandbox.runner.isolation import Lockdown
from agentrl_sandbox.runner.sessions.session_process import serve_session
from agentrl_sandbox.runner.usage import children, is_alive, tree

_OWN_SOCKET = 200
_PROCESS_SOCKET = 201
_MAX_MESSAGE = 4096
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_KILL_SECONDS = 4.0  # for processes to end after SIGKILL
_PAUSE_SECONDS = 0.001


def run_session_init(limits: ChildLimits, slot: int, session: int, descriptors: list[int]) -> NoReturn:
    """Isolate this process, start the session, and serve until its last process has ended. Never returns."""
    try:
        server = _take_descriptors(descriptors)
        try:
            scratch = isolate(limits, slot)
            # one for the session init
            resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_processes + 1, limits.max_processes + 1))
            kernel.forbid_tracing()
            limits.reseed()
            SessionInit(server, scratch, limits.lockdown).serve(session)
        except OSError as error:
            server.send(json.dumps({"op": "failed", "why": str(error)}).encode())
    finally:
        os._exit(0)


def _take_descriptors(descriptors: list[int]) -> socket.socket:
    own, process = descriptors
    os.dup2(own, _OWN_SOCKET, inheritable=False)
    os.dup2(process, _PROCESS_SOCKET, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return socket.socket(fileno=_OWN_SOCKET)


class SessionInit:
    """The parent of a session's processes, which it knows by the numbers that the server gives them."""

    def __init__(self, server: socket.socket, scratch: str, lockdown: Lockdown) -> None:
        self._server = server
        self._scratch = scratch
        self._lockdown = lockdown
        self._pids: dict[int, int] = {}  # session -> process
        self._running: set[int] = set()  # sessions
        self._expected: dict[int, tuple[int, socket.socket]] = {}  # descriptor -> session, birth socket
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, first: int) -> None:
        """Start the first session process, then serve until the last one has ended."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._start(first)
        self._poll.register(self._server, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        while self._pids or self._expected:
            for descriptor, _ in self._poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._reap()
                elif descriptor in self._expected:
                    self._on_birth(descriptor)
                elif descriptor == self._server.fileno() and not self._receive():
                    return

    def _start(self, session: int) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve_session(_PROCESS_SOCKET, self._scratch, str(session), self._lockdown)
        close_descriptors_but(*sorted((self._wake_read, self._wake_write, _OWN_SOCKET)))
        self._add(session, pid)

    def _receive(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._server, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        message: ProcessMessage = json.loads(data)
        session = message["id"]
        if message["op"] == "expect":
            self._expect(session, socket.socket(fileno=descriptors[0]))
        elif message["op"] == "forget":
            self._forget(session)
        elif session in self._pids:
            pid = self._pids[session]
            if message["op"] == "wake":
                self._running.add(session)
                os.kill(pid, signal.SIGCONT)
            elif message["op"] == "rest":
                self._rest(session, pid)
            else:
                os.kill(pid, signal.SIGKILL)
        return True

    def _rest(self, session: int, pid: int) -> None:
        self._running.discard(session)
        self._stop_resting()
        self._kill_leftovers()
        self._send({"op": "rested", "id": session})

    def _stop_resting(self) -> None:
        """Stop them all: a running session process or the end of a stopped process group may have woken one."""
        for session, pid in self._pids.items():
            if session not in self._running:
                _signal(pid, signal.SIGSTOP)

    # Forks.

    def _expect(self, session: int, birth: socket.socket) -> None:
        self._expected[birth.fileno()] = (session, birth)
        self._poll.register(birth, select.POLLIN)

    def _on_birth(self, descriptor: int) -> None:
        """Check that the announced process, identified by the kernel, is a child of this one."""
        session, birth = self._expected.pop(descriptor)
        self._poll.unregister(descriptor)
        with birth:
            data, ancillary, _, _ = birth.recvmsg(4, socket.CMSG_SPACE(_CREDENTIALS.size))
        pid = 0
        for _, kind, payload in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                pid = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0]
        error = int.from_bytes(data, "big") if len(data) == 4 else 1
        if error or pid not in children(os.getpid()) or pid in self._pids.values():
            self._send({"op": "born", "id": session, "pid": 0, "error": error or 1})
        else:
            self._add(session, pid)

    def _add(self, session: int, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._pids[session] = pid
        self._send({"op": "born", "id": session, "pid": pid, "error": 0})

    def _forget(self, session: int) -> None:
        for descriptor in [descriptor for descriptor, (number, _) in self._expected.items() if number == session]:
            self._poll.unregister(descriptor)
            self._expected.pop(descriptor)[1].close()
        self._kill_leftovers()

    # Ends.

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                self._stop_resting()
                return
            for session in [session for session, process in self._pids.items() if process == pid]:
                del self._pids[session]
                self._running.discard(session)
                self._kill_leftovers()
                self._send({"op": "exit", "id": session, "status": status})

    def _kill_leftovers(self) -> None:
        """Kill orphans and the descendants of session processes at rest. Raises TimeoutError.

        All are stopped before any is killed. Stopped processes still count against RLIMIT_NPROC, so a fork bomb
        cannot outrun the loop. A process may end before it is stopped and leave a child that the same look does not
        find, so the loop ends with a look whose processes had all ended before it.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        stopped: set[int] = set()
        ended: set[int] = set()
        while not (found := self._stop_leftovers()) <= ended:
            alive = set(filter(is_alive, found))
            if alive and alive <= stopped:
                for pid in alive:
                    _signal(pid, signal.SIGKILL)
                time.sleep(_PAUSE_SECONDS)  # they take a moment to end
            stopped |= alive
            ended = found - alive
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(alive)} processes of a program did not end in {_KILL_SECONDS:g} s")

    def _stop_leftovers(self) -> set[int]:
        """Stop each before its children are listed. Returns them, with those that have ended and are not reaped."""
        sessions = {pid: session for session, pid in self._pids.items()}
        found: list[int] = []
        for child in children(os.getpid()):
            if child not in sessions:
                if not self._expected:  # it may be a fork that has not announced itself yet
                    found += tree(child, _stop)
            elif sessions[child] not in self._running:
                found += tree(child, _stop)[1:]
        return set(found)

    def _send(self, message: ProcessMessage) -> None:
        self._server.send(json.dumps(message).encode())


def _stop(pid: int) -> None:
    _signal(pid, signal.SIGSTOP)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
