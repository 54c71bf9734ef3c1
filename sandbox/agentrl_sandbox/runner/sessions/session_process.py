"""A session's interpreter: runs one program after another in one ``__main__``, and forks on request.

    server -> process   {"op": "run", "serial"} with descriptors [program file, stdout, stderr] and [fetch file]
                        {"op": "fork", "serial", "directory"} with descriptors [the fork's socket, its birth socket]
    process -> server   DONE: serial, exit status, whether memory ran out, error number of a fork that failed

Programs can tamper with this process, so the server trusts it only to report that a program of this session is done.
Between programs the session init stops this process.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
import time
import warnings
from typing import NoReturn

from agentrl_sandbox.runner import interpreter, kernel
from agentrl_sandbox.runner.child import close_descriptors_but
from agentrl_sandbox.runner.files import Fetched, fetch_files
from agentrl_sandbox.runner.isolation import Lockdown
from agentrl_sandbox.runner.sessions.scratch_copy import copy_scratch

DONE = struct.Struct("!QB?i")
_MAX_MESSAGE = 4096
_MOST_DESCRIPTORS = 4


def serve_session(control: int, scratch: str, first: str, lockdown: Lockdown) -> NoReturn:
    """Isolate this process and become a session's interpreter, in a new directory ``first`` inside ``scratch``.

    Never returns.
    """
    leave = os._exit  # programs may replace os._exit
    try:
        os.setpgid(0, 0)  # signals that programs send to their group must not reach the session init
        os.mkdir(f"{scratch}/{first}", 0o700)
        kernel.set_dumpable()
        kernel.die_with_parent(signal.SIGKILL)
        lockdown.close(scratch)
        close_descriptors_but(control)
        SessionProcess(control, scratch, first).serve()
    finally:
        leave(70)


class SessionProcess:
    """The interpreter's side of a session."""

    def __init__(self, control: int, scratch: str, directory: str) -> None:
        self._control = socket.socket(fileno=control)
        self._pid = os.getpid()
        self._root = scratch
        self._scratch = ""
        self._programs = 0
        self._out_of_memory = False
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        self._streams = (sys.stdout, sys.stderr)
        self._main = interpreter.make_main()
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._move_to(directory)
        sys.path.insert(0, "")
        gc.enable()

    def serve(self) -> None:
        while True:
            flags = socket.MSG_CMSG_CLOEXEC
            data, descriptors, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE, _MOST_DESCRIPTORS, flags)
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

    # Programs.

    def _run(self, descriptors: list[int]) -> int:
        program, stdout, stderr, *fetched = descriptors
        for number, descriptor in enumerate((program, stdout, stderr)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._out_of_memory = False
        self._programs += 1
        self._restore_streams()
        task = interpreter.take_task(self._scratch, self._on_out_of_memory)
        exit_code = interpreter.UNCAUGHT
        if task is not None:
            exit_code = interpreter.run(task, f"<program {self._programs}>", self._main, self._on_out_of_memory)
            exit_code = interpreter.finish(exit_code, self._on_out_of_memory, leaves=False)
        if os.getpid() != self._pid:  # a forked child of the program also returns here
            os._exit(interpreter.finish(exit_code, self._on_out_of_memory, leaves=True))
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)
        if fetched:
            self._fetch(task.fetch if task is not None else (), fetched[0])
        self._take_streams_away()
        return exit_code

    def _fetch(self, names: tuple[str, ...], file: int) -> None:
        try:
            fetch_files(self._scratch, names, Fetched(file, names))
        except Exception:  # noqa: BLE001 - programs may have broken what this needs; the outcome is unchanged
            return
        finally:
            os.close(file)

    def _on_out_of_memory(self) -> None:
        self._out_of_memory = True

    def _take_streams_away(self) -> None:
        for number in range(3):
            os.dup2(self._null, number)
        for stream in self._streams:
            if not stream.closed:
                stream.flush()  # unwritten output must not appear in the next program's output

    def _restore_streams(self) -> None:
        """Give each program fresh streams, even if an earlier one closed or replaced them."""
        sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
        stdout, stderr = (
            stream if not stream.closed else open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            for number, stream in enumerate(self._streams, start=1)
        )
        self._streams = (stdout, stderr)
        sys.stdout, sys.stderr = stdout, stderr

    # Forks.

    def _fork(self, directory: str, descriptors: list[int]) -> int:
        """Fork twice: the first child ends at once, so that the session init adopts the fork. Returns an errno or 0."""
        control, birth = descriptors
        try:
            between = _quiet_fork()
        except OSError as error:
            return error.errno or 1
        if between == 0:
            _leave_the_fork_to_init()
            self._be_born(directory, control, birth)
            return 0
        os.close(control)
        os.close(birth)
        _, status = os.waitpid(between, 0)
        return os.waitstatus_to_exitcode(status)

    def _be_born(self, directory: str, control: int, birth: int) -> None:
        """Become a separate session with its own socket and directory. The kernel identifies it to the session init."""
        self._control.close()
        self._control = socket.socket(fileno=control)
        inside = os.path.relpath(os.getcwd(), self._scratch)
        with socket.socket(fileno=birth) as init:
            error = copy_scratch(self._scratch, f"{self._root}/{directory}")
            if error == 0:
                self._move_to(directory, inside)
            init.send(error.to_bytes(4, "big"))
        if error:
            os._exit(0)

    def _move_to(self, directory: str, inside: str = ".") -> None:
        self._scratch = f"{self._root}/{directory}"
        os.chdir(f"{self._scratch}/{inside}" if not inside.startswith("..") else self._scratch)
        os.environ["HOME"] = os.environ["TMPDIR"] = self._scratch
        tempfile = sys.modules.get("tempfile")
        if tempfile is not None:
            tempfile.__dict__["tempdir"] = None  # read TMPDIR again


def _leave_the_fork_to_init() -> None:
    """Fork again, end this process, and return in the fork once it has been adopted."""
    between = os.getpid()
    try:
        made = _quiet_fork()
    except OSError as error:
        os._exit(error.errno or 1)
    if made != 0:
        os._exit(0)
    while os.getppid() == between:
        time.sleep(0.0002)


def _quiet_fork() -> int:
    """Fork without Python's warning about threads, which the fork does not have.

    ``random`` reseeds itself in every fork; a fork of a session keeps its origin's state.
    """
    state = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        random.setstate(state)
    return pid
