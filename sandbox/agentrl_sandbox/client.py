"""Everything that users of a sandbox need.

sandbox = await open_sandbox(SandboxSettings())
execution = await sandbox.execute("print(1 + 1)")
await sandbox.close()
"""

from __future__ import annotations

from agentrl_sandbox.errors import (
    ClosedError,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnisolatedError,
    UnknownSessionError,
)
from agentrl_sandbox.local import open_local
from agentrl_sandbox.settings import SandboxSettings
from agentrl_sandbox.types import PROPERTIES, Execution, Isolation, Outcome, Sandbox

__all__ = [
    "PROPERTIES",
    "ClosedError",
    "Execution",
    "Isolation",
    "Outcome",
    "Sandbox",
    "SandboxError",
    "SandboxSettings",
    "SessionForkError",
    "SessionLimitError",
    "StartError",
    "UnisolatedError",
    "UnknownSessionError",
    "open_sandbox",
]


async def open_sandbox(settings: SandboxSettings) -> Sandbox:
    """Open the sandbox that ``settings.url`` names and probe its isolation.

    Raises UnisolatedError where a property is missing (unless ``allow_unisolated``), StartError where it cannot start.
    """
    return await open_local(settings)
