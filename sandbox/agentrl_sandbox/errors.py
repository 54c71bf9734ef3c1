"""The errors of a sandbox. A program that fails is not an error: its outcome is reported.

SandboxError
├── UnisolatedError     an isolation property does not hold on this machine
├── StartError          the server did not start
├── ClosedError         the sandbox was closed
├── SessionLimitError   max_sessions sessions are open
├── SessionForkError    a live session could not be forked; it continues
├── UnknownSessionError the session never existed, or has ended
├── BusyError           a service has no capacity now; the same call may succeed later
│   ├── QueueFullError  its queue is full
│   └── AbsentError     it did not answer, or the connection broke
├── RefusedError        a service rejected a call; retrying does not help
└── service.gateway_settings.ServiceSettingsError  a command was given invalid settings
"""

from __future__ import annotations

from agentrl_sandbox.types import PROPERTIES


class SandboxError(Exception):
    """Base of this package's errors."""


class UnisolatedError(SandboxError):
    """The sandbox cannot isolate programs here; ``missing`` names the properties, ``why`` the reason and the fix."""

    def __init__(self, where: str, missing: tuple[str, ...], why: str) -> None:
        meanings = "; ".join(f"{name} ({PROPERTIES[name]})" for name in missing)
        super().__init__(f"{where}: missing {meanings}. {why}")
        self.missing = missing


class StartError(SandboxError):
    """The sandbox's server did not start."""


class ClosedError(SandboxError):
    """The sandbox was closed."""


class SessionLimitError(SandboxError):
    """As many sessions are open as ``max_sessions`` allows."""


class SessionForkError(SandboxError):
    """A session could not be forked. It continues."""


class UnknownSessionError(SandboxError):
    """No such session: it was never opened, was closed, or ended with its interpreter; the message says how."""


class BusyError(SandboxError):
    """There is no capacity for a call now; retry it after ``retry_after`` seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFullError(BusyError):
    """The queue is full."""


class AbsentError(BusyError):
    """A service did not answer. ``begun``: it may have begun the call."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message, retry_after=0)
        self.begun = begun


class RefusedError(SandboxError):
    """A service rejected a call, for example for its token or size; retrying does not help."""
