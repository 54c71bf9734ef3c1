"""``agentrl doctor``: describe this machine and the isolation of the local sandbox."""

from __future__ import annotations

import asyncio

from agentrl.telemetry.machine import describe_machine
from agentrl_sandbox.client import SandboxError, SandboxSettings, open_sandbox


def describe_machine_and_sandbox() -> list[str]:
    """Return console lines about the machine and the sandbox: its isolation, or the reason why it does not start."""
    return [*describe_machine(), f"sandbox: {asyncio.run(_describe_sandbox())}"]


async def _describe_sandbox() -> str:
    settings = SandboxSettings(allow_unisolated=True)
    try:
        sandbox = await open_sandbox(settings)
    except SandboxError as error:
        return f"{settings.url} does not start: {error}"
    try:
        execution = await sandbox.execute("print(6 * 7)")
        answered = execution.stdout.strip() == "42"
        works = "runs programs" if answered else f"FAILED a program: {execution.outcome}: {execution.stderr.strip()}"
        return f"{settings.url} {works}; {sandbox.isolation.describe()}"
    finally:
        await sandbox.close()
