"""A session's processes: the interpreter, its forks, and their parent, the init process.

The interpreter runs programs one at a time in one ``__main__``, and forks on request.

    server -> process   {"op": "run", "serial"} with descriptors [program file, stdout, stderr] and [fetch file]
                        {"op": "fork", "serial", "directory"} with descriptors [control socket, announcement socket]
    process -> server   DONE: serial, exit status, true if memory ran out, error number of a failed fork

Programs can tamper with this process, so the server trusts it only to report that a program of this session is done.
Between programs the session init stops this process.

The session init is forked from a warm interpreter, isolates itself like a program, and runs no untrusted code. It
stops, kills and reaps the interpreters. The interpreters run as the same user as the session init. Therefore the
session init forbids tracing, and the kernel blocks signals from its namespace. It reports only facts about processes
that the kernel confirms.

    server -> init   {"op": "resume", "id"} · {"op": "stop", "id"} · {"op": "kill", "id"}
                     {"op": "expect", "id"} with an announcement socket (SO_PASSCRED), to which a fork writes
                     {"op": "forget", "id"}: stop waiting for that fork
    init -> server   {"op": "started", "id", "pid", "error"} · {"op": "stopped", "id"} · {"op": "exit", "id", "status"}
                     {"op": "failed", "why"}
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
import warnings
from typing import NoReturn

from agentrl_sandbox.runner import interpreter, kernel
from agentrl_sandbox.runner.child import ChildLimits, Lockdown, close_other_descriptors, isolate_child
from agentrl_sandbox.runner.config import ProcessMessage
from agentrl_sandbox.runner.files import ChildFetchWriter, fetch_files
from agentrl_sandbox.runner.usage import child_pids, has_live_thread, process_tree


def copy_scratch(source: str, target: str) -> int:
    """Copy directories, regular files and links, but not pipes, sockets and devices. Returns an errno or 0."""
    try:
        _copy_directory(source, target)
    except OSError as error:
        return error.errno or 1
    return 0


def _copy_directory(source: str, target: str) -> None:
    os.mkdir(target, 0o700)
    with os.scandir(source) as entries:
        for entry in entries:
            copy = f"{target}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), copy)
            elif entry.is_dir(follow_symlinks=False):
                _copy_directory(entry.path, copy)
            elif entry.is_file(follow_symlinks=False):
                shutil.copyfile(entry.path, copy, follow_symlinks=False)
                _copy_permissions_and_times(entry.path, copy)
    _copy_permissions_and_times(source, target)


def _copy_permissions_and_times(source: str, target: str) -> None:
    """Copy permissions and times, if programs may change them."""
    with contextlib.suppress(PermissionError):
        shutil.copystat(source, target, follow_symlinks=False)


DONE = struct.Struct("!QB?i")
_MAX_MESSAGE = 4096
_MAX_DESCRIPTORS = 4


def run_session_interpreter(control: int, scratch: str, directory_name: str, lockdown: Lockdown) -> NoReturn:
    """Isolate this process and become a session's interpreter, in a new directory inside ``scratch``.

    Never returns.
    """
    leave = os._exit  # programs may replace os._exit
    try:
        os.setpgid(0, 0)  # programs' signals to their process group must not reach the session init
        os.mkdir(f"{scratch}/{directory_name}", 0o700)
        kernel.set_dumpable()
        kernel.die_with_parent(signal.SIGKILL)
        lockdown.apply(scratch)
        close_other_descriptors(control)
        SessionInterpreter(control, scratch, directory_name).serve()
    finally:
        leave(70)


class SessionInterpreter:
    """Runs the programs of a session and forks the session, in its interpreter process."""

    def __init__(self, control: int, scratch: str, directory: str) -> None:
        self._control = socket.socket(fileno=control)
        self._pid = os.getpid()
        self._root = scratch
        self._scratch = ""
        self._programs = 0
        self._out_of_memory = False
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        self._streams = (sys.stdout, sys.stderr)
        self._main = interpreter.install_main_module()
        self._null_device = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._enter_directory(directory)
        sys.path.insert(0, "")
        gc.enable()

    def serve(self) -> None:
        while True:
            flags = socket.MSG_CMSG_CLOEXEC
            data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, _MAX_DESCRIPTORS, flags)
            if not data:
                return
            message = json.loads(data)
            if message["op"] == "run":
                exit_code, error = self._run(descriptors), 0
            else:
                exit_code, error = 0, self._fork(message["directory"], descriptors)
                if os.getpid() != self._pid:
                    self._pid = os.getpid()
                    continue
            self._control.send(DONE.pack(message["serial"], exit_code, self._out_of_memory, error))

    # -- programs -------------------------------------------------------------------------------------------------

    def _run(self, descriptors: list[int]) -> int:
        program, stdout, stderr, *fetched = descriptors
        for number, descriptor in enumerate((program, stdout, stderr)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._out_of_memory = False
        self._programs += 1
        self._restore_streams()
        task = interpreter.receive_task(self._scratch, self._on_out_of_memory)
        exit_code = interpreter.UNCAUGHT
        if task is not None:
            exit_code = interpreter.run_program(task, f"<program {self._programs}>", self._main, self._on_out_of_memory)
            exit_code = interpreter.finish_program(exit_code, self._on_out_of_memory, run_exit_functions=False)
        if os.getpid() != self._pid:  # a forked child of the program also returns here
            os._exit(interpreter.finish_program(exit_code, self._on_out_of_memory, run_exit_functions=True))
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)
        if fetched:
            self._write_fetch_file(task.fetch if task is not None else (), fetched[0])
        self._detach_streams()
        return exit_code

    def _write_fetch_file(self, names: tuple[str, ...], file: int) -> None:
        try:
            fetch_files(self._scratch, names, ChildFetchWriter(file, names))
        except Exception:  # noqa: BLE001 - programs may have broken what this needs; the outcome is unchanged
            return
        finally:
            os.close(file)

    def _on_out_of_memory(self) -> None:
        self._out_of_memory = True

    def _detach_streams(self) -> None:
        for number in range(3):
            os.dup2(self._null_device, number)
        for stream in self._streams:
            if not stream.closed:
                stream.flush()  # unwritten output must not appear in the next program's output

    def _restore_streams(self) -> None:
        """Install fresh streams for a program, even if an earlier program closed or replaced them."""
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
        stdout, stderr = (
            stream if not stream.closed else open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            for number, stream in enumerate(self._streams, start=1)
        )
        self._streams = (stdout, stderr)
        sys.stdout, sys.stderr = stdout, stderr

    # -- forks ----------------------------------------------------------------------------------------------------

    def _fork(self, directory: str, descriptors: list[int]) -> int:
        """Fork twice. The first child exits immediately, so the session init adopts the fork. Returns an errno or 0."""
        control, announcement = descriptors
        try:
            intermediate = _fork_without_warning()
        except OSError as error:
            return error.errno or 1
        if intermediate == 0:
            _fork_again_for_adoption()
            self._become_fork(directory, control, announcement)
            return 0
        os.close(control)
        os.close(announcement)
        _, status = os.waitpid(intermediate, 0)
        return os.waitstatus_to_exitcode(status)

    def _become_fork(self, directory: str, control: int, announcement: int) -> None:
        """Become a session with its own socket and directory, and announce it to the session init.

        The kernel adds the PID to the announcement.
        """
        self._control.close()
        self._control = socket.socket(fileno=control)
        relative = os.path.relpath(os.getcwd(), self._scratch)
        with socket.socket(fileno=announcement) as init:
            error = copy_scratch(self._scratch, f"{self._root}/{directory}")
            if error == 0:
                self._enter_directory(directory, relative)
            init.send(error.to_bytes(4, "big"))
        if error:
            os._exit(0)

    def _enter_directory(self, directory: str, relative: str = ".") -> None:
        self._scratch = f"{self._root}/{directory}"
        os.chdir(f"{self._scratch}/{relative}" if not relative.startswith("..") else self._scratch)
        os.environ["HOME"] = os.environ["TMPDIR"] = self._scratch
        tempfile = sys.modules.get("tempfile")
        if tempfile is not None:
            tempfile.__dict__["tempdir"] = None  # so that TMPDIR is read again


def _fork_again_for_adoption() -> None:
    """Fork again and end this process. Returns in the fork after the session init has adopted it."""
    intermediate = os.getpid()
    try:
        made = _fork_without_warning()
    except OSError as error:
        os._exit(error.errno or 1)
    if made != 0:
        os._exit(0)
    while os.getppid() == intermediate:
        time.sleep(0.0002)


def _fork_without_warning() -> int:
    """Fork without Python's warning about threads: no thread continues in the fork.

    ``random`` reseeds itself in every fork, so its state is restored: a fork of a session keeps its origin's state.
    """
    state = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid


_OWN_SOCKET = 200
_PROCESS_SOCKET = 201
_CREDENTIALS = struct.Struct("iII")  # process, user, group
_KILL_SECONDS = 4.0  # seconds to wait for processes to end after SIGKILL
_PAUSE_SECONDS = 0.001


def run_session_init(limits: ChildLimits, slot: int, session: int, descriptors: list[int]) -> NoReturn:
    """Isolate this process, start the session, and serve until the last process has ended. Never returns."""
    try:
        server = _install_descriptors(descriptors)
        try:
            scratch = isolate_child(limits, slot)
            # Allow one more process than the limit, because the session init counts too.
            resource.setrlimit(resource.RLIMIT_NPROC, (limits.max_processes + 1, limits.max_processes + 1))
            kernel.forbid_tracing()
            limits.reseed_generators()
            SessionInit(server, scratch, limits.lockdown).serve(session)
        except OSError as error:
            server.send(json.dumps({"op": "failed", "why": str(error)}).encode())
    finally:
        os._exit(0)


def _install_descriptors(descriptors: list[int]) -> socket.socket:
    own, process = descriptors
    os.dup2(own, _OWN_SOCKET, inheritable=False)
    os.dup2(process, _PROCESS_SOCKET, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return socket.socket(fileno=_OWN_SOCKET)


class SessionInit:
    """The parent of the processes of a session and its forks. The server assigns session numbers."""

    def __init__(self, server: socket.socket, scratch: str, lockdown: Lockdown) -> None:
        self._server = server
        self._scratch = scratch
        self._lockdown = lockdown
        self._pids: dict[int, int] = {}  # session -> process
        self._running: set[int] = set()  # sessions
        self._expected_forks: dict[int, tuple[int, socket.socket]] = {}  # descriptor -> session, announcement socket
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self, first_session: int) -> None:
        """Start the first session process, then serve until no session process is left."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._start_session(first_session)
        self._poll.register(self._server, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        while self._pids or self._expected_forks:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in ready:
                if descriptor in self._expected_forks:
                    self._accept_announced_fork(descriptor)
                elif descriptor == self._server.fileno() and not self._receive_and_execute_command():
                    return
            # Reap after all commands, because a search for leftovers takes longer with more sessions. If all sessions
            # are closed at once, they are killed first and then reaped together.
            if self._wake_read in ready and not select.select([self._server], [], [], 0)[0]:
                os.read(self._wake_read, 4096)
                self._reap()

    def _start_session(self, session: int) -> None:
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_session_interpreter(_PROCESS_SOCKET, self._scratch, str(session), self._lockdown)
        close_other_descriptors(*sorted((self._wake_read, self._wake_write, _OWN_SOCKET)))
        self._add(session, pid)

    def _receive_and_execute_command(self) -> bool:
        """Execute one command from the server. Returns False if the server has disconnected."""
        data, descriptors, _, _ = socket.recv_fds(self._server, _MAX_MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        message: ProcessMessage = json.loads(data)
        session = message["id"]
        if message["op"] == "expect":
            announcement = socket.socket(fileno=descriptors[0])
            self._expected_forks[announcement.fileno()] = (session, announcement)
            self._poll.register(announcement, select.POLLIN)
        elif message["op"] == "forget":
            for descriptor in [one for one, (number, _) in self._expected_forks.items() if number == session]:
                self._poll.unregister(descriptor)
                self._expected_forks.pop(descriptor)[1].close()
            self._kill_leftovers()
        elif session in self._pids:
            pid = self._pids[session]
            if message["op"] == "resume":
                self._running.add(session)
                os.kill(pid, signal.SIGCONT)
            elif message["op"] == "stop":
                self._running.discard(session)
                self._stop_idle_processes()
                self._kill_leftovers()
                self._send({"op": "stopped", "id": session})
            else:
                os.kill(pid, signal.SIGKILL)
        return True

    def _stop_idle_processes(self) -> None:
        """Stop all idle interpreters. A running process or the end of a process group may have resumed them."""
        for session, pid in self._pids.items():
            if session not in self._running:
                _signal(pid, signal.SIGSTOP)

    # -- forks ----------------------------------------------------------------------------------------------------

    def _accept_announced_fork(self, descriptor: int) -> None:
        """Check that the announced process is a child of this process. The kernel identifies the process."""
        session, announcement = self._expected_forks.pop(descriptor)
        self._poll.unregister(descriptor)
        with announcement:
            data, ancillary, _, _ = announcement.recvmsg(4, socket.CMSG_SPACE(_CREDENTIALS.size))
        pid = 0
        for _, kind, payload in ancillary:
            if kind == socket.SCM_CREDENTIALS:
                pid = _CREDENTIALS.unpack(payload[: _CREDENTIALS.size])[0]
        error = int.from_bytes(data, "big") if len(data) == 4 else 1
        if error or pid not in child_pids(os.getpid()) or pid in self._pids.values():
            self._send({"op": "started", "id": session, "pid": 0, "error": error or 1})
        else:
            self._add(session, pid)

    def _add(self, session: int, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._pids[session] = pid
        self._send({"op": "started", "id": session, "pid": pid, "error": 0})

    # -- exits ----------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        exits: list[tuple[int, int]] = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                self._stop_idle_processes()
                break
            for session in [session for session, process in self._pids.items() if process == pid]:
                del self._pids[session]
                self._running.discard(session)
                exits.append((session, status))
        if exits:
            self._kill_leftovers()
        for session, status in exits:
            self._send({"op": "exit", "id": session, "status": status})

    def _kill_leftovers(self) -> None:
        """Kill orphans and the descendants of idle interpreters. Raises TimeoutError if they do not end.

        All processes are stopped before any is killed. Stopped processes still count against RLIMIT_NPROC, so a fork
        bomb cannot outrun the loop. A process may end before it is stopped and leave a child that the same scan misses.
        The loop therefore repeats until a scan finds only processes that had ended before the scan.
        """
        deadline = time.monotonic() + _KILL_SECONDS
        stopped: set[int] = set()
        ended: set[int] = set()
        while not (found := self._stop_leftovers()) <= ended:
            alive = set(filter(has_live_thread, found))
            if alive and alive <= stopped:
                for pid in alive:
                    _signal(pid, signal.SIGKILL)
                time.sleep(_PAUSE_SECONDS)  # killed processes take a moment to end
            stopped |= alive
            ended = found - alive
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(alive)} processes of a program did not end within {_KILL_SECONDS:g} s")

    def _stop_leftovers(self) -> set[int]:
        """Stop leftover processes, each before its children are listed. Returns their PIDs, including unreaped ones."""
        sessions = {pid: session for session, pid in self._pids.items()}
        found: list[int] = []
        for child in child_pids(os.getpid()):
            if child not in sessions:
                if not self._expected_forks:  # otherwise the child may be a fork that has not announced itself yet
                    found += process_tree(child, _stop)
            elif sessions[child] not in self._running:
                found += process_tree(child, _stop)[1:]
        return set(found)

    def _send(self, message: ProcessMessage) -> None:
        self._server.send(json.dumps(message).encode())


def _stop(pid: int) -> None:
    _signal(pid, signal.SIGSTOP)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
