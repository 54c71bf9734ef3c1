"""``subprocess.Popen`` whose Python commands are forked from the server."""

from __future__ import annotations

import atexit
import ctypes
import inspect
import itertools
import json
import multiprocessing.util
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
LIBRARIES = "WARM_LIBRARIES"
"""A command with this variable is forked from a server that has loaded vLLM too. Its children are."""
_OF_VLLM = {
    "agentrl.cluster.supervise",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.registry",
}
_PR_SET_CHILD_SUBREAPER = 36
_SPAWN = multiprocessing.util.spawnv_passfds
_EXECUTE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class ForkServer:
    """This process's side: what the server forks becomes a child of this process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    @classmethod
    def launch(cls, libraries: str) -> ForkServer:
        """A server that loads the libraries; it ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            handle = theirs.fileno()
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), str(handle), _PADDING],
                pass_fds=[handle],
                env={**os.environ, **_NO_THREADS, "WARM_PADDING": _PADDING, LIBRARIES: libraries},
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


_servers: dict[tuple[int, str], ForkServer] = {}
"""By the process that uses it, as a forked process must not use its parent's, and by what it has loaded."""


def use(server: ForkServer) -> None:
    _servers[os.getpid(), os.environ.get(LIBRARIES, "")] = server


def _server(libraries: str) -> ForkServer:
    key = (os.getpid(), libraries)
    if key not in _servers:
        _servers[key] = ForkServer.launch(libraries)
    return _servers[key]


def spawn(executable: str | bytes, command: Sequence[str], handles: Sequence[int]) -> int:
    """``multiprocessing.util.spawnv_passfds`` whose processes are forked; its resource tracker is started as ever."""
    if "--multiprocessing-fork" not in command:
        return _SPAWN(executable, command, handles)  # type: ignore[attr-defined, no-any-return]
    told = [os.fsdecode(part) for part in command]
    order = {
        "command": told,
        "program": told[told.index("-c") :],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "session": False,
        "handles": [0, 1, 2, *handles],
    }
    return _server(os.environ[LIBRARIES]).start(order, [0, 1, 2, *handles])


class WarmPopen(subprocess.Popen[Any]):
    """Modules that take long to load, and scripts, are forked from the server; other commands are started as ever."""

    def _execute_child(self, *arguments: object) -> None:
        given = _EXECUTE.bind(self, *arguments).arguments
        command = [os.fspath(part) for part in given["args"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        libraries = environment.get(LIBRARIES, "")
        program = _program(command, _MODULES | _OF_VLLM if libraries else _MODULES)
        if program is None:
            super()._execute_child(*arguments)  # type: ignore[misc]
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [own if end == -1 else end for own, end in enumerate(ends)]
        order = {
            "command": command,
            "program": program,
            "environment": environment,
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "session": bool(given["start_new_session"]),
            "handles": [0, 1, 2, *given["pass_fds"]],
        }
        self.pid = _server(libraries).start(order, [*streams, *given["pass_fds"]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))  # type: ignore[attr-defined]


def _program(command: Sequence[str], modules: set[str]) -> list[str] | None:
    """The module or script and its arguments, if they can be forked. CUDA works in no forked process."""
    if command[0] != sys.executable or torch.cuda.is_available():
        return None
    rest = [*itertools.dropwhile("-u".__eq__, command[1:])]
    known = rest[:1] == ["-m"] and rest[1] in modules
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
