"""What can go wrong in the algorithms.

    AlgorithmError (a ValueError)
    ├── UnknownNameError     no estimator, loss, option or mode of that name
    ├── InvalidOptionError   an option's value is outside its range
    ├── MissingInputError    a tensor that the choice of options needs was not given
    └── InvalidInputError    a tensor has a wrong shape, dtype or value

The first two are the user's settings; the others are bugs of the caller.
"""

import difflib
from collections.abc import Iterable


class AlgorithmError(ValueError):
    """Base of everything that this package raises on purpose."""


class UnknownNameError(AlgorithmError):
    """A name that is not registered; the message gives the nearest one and all of them."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, owner: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        super().__init__(
            f"unknown {kind} {name!r}{owner and f' of {owner}'}{hint} (known: {', '.join(names) or 'none'})"
        )


class InvalidOptionError(AlgorithmError):
    """A known option with a value outside its range."""


class MissingInputError(AlgorithmError):
    """An optional tensor is missing that the chosen options need."""


class InvalidInputError(AlgorithmError):
    """A tensor that cannot be what it is said to be."""


def check_choice(option: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise InvalidOptionError unless `value` is one of `choices`, naming the nearest."""
    known = list(choices)
    if value in known:
        return
    near = difflib.get_close_matches(str(value), [c for c in known if c is not None], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidOptionError(f"{option}={value!r} is none of {', '.join(map(str, known))}{hint}")
