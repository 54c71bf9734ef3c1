"""The suite of `agentrl-sandbox check`: this sandbox passes, and a sandbox without isolation fails."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from agentrl_sandbox.check.case import Case
from agentrl_sandbox.check.suite import CASES, format_result, format_summary, run_case, run_suite
from agentrl_sandbox.client import Execution, Outcome, SandboxSettings

pytestmark = pytest.mark.slow

NEEDS_EVERY_LIBRARY = "has the scientific libraries"


@pytest.fixture(scope="module")
def settings() -> SandboxSettings:
    return SandboxSettings()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_this_sandbox_passes(sandbox, case: Case) -> None:
    if case.name == NEEDS_EVERY_LIBRARY:
        pytest.importorskip("scipy", reason="scipy is not installed")
        pytest.importorskip("pandas", reason="pandas is not installed")
        pytest.importorskip("networkx", reason="networkx is not installed")
    finding = await run_case(sandbox, case)
    assert finding.passed, finding.why


@pytest.mark.asyncio(loop_scope="module")
async def test_cases_with_several_programs_pass(sandbox) -> None:
    findings = [finding async for finding in run_suite(sandbox, cases=())]
    assert [finding.why for finding in findings if not finding.passed] == []
    assert len(findings) == 3


class UnisolatedSandbox:
    """Runs programs in a plain interpreter with a time limit and no isolation."""

    async def execute(self, program: str, *, timeout: float = 10.0, stdin: str = "", **rest: object) -> Execution:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        stdout, stderr = await process.communicate(stdin.encode())
        code = process.returncode
        return Execution(
            outcome=Outcome.OK if code == 0 else Outcome.ERROR,
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            exit_code=code,
            seconds=0.0,
            truncated=False,
        )


HARMLESS = (
    "prints",
    "removes files between programs",
    "runs as __main__",
    "tracing others",
    "secrets of the host",
    "flood of lines",
    "sockets of every kind",
)


async def test_the_suite_detects_a_sandbox_without_isolation(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = [case for case in CASES if case.name in HARMLESS]
    assert len(chosen) == len(HARMLESS)
    findings = {case.name: await run_case(UnisolatedSandbox(), case) for case in chosen}
    assert {name for name, finding in findings.items() if finding.passed} == {"prints", "runs as __main__"}
    assert findings["removes files between programs"].why == "afterwards: ok: dirty"
    assert format_result(findings["prints"]).startswith("ok")
    assert "reached" in format_result(findings["secrets of the host"])
    assert "conformance       2 of 3 held" in format_summary(list(findings.values()))
