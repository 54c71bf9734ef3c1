"""``agentrl-sandbox check``: run the complete suite against one sandbox and print one line per case."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass

from agentrl_sandbox.check.case import CONFORMANCE, Case
from agentrl_sandbox.check.escapes import ESCAPES
from agentrl_sandbox.check.resources import RESOURCES
from agentrl_sandbox.client import SandboxSettings, open_sandbox
from agentrl_sandbox.types import Execution, Outcome, Sandbox

CASES: Sequence[Case] = (*CONFORMANCE, *RESOURCES, *ESCAPES)
_CONCURRENT_PROGRAMS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Result of one case. ``why`` is empty if the case passed."""

    name: str
    property_name: str
    seconds: float
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.why


async def run_case(sandbox: Sandbox, case: Case) -> CaseResult:
    """Run a case: its program, its ``after`` program, and a check that the sandbox still works."""
    return await _time_case(case.name, case.property_name, _run_one(sandbox, case))


async def run_suite(sandbox: Sandbox, cases: Sequence[Case] = CASES) -> AsyncIterator[CaseResult]:
    """Run ``cases``, then the cases that need several programs."""
    for case in cases:
        yield await run_case(sandbox, case)
    yield await _time_case(
        f"{_CONCURRENT_PROGRAMS} programs at once", "conformance", _check_concurrent_results(sandbox)
    )
    yield await _time_case("one request_id runs once", "conformance", _check_shared_run(sandbox))
    yield await _time_case("a neighbour's files", "no_foreign_reads", _check_hidden_neighbour(sandbox))


async def _time_case(name: str, property_name: str, running: Awaitable[str]) -> CaseResult:
    began = time.monotonic()
    why = await running
    return CaseResult(name=name, property_name=property_name, seconds=time.monotonic() - began, why=why)


async def _run_one(sandbox: Sandbox, case: Case) -> str:
    run = await sandbox.execute(case.program, timeout=case.timeout, stdin=case.stdin)
    if not case.passes(run):
        return _describe(run)
    if case.after is not None:
        later = await sandbox.execute(case.after, timeout=30.0)
        if later.stdout != "clean\n":
            return f"afterwards: {_describe(later)}"
    alive = await sandbox.execute("print('alive')", timeout=30.0)
    return "" if alive.stdout == "alive\n" else f"no answer afterwards: {_describe(alive)}"


async def _check_concurrent_results(sandbox: Sandbox) -> str:
    runs = await asyncio.gather(
        *(sandbox.execute(f"print({number} ** 3)", timeout=60.0) for number in range(_CONCURRENT_PROGRAMS))
    )
    return next((_describe(run) for number, run in enumerate(runs) if run.stdout != f"{number**3}\n"), "")


async def _check_shared_run(sandbox: Sandbox) -> str:
    name = f"check-{time.time_ns()}"
    draw = "import random\nprint(random.random())"
    runs = [await sandbox.execute(draw, timeout=30.0, request_id=name) for _ in range(2)]
    free = [await sandbox.execute(draw, timeout=30.0) for _ in range(2)]
    if runs[0].stdout != runs[1].stdout:
        return "the same request_id ran twice"
    return "two programs drew the same random number" if free[0].stdout == free[1].stdout else ""


async def _check_hidden_neighbour(sandbox: Sandbox) -> str:
    """Run a program that writes a secret to its scratch directory, and another program that searches for it."""
    secret = f"secret-{time.time_ns()}"
    holder = asyncio.ensure_future(
        sandbox.execute(f"import time\nopen('{secret}', 'w').close()\ntime.sleep(3)\nprint('kept')", timeout=30.0)
    )
    await asyncio.sleep(0.5)
    look = (
        "import os\nfound = False\n"
        "for top in {'/scratch', '/tmp', '/dev/shm', '/var/tmp', os.path.dirname(os.getcwd())} - {'/'}:\n"
        f"    for _, _, files in os.walk(top):\n        found = found or {secret!r} in files\n"
        "print('reached' if found else 'clean')"
    )
    seen = await sandbox.execute(look, timeout=30.0)
    kept = await holder
    if seen.stdout != "clean\n":
        return _describe(seen)
    return "" if kept.stdout == "kept\n" else f"the neighbour was disturbed: {_describe(kept)}"


def _describe(run: Execution) -> str:
    text = " ".join((run.stdout[-200:] + " " + run.stderr[-200:]).split())
    code = "" if run.exit_code is None or run.outcome is Outcome.OK else f" ({run.exit_code})"
    return f"{run.outcome}{code}: {text[:300]}"


async def run_checks(settings: SandboxSettings) -> int:
    """Run the suite and print the results. Returns 0 if all cases passed, otherwise 1.

    Raises SandboxError if the sandbox cannot be opened.
    """
    sandbox = await open_sandbox(settings)
    print(f"{settings.url}: {sandbox.isolation.describe()}\n", flush=True)
    results = []
    try:
        async for result in run_suite(sandbox):
            results.append(result)
            print(format_result(result), flush=True)
    finally:
        await sandbox.close()
    print(f"\n{format_summary(results)}")
    return 0 if all(result.passed for result in results) else 1


def format_result(result: CaseResult) -> str:
    verdict = "ok  " if result.passed else "FAIL"
    row = f"{verdict}  {result.property_name:<21}  {result.name:<42}  {result.seconds:6.2f} s"
    return row if result.passed else f"{row}\n      {result.why}"


def format_summary(results: Sequence[CaseResult]) -> str:
    """Format the number of passed cases of each property.

    >>> print(format_summary([CaseResult(name="a", property_name="robust", seconds=0.1)]))
    robust  1 of 1 held
    """
    property_names = dict.fromkeys(result.property_name for result in results)
    width = max(map(len, property_names), default=0)
    rows = []
    for name in property_names:
        of_property = [result for result in results if result.property_name == name]
        rows.append(f"{name:<{width}}  {sum(result.passed for result in of_property)} of {len(of_property)} held")
    return "\n".join(rows)
