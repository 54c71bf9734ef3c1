"""What can go wrong with a sandbox, other than programs, whose ends are data.

SandboxError
├── UnisolatedError     a property that programs must not be without does not hold here
├── StartError          the server did not start
└── ClosedError         the sandbox was closed
"""

from __future__ import annotations


class SandboxError(Exception):
    """Base of this package's errors."""


class UnisolatedError(SandboxError):
    """The sandbox cannot isolate programs here; ``missing`` names the properties."""

    def __init__(self, message: str, *, missing: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class StartError(SandboxError):
    """The sandbox's server did not start."""


class ClosedError(SandboxError):
    """The sandbox was closed."""
