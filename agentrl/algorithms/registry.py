"""Tables of named functions with typed options, filled by decorators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Generic, TypeVar

from agentrl.algorithms.errors import UnknownNameError
from agentrl_envs.registry import Registry

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def option(default: T, check: Callable[..., None], *limits: object) -> T:
    """A field of `Options` with its check, one of `agentrl.algorithms.validation`: check(name, value, *limits)."""
    return field(default=default, metadata={"check": check, "limits": limits})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of option records, whose defaults are *the* defaults. InvalidOptionError on a value out of its limits."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.metadata:
                item.metadata["check"](item.name, getattr(self, item.name), *item.metadata["limits"])


@dataclass(frozen=True)
class NoOptions:
    """For functions that take none."""


@dataclass(frozen=True)
class Entry(Generic[F]):
    """A registered function and the frozen dataclass of its options."""

    function: F
    options: type

    def make_options(self, owner: str, given: Mapping[str, object]) -> Any:
        """The options record from keyword arguments; UnknownNameError names the nearest option."""
        known = [item.name for item in fields(self.options)]
        for name in given:
            if name not in known:
                raise UnknownNameError("option", name, known, owner=owner)
        return self.options(**given)


E = TypeVar("E", bound=Entry[Any])


class OptionsRegistry(Registry[E]):
    """Names -> entries with options."""

    def option_names(self, name: str) -> tuple[str, ...]:
        """The options that the entry takes."""
        return tuple(item.name for item in fields(self[name].options))
