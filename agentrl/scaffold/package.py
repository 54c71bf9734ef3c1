"""``agentrl new environment NAME``: write an installable package with an environment, data, a test and settings."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from agentrl.errors import SettingsError, WorldError
from agentrl_envs.registry import DISTRIBUTION, ENVIRONMENTS

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_SUFFIX = ".template"  # keeps linters and test runners from treating a template as code
_PACKAGE = "package"  # name of the template directory that becomes the Python package


def new_environment_command(name: str) -> list[str]:
    """Write the package ``name`` into the working directory and return the lines to print.

    Raises SettingsError before anything is written if the name is invalid, the folder exists, or agentrl is not an
    installed distribution.
    """
    folder = Path(name)
    written = write_environment(name, folder)
    module = _module(name)
    return [
        f"wrote {folder}/: {', '.join(str(path.relative_to(folder)) for path in written)}",
        "next:",
        f"  pip install --no-deps -e {folder}",
        f"  cd {folder}",
        "  python -m pytest",
        f"  python -m {module}.data",
        "  agentrl train --config config.yaml",
    ]


def write_environment(name: str, folder: Path) -> list[Path]:
    """Write the package into the new directory ``folder``. Returns its files, sorted."""
    if folder.exists():
        raise SettingsError(f"{folder} already exists: choose another name, or change to another directory")
    _check_name(name)
    module = _module(name)
    words = {
        "name": name,
        "module": module,
        "class_name": _class_name(name),
        "trainer": pinned(DISTRIBUTION),
        "sandbox": pinned("agentrl-sandbox"),  # a dependency of agentrl, whose metadata records no origin for it
    }
    try:
        folder.mkdir(parents=True)
        written = []
        for parts, text in _templates():
            path = folder.joinpath(*(module if part == _PACKAGE else part for part in parts))
            path.parent.mkdir(exist_ok=True)
            path.write_text(Template(text).substitute(words), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise WorldError(f"cannot write {folder}: {error.strerror}") from error
    return sorted(written)


def pinned(name: str) -> str:
    """Return a requirement for an installed distribution, pinned to its recorded origin or, without one, its version.

    The origin (PEP 610) is a commit, a directory or an archive. Raises SettingsError if the distribution is not
    installed.
    """
    try:
        installed = distribution(name)
    except PackageNotFoundError as error:
        raise SettingsError(
            f"a new package depends on {name}, which is not installed for {sys.executable}: in your clone of agentrl, "
            "run pip install -e sandbox -e ."
        ) from error
    text = installed.read_text("direct_url.json")
    if text is None:
        return f"{name}=={installed.version}"
    origin = json.loads(text)
    url = origin["url"]
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    if "subdirectory" in origin:
        url += f"#subdirectory={origin['subdirectory']}"
    return f"{name} @ {url}"


def _check_name(name: str) -> None:
    module = _module(name)
    if not _NAME.fullmatch(name):
        nearest = re.sub(r"[^a-z0-9]+", "-", _kebab(name).lower()).strip("-0123456789")
        hint = f"; did you mean {nearest!r}?" if _NAME.fullmatch(nearest) else ""
        raise SettingsError(
            f"new environment {name!r}: a name must start with a letter and contain only lowercase "
            f"letters, digits, '-' and '_'{hint}"
        )
    if keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise SettingsError(f"new environment {name!r}: {module!r} is reserved by Python; choose another name")
    if name in ENVIRONMENTS.names() or importlib.util.find_spec(module) is not None:
        raise SettingsError(
            f"new environment {name!r}: an environment or module with this name is installed; choose another name"
        )


def _kebab(name: str) -> str:
    """Insert hyphens at changes of case: ``MyShop`` becomes ``My-Shop``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)


def _module(name: str) -> str:
    return name.replace("-", "_")


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in _module(name).split("_"))


def _templates() -> list[tuple[tuple[str, ...], str]]:
    """Return the path (without the suffix) and the text of each template."""
    return _below(files("agentrl.scaffold").joinpath("template"), ())


def _below(folder: Traversable, parts: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
    templates = []
    for entry in folder.iterdir():
        if entry.is_dir():
            templates += _below(entry, (*parts, entry.name))
        elif entry.name.endswith(_SUFFIX):
            templates.append(((*parts, entry.name.removesuffix(_SUFFIX)), entry.read_text(encoding="utf-8")))
    return templates
