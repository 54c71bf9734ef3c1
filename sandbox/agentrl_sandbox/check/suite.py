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
_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Result of one case. ``why`` is empty if the case passed."""

    name: str
    guards: str
    seconds: float
    why: str = ""

    @property
    def passed(self) -> bool:
        return not self.why


async def run_case(sandbox: Sandbox, case: Case) -> CaseResult:
    """Run the program, its ``after`` program, and a check that the sandbox still works."""
    return await _find(case.name, case.property_name, _run_one(sandbox, case))


async def run_suite(sandbox: Sandbox, cases: Sequence[Case] = CASES) -> AsyncIterator[CaseResult]:
    """Run all cases, then the cases with several programs."""
    for case in cases:
        yield await run_case(sandbox, case)
    yield await _find(f"{_AT_ONCE} programs at once", "conformance", _answers_are_not_mixed_up(sandbox))
    yield await _find("one request_id runs once", "conformance", _one_identifier_runs_once(sandbox))
    yield await _find("a neighbour's files", "no_foreign_reads", _neighbours_are_hidden(sandbox))


async def _find(name: str, guards: str, running: Awaitable[str]) -> CaseResult:
    began = time.monotonic()
    why = await running
    return CaseResult(name=name, guards=guards, seconds=time.monotonic() - began, why=why)


async def _run_one(sandbox: Sandbox, case: Case) -> str:
    run = await sandbox.execute(case.program, timeout=case.timeout, stdin=case.stdin)
    if not case.passes(run):
        return _told(run)
    if case.after is not None:
        later = await sandbox.execute(case.after, timeout=30.0)
        if later.stdout != "clean\n":
            return f"afterwards: {_told(later)}"
    alive = await sandbox.execute("print('alive')", timeout=30.0)
    return "" if alive.stdout == "alive\n" else f"no answer afterwards: {_told(alive)}"


async def _answers_are_not_mixed_up(sandbox: Sandbox) -> str:
    runs = await asyncio.gather(*(sandbox.execute(f"print({number} ** 3)", timeout=60.0) for number in range(_AT_ONCE)))
    return next((_told(run) for number, run in enumerate(runs) if run.stdout != f"{number**3}\n"), "")


async def _one_identifier_runs_once(sandbox: Sandbox) -> str:
    name = f"check-{time.time_ns()}"
    draw = "import random\nprint(random.random())"
    runs = [await sandbox.execute(draw, timeout=30.0, request_id=name) for _ in range(2)]
    free = [await sandbox.execute(draw, timeout=30.0) for _ in range(2)]
    if runs[0].stdout != runs[1].stdout:
        return "the same request_id ran twice"
    return "two programs drew the same random number" if free[0].stdout == free[1].stdout else ""


async def _neighbours_are_hidden(sandbox: Sandbox) -> str:
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
        return _told(seen)
    return "" if kept.stdout == "kept\n" else f"the neighbour was disturbed: {_told(kept)}"


def _told(run: Execution) -> str:
    text = " ".join((run.stdout[-200:] + " " + run.stderr[-200:]).split())
    code = "" if run.exit_code is None or run.outcome is Outcome.OK else f" ({run.exit_code})"
    return f"{run.outcome}{code}: {text[:300]}"


async def run_checks(settings: SandboxSettings) -> int:
    """Run the suite and print the results. Returns 0 if all cases passed, else 1. Raises SandboxError."""
    sandbox = await open_sandbox(settings)
    print(f"{settings.url}: {sandbox.isolation.describe()}\n", flush=True)
    findings = []
    try:
        async for finding in run_suite(sandbox):
            findings.append(finding)
            print(format_result(finding), flush=True)
    finally:
        await sandbox.close()
    print(f"\n{format_summary(findings)}")
    return 0 if all(finding.passed for finding in findings) else 1


def format_result(finding: CaseResult) -> str:
    verdict = "ok  " if finding.passed else "FAIL"
    row = f"{verdict}  {finding.guards:<21}  {finding.name:<42}  {finding.seconds:6.2f} s"
    return row if finding.passed else f"{row}\n      {finding.why}"


def format_summary(findings: Sequence[CaseResult]) -> str:
    """Format the number of passed cases of each property.

    >>> print(format_summary([CaseResult(name="a", guards="robust", seconds=0.1)]))
    robust  1 of 1 held
    """
    guarded = dict.fromkeys(finding.guards for finding in findings)
    width = max(map(len, guarded), default=0)
    rows = []
    for name in guarded:
        own = [finding for finding in findings if finding.guards == name]
        rows.append(f"{name:<{width}}  {sum(finding.passed for finding in own)} of {len(own)} held")
    return "\n".join(rows)
