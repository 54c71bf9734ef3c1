"""Tables of named functions with typed options, filled by decorators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from agentrl.algorithms.errors import UnknownNameError
from agentrl_envs.registry import Registry

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


E = TypeVar("E", bound=Entry[Any])


class OptionsRegistry(Registry[E]):
    """Names -> entries with options."""

    def option_names(self, name: str) -> tuple[str, ...]:
        """The options that the entry takes."""
        return tuple(field.name for field in fields(self[name].options))
