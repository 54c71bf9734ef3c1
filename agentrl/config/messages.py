"""Messages for invalid settings: the key, value and origin, the valid values and the nearest valid key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from agentrl.config.overlays import Layer
from agentrl.config.settings import settings_model
from agentrl.errors import SettingsError

_SchemaNode = dict[str, Any]  # node of a JSON schema

_LIMITS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "pattern": "matching {}",
}
RENAMED = {
    "evaluation.chat_template": "environment.chat",
    "evaluation.endpoint.patience": "evaluation.endpoint.retry_deadline",
    "evaluation.endpoint.silence": "evaluation.endpoint.read_timeout",
    "rollout.branching.turns": "rollout.branching.where",
    "rollout.kv_use": "rollout.kv_high_watermark",
    "training.plan_deadline": "training.worker_timeout",
    "reward.function": "reward.functions",
    "sandbox.patience": "sandbox.retry_deadline",
}
"""Renamed settings: old name -> new name. Old names are rejected, except in the config.yaml of an old run."""
CONVERTED: dict[str, Callable[[Any], object]] = {
    "evaluation.chat_template": lambda wrapped: "always" if wrapped else "auto",
    "reward.function": lambda name: {name: 1.0},
}
"""Renamed settings whose values also changed: old name -> function from the old value to the new value."""
REMOVED = {
    "cluster.elastic": "to continue with fewer ranks, resume the run with training.num_processes",
    "rollout.branching.depth": "list the turns in rollout.branching.where, such as [1,2,3]",
    "sandbox.standby": "a server that exits is restarted automatically",
}
"""Removed settings: old name -> replacement behaviour. Rejected, except in the config.yaml of an old run."""
_TYPE_NAMES = {"number": "a number", "integer": "a whole number", "string": "text", "boolean": "true or false"}


def settings_error(error: ValidationError, env: str, layers: Sequence[Layer]) -> SettingsError:
    """Build an error that lists every invalid setting, one per line."""
    lines = dict.fromkeys(_describe_error(detail, env, layers) for detail in error.errors(include_url=False))
    return SettingsError("\n".join(lines))


def known_keys(env: str) -> list[str]:
    """Return the dotted keys of all settings of a run in ``env``. ``0`` denotes any list index."""
    return list(_walk_keys(_schema(env), _schema(env), ""))


def nearest_key(key: str, env: str) -> str:
    """Return the known key most similar to ``key``: as a whole, by its last part, or by its initials (``lr``).

    If ``key`` has no section, the first of several keys with the same last part is returned.
    """
    last = key.rpartition(".")[2]

    def likeness(known: str) -> float:
        known_last = known.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, key, known).ratio()
        ending = difflib.SequenceMatcher(None, last, known_last).ratio()
        initials = "".join(word[0] for word in known_last.split("_") if word) == last
        section = 0.01 * whole if "." in key else 0.0
        # The complete key has the largest weight, then its last part, then its initials. The section breaks ties
        # between equal last parts.
        return max(whole, 0.98 * ending + section, 0.9 * initials)

    return max(known_keys(env), key=likeness)


def describe_valid_values(key: str, env: str) -> str:
    """Describe the valid values of the setting ``key`` in words. Raises KeyError for an unknown key."""
    known, node = _find_deepest_node(_schema(env), key.split("."))
    if ".".join(known) != key:
        raise KeyError(key)
    return _describe_node(_schema(env), node)


def _find_deepest_node(schema: _SchemaNode, path: Sequence[str]) -> tuple[list[str], _SchemaNode]:
    """Return the longest prefix of the path that is in the schema, and its node."""
    known: list[str] = []
    node = schema
    for part in path:
        child = _child_node(schema, node, part)
        if child is None:
            break
        known.append(part)
        node = child
    return known, node


def find_origin_and_value(key: str, layers: Sequence[Layer]) -> tuple[str, object]:
    """Return the origin and value from the last layer that sets ``key``, or ("", None) for a default."""
    for layer in reversed(layers):
        value_at: object = layer.values
        for part in key.split("."):
            if isinstance(value_at, Mapping) and part in value_at:
                value_at = value_at[part]
            elif isinstance(value_at, list) and part.isdigit() and int(part) < len(value_at):
                value_at = value_at[int(part)]
            else:
                break
        else:
            return layer.origin, value_at
    return "", None


def _describe_error(detail: ErrorDetails, env: str, layers: Sequence[Layer]) -> str:
    path = [str(part) for part in detail["loc"]]
    schema = _schema(env)
    known, node = _find_deepest_node(schema, path)
    key = ".".join(path if detail["type"] == "extra_forbidden" else known)
    missing = detail["type"] == "missing" and len(path) == len(known)
    origin, merged_value = find_origin_and_value(key.rpartition(".")[0] if missing else key, layers)
    # For an invalid list entry, report the whole list.
    value = detail["input"] if len(path) == len(known) else merged_value
    suffix = f" ({origin})" if origin else ""
    if detail["type"] == "extra_forbidden":
        return unknown_key_message(key, detail["input"], env, suffix)
    if missing:
        return f"{key} is missing{suffix} and has no default; valid: {_describe_node(schema, node)}"
    if detail["type"] == "value_error":
        reason = detail["msg"].removeprefix("Value error, ")
        return f"{key}{suffix}: {reason}" if key else reason
    return f"{key}={format_value(value)}{suffix}: expected {_describe_node(schema, node) or detail['msg']}"


def unknown_key_message(key: str, value: object, env: str, suffix: str = "") -> str:
    """Return the message for an unknown, renamed or removed key."""
    if key in REMOVED:
        return f"{key} (value {format_value(value)}){suffix} was removed: {REMOVED[key]}; delete it"
    if key in RENAMED:
        return f"{key} (value {format_value(value)}){suffix} was renamed to {RENAMED[key]}"
    schema = _schema(env)
    known, node = _find_deepest_node(schema, key.split(".")[:-1])
    section = ".".join(known)
    keys = ", ".join(_properties(schema, node)) or "none, because it is not a section"
    where = f"valid keys in {section}" if section else "valid sections and keys"
    nearest = nearest_key(key, env)
    return f"unknown key {key} (value {format_value(value)}){suffix}; nearest valid key: {nearest}; {where}: {keys}"


def format_value(value: object) -> str:
    """Format ``value`` on one line in the syntax of a setting, shortened if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


