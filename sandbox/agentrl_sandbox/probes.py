"""Tries, with real programs, what programs must not be able to do.

A probe is believed only where it shows a property missing or where the outcome and the world outside agree; what the
programs print decides nothing that they could gain from.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentrl_sandbox import probe_programs as programs
from agentrl_sandbox.errors import StartError
from agentrl_sandbox.layers import layers_of
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import PROPERTIES, Execution, Isolation, Outcome, Sandbox

_PROBE_SECONDS = 0.3  # the deadline that the time probe is given
_PATIENCE_SECONDS = 20.0  # for probes that should end by themselves
_NEIGHBOUR_SECONDS = 0.3  # that a neighbour's files are there to be looked for

Execute = Callable[..., Awaitable[Execution]]


async def probe(sandbox: Sandbox, *, mode: str, layers: Mapping[str, int], settings: SandboxSettings) -> Isolation:
    """Run every probe at once; for each property the layer that holds it, or None. Raises StartError.

    ``layers`` is what the server found of the layers that need no namespace.
    """

    async def execute(program: str, *, timeout: float) -> Execution:
        ran = await sandbox.execute(program, timeout=timeout)
        if ran.outcome is Outcome.INFRASTRUCTURE_FAILURE:
            raise StartError(f"the sandbox cannot run programs: {ran.stderr}")
        return ran

    with _victim() as victim:
        results = {
            "no_network": _network(execute),
            "scratch_only_writes": _writes(execute),
            "no_foreign_reads": _reads(execute, victim),
            "bounded_memory": _memory(execute, settings.memory_mb),
            "bounded_processes": _processes(execute, settings.max_processes),
            "bounded_time": _outcome(execute, programs.TIME, Outcome.TIMEOUT, timeout=_PROBE_SECONDS),
            "bounded_output": _outcome(execute, programs.OUTPUT, Outcome.OUTPUT_LIMIT, timeout=_PATIENCE_SECONDS),
            "no_tracing": _tracing(execute, victim),
        }
        held = dict(zip(results, await asyncio.gather(*results.values()), strict=True))
        held["no_foreign_signals"] = await _signals(execute, victim)
    names = layers_of(mode, layers)
    return Isolation(layers={name: names[name] if held[name] else None for name in PROPERTIES}, mode=mode)


class _Victim:
    """A process of this user with a secret in its environment, its memory and an open file that has no name."""

    def __init__(self, process: subprocess.Popen[bytes], start: str, rest: str) -> None:
        self.process = process
        self.start = start  # of the secret; programs know it, to find the rest
        self.rest = rest


@contextmanager
def _victim() -> Iterator[_Victim]:
    start, rest = secrets.token_hex(8), secrets.token_hex(8)
    with tempfile.TemporaryFile() as file:
        file.write((start + rest).encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={"SECRET": start + rest}, stdin=file
        )
        try:
            yield _Victim(process, start, rest)
        finally:
            process.kill()
            process.wait()


async def _outcome(execute: Execute, program: str, expected: Outcome, *, timeout: float) -> bool:
    return (await execute(program, timeout=timeout)).outcome is expected


async def _network(execute: Execute) -> bool:
    """A TCP and a UDP socket listen here; nothing may arrive."""
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        ran = await execute(programs.NETWORK.format(port=port), timeout=_PATIENCE_SECONDS)
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
def _open_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-probe-") as directory:
        os.chmod(directory, 0o777)
        yield directory


async def _writes(execute: Execute) -> bool:
    """Writes to places where this user may write must not appear there; those to scratch must succeed."""
    name = f"agentrl-sandbox-probe-{secrets.token_hex(8)}"
    with _open_directory() as open_to_all:
        untouched = Path(open_to_all, "untouched")
        untouched.write_text("untouched")
        untouched.chmod(0o666)
        directories = [open_to_all, os.getcwd(), str(Path.home()), tempfile.gettempdir(), "/var/tmp", sys.prefix, "/"]
        program = programs.WRITES.format(directories=directories, name=name, untouched=str(untouched))
        ran = await execute(program, timeout=_PATIENCE_SECONDS)
        changed = not _is_untouched(untouched)
        leaked = [path for path in (Path(directory) / name for directory in directories) if path.exists()]
        for path in leaked:
            path.unlink(missing_ok=True)
    return ran.outcome is Outcome.OK and not leaked and not changed


def _is_untouched(file: Path) -> bool:
    return file.exists() and file.stat().st_mode & 0o777 == 0o666 and file.read_text() == "untouched"


async def _reads(execute: Execute, victim: _Victim) -> bool:
    """Secrets in a file that everyone may read, in another program's files and in a process's open files stay there."""
    with _open_directory() as open_to_all:
        secret = Path(open_to_all, "secret")
        secret.write_text(victim.start + victim.rest)
        neighbour = programs.NEIGHBOUR.format(secret=victim.start + victim.rest, seconds=2 * _NEIGHBOUR_SECONDS)
        places = [str(secret), f"/proc/{victim.process.pid}/environ", f"/proc/{victim.process.pid}/fd/0"]
        reader = programs.READS.format(places=places, start=victim.start, seconds=_NEIGHBOUR_SECONDS)
        _, ran = await asyncio.gather(
            execute(neighbour, timeout=_PATIENCE_SECONDS), execute(reader, timeout=_PATIENCE_SECONDS)
        )
        if ran.outcome is not Outcome.OK or victim.rest in ran.stdout:
            return False
        if os.access("/etc/shadow", os.R_OK):
            return await _outcome(execute, programs.SHADOW, Outcome.OK, timeout=_PATIENCE_SECONDS)
        return True


async def _memory(execute: Execute, memory_mb: int) -> bool:
    program = programs.MEMORY.format(size=2 * memory_mb << 20)
    return await _outcome(execute, program, Outcome.MEMORY_LIMIT, timeout=_PATIENCE_SECONDS)


async def _processes(execute: Execute, max_processes: int) -> bool:
    """Either no more can be made, or the program that has them is killed."""
    ran = await execute(programs.PROCESSES.format(most=max_processes + 8), timeout=_PATIENCE_SECONDS)
    return ran.outcome in (Outcome.OK, Outcome.KILLED)


async def _tracing(execute: Execute, victim: _Victim) -> bool:
    program = programs.TRACING.format(pid=victim.process.pid, start=victim.start)
    ran = await execute(program, timeout=_PATIENCE_SECONDS)
    return ran.outcome is Outcome.OK and victim.rest not in ran.stdout


async def _signals(execute: Execute, victim: _Victim) -> bool:
    """A process of this user must survive."""
    ran = await execute(programs.SIGNALS.format(pid=victim.process.pid), timeout=_PATIENCE_SECONDS)
    return ran.outcome is Outcome.OK and victim.process.poll() is None
