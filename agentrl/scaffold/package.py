"""``agentrl new environment NAME``: write an installable package with an environment, data, a test and settings."""

from __future__ import annotations

import importlib.util
import json
import keyword
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template

from agentrl.errors import SettingsError, WorldError
from agentrl_envs.registry import DISTRIBUTION, ENVIRONMENTS

_PACKAGE_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_TEMPLATES = Path(__file__).with_name("template")
_TEMPLATE_SUFFIX = ".template"  # keeps linters and test runners from treating a template as code
_PACKAGE_DIRECTORY = "package"  # name of the template directory that becomes the Python package


def new_environment_command(name: str) -> list[str]:
    """Write the package ``name`` into the working directory and return the lines to print.

    Raises SettingsError before anything is written if the name is invalid, the folder exists, or agentrl is not an
    installed distribution.
    """
    folder = Path(name)
    written = write_environment(name, folder)
    module = _module_name(name)
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
    module = _module_name(name)
    words = {
        "name": name,
        "module": module,
        "class_name": "".join(part.capitalize() for part in module.split("_")),
        "trainer": pinned_requirement(DISTRIBUTION),
        # A dependency of agentrl must be pinned separately, because agentrl's metadata records no origin for it.
        "sandbox": pinned_requirement("agentrl-sandbox"),
    }
    try:
        folder.mkdir(parents=True)
        written = []
        for template in _TEMPLATES.rglob(f"*{_TEMPLATE_SUFFIX}"):
            parts = template.relative_to(_TEMPLATES).with_suffix("").parts
            path = folder.joinpath(*(module if part == _PACKAGE_DIRECTORY else part for part in parts))
            path.parent.mkdir(exist_ok=True)
            path.write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise WorldError(f"cannot write {folder}: {error.strerror}") from error
    return sorted(written)


def pinned_requirement(name: str) -> str:
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
    module = _module_name(name)
    if not _PACKAGE_NAME.fullmatch(name):
        hyphenated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name)  # MyShop becomes My-Shop
        nearest = re.sub(r"[^a-z0-9]+", "-", hyphenated.lower()).strip("-0123456789")
        hint = f"; did you mean {nearest!r}?" if _PACKAGE_NAME.fullmatch(nearest) else ""
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


def _module_name(name: str) -> str:
    return name.replace("-", "_")
