"""Probes of the isolation properties, with real programs that attempt forbidden operations.

A probe observes, inside and outside the sandbox, whether the attack succeeded or the program ended without success. An
interrupted probe is inconclusive, because the machine may just be slow: the probe is repeated with more time and never
counts as missing isolation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import PROPERTIES, Execution, Isolation, Outcome, Sandbox, StartError


def layers_by_property(mode: str, found: Mapping[str, int]) -> dict[str, str]:
    """Return the layers that should provide each property on this machine, strongest first.

    >>> found = {"landlock": 4, "seccomp": 1, "separate_users": 0}
    >>> layers_by_property("none", found)["no_network"]
    'seccomp, Landlock'
    >>> layers_by_property("none", found)["no_foreign_signals"]
    'unknown'
    """
    has_namespaces = mode != "none"
    separate_user = bool(found["separate_users"])
    version, filtered = found["landlock"], bool(found["seccomp"])
    user = ("a user for each slot", separate_user)
    counted = ("counting of processes and threads", not separate_user)
    return {
        "no_network": _join_layers(
            ("network namespace", has_namespaces), ("seccomp", filtered), ("Landlock", version >= 4)
        ),
        "scratch_only_writes": _join_layers(("mount namespace", has_namespaces), user, ("Landlock", version >= 1)),
        "no_foreign_reads": _join_layers(("mount namespace", has_namespaces), user, ("Landlock", version >= 1)),
        "bounded_memory": "RLIMIT_AS, measurement of resident memory",
        "bounded_processes": _join_layers(counted, ("RLIMIT_NPROC", True), user, ("user namespace", mode == "user")),
        "bounded_time": "the server's deadline, RLIMIT_CPU",
        "bounded_output": "counting by the server",
        "no_foreign_signals": _join_layers(("PID namespace", has_namespaces), user, ("Landlock", version >= 6)),
        "no_tracing": _join_layers(
            ("PID namespace", has_namespaces), user, ("seccomp", filtered), ("Landlock", version >= 1)
        ),
    }


def _join_layers(*layers: tuple[str, bool]) -> str:
    return ", ".join(name for name, is_active in layers if is_active) or "unknown"


# The programs that the probes run: templates for ``str.format``, or texts to run unchanged.

ATTACK_SUCCEEDED = 3
"""Exit status of a program whose attack succeeded."""

UNCOUNTED_BYTES = 1 << 20
"""Bytes that a program may write before the server counts them."""

NETWORK = """
import socket
for kind, port in ((socket.SOCK_DGRAM, {udp}), (socket.SOCK_STREAM, {tcp})):
    try:
        probe = socket.socket(socket.AF_INET, kind)
        probe.settimeout(1)
        probe.connect(("127.0.0.1", port))
        probe.send(b"{word}")
    except OSError:
        continue
    if kind == socket.SOCK_STREAM:
        print("sent")
"""

WRITES = """
import os
for directory in {directories!r}:
    try:
        open(directory + "/" + {name!r}, "w").close()
    except OSError:
        pass
for change in (
    lambda: open({untouched!r}, "w").close(),
    lambda: os.close(os.open({untouched!r}, os.O_RDONLY | os.O_TRUNC)),
    lambda: os.truncate({untouched!r}, 0),
    lambda: os.unlink({untouched!r}),
    lambda: os.chmod({untouched!r}, 0o600),
):
    try:
        change()
    except OSError:
        pass
open({name!r}, "w").close()
"""

NEIGHBOUR = """
import os, time
os.umask(0)
open("secret", "w").write({secret!r})
begin = time.monotonic()
time.sleep({seconds})
print(begin, time.monotonic())
"""

# The program prints little, to fit into the smallest output_limit.
READS = """
import os, time

def names(directory):
    try:
        return os.listdir(directory)
    except OSError:
        return []

