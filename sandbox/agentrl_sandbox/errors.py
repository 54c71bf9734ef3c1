"""What can go wrong with a sandbox, other than programs, whose ends are data.

SandboxError
├── UnisolatedError     a property that programs must not be without does not hold here
├── StartError          the server did not start
├── ClosedError         the sandbox was closed
├── SessionLimitError   max_sessions sessions are open
├── SessionForkError    a live session could not be forked; it goes on
├── UnknownSessionError the session never existed, or has ended
├── BusyError           a service has no room now; the same call may succeed later
│   └── QueueFullError  more calls wait already than its queue holds
├── RefusedError        a service refused a call for a reason that trying again does not change
└── service.gateway_settings.ServiceSettingsError  a service was told to start with settings that cannot hold
"""

from __future__ import annotations

from agentrl_sandbox.types import PROPERTIES


class SandboxError(Exception):
    """Base of this package's errors."""


class UnisolatedError(SandboxError):
    """The sandbox cannot isolate programs here; ``missing`` names the properties."""

    def __init__(self, message: str, *, missing: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing = missing


def unisolated(where: str, missing: tuple[str, ...], why: str) -> UnisolatedError:
    """The error that names the missing properties and their meanings; ``why`` says the reason and the fix."""
    meanings = "; ".join(f"{name} ({PROPERTIES[name]})" for name in missing)
    return UnisolatedError(f"{where}: missing {meanings}. {why}", missing=missing)


class StartError(SandboxError):
    """The sandbox's server did not start."""


class ClosedError(SandboxError):
    """The sandbox was closed."""


class SessionLimitError(SandboxError):
    """As many sessions are open as ``max_sessions`` allows."""


class SessionForkError(SandboxError):
    """A session could not be forked. It goes on."""


class UnknownSessionError(SandboxError):
    """No such session: it was never opened, was closed, or ended with its interpreter; the message says how."""


class BusyError(SandboxError):
    """There is no room for a call now; ``retry_after`` is after how many seconds there may be."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(BusyError):
    """More calls wait already than the queue holds."""


class RefusedError(SandboxError):
    """A service refused a call for a reason that trying again does not change: its token, its size."""
