"""The public API of the sandbox.

sandbox = await open_sandbox(SandboxSettings())
execution = await sandbox.execute("print(1 + 1)")
await sandbox.close()
"""

from __future__ import annotations

from importlib.metadata import entry_points

from agentrl_sandbox.local import open_local
from agentrl_sandbox.settings import PLUGINS, PROGRAM_LIMITS, SandboxSettings
from agentrl_sandbox.types import (
    PROPERTIES,
    BusyError,
    ClosedError,
    Execution,
    Isolation,
    Outcome,
    QueueFullError,
    RefusedError,
    Sandbox,
    SandboxError,
    SessionForkError,
    SessionLimitError,
    StartError,
    UnisolatedError,
    UnknownSessionError,
)

__all__ = [
    "PROGRAM_LIMITS",
    "PROPERTIES",
    "BusyError",
    "ClosedError",
    "Execution",
    "Isolation",
    "Outcome",
    "QueueFullError",
    "RefusedError",
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
    """Open the sandbox at ``settings.url`` and check its isolation.

    If the scheme is not built in, it is the name of an entry point in the group ``agentrl.sandboxes``: an ``async def
    function(settings)`` that returns a `Sandbox`. Raises UnisolatedError if a property is missing (unless
    ``allow_unisolated``) and StartError if the sandbox does not start.
    """
    if settings.scheme == "local":
        return await open_local(settings)
    if settings.scheme == "docker":
        from agentrl_sandbox.docker import open_docker

        return await open_docker(settings)
    if settings.scheme == "ray":
        raise StartError(
            "url=ray:// is supported only by `agentrl train cluster=ray`, which starts the services: set url to the "
            "addresses of services, http://HOST:PORT"
        )
    if settings.scheme in ("http", "https") and len(settings.addresses) > 1:
        from agentrl_sandbox.several import SeveralSandboxes

        return await SeveralSandboxes(settings).open()
    if settings.scheme in ("http", "https"):
        from agentrl_sandbox.http import HttpSandbox

        return await HttpSandbox(settings).open()
    entry, *_ = entry_points(group=PLUGINS, name=settings.scheme)
    plugged: Sandbox = await entry.load()(settings)
    layers = plugged.isolation.layers
    missing = tuple(name for name in PROPERTIES if layers.get(name) is None)  # or not mentioned
    if missing and not settings.allow_unisolated:
        await plugged.close()
        raise UnisolatedError(
            settings.url, missing, "Set allow_unisolated=true to run programs without these properties"
        )
    return plugged