end = time.monotonic() + {seconds}
while (begin := time.monotonic()) < end:
    directories = ["../" + name for name in names("..") + [str(slot) for slot in range(16)]]
    for process in names("/proc"):
        directories += ["/proc/" + process + "/cwd", "/proc/" + process + "/root/scratch"]
    for place in {places!r} + [directory + "/secret" for directory in directories]:
        try:
            text = open(place, "rb").read()
        except OSError:
            continue
        if {start!r}.encode() in text:
            print(text[text.index({start!r}.encode()):][:32].decode())
            raise SystemExit
    print(f"{{begin:.6f}} {{time.monotonic():.6f}}")
    time.sleep({seconds} / 4)
"""

SHADOW = """
import os
try:
    open("/etc/shadow").read()
except OSError:
    os._exit(0)
os._exit(3)
"""

MEMORY = "data = bytearray({size})\nprint(len(data))"

PROCESSES = """
import os, time
made = 0
try:
    while made < {most}:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError:
    os._exit(0)
time.sleep(10)
os._exit(3)
"""

TIME = """
import signal
for number in set(range(1, 32)) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("spins", flush=True)
while True:
    pass
"""

OUTPUT = "import os\nsize = {size}\nwhile size > 0:\n    size -= os.write(1, b'x' * 65536)"

TRACING = """
import ctypes, os
libc = ctypes.CDLL(None)
if libc.ptrace(16, {pid}, None, None) == 0:
    os._exit(3)
