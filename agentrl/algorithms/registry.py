"""A table of named functions with typed options, filled by a decorator."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from agentrl.algorithms.errors import AlgorithmError, UnknownNameError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class NoOptions:
    """For functions that take none."""


@dataclass(frozen=True)
class Entry(Generic[F]):
    """A registered function and the frozen dataclass of its options (its defaults are *the* defaults)."""

    function: F
    options: type

    def make_options(self, owner: str, given: Mapping[str, object]) -> Any:
        """The options record from keyword arguments; UnknownNameError names the nearest option."""
        known = [field.name for field in fields(self.options)]
        for name in given:
            if name not in known:
                raise UnknownNameError("option", name, known, owner=owner)
        return self.options(**given)


class Registry(Generic[F]):
    """Names -> entries. `kind` is what an entry is called in messages."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[F]] = {}

    def register(self, name: str, options: type = NoOptions) -> Callable[[F], F]:
        """Decorator: add a function under `name`. AlgorithmError if the name is taken by another function."""

        def add(function: F) -> F:
            if name in self._entries:
                raise AlgorithmError(f"{self.kind} {name!r} is already registered")
            self._entries[name] = Entry(function, options)
            return function

        return add

    def __getitem__(self, name: str) -> Entry[F]:
        if name not in self._entries:
            raise UnknownNameError(self.kind, name, self._entries)
        return self._entries[name]

    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._entries))

    def option_names(self, name: str) -> tuple[str, ...]:
        """The options that the entry takes."""
        return tuple(field.name for field in fields(self[name].options))
