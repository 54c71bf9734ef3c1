"""Registries of environments, protocols, tools and rewards, and the import of plug-in modules.

A name is built-in, registered by a decorator, an entry point of an installed package, or ``module:attribute``. This
module imports only the standard library, and imports the object of a name on first use. Settings can therefore be
checked without importing these objects. Estimators and losses use the same `Registry` (`agentrl.algorithms`).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from agentrl_envs.episode import AgentRLEnvError, Environment

Item = TypeVar("Item")
_Decorated = TypeVar("_Decorated")
DISTRIBUTION = "agentrl-trainer"
"""Name of the distribution that contains this package. `agentrl` on PyPI is another project."""
TRL_PREFIX = "trl:"
"""Prefix of ``module:Class`` for an environment with the interface of TRL's ``environment_factory``."""


def install_command(name: str) -> str:
    """Return the command that installs an extra. The command keeps the installed version, even if it is editable."""
    return f"pip install '{DISTRIBUTION}[{name}]'"


class PluginError(AgentRLEnvError, LookupError):
    """A name in the settings cannot be found or imported, or its object has the wrong type or signature."""


class UnknownNameError(PluginError, ValueError):
    """The name is not registered. The message contains the nearest name and all valid names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, owner: str = "", paths: bool = False) -> None:
        names = sorted(known)
        valid = ", ".join(names + ["module:attribute"] * paths) or "none"
        of = f" of {owner}" if owner else ""
        super().__init__(f"unknown {kind} {name!r}{of}{did_you_mean(name, names)} (valid: {valid})")


class NameTakenError(PluginError, ValueError):
    """The name is already registered for a different object."""


class Registry(Generic[Item]):
    """Maps names to objects that settings can select. ``kind`` is the noun for an entry in messages.

    ``builtin`` maps the built-in names to ``module:attribute`` paths. ``group`` is the entry-point group of installed
    packages, or "". With ``paths=True``, ``module:attribute`` is valid as a name. ``removed`` is for names that earlier
    versions supported: it maps the part before the colon to a replacement, which the message names.
    """

    def __init__(
        self,
        kind: str,
        *,
        builtin: Mapping[str, str] | None = None,
        group: str = "",
        paths: bool = False,
        removed: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.builtin = builtin or {}
        self._group = group
        self._paths = paths
        self._removed = removed or {}
        self._entries: dict[str, Item] = {}

    def add(self, name: str, item: Item) -> None:
        """Add an entry. Raises NameTakenError if the name exists."""
        if name in self._entries or name in self.builtin:
            raise NameTakenError(f"{self.kind} {name!r} is already registered")
        self._entries[name] = item

    def decorator(self, name: str) -> Callable[[_Decorated], _Decorated]:
        """Return a decorator that registers its object as ``name`` and returns the object unchanged."""

        def add(item: _Decorated) -> _Decorated:
            self.add(name, cast(Item, item))
            return item

        return add

    def names(self) -> tuple[str, ...]:
        """Return all names in order, including names of entry points."""
        return tuple(sorted({*self.builtin, *self._entries, *self._entry_points()}))

    def check(self, name: str) -> None:
        """Raise PluginError for a removed name and UnknownNameError for any other invalid name.

        Does not import ``module:attribute``.
        """
        if name in self.names():  # a package may register a removed name
            return
        replacement = self._removed.get(name.partition(":")[0])
        if replacement is not None:
            raise PluginError(f"{self.kind} {name!r} was removed: {replacement}")
        if not (self._paths and name.removeprefix(TRL_PREFIX).count(":") == 1):
            raise UnknownNameError(self.kind, name, self.names(), paths=self._paths)

    def __getitem__(self, name: str) -> Item:
        self.check(name)
        if name in self._entries:
            return self._entries[name]
        path = self.builtin.get(name) or self._entry_points().get(name, name.removeprefix(TRL_PREFIX))
        return cast(Item, import_attribute(path, self.kind))

    def _entry_points(self) -> dict[str, str]:
        return {entry.name: entry.value for entry in entry_points(group=self._group)} if self._group else {}


ENVIRONMENTS: Registry[Callable[..., Environment]] = Registry(
    "environment",
    builtin={
        "simpletir": "agentrl_envs.simpletir:SimpleTIRFactory",
        "reasoning": "agentrl_envs.reasoning:ReasoningFactory",
    },
    group="agentrl.envs",
    paths=True,
    removed={"textarena": "make the game a gymnasium environment in your module (docs/how-to/environments.md)"},
)
"""Classes and functions that create an `Environment`. Built-in names refer to factories."""

ADAPTERS: Mapping[str, str] = {
    "harbor": "agentrl_envs.adapters.harbor:HarborFactory",
    "openenv": "agentrl_envs.adapters.openenv:openenv_environment",
}
"""Environments of other libraries, named ``PREFIX:NAME``. Each path names a callable that maps NAME to a factory."""

PROTOCOLS: Registry[Any] = Registry(
    "protocol",
    builtin={
        "simpletir": "agentrl_envs.protocols.simpletir:SimpleTIRProtocol.from_settings",
        "retool": "agentrl_envs.protocols.retool:ReToolProtocol.from_settings",
        "torl": "agentrl_envs.protocols.torl:ToRLProtocol.from_settings",
        "hermes": "agentrl_envs.protocols.hermes:make_hermes_protocol",
    },
    group="agentrl.protocols",
    paths=True,
)
"""Functions that create a `TextProtocol` (`agentrl_envs.protocols.base.ProtocolFactory`)."""

TOOLS: Registry[object] = Registry(
    "tool", builtin={"python": "agentrl_envs.tools.schema:PYTHON_SCHEMA"}, group="agentrl.tools", paths=True
)
"""Tools of ``environment.tools``: functions, classes, or objects with the attributes of `agentrl_envs.tools.Tool`."""

REWARDS: Registry[object] = Registry("reward", group="agentrl.rewards", paths=True)
"""Reward functions of ``reward.functions`` (`agentrl_envs.rewards.RewardFunction`)."""


def grades_answers(env: str) -> bool:
    """Return True if the environment ``env`` compares answers with reference answers."""
    return env in ENVIRONMENTS.builtin


def register_environment(name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers a class or function as ``--env NAME``."""
    return ENVIRONMENTS.decorator(name)