try:
    lines = open("/proc/{pid}/maps").read().splitlines()
    begin, end = next(line.split()[0].split("-") for line in lines if "[stack]" in line)
    with open("/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int(begin, 16))
        text = memory.read(int(end, 16) - int(begin, 16))
        print(text[text.index(b"{start}"):][:32].decode())
except (OSError, ValueError, StopIteration):
    pass
"""

SIGNALS = """
import os, signal
try:
    os.kill({pid}, signal.SIGKILL)
except OSError:
    os._exit(0)
os._exit(3)
"""


_TIMEOUT_FACTORS = (1, 3, 9)  # factors by which the time limits of successive attempts are multiplied
_PROBE_SECONDS = 0.3  # deadline of the time probe
_PROBE_TIMEOUT_SECONDS = 20.0  # for probes that should exit by themselves
_NEIGHBOUR_SECONDS = 0.3  # time to search for a neighbour's files

ExecuteProbe = Callable[..., Awaitable[Execution]]
# Runs a probe with its time limits multiplied by the argument. Returns True if the sandbox has the property. Raises
# InconclusiveProbeError if the probe must be repeated.
Probe = Callable[[int], Awaitable[bool]]


class InconclusiveProbeError(Exception):
    """A probe's program ended without a conclusive result."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(" ".join([execution.outcome.value, *execution.stderr.strip().splitlines()[-1:]]))


async def probe_isolation(
    sandbox: Sandbox, *, mode: str, layers: Mapping[str, int], settings: SandboxSettings
) -> Isolation:
    """Run all probes and return the layer that provides each property, or None.

    ``layers`` are the layers that the server reports, apart from namespaces. Raises StartError if the sandbox cannot
    run programs or a probe stays inconclusive.
    """

    async def execute(program: str, *, timeout: float) -> Execution:
        ran = await sandbox.execute(program, timeout=timeout)
        if ran.outcome is Outcome.INFRASTRUCTURE_FAILURE:
            raise StartError(f"the sandbox cannot run programs: {ran.stderr}")
        return ran

    def attack(program: str, succeeded: Callable[[Execution], bool], *blocked: Outcome) -> Probe:
        """Return a probe that runs an attack. ``blocked`` lists the valid outcomes of a failed attack."""

        async def probe(factor: int) -> bool:
            ran = await execute(program, timeout=factor * _PROBE_TIMEOUT_SECONDS)
            return _is_blocked(ran, *blocked, attack_succeeded=succeeded(ran))

        return probe

    with _victim_process() as victim:
        pid = victim.process.pid
        memory = MEMORY.format(size=2 * settings.memory_mb << 20)
        processes = PROCESSES.format(most=settings.max_processes + 8)
        output = OUTPUT.format(size=2 * settings.flood_limit + UNCOUNTED_BYTES)
        tracing = TRACING.format(pid=pid, start=victim.secret_start)
        probes: dict[str, Probe] = {
            "no_network": partial(_probe_network, execute),
            "scratch_only_writes": partial(_probe_write_isolation, execute),
            "no_foreign_reads": partial(_probe_read_isolation, execute, victim, settings.concurrency > 1),
            "bounded_memory": attack(memory, _ended_normally, Outcome.MEMORY_LIMIT),
            # Either further forks fail, or the program is killed.
            "bounded_processes": attack(processes, _reported_success, Outcome.OK, Outcome.KILLED),
            "bounded_time": partial(_probe_timeout, execute),
            "bounded_output": attack(output, _ended_normally, Outcome.OUTPUT_LIMIT),
            "no_tracing": attack(
                tracing, lambda ran: _reported_success(ran) or victim.secret_end in ran.stdout, Outcome.OK
            ),
        }
        results = await asyncio.gather(*(_repeat_until_conclusive(name, probe) for name, probe in probes.items()))
        holds = dict(zip(probes, results, strict=True))
        kill = attack(
            SIGNALS.format(pid=pid),
            lambda ran: _reported_success(ran) or victim.process.poll() is not None,
            Outcome.OK,
        )
        holds["no_foreign_signals"] = await _repeat_until_conclusive("no_foreign_signals", kill)
    names = layers_by_property(mode, layers)
    return Isolation(layers={name: names[name] if holds[name] else None for name in PROPERTIES}, mode=mode)


async def _repeat_until_conclusive(name: str, probe_once: Probe) -> bool:
    """Repeat a probe until it is conclusive. Raises StartError if all attempts are inconclusive."""
    endings: list[str] = []
    for factor in _TIMEOUT_FACTORS:
        try:
            return await probe_once(factor)
        except InconclusiveProbeError as unclear:
            endings.append(str(unclear))
    raise StartError(
        f"the probe of {name} was inconclusive: its program ended as {', then '.join(endings)}; "
        "the machine may be overloaded"
    )


def _is_blocked(ran: Execution, *blocked: Outcome, attack_succeeded: bool) -> bool:
    """Return True if an attack was blocked. Raises InconclusiveProbeError if its outcome is not in ``blocked``."""
    if not attack_succeeded and ran.outcome not in blocked:
        raise InconclusiveProbeError(ran)
    return not attack_succeeded


@dataclass(frozen=True, kw_only=True)
class _Victim:
    """A process of this user with a secret in its environment, its memory and an unnamed open file."""

    process: subprocess.Popen[bytes]
    secret_start: str  # the programs search for this part
    secret_end: str  # not in the programs that search


@contextmanager
def _victim_process() -> Iterator[_Victim]:
    start, end = secrets.token_hex(8), secrets.token_hex(8)
    with tempfile.TemporaryFile() as file:
        file.write((start + end).encode())
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"], env={"SECRET": start + end}, stdin=file
        )
        try:
            yield _Victim(process=process, secret_start=start, secret_end=end)
        finally:
            process.kill()
            process.wait()


async def _probe_network(execute: ExecuteProbe, factor: int) -> bool:
    """Check that no message of the program reaches a TCP or a UDP socket. Messages of other processes are ignored."""
    word = secrets.token_hex(8)
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        for listener in (tcp, udp):
            listener.bind(("127.0.0.1", 0))
            listener.setblocking(False)
        tcp.listen()
        program = NETWORK.format(tcp=tcp.getsockname()[1], udp=udp.getsockname()[1], word=word)
        ran = await execute(program, timeout=factor * _PROBE_TIMEOUT_SECONDS)
        return _is_blocked(
            ran, Outcome.OK, attack_succeeded="sent" in ran.stdout or word.encode() in _received_data(tcp, udp)
        )


def _received_data(tcp: socket.socket, udp: socket.socket) -> bytes:
    data: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            caller, _ = tcp.accept()
            with caller, contextlib.suppress(BlockingIOError, ConnectionError):
                caller.setblocking(False)
                data.append(caller.recv(64))
    with contextlib.suppress(BlockingIOError):
        while True:
            data.append(udp.recv(64))
    return b" ".join(data)


