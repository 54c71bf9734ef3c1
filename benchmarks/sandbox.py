"""Compare programs per second in the sandbox, a fork loop, a fresh interpreter per program, and `docker exec`.

    python benchmarks/sandbox.py [--concurrency 1 16 256] [--seconds 5] [--repeat 3] [--queued 45000] [--container NAME]
    python benchmarks/sandbox.py --forks 1000

There are two programs: ``print`` prints a sum, ``sympy`` solves a quadratic equation. All kinds run on one machine:

fork loop   one process that forks a warm interpreter for each program in turn, without isolation and limits. No sandbox
            on one core can be faster. SymPy is imported for ``sympy``, and no scientific package for ``print``.
fresh       ``python -c`` for each program, with the given concurrency, as SandboxFusion does.
local       ``local://``: this package inside the caller's process.
service     ``agentrl-sandbox serve`` and a client in another process, over HTTP.
docker      ``docker exec`` of ``python -c`` in the running ``--container``, if one is given.

A row is the median of ``--repeat`` rounds; the kinds take turns within a round. ``ideal`` is the time that a call would
wait if all calls in flight were answered in turn at the measured rate: concurrency / rate. ``--queued`` sends this
number of calls to the service at the same time. Every reply must contain the sum of its call. The memory of the
service's processes is compared between the first and the last tenth.

``--forks N`` measures sessions instead:

- N forks of a session that holds 100 MB, first idle, then after each has written to one page. Because of copy-on-write,
  memory must not grow by the state.
- 256 sessions that fork into 8 leaves each. ``max_sessions`` refuses the forks beyond 1,024 sessions.
- A fork that fills its memory.
- Forks of a session that was killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from agentrl_sandbox.client import Outcome, Sandbox, SandboxError, SandboxSettings, open_sandbox

PROGRAMS = {
    "print": "print({number} + 1)",
    "sympy": "from sympy import *\nx = symbols('x')\nsolve(x**2 - 5*x + 6, x)\nprint({number} + 1)",
}
FORK_LOOP = """
import os, sys, time
{imports}
seconds, count, source = {seconds}, 0, {source!r}
times = []
began = time.perf_counter()
while time.perf_counter() - began < seconds:
    one = time.perf_counter()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        exec(compile(source.replace("NUMBER", str(count)), "<program>", "exec"), {{"__name__": "__main__"}})
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    text = b""
    while data := os.read(read, 65536):
        text += data
    os.close(read)
    os.waitpid(child, 0)
    assert int(text) == count + 1, text
    count += 1
    times.append(time.perf_counter() - one)
print(*times)
"""
WARM_UP = 20

Call = Callable[[int], Awaitable[str]]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Wall-clock time of a round of calls, and the latency of each call, in seconds."""

    wall: float
    latencies: tuple[float, ...]

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.wall

    def percentile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def load(call: Call, *, concurrency: int, seconds: float) -> Round:
    """Run ``concurrency`` callers that call again as soon as they receive a result. Every result is checked."""
    latencies: list[float] = []
    numbers = iter(range(1 << 60))
    until = time.perf_counter() + seconds

    async def caller() -> None:
        while time.perf_counter() < until:
            number = next(numbers)
            began = time.perf_counter()
            text = await call(number)
            if text.strip() != str(number + 1):
                raise SystemExit(f"wrong answer to {number}: {text!r}")
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return Round(wall=time.perf_counter() - began, latencies=tuple(latencies))


def fork_loop(program: str, *, seconds: float) -> Round:
    """Measure one process with one fork per program."""
    source = PROGRAMS[program].format(number="NUMBER")
    imports = "import sympy" if program == "sympy" else ""
    code = FORK_LOOP.format(seconds=seconds, source=source, imports=imports)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    latencies = tuple(map(float, done.stdout.split()))
    return Round(wall=sum(latencies), latencies=latencies)


def sandboxed(sandbox: Sandbox, program: str) -> Call:
    async def call(number: int) -> str:
        run = await sandbox.execute(PROGRAMS[program].format(number=number), timeout=600.0)
        if run.outcome is not Outcome.OK:
            raise SystemExit(f"{run.outcome}: {run.stderr}")
        return run.stdout

    return call


