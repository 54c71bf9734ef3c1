"""The names that users import, with their parameters, are those of public_api.txt.

After an intended change: ``python tests/test_public_api.py`` writes the file again. Its difference belongs into the
changelog.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).with_name("public_api.txt")
MODULES = (
    "agentrl",
    "agentrl.algorithms",
    "agentrl.kernels",
    "agentrl_envs.episode",
    "agentrl_envs.registry",
    "agentrl_envs.rewards",
    "agentrl_envs.gym",
    "agentrl_envs.tools",
    "agentrl_envs.types",
    "agentrl_sandbox.client",
)


def public_names(module: ModuleType) -> list[str]:
    """What the module exports; where it has no list of it, the functions and classes that it defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(name for name in own if not name.startswith("_"))


def parameters(function: object) -> str:
    """The names of the parameters as a signature writes them, those with a default followed by ``=``.

    >>> parameters(lambda a, /, b, *c, d=1, **e: None)
    '(a, /, b, *c, d=, **e)'
    """
    signature = inspect.signature(typing.cast("typing.Callable[..., object]", function))
    plain = [
        item.replace(annotation=item.empty, default=item.empty if item.default is item.empty else _DEFAULT)
        for item in signature.parameters.values()
    ]
    return str(inspect.Signature(plain)).replace(repr(_DEFAULT), "")


class _Default:
    def __repr__(self) -> str:
        return "<default>"


_DEFAULT = _Default()


def lines_of(name: str, value: object) -> Iterator[str]:
    """A name with its parameters; of an enum its members, of a protocol its methods."""
    if isinstance(value, enum.EnumMeta):
        yield f"{name}: {', '.join(member.name for member in value)}"
    elif typing.is_typeddict(value):
        yield f"{name}: {', '.join(value.__annotations__)}"
    elif getattr(value, "_is_protocol", False):
        yield name
        for method, function in sorted(vars(value).items()):
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"    {method}{parameters(function)}"
            elif isinstance(function, property):
                yield f"    {method}"
    elif inspect.isclass(value) and issubclass(value, Exception):
        yield f"{name}: {value.__mro__[1].__name__}"
    elif inspect.isclass(value) or inspect.isroutine(value):
        yield name + parameters(value)
    else:
        yield name


def public_api() -> str:
    parts = []
    for path in MODULES:
        module = importlib.import_module(path)
        lines = [line for name in public_names(module) for line in lines_of(name, getattr(module, name))]
        parts.append("\n    ".join([path, *lines]))
    return "\n\n".join(parts) + "\n"


def test_the_public_names_and_their_parameters_are_those_of_the_page() -> None:
    assert public_api().splitlines() == PAGE.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    PAGE.write_text(public_api(), encoding="utf-8")
