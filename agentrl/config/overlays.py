"""YAML overlays: shipped overlays, user files, ``base:`` chains and ``${VARIABLE}`` in values.

The YAML 1.2 core schema replaces surprising rules of YAML 1.1: ``1e-6`` is a number, ``no`` and ``on`` are text, dates
are text, and a duplicate key in a mapping is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from agentrl.errors import SettingsError
from agentrl_envs.registry import did_you_mean

# Sections that accept a single word, and the setting that the word sets.
_SHORT_FORMS = {"cluster": "kind", "sandbox": "url"}
_VARIABLE = re.compile(r"\$\{([A-Z_][A-Z0-9_]*)\}")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A source of settings: its values, and its origin for messages."""

    origin: str
    values: Mapping[str, object]


class _YAML12Loader(yaml.SafeLoader):
    """SafeLoader with the numbers and booleans of YAML 1.2, without dates and without duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not a string", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"duplicate key {key!r}", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


# PyYAML implements YAML 1.1. The resolvers of these types are replaced by the resolvers of the 1.2 core schema.
_REPLACED_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "timestamp")}
_YAML12Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_YAML12Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_YAML12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_YAML12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$|^[-+]?\.(?:inf|nan)$"
    ),
    list("-+.0123456789"),
)


def parse_yaml(text: str, origin: str) -> object:
    """Parse ``text``. Raises SettingsError with ``origin``, line and column if it is not valid YAML."""
    try:
        return yaml.load(text, Loader=_YAML12Loader)  # safe: _YAML12Loader is a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        position = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError(f"{origin}{position}: not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"{origin}: not valid YAML: {' '.join(str(error).split())}") from error


def shipped_configs() -> dict[str, Path]:
    """Return the files of the shipped overlays by name, from an installation or a checkout."""
    installed = Path(str(resources.files("agentrl"))) / "configs"
    checkout = Path(str(resources.files("agentrl"))).parent / "configs"
    folder = installed if installed.is_dir() else checkout
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def shipped_config(name: str) -> Path | None:
    """Return the shipped overlay called ``name``, ``name.yaml`` or ``configs/name.yaml``, or None."""
    plain = name.removeprefix("configs/").removesuffix(".yaml")
    return shipped_configs().get(plain)


def find_config(name: str) -> Path:
    """Return the file at this path, or else the shipped overlay of this name.

    Raises SettingsError with the names of the shipped overlays if neither exists.
    """
    path = Path(name)
    file = path if path.is_file() else shipped_config(name)
    if file is not None:
        return file
    shipped = list(shipped_configs())
    hint = did_you_mean(path.stem, shipped)
    raise SettingsError(f"no config file {name!r}{hint} (shipped configs: {', '.join(shipped)})")


def read_overlay_chain(name: str, _seen: tuple[Path, ...] = ()) -> list[Layer]:
    """Read the layers of an overlay, ``base`` first. Raises SettingsError for an unreadable or circular file."""
    path = find_config(name).resolve()
    if path in _seen:
        raise SettingsError(f"{path}: 'base' is circular: {' -> '.join(p.name for p in (*_seen, path))}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the config file {path}: {error}") from error
    values = parse_yaml(text, str(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: a config file must be a mapping of sections, not a {type(values).__name__}")
    base = values.pop("base", None)
    for key, value in values.items():
        if (setting := short_form_key(key, value)) is not None:
            values[key] = {setting: value}
    overlay = Layer(origin=str(path), values=values)
    bases = [] if base is None else base if isinstance(base, list) else [base]
    if not all(isinstance(name, str) for name in bases):
        raise SettingsError(f"{path}: base={base!r} must be the name of a shipped config, a path, or a list of these")
    return [*(layer for name in bases for layer in read_overlay_chain(name, (*_seen, path))), overlay]


def interpolate_variables(values: object, environment: Mapping[str, str] = os.environ, path: str = "") -> object:
    """Replace every ``${VARIABLE}`` in strings of ``values``. Raises SettingsError if a variable is not set."""
    if isinstance(values, dict):
        return {key: interpolate_variables(value, environment, _join_keys(path, key)) for key, value in values.items()}
    if isinstance(values, list):
        return [
            interpolate_variables(value, environment, _join_keys(path, str(index)))
            for index, value in enumerate(values)
        ]
    if not isinstance(values, str):
        return values
    for variable in _VARIABLE.findall(values):
        if variable not in environment:
            raise SettingsError(
                f"{path}={values!r} requires the environment variable {variable}, which is not set: "
                f"set the variable (export {variable}=...) or the key ({path}=...)"
            )
    return _VARIABLE.sub(lambda match: environment[match.group(1)], values)


def short_form_key(section: str, value: object) -> str | None:
    """Return the key set by the short form ``section=value``, or None if there is no such short form.

    >>> short_form_key("cluster", "local"), short_form_key("sandbox", "local://"), short_form_key("env", "simpletir")
    ('kind', 'url', None)
    """
    return _SHORT_FORMS.get(section) if isinstance(value, str) else None


def _join_keys(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