@cache
def _schema(env: str) -> _SchemaNode:
    return settings_model(env).model_json_schema()


def _alternatives(root: _SchemaNode, node: _SchemaNode) -> list[_SchemaNode]:
    """Return the alternatives of a node, with references resolved and null omitted."""
    if "$ref" in node:
        return _alternatives(root, root["$defs"][node["$ref"].rpartition("/")[2]])
    alternatives = node.get("anyOf") or node.get("oneOf")
    if alternatives:
        return [option for one in alternatives if one.get("type") != "null" for option in _alternatives(root, one)]
    return [node]


def _properties(root: _SchemaNode, node: _SchemaNode) -> dict[str, _SchemaNode]:
    return {key: value for option in _alternatives(root, node) for key, value in option.get("properties", {}).items()}


def _child_node(root: _SchemaNode, node: _SchemaNode, part: str) -> _SchemaNode | None:
    properties = _properties(root, node)
    if part in properties:
        return properties[part]
    for option in _alternatives(root, node):
        if part.isdigit() and isinstance(option.get("items"), dict):
            return option["items"]
        if isinstance(option.get("additionalProperties"), dict):
            return option["additionalProperties"]
    return None


def _walk_keys(root: _SchemaNode, node: _SchemaNode, path: str) -> Iterable[str]:
    for key, child in _properties(root, node).items():
        here = f"{path}.{key}" if path else key
        below = list(_walk_keys(root, child, here))
        for option in _alternatives(root, child):
            if isinstance(option.get("items"), dict):
                below += _walk_keys(root, option["items"], f"{here}.0")
            if isinstance(option.get("additionalProperties"), dict):
                below += _walk_keys(root, option["additionalProperties"], f"{here}.*")
        yield here
        yield from below


def _describe_node(root: _SchemaNode, node: _SchemaNode) -> str:
    """Describe the valid values of a node, for example ``a whole number at least 1 or null``."""
    options = _alternatives(root, node)
    form = node.get("form")  # description of a pattern in words
    words = [str(form)] if form else [_describe_alternative(option) for option in options]
    if any(one.get("type") == "null" for one in node.get("anyOf", [])):
        words.append("null")
    return " or ".join(dict.fromkeys(word for word in words if word))


def _describe_alternative(option: _SchemaNode) -> str:
    if "enum" in option:
        return "one of " + ", ".join(str(value) for value in option["enum"])
    if "const" in option:
        return str(option["const"])
    if "properties" in option:
        return "a section with the keys " + ", ".join(option["properties"])
    if option.get("type") == "object":
        keys = option.get("propertyNames", {}).get("enum")
        return f"a mapping with the keys {', '.join(keys)}" if keys else "a mapping"
    if option.get("type") == "array":
        size = option.get("minItems")
        if size and size == option.get("maxItems"):
            return f"a list of {size} values"
        return f"a list of at least {size} value{'s' * (size > 1)}" if size else "a list"
    kind = _TYPE_NAMES.get(str(option.get("type")), "")
    limits = [text.format(option[name]) for name, text in _LIMITS.items() if name in option]
    return " ".join([kind, " and ".join(limits)]).strip()
