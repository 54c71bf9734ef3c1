"""Errors in problems. Every message is one line that names the file, the value and the fix.

ProblemError(SettingsError, ValueError): the command line reports it and ends with exit code 2
├── ProblemFileError        the file is missing, malformed or of an unknown kind
├── ProblemFieldError       a row lacks a field, or its statement or answer is unusable
├── EmptyProblemsError      no problem is left to sample
└── SamplerStateError       a saved position belongs to other problems
"""

from __future__ import annotations

from agentrl.errors import SettingsError


class ProblemError(SettingsError, ValueError):
    """The requested problems cannot be loaded; the message says why and what is valid."""


class ProblemFileError(ProblemError):
    """A file that is missing, not readable in the format of its name, or of an unknown kind."""


class ProblemFieldError(ProblemError):
    """A row without the requested fields, or with an unusable statement or answer."""


class EmptyProblemsError(ProblemError):
    """A source has no problems, or none are left after a split or a filter."""


class SamplerStateError(ProblemError):
    """A saved sampler position that belongs to other sources or another seed."""
