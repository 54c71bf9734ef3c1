"""``subprocess.Popen`` whose Python commands are forked from the server."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

_PADDING = "x" * 8192
_NO_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""For libraries that start a thread as they load; DeepSpeed loads mlflow, which loads Arrow, where it is installed."""
_MODULES = {
    "agentrl.cli",
    "agentrl.training.run.rank",
    "agentrl.training.worker.process",
}
# The second: pyarrow, which DeepSpeed loads where MLflow is installed.
_NO_THREADS = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_PR_SET_CHILD_SUBREAPER = 36
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class ForkServer:
    """This process's side: what the server forks becomes a child of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def launch(cls) -> ForkServer:
        """A server that loads the libraries; it ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            handle = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), str(handle), _PADDING],
                pass_fds=[handle],
                env={**os.environ, **_NO_THREADS, "WARM_PADDING": _PADDING},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(process.wait)
        atexit.register(ours.close)  # the last is called first
        return cls(ours)

    def start(self, order: Mapping[str, object], handles: Sequence[int]) -> int:
        """Fork a process that carries out ``order`` with copies of ``handles``; its id."""
        with self._lock:
            _adopt(True)
            try:
                socket.send_fds(self._connection, [json.dumps(order).encode()], handles)
                answer = self._connection.recv(64)
            finally:
                _adopt(False)
        if not answer:
            raise RuntimeError("the server of warm processes has ended")
        return int(answer)


def _adopt(wanted: bool) -> None:
    """Whether what loses its parent below this process becomes its child."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


_servers: dict[int, ForkServer] = {}
"""By the process that uses it: a forked process must not use its parent's."""


def use(server: ForkServer) -> None:
    _servers[os.getpid()] = server


def _server() -> ForkServer:
    if os.getpid() not in _servers:
        use(ForkServer.launch())
    return _servers[os.getpid()]


class WarmPopen(subprocess.Popen[Any]):
    """Modules that take long to load, and scripts, are forked from the server; other commands are started as ever."""

    def _execute_child(self, *arguments: object) -> None:
        given = _EXECUTE.bind(self, *arguments).arguments
        command = [os.fspath(part) for part in given["args"]]
        program = _program(command)
        if program is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if end == -1 else end for own, end in enumerate(ends)]
        order = {
            "command": command,
            "program": program,
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "session": bool(given["start_new_session"]),
            "handles": [0, 1, 2, *given["pass_fds"]],
        }
        self.pid = _server().start(order, [*streams, *given["pass_fds"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _program(command: Sequence[str]) -> list[str] | None:
    """The module or script and its arguments, if they can be forked. CUDA works in no forked process."""
    if command[0] != sys.executable or torch.cuda.is_available():
        return None
    rest = [*itertools.dropwhile("-u".__eq__, command[1:])]
    known = rest[:1] == ["-m"] and rest[1] in _MODULES
    return rest if known or (rest and rest[0].endswith(".py")) else None


def run_warm(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` in text mode, with both streams in one unless they are given."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with WarmPopen(command, **(streams | options)) as process:
        try:
            said, complained = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, said, complained)
