"""The exceptions of the algorithms.

    AlgorithmError (a ValueError)
    ├── InvalidOptionError   an option's value is outside its range
    ├── MissingInputError    a tensor that the choice of options needs was not given
    └── InvalidInputError    a tensor has a wrong shape, dtype or value

InvalidOptionError is the user's settings, and so is UnknownNameError of `agentrl_envs.registry` (no estimator, loss,
option or mode of that name); the others are bugs of the caller.
"""

from collections.abc import Iterable

from agentrl_envs.registry import UnknownNameError as UnknownNameError
from agentrl_envs.registry import did_you_mean


class AlgorithmError(ValueError):
    """Base of everything that this package raises on purpose."""


class InvalidOptionError(AlgorithmError):
    """A known option with a value outside its range."""


class MissingInputError(AlgorithmError):
    """An optional tensor is missing that the chosen options need."""


class InvalidInputError(AlgorithmError):
    """A tensor of a wrong shape, dtype or value."""


def check_choice(option: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise InvalidOptionError unless `value` is one of `choices`, naming the nearest."""
    known = list(choices)
    if value in known:
        return
    hint = did_you_mean(str(value), [choice for choice in known if choice is not None])
    raise InvalidOptionError(f"{option}={value!r} is none of {', '.join(map(str, known))}{hint}")
