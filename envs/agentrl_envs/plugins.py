"""Load users' modules, in which they register what a run names: ``plugins=[module, file.py]``.

Every command loads them before it reads the other settings, and so does every process of a run.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path

from agentrl_envs.registry import PluginError, describe_error, did_you_mean

GROUP = "agentrl.plugins"
"""Entry points of installed packages; each names a module to import."""


def load_plugins(names: Iterable[str]) -> None:
    """Import each module, file or entry point once. Raises `PluginError` for one that cannot be imported."""
    for name in names:
        if name.endswith(".py"):
            _load_file(name)
        else:
            _import(name)


def _import(name: str) -> None:
    installed = {entry.name: entry.value for entry in entry_points(group=GROUP)}
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
            f"name of an entry point in {GROUP})"
        ) from error
    except (Exception, SystemExit) as error:
        raise PluginError(f"plugins {name!r}: importing it raised {describe_error(error)}") from error


def _load_file(name: str) -> None:
    """A file becomes the module of its name, so that ``module:attribute`` and pickles find what it defines."""
    path = Path(name).expanduser().absolute()
    if not path.is_file():
        raise PluginError(f"plugins {name!r}: there is no file {path}")
    found = sys.modules.get(path.stem)
    if found is not None:
        if found.__file__ is not None and Path(found.__file__) == path:
            return
        raise PluginError(
            f"plugins {name!r}: a module {path.stem!r} is already loaded from {found.__file__}; rename the file"
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
