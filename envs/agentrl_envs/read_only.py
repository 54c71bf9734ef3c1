"""JSON values that nobody can change: lists and objects of a data set's row, shared by all trajectories of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NoReturn


class NotJSONError(ValueError):
    """A value that JSON cannot write; the message says where it stands and what it is."""


def _refuse(self: object, *_: object, **__: object) -> NoReturn:
    raise TypeError(f"{type(self).__name__} is read-only: copy it (copy.deepcopy) and change the copy")


class ReadOnlyDict(dict[str, object]):
    """A dictionary that cannot be changed. A deep copy is an ordinary dictionary.

    >>> ReadOnlyDict(a=1) == {"a": 1}
    True
    """

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    clear = pop = popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: object) -> dict[str, object]:
        return {key: thawed(value) for key, value in self.items()}

    def __reduce__(self) -> tuple[type[ReadOnlyDict], tuple[dict[str, object]]]:
        return ReadOnlyDict, (dict(self),)


class ReadOnlyList(list[object]):
    """A list that cannot be changed. A deep copy is an ordinary list."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: object) -> list[object]:
        return [thawed(value) for value in self]

    def __reduce__(self) -> tuple[type[ReadOnlyList], tuple[list[object]]]:
        return ReadOnlyList, (list(self),)


def frozen(value: object, place: str = "") -> object:
    """``value`` with read-only lists and objects. Raises `NotJSONError`, which names ``place`` inside the value.

    >>> frozen({"tables": ["a"]})["tables"].append("b")
    Traceback (most recent call last):
    TypeError: ReadOnlyList is read-only: copy it (copy.deepcopy) and change the copy
    """
    if value is None or isinstance(value, (str, bool, int, ReadOnlyDict, ReadOnlyList)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NotJSONError(f"{place} is {value}")
        return value
    if isinstance(value, Mapping):
        return ReadOnlyDict(_items(value, place))
    if isinstance(value, (list, tuple)):
        return ReadOnlyList([frozen(item, f"{place}.{number}") for number, item in enumerate(value)])
    raise NotJSONError(f"{place} holds {type(value).__name__}")


def thawed(value: object) -> object:
    """An ordinary copy of a read-only value, which may be changed."""
    if isinstance(value, ReadOnlyDict):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, ReadOnlyList):
        return [thawed(item) for item in value]
    return value


def _items(value: Mapping[object, object], place: str) -> Iterable[tuple[str, object]]:
    for key, item in value.items():
        if not isinstance(key, str):
            raise NotJSONError(f"{place} has the key {key!r}, which is not text")
        yield key, frozen(item, f"{place}.{key}" if place else key)