def command(prefix: list[str], program: str) -> Call:
    """Return a call that runs a program with the interpreter command ``prefix`` in a separate process."""

    async def call(number: int) -> str:
        process = await asyncio.create_subprocess_exec(
            *prefix, "-c", PROGRAMS[program].format(number=number), stdout=asyncio.subprocess.PIPE
        )
        stdout, _ = await process.communicate()
        return stdout.decode()

    return call


@contextmanager
def service() -> Iterator[tuple[str, psutil.Process]]:
    """Start the service with one runner on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl_sandbox", "serve", "--port", "0", "--no-token"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[-1], psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def resident_mb(process: psutil.Process) -> float:
    """Return the memory of a process and its descendants. Shared pages are divided among processes (PSS)."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError):
            continue
    return total / 1e6


async def measure(options: argparse.Namespace) -> None:
    with service() as (url, process):
        local = await open_sandbox(SandboxSettings())
        remote = await open_sandbox(SandboxSettings(url=url))
        print(f"local: {local.isolation.describe()}\nservice: {remote.isolation.describe()}\n")
        for program in options.programs:
            kinds: dict[str, Call] = {
                "local": sandboxed(local, program),
                "service": sandboxed(remote, program),
                "fresh": command([sys.executable], program),
            }
            if options.container:
                kinds["docker"] = command(["docker", "exec", options.container, "python3"], program)
            await _table(program, kinds, options)
        print(f"\nmemory at rest: service {resident_mb(process):.0f} MB")
        await local.close()
        if options.queued:
            await _queue(remote, process, options.queued)
        await remote.close()


async def _table(program: str, kinds: dict[str, Call], options: argparse.Namespace) -> None:
    loops: list[Round] = []
    rounds: dict[tuple[str, int], list[Round]] = {}
    for _ in range(options.repeat):
        loops.append(fork_loop(program, seconds=options.seconds))
        for concurrency in options.concurrency:
            for kind, call in kinds.items():
                await asyncio.gather(*(call(number) for number in range(min(WARM_UP, concurrency))))
                found = await load(call, concurrency=concurrency, seconds=options.seconds)
                rounds.setdefault((kind, concurrency), []).append(found)
    base = statistics.median(one.rate for one in loops)
    fresh = {c: statistics.median(one.rate for one in rounds["fresh", c]) for c in options.concurrency}
    print(f"{program:8}{'in flight':>10}{'calls/s':>10}{'p50 ms':>9}{'p99 ms':>9}{'ideal ms':>10}", end="")
    print(f"{'of fork loop':>14}{'over fresh':>12}")
    print(f"{'fork loop':8}{1:>9}{base:>10.1f}{_ms(loops, 0.5):>9.1f}{_ms(loops, 0.99):>9.1f}")
    for (kind, concurrency), repeated in rounds.items():
        rate = statistics.median(one.rate for one in repeated)
        print(
            f"{kind:8}{concurrency:>10}{rate:>10.1f}{_ms(repeated, 0.5):>9.1f}{_ms(repeated, 0.99):>9.1f}"
            f"{1e3 * concurrency / rate:>10.1f}{rate / base:>14.2f}{rate / fresh[concurrency]:>12.1f}"
        )


def _ms(found: list[Round], share: float) -> float:
    return 1e3 * statistics.median(one.percentile(share) for one in found)


