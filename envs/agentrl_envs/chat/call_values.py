"""Values of arguments that a model writes as bare text, without quotes: their types are those of the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jsonschema import Draft202012Validator

_CONSTANTS = {"True": True, "False": False, "None": None, "null": None}
"""Python's words, which templates of the Qwen3-Coder family write as well."""


def parameter_value(text: str, name: str, parameters: Mapping[str, object] | None) -> object:
    """The value that ``text`` is for the parameter ``name`` of a tool whose schema is ``parameters``.

    The text itself if the schema takes it, else the JSON value that it spells. What neither fits stays text.

    >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    >>> parameter_value("5", "n", schema), parameter_value("5", "s", schema), parameter_value("x", "n", schema)
    (5, '5', 'x')
    """
    properties = (parameters or {}).get("properties")
    own = properties.get(name) if isinstance(properties, Mapping) else None
    if parameters is None or not isinstance(own, Mapping):
        return text
    check = Draft202012Validator({**own, "$defs": parameters.get("$defs", {})})
    bare = text.strip()
    if bare in ("None", "null") and check.is_valid(None):
        return None
    if check.is_valid(text):
        return text
    try:
        value = _CONSTANTS[bare] if bare in _CONSTANTS else json.loads(bare)
    except (ValueError, RecursionError):
        return text
    return value if check.is_valid(value) else text
