r"""Formats of tool calls, with one parser per format, for protocols and the gateway.

| format | a call |
|---|---|
| ``hermes`` | ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen) |
| ``qwen_coder`` | ``<tool_call><function=F><parameter=P>VALUE</parameter></function></tool_call>`` (Qwen3-Coder) |
| ``mistral`` | ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` (Mistral) |
| ``llama`` | ``{"name": ..., "parameters": {...}}`` at a line's start or after ``<\|python_tag\|>`` (Llama 3) |

A parser returns every attempted call in order. The caller checks names and arguments against its tools.

>>> turn = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
>>> [(call.name, call.arguments) for call in TOOL_CALL_FORMATS["hermes"].find_calls(turn)]
[('add', {'a': 1})]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from jsonschema import Draft202012Validator

_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None, "null": None}
"""Python constants that templates of the Qwen3-Coder family write instead of JSON constants."""


def parse_parameter(text: str, name: str, parameters: Mapping[str, object] | None) -> object:
    """Convert unquoted text to the type of the parameter ``name`` in the JSON schema ``parameters``.

    Returns the text itself if the schema accepts it, otherwise the JSON value that the text represents. If the schema
    accepts neither, the text is returned unchanged.

    >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}
    >>> parse_parameter("5", "n", schema), parse_parameter("5", "s", schema), parse_parameter("x", "n", schema)
    (5, '5', 'x')
    """
    properties = (parameters or {}).get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    if parameters is None or not isinstance(schema, Mapping):
        return text
    check = Draft202012Validator({**schema, "$defs": parameters.get("$defs", {})})
    bare = text.strip()
    if bare in ("None", "null") and check.is_valid(None):
        return None
    if check.is_valid(text):
        return text
    try:
        value = _PYTHON_CONSTANTS[bare] if bare in _PYTHON_CONSTANTS else json.loads(bare)
    except (ValueError, RecursionError):
        return text
    return value if check.is_valid(value) else text


Parameters = Callable[[str], Mapping[str, object] | None]
"""Function from a tool's name to the JSON schema of its parameters, or to None for an unknown tool."""

