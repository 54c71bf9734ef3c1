"""What can be wrong with problems. Every message is one line that names the file, the value and the way out.

ProblemError(SettingsError, ValueError): the command line reports it and ends with exit code 2
├── ProblemFileError        the file is missing, malformed or of an unknown kind
├── ProblemFieldError       a row lacks a field, or its statement or answer is unusable
├── EmptyProblemsError      nothing is left to draw from
└── SamplerStateError       a saved position belongs to other problems
"""

from __future__ import annotations

from agentrl.errors import SettingsError


class ProblemError(SettingsError, ValueError):
    """The problems a user asked for cannot be had as asked; the message says why and what would be valid."""


class ProblemFileError(ProblemError):
    """A file that is missing, not readable as what its name says, or of an unknown kind."""


class ProblemFieldError(ProblemError):
    """A row without the fields asked for, or with an unusable statement or answer."""


class EmptyProblemsError(ProblemError):
    """A source, or what a split or a filter left of it, holds no problem."""


class SamplerStateError(ProblemError):
    """A saved sampler position that belongs to other sources or another seed."""
