"""``agentrl-sandbox check``: runs the whole suite against one sandbox, one line per case."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl_sandbox.check.fusion_client import FusionSandbox
from agentrl_sandbox.check.suite import Finding, run_suite
from agentrl_sandbox.client import SandboxSettings, open_sandbox
from agentrl_sandbox.types import Sandbox


async def check(settings: SandboxSettings, *, fusion: bool) -> int:
    """Print the results. Returns 0 if every case passed, else 1. Raises SandboxError if the sandbox is unreachable."""
    sandbox: Sandbox = FusionSandbox(settings) if fusion else await open_sandbox(settings)
    print(f"{settings.url}: {'SandboxFusion interface' if fusion else sandbox.isolation.describe()}\n", flush=True)
    findings = []
    try:
        async for finding in run_suite(sandbox, identifiers=not fusion):
            findings.append(finding)
            print(line(finding), flush=True)
    finally:
        await sandbox.close()
    print(f"\n{summary(findings)}")
    return 0 if all(finding.held for finding in findings) else 1


def line(finding: Finding) -> str:
    verdict = "ok  " if finding.held else "FAIL"
    row = f"{verdict}  {finding.guards:<21}  {finding.name:<42}  {finding.seconds:6.2f} s"
    return row if finding.held else f"{row}\n      {finding.why}"


def summary(findings: Sequence[Finding]) -> str:
    """The number of passed cases of each property.

    >>> print(summary([Finding(name="a", guards="robust", seconds=0.1)]))
    robust  1 of 1 held
    """
    guarded = dict.fromkeys(finding.guards for finding in findings)
    width = max(map(len, guarded), default=0)
    rows = []
    for name in guarded:
        own = [finding for finding in findings if finding.guards == name]
        rows.append(f"{name:<{width}}  {sum(finding.held for finding in own)} of {len(own)} held")
    return "\n".join(rows)