_CALL_START, _CALL_END = "<tool_call>", "</tool_call>"
_TOOL_CALLS_MARK = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_WHITESPACE = re.compile(r"\s*")
_QWEN_FUNCTION = re.compile(
    r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*(?=</tool_call>)",
    re.DOTALL,
)
_QWEN_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_MISTRAL_NAME = re.compile(r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")
_LLAMA_CALL_START = re.compile(r'<\|python_tag\|>\s*|(?:^[ \t]*|;\s*)(?=\{\s*"(?:name|type)"\s*:)', re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCall:
    """An attempted call at ``text[start:end]``. ``error`` is the reason why it cannot be parsed, or "".

    ``arguments`` is the parsed value, which may have any type, or None if missing. ``id`` is the id that the model
    wrote, or "".
    """

    start: int
    end: int
    name: str = ""
    arguments: object = None
    id: str = ""
    error: str = ""


def _no_schema(name: str) -> None:
    """Return None: the schema is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallFormat:
    """A format of tool calls.

    ``key`` is the name of the arguments in messages. ``tokens`` are strings that may be special tokens.
    """

    name: str
    reader: Callable[[str, Parameters], Iterator[ParsedCall]]
    key: str = "arguments"
    tokens: tuple[str, ...] = ()

    def find_calls(self, text: str, parameters: Parameters = _no_schema) -> list[ParsedCall]:
        """Return every attempted call.

        ``parameters`` returns the schema of a tool's parameters, for formats whose values have no explicit type.
        """
        return list(self.reader(text, parameters))


def remove_calls(text: str, calls: Sequence[ParsedCall]) -> str:
    """Return the text outside the calls."""
    kept, position = [], 0
    for call in calls:
        kept.append(text[position : call.start])
        position = max(position, call.end)
    return "".join([*kept, text[position:]]).strip()


def _parse_hermes(text: str, parameters: Parameters) -> Iterator[ParsedCall]:
    position = 0
    while (start := text.find(_CALL_START, position)) >= 0:
        position = start + len(_CALL_START)
        value, end = _read_json(text, position)
        close = text.find(_CALL_END, position if end is None else end)
        if close < 0:
            yield ParsedCall(start=start, end=len(text), error=f"{_CALL_START} is not closed by {_CALL_END}")
            return
        position = close + len(_CALL_END)
        if end is None or text[end:close].strip():
            error = f"between {_CALL_START} and {_CALL_END} there must be one JSON object"
            yield ParsedCall(start=start, end=position, error=error)
        else:
            yield _call_from_object(value, start, position, "arguments")


def _parse_qwen_coder(text: str, parameters: Parameters) -> Iterator[ParsedCall]:
    position = 0
    while (start := text.find(_CALL_START, position)) >= 0:
        position = start + len(_CALL_START)
        match = _QWEN_FUNCTION.match(text, position)
        close = text.find(_CALL_END, position if match is None else match.end())
        if close < 0:
            yield ParsedCall(start=start, end=len(text), error=f"{_CALL_START} is not closed by {_CALL_END}")
            return
        position = close + len(_CALL_END)
        written = None if match is None else _parse_parameters(match["body"])
        if match is None or written is None:
            error = (
                f"between {_CALL_START} and {_CALL_END} there must be <function=NAME>, a <parameter=NAME> with "
                "</parameter> for each argument, and </function>"
            )
            yield ParsedCall(start=start, end=position, error=error)
            continue
        schema = parameters(match["name"])
        arguments = {name: parse_parameter(value, name, schema) for name, value in written}
        yield ParsedCall(start=start, end=position, name=match["name"], arguments=arguments)


def _parse_parameters(body: str) -> list[tuple[str, str]] | None:
    """Return names and values as written, or None if the body contains anything else."""
    pairs, position = [], 0
    while (parameter := _QWEN_PARAMETER.match(body, position)) is not None:
        pairs.append((parameter["name"], parameter["value"]))
        position = parameter.end()
    return None if body[position:].strip() else pairs


def _parse_mistral(text: str, parameters: Parameters) -> Iterator[ParsedCall]:
    position = 0
    while (start := text.find(_TOOL_CALLS_MARK, position)) >= 0:
        position = start + len(_TOOL_CALLS_MARK)
        named = _MISTRAL_NAME.match(text, position)
        value, end = _read_json(text, position if named is None else named.end())
        if end is None or not isinstance(value, dict | list):
            following = text.find(_TOOL_CALLS_MARK, position)
            position = following if following >= 0 else len(text)
            error = (
                f"{_TOOL_CALLS_MARK} must be followed by a JSON list of calls, or by a tool's name and a JSON object"
            )
            yield ParsedCall(start=start, end=position, error=error)
            continue
        position = end
        if named is not None:
            yield ParsedCall(start=start, end=end, name=named["name"], arguments=value, id=named["id"] or "")
            continue
        for call in value if isinstance(value, list) else [value]:
            yield _call_from_object(call, start, end, "arguments")


def _parse_llama(text: str, parameters: Parameters) -> Iterator[ParsedCall]:
    position = 0
    while (start := _LLAMA_CALL_START.search(text, position)) is not None:
        value, end = _read_json(text, start.end())
        if end is None:
            error = 'a call is a JSON object with a string "name" and an object "parameters", and nothing else'
            yield ParsedCall(start=start.start(), end=len(text), error=error)
            return
        position = end
        yield _call_from_object(value, start.start(), end, "parameters", "arguments")


def _call_from_object(value: object, start: int, end: int, *keys: str) -> ParsedCall:
    """Convert a JSON value to a call. The arguments are the value of the first key in ``keys`` that is present."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        error = f'a call is a JSON object with a string "name" and an object "{keys[0]}"'
        return ParsedCall(start=start, end=end, error=error)
    arguments = next((value[key] for key in keys if key in value), None)
    call_id = value.get("id")
    return ParsedCall(
        start=start, end=end, name=value["name"], arguments=arguments, id=call_id if isinstance(call_id, str) else ""
    )


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def _read_json(text: str, start: int) -> tuple[object, int | None]:
    """Parse the JSON value at ``start`` after optional whitespace. Returns the value and its end, or (None, None).

    Because the value is parsed, a string inside it may contain ``</tool_call>``.
    """
    blanks = _WHITESPACE.match(text, start)
    try:
        return _DECODER.raw_decode(text, start if blanks is None else blanks.end())
    except (ValueError, RecursionError):  # invalid JSON, an integer of over 4300 digits, or deep nesting
        return None, None


TOOL_CALL_FORMATS: Mapping[str, ToolCallFormat] = {
    form.name: form
    for form in (
        ToolCallFormat(name="hermes", reader=_parse_hermes, tokens=(_CALL_START, _CALL_END)),
        ToolCallFormat(name="qwen_coder", reader=_parse_qwen_coder, tokens=(_CALL_START, _CALL_END)),
        ToolCallFormat(name="mistral", reader=_parse_mistral, tokens=(_TOOL_CALLS_MARK, "[CALL_ID]", "[ARGS]")),
        ToolCallFormat(name="llama", reader=_parse_llama, key="parameters", tokens=(_PYTHON_TAG,)),
    )
}
"""The formats by name."""

HERMES = TOOL_CALL_FORMATS["hermes"]
"""The format for models without a chat template."""