def register_protocol(name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers a factory as ``environment.protocol=NAME``."""
    return PROTOCOLS.decorator(name)


def register_tool(name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers a tool as NAME in ``environment.tools``."""
    return TOOLS.decorator(name)


def register_reward(name: str) -> Callable[[Item], Item]:
    """Return a decorator that registers a function as NAME in ``reward.functions``."""
    return REWARDS.decorator(name)


def import_attribute(path: str, kind: str) -> object:
    """Import ``module:attribute``. Raises PluginError with the missing part and the nearest name."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{kind} {path!r} is not of the form module:attribute")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise PluginError(f"{kind} {path!r}: there is no module {error.name!r}") from error
        raise PluginError(
            f"{kind} {path!r}: importing module {module_name!r} raised {describe_error(error)}"
        ) from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        hint = did_you_mean(attribute, dir(module))
        file = getattr(module, "__file__", None)
        location = f" ({file})" if file else ""
        raise PluginError(f"{kind} {path!r}: module {module_name!r}{location} has no {attribute!r}{hint}") from error


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the nearest known name, or "" if no name is similar.

    >>> did_you_mean("ad", ["add", "subtract"])
    "; did you mean 'add'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


_CALLING_FILE = str(Path(__file__).with_name("threads.py"))
"""The file whose frames call custom code. Error messages omit these frames."""


def describe_error(error: BaseException) -> str:
    """Return the error's type, message, file and line, for messages without a traceback.

    File and line are omitted if the call itself failed, for example because of a missing argument.
    """
    if isinstance(error, SyntaxError):  # the message already contains file and line
        return f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1:]
    location = "".join(f" ({at.filename}:{at.lineno})" for at in last if at.filename != _CALLING_FILE)
    return f"{type(error).__name__}: {error}{location}"


PLUGIN_GROUP = "agentrl.plugins"
"""Entry-point group of installed packages. Each entry point names a module to import."""


def load_plugins(names: Iterable[str]) -> None:
    """Import each module, file or entry point of ``plugins=[module, file.py]`` once.

    Every command and every process of a run loads the plug-ins before reading the other settings. Raises PluginError if
    an import fails.
    """
    for name in names:
        if name.endswith(".py"):
            _import_plugin_file(name)
        else:
            _import_plugin(name)


def _import_plugin(name: str) -> None:
    installed = {entry.name: entry.value for entry in entry_points(group=PLUGIN_GROUP)}
    module = installed.get(name, name)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if missing != module and not module.startswith(f"{missing}."):
            raise PluginError(f"plugins {name!r}: importing it raised {describe_error(error)}") from error
        hint = did_you_mean(name, installed)
        raise PluginError(
            f"plugins {name!r}: there is no module {missing!r}{hint} (valid: a module, a file that ends in .py, or the "
            f"name of an entry point in {PLUGIN_GROUP})"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugins {name!r}: importing it raised {describe_error(error)}") from error


def _import_plugin_file(name: str) -> None:
    """Import a file as the module ``STEM``, so that ``module:attribute`` and pickle can resolve its objects."""
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise PluginError(f"plugins {name!r}: there is no file {path}")
    loaded = sys.modules.get(path.stem)
    if loaded is not None:
        if loaded.__file__ is not None and Path(loaded.__file__) == path:
            return
        raise PluginError(
            f"plugins {name!r}: a module {path.stem!r} is already loaded from {loaded.__file__}; rename the file"
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise PluginError(f"plugins {name!r}: importing it raised {describe_error(error)}") from error
