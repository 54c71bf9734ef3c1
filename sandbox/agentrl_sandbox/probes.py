"""Tries, with real programs, what programs must not be able to do.

A probe is believed only where it shows a property missing or where the outcome and the world outside agree; what the
programs print decides nothing that they could gain from.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl_sandbox.errors import StartError
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import PROPERTIES, Execution, Isolation, Outcome, Sandbox

_PROBE_SECONDS = 0.3  # the deadline that the time probe is given
_PATIENCE_SECONDS = 20.0  # for probes that should end by themselves

_NETWORK = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try:
        probe = socket.socket(socket.AF_INET, kind)
        probe.settimeout(1)
        probe.connect(("127.0.0.1", {port}))
        probe.send(b"probe")
    except OSError:
        pass
"""
_WRITES = """
for directory in {directories!r}:
    try:
        open(directory + "/" + {name!r}, "w").close()
    except OSError:
        pass
open({name!r}, "w").close()
print("wrote scratch")
"""
_MEMORY = "data = bytearray({size})\nprint(len(data))"
_PROCESSES = """
import os, time
made = 0
try:
    while made < {most}:
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        made += 1
except OSError:
    pass
print("made", made)
os._exit(0 if made < {most} else 3)
"""
_TIME = """
import signal
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
"""
_OUTPUT = "import os\nwhile True:\n    os.write(1, b'x' * 65536)"
_SIGNALS = """
import os
try:
    os.kill({pid}, 0)
except OSError:
    os._exit(0)
os._exit(3)
"""

Execute = Callable[..., Awaitable[Execution]]


async def probe(sandbox: Sandbox, *, mode: str, settings: SandboxSettings) -> Isolation:
    """Run every probe at once; for each property the layer that holds it, or None. Raises StartError."""

    async def execute(program: str, *, timeout: float) -> Execution:
        ran = await sandbox.execute(program, timeout=timeout)
        if ran.outcome is Outcome.INFRASTRUCTURE_FAILURE:
            raise StartError(f"the sandbox cannot run programs: {ran.stderr}")
        return ran

    held = await asyncio.gather(
        _network(execute),
        _writes(execute),
        _memory(execute, settings.memory_mb),
        _processes(execute, settings.max_processes),
        _outcome(execute, _TIME, Outcome.TIMEOUT, timeout=_PROBE_SECONDS),
        _outcome(execute, _OUTPUT, Outcome.OUTPUT_LIMIT, timeout=_PATIENCE_SECONDS),
        _signals(execute),
    )
    layers = _layers(mode)
    return Isolation(
        layers={name: layers[name] if holds else None for name, holds in zip(PROPERTIES, held, strict=True)}, mode=mode
    )


def _layers(mode: str) -> dict[str, str]:
    namespaces = mode != "none"
    return {
        "no_network": "network namespace" if namespaces else "no network here",
        "scratch_only_writes": "mount namespace" if namespaces else "separate user",
        "bounded_memory": "RLIMIT_AS and a watch on resident memory",
        "bounded_processes": "RLIMIT_NPROC",
        "bounded_time": "the server's deadline and RLIMIT_CPU",
        "bounded_output": "the server's count",
        "no_foreign_signals": "PID namespace" if namespaces else "separate user",
    }


async def _outcome(execute: Execute, program: str, expected: Outcome, *, timeout: float) -> bool:
    return (await execute(program, timeout=timeout)).outcome is expected


async def _network(execute: Execute) -> bool:
    """A TCP and a UDP socket listen here; nothing may arrive."""
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        ran = await execute(_NETWORK.format(port=port), timeout=_PATIENCE_SECONDS)
        tcp.setblocking(False)
        udp.setblocking(False)
        return (
            ran.outcome is Outcome.OK
            and not _arrived(lambda: tcp.accept()[0].close())
            and not _arrived(lambda: udp.recv(16))
        )


def _arrived(receive: Callable[[], object]) -> bool:
    try:
        receive()
    except BlockingIOError:
        return False
    return True


@contextmanager
def _writable_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-probe-") as directory:
        os.chmod(directory, 0o777)
        yield directory


async def _writes(execute: Execute) -> bool:
    """Writes to places where this user may write must not appear there; those to scratch must succeed."""
    name = f"agentrl-sandbox-probe-{secrets.token_hex(8)}"
    with _writable_directory() as open_to_all:
        directories = [open_to_all, os.getcwd(), str(Path.home()), tempfile.gettempdir(), "/var/tmp", sys.prefix, "/"]
        ran = await execute(_WRITES.format(directories=directories, name=name), timeout=_PATIENCE_SECONDS)
        leaked = [path for path in (Path(directory) / name for directory in directories) if path.exists()]
        for path in leaked:
            path.unlink(missing_ok=True)
    return ran.outcome is Outcome.OK and not leaked


async def _memory(execute: Execute, memory_mb: int) -> bool:
    return await _outcome(
        execute, _MEMORY.format(size=2 * memory_mb << 20), Outcome.MEMORY_LIMIT, timeout=_PATIENCE_SECONDS
    )


async def _processes(execute: Execute, max_processes: int) -> bool:
    return await _outcome(execute, _PROCESSES.format(most=max_processes + 8), Outcome.OK, timeout=_PATIENCE_SECONDS)


async def _signals(execute: Execute) -> bool:
    return await _outcome(execute, _SIGNALS.format(pid=os.getpid()), Outcome.OK, timeout=_PATIENCE_SECONDS)
