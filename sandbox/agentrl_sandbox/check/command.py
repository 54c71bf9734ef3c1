"""``agentrl-sandbox check``: the whole suite against one sandbox, a line a case."""

from __future__ import annotations

from agentrl_sandbox.check.report import line, summary
from agentrl_sandbox.check.suite import run_suite
from agentrl_sandbox.client import SandboxSettings, open_sandbox
from agentrl_sandbox.fusion_client import FusionSandbox
from agentrl_sandbox.types import Sandbox


async def check(settings: SandboxSettings, *, fusion: bool) -> int:
    """Print what held; 0 if everything did, else 1. Raises SandboxError where the sandbox cannot be reached."""
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