async def _queue(remote: Sandbox, process: psutil.Process, count: int) -> None:
    """Send all calls at the same time."""
    call = sandboxed(remote, "print")
    memory: list[tuple[int, float]] = []
    done = 0

    async def one(number: int) -> bool:
        nonlocal done
        text = await call(number)
        done += 1
        if done % (count // 20) == 0:
            memory.append((done, resident_mb(process)))
        return text.strip() == str(number + 1)

    began = time.perf_counter()
    right = await asyncio.gather(*(one(number) for number in range(count)))
    seconds = time.perf_counter() - began
    early = statistics.mean(mb for at, mb in memory if at <= count * 0.15)
    late = statistics.mean(mb for at, mb in memory if at >= count * 0.9)
    print(f"\n{count} calls at once: {sum(right)} right answers in {seconds:.1f} s, {count / seconds:.0f} calls/s")
    print(f"memory of the service: {early:.1f} MB early, {late:.1f} MB late, ratio {late / early:.3f}")


STATE_MB = 100
FILLS = "rows = []\nwhile True: rows.append(bytes(range(256)) * 4096)"


async def measure_forks(count: int) -> None:
    """Measure forks of sessions, under load and under attack."""
    # The forks of a session share max_processes.
    sandbox = await open_sandbox(SandboxSettings(max_sessions=1024, max_processes=1100, session_idle_timeout=3600.0))
    own = psutil.Process()
    print(f"local: {sandbox.isolation.describe()}\n")
    origin = await sandbox.open_session()
    state = f"import os\nstate = bytearray(os.urandom(1 << 20) * {STATE_MB})\nprint(len(state) + 1)"
    await _succeeds(sandbox, state, origin)
    before, began = resident_mb(own), time.perf_counter()
    forks = [await sandbox.fork_session(origin) for _ in range(count)]
    seconds, idle = time.perf_counter() - began, resident_mb(own)
    await asyncio.gather(*(_succeeds(sandbox, "state[0] = 1\nprint(len(state) + 1)", fork) for fork in forks))
    after = resident_mb(own)
    print(f"{count} forks of {STATE_MB} MB: {1e3 * seconds / count:.1f} ms each; memory {before:.0f} MB, with forks")
    print(f"{idle:.0f} MB ({(idle - before) / count:.2f} MB each), after a program in each {after:.0f} MB")
    began = time.perf_counter()
    await asyncio.gather(*map(sandbox.close_session, forks))
    print(f"all forks closed at the same time in {time.perf_counter() - began:.1f} s")

    fork, sibling = [await sandbox.fork_session(origin) for _ in range(2)]
    began = time.perf_counter()
    filled = await sandbox.execute(FILLS, session=fork, timeout=60.0)
    await _succeeds(sandbox, "print(len(state) + 1)", sibling)
    await _succeeds(sandbox, "print(len(state) + 1)", origin)
    print(f"a fork that fills its memory: {filled.outcome} after {time.perf_counter() - began:.1f} s; its sibling and")
    print("its origin continue")

    await sandbox.execute("import os; os.abort()", session=origin)
    refusals = [await _refused(sandbox, origin) for _ in range(2)]
    await _succeeds(sandbox, "print(len(state) + 1)", sibling)
    print(f"forks of a killed session: {' and '.join(refusals)}; its earlier fork continues")
    await sandbox.close_session(sibling)

    began = time.perf_counter()
    trees = await asyncio.gather(*(_tree(sandbox, leaves=8) for _ in range(256)))
    opened = sum(len(tree) for tree, _ in trees)
    refused = [name for _, names in trees for name in names]
    print(
        f"256 trees of 8 leaves: {opened} sessions in {time.perf_counter() - began:.1f} s, {resident_mb(own):.0f} MB;"
    )
    print(f"{len(refused)} forks refused ({', '.join(sorted(set(refused)))})")
    await asyncio.gather(*(sandbox.close_session(session) for tree, _ in trees for session in tree))
    await _succeeds(sandbox, "print(104857601)", await sandbox.open_session())
    await sandbox.close()
    print(f"processes left: {len(own.children(recursive=True))}")


async def _tree(sandbox: Sandbox, *, leaves: int) -> tuple[list[str], list[str]]:
    """Return the open sessions of a tree, and the error name of each refused fork."""
    tree, errors = [await sandbox.open_session()], []
    while len(tree) + len(errors) < leaves:
        try:
            tree.append(await sandbox.fork_session(tree[0]))
        except SandboxError as error:
            errors.append(type(error).__name__)
    return tree, errors


async def _refused(sandbox: Sandbox, session: str) -> str:
    try:
        await sandbox.fork_session(session)
    except SandboxError as error:
        return type(error).__name__
    raise SystemExit(f"{session} was forked")


async def _succeeds(sandbox: Sandbox, program: str, session: str) -> None:
    run = await sandbox.execute(program, session=session, timeout=600.0)
    if run.stdout.strip() != str(STATE_MB * (1 << 20) + 1):
        raise SystemExit(f"{run.outcome}: {run.stdout} {run.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--queued", type=int, default=45_000, help="number of calls sent at once at the end; 0: none")
    parser.add_argument("--container", help="a running container for the comparison with `docker exec`")
    parser.add_argument("--forks", type=int, default=0, help="measure this many forks of a session instead")
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n")
    asyncio.run(measure_forks(options.forks) if options.forks else measure(options))


if __name__ == "__main__":
    main()
