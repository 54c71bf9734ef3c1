"""The server: ``HANDLE PADDING``. It loads the libraries, then forks for each order that comes through the handle.

A forked process is handed to the client by a parent between the two that ends at once: the client adopts orphans
meanwhile. It begins when it has been handed over, and starts a server of its own for the commands that it runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple, cast

Order = dict[str, Any]
_LONGEST = 1 << 20


class Area(NamedTuple):
    """Where /proc finds what a process was started with."""

    start: int
    end: int

    def show(self, parts: list[str]) -> None:
        size = self.end - self.start
        shown = b"\0".join(part.encode(errors="surrogateescape") for part in parts) + b"\0"
        ctypes.memmove(self.start, shown[: size - 1].ljust(size, b"\0"), size)


def areas() -> tuple[Area, Area]:
    """Those of the arguments and of the environment variables."""
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return Area(*map(int, numbers[45:47])), Area(*map(int, numbers[47:49]))


def load() -> None:
    """Import what commands import. Nothing of it may start a thread, which a fork would lose."""
    from agentrl.cli import shorten_spinning

    del sys.modules["agentrl.cli"]
    shorten_spinning()
    import deepspeed  # noqa: F401

    import agentrl.models.loading
    import agentrl.training.run.start  # noqa: F401

    if os.environ["WARM_LIBRARIES"]:
        import vllm.entrypoints.launchers.api_server.entry
        import vllm.entrypoints.openai.api_server
        import vllm.v1.engine.core
        import vllm.v1.executor.multiproc_executor
        import vllm.v1.worker.cpu_worker  # noqa: F401

    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"a library has started {len(threads) - 1} threads")
    gc.freeze()  # collections need not look at what is there for good


def serve(connection: socket.socket) -> tuple[Order, list[int]]:
    """Fork for each order until the client ends. Returns in the forked processes, with the order and its handles."""
    while True:
        message, handles, _, _ = socket.recv_fds(connection, _LONGEST, 64)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        handed_over, hand_over = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                for handle in (told, tell, hand_over, connection.detach()):
                    os.close(handle)
                os.read(handed_over, 1)
                os.close(handed_over)
                return json.loads(message), handles
            os.write(tell, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        connection.send(os.read(told, 64))
        for handle in (told, tell, handed_over, hand_over, *handles):
            os.close(handle)


def place(order: Order, handles: list[int]) -> None:
    """Give this process its folder, environment variables and handles."""
    os.chdir(order["folder"])
    arguments, variables = _AREAS
    os.environ.clear()
    os.environ.update(order["environment"])
    arguments.show(order["command"])
    variables.show([f"{name}={value}" for name, value in order["environment"].items()])
    moved = [_away(handle, order) for handle in handles]
    for handle, wanted in zip(moved, order["handles"], strict=True):
        os.dup2(handle, wanted)
        os.close(handle)
    if "PYTHONUNBUFFERED" in os.environ or "-u" in order["command"][:2]:
        for stream in (sys.stdout, sys.stderr):
            cast("TextIOWrapper", stream).reconfigure(write_through=True)


def _away(handle: int, order: Order) -> int:
    """The same under a number that no handle of the order has."""
    moved = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, max(order["handles"]) + 1)
    os.close(handle)
    return moved


def lend(server: socket.socket) -> None:
    """Let what this process starts through ``subprocess`` be forked as well."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from warm.client import LIBRARIES, ForkServer, WarmPopen, spawn, use

    use(ForkServer(server))
    subprocess.Popen = WarmPopen  # type: ignore[misc]
    if os.environ.get(LIBRARIES):
        multiprocessing.util.spawnv_passfds = spawn  # type: ignore[attr-defined]


def carry_out(order: Order) -> None:
    """Run the module, the script or the code of a spawned process as Python would."""
    program = order["program"]
    found = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if program[0] == "-m":
        sys.path[:] = [order["folder"], *found, *_PATH]
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.path[:] = ["", *found, *_PATH]
        sys.argv = ["-c", *program[2:]]
        exec(program[1], {"__name__": "__main__"})
    else:
        sys.path[:] = [str(Path(program[0]).resolve().parent), *found, *_PATH]
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load()
    while True:
        order, handles = serve(connection)
        if order["session"]:
            os.setsid()  # also for the server: what it forks is of the group of the process that it serves
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            for handle in handles:
                os.close(handle)
            connection = theirs
            continue
        theirs.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ours = socket.socket(fileno=_away(ours.detach(), order))
        place(order, handles)
        lend(ours)
        carry_out(order)
        return


_OWN = {str(Path(__file__).parent)} | set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
_PATH = [path for path in sys.path if path not in _OWN]
_AREAS = areas()

if __name__ == "__main__":
    main()
