"""Errors in problems. Every message is one line with the file, the value and the fix.

ProblemError(SettingsError, ValueError): the command line reports it and ends with exit code 2
├── ProblemFileError        the file is missing, malformed or of an unknown kind
├── ProblemFieldError       a row lacks a field, or its statement or answer is unusable
├── EmptyProblemsError      no problem is left to sample
└── SamplerStateError       a saved position was made with other problems
"""

from __future__ import annotations

from agentrl.errors import SettingsError


class ProblemError(SettingsError, ValueError):
    """The requested problems cannot be loaded; the message contains the reason and the valid values."""


class ProblemFileError(ProblemError):
    """The file is missing, not readable in the format of its name, or of an unknown kind."""


class ProblemFieldError(ProblemError):
    """The row lacks the requested fields, or its statement or answer is unusable."""


class EmptyProblemsError(ProblemError):
    """The source has no problems, or none remain after a split or a filter."""


class SamplerStateError(ProblemError):
    """The saved sampler position was made with other sources or another seed."""