@contextmanager
def _public_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-probe-") as directory:
        os.chmod(directory, 0o777)
        yield directory


async def _probe_write_isolation(execute: ExecuteProbe, factor: int) -> bool:
    """Check that writes have no effect in directories outside scratch, and that scratch is writable."""
    name = f"agentrl-sandbox-probe-{secrets.token_hex(8)}"
    with _public_directory() as public:
        untouched = Path(public, "untouched")
        untouched.write_text("untouched")
        untouched.chmod(0o666)
        directories = [public, os.getcwd(), str(Path.home()), tempfile.gettempdir(), "/var/tmp", sys.prefix, "/"]
        program = WRITES.format(directories=directories, name=name, untouched=str(untouched))
        ran = await execute(program, timeout=factor * _PROBE_TIMEOUT_SECONDS)
        unchanged = untouched.exists() and untouched.stat().st_mode & 0o777 == 0o666
        changed = not (unchanged and untouched.read_text() == "untouched")
        leaked = [path for path in (Path(directory) / name for directory in directories) if path.exists()]
        for path in leaked:
            path.unlink(missing_ok=True)
    return _is_blocked(ran, Outcome.OK, attack_succeeded=bool(leaked) or changed)


async def _probe_read_isolation(execute: ExecuteProbe, victim: _Victim, neighbours: bool, factor: int) -> bool:
    """Check that a program cannot read secrets from a world-readable file, another program's files or a process.

    ``neighbours``: programs run concurrently, so the search is conclusive only if the other program's file existed.
    """
    timeout = factor * _PROBE_TIMEOUT_SECONDS
    with _public_directory() as public:
        secret = Path(public, "secret")
        secret.write_text(victim.secret_start + victim.secret_end)
        seconds = factor * _NEIGHBOUR_SECONDS
        neighbour = NEIGHBOUR.format(secret=victim.secret_start + victim.secret_end, seconds=2 * seconds)
        places = [str(secret), f"/proc/{victim.process.pid}/environ", f"/proc/{victim.process.pid}/fd/0"]
        reader = READS.format(places=places, start=victim.secret_start, seconds=seconds)
        neighbour_run, ran = await asyncio.gather(execute(neighbour, timeout=timeout), execute(reader, timeout=timeout))
        blocked = _is_blocked(ran, Outcome.OK, attack_succeeded=victim.secret_end in ran.stdout)
        if blocked and neighbours and not _searched_while_file_existed(neighbour_run, ran):
            raise InconclusiveProbeError(neighbour_run)
        if blocked and os.access("/etc/shadow", os.R_OK):
            ran = await execute(SHADOW, timeout=timeout)
            blocked = _is_blocked(ran, Outcome.OK, attack_succeeded=ran.exit_code == ATTACK_SUCCEEDED)
        return blocked


def _searched_while_file_existed(neighbour: Execution, reader: Execution) -> bool:
    """Return True if the reader completed a search while the neighbour's file existed. Output lines are time spans."""
    spans = [[float(word) for word in line.split()] for line in neighbour.stdout.splitlines()]
    looks = [[float(word) for word in line.split()] for line in reader.stdout.splitlines()]
    return any(begin <= look[0] and look[1] <= end for begin, end in spans for look in looks)


def _reported_success(ran: Execution) -> bool:
    return ran.exit_code == ATTACK_SUCCEEDED


def _ended_normally(ran: Execution) -> bool:
    return ran.outcome is Outcome.OK


async def _probe_timeout(execute: ExecuteProbe, factor: int) -> bool:
    """Check that a program that ignores signals is killed at its timeout."""
    ran = await execute(TIME, timeout=factor * _PROBE_SECONDS)
    if "spins" not in ran.stdout:
        raise InconclusiveProbeError(ran)
    return _is_blocked(ran, Outcome.TIMEOUT, attack_succeeded=False)
