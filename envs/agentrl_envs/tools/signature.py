"""A function's parameters as a JSON schema: types from the signature, descriptions from the docstring.

The result is that of ``transformers.utils.get_json_schema`` for the types that both know; that function imports torch.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NotRequired

from pydantic import Field, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from typing_extensions import TypedDict

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
_PARAMETER = re.compile(r"^(?P<name>\w+)[ \t]*(\([^)]*\))?:[ \t]*(?P<text>.*)$")


class SignatureError(ValueError):
    """A signature or a docstring that does not say what a model must be told."""


def described(function: Callable[..., object]) -> tuple[str, Mapping[str, str]]:
    """The description in a docstring (Google style), and those of its parameters.

    >>> def f(a):
    ...     '''Adds one.
    ...
    ...     Args:
    ...         a: a number,
    ...             any number
    ...     '''
    >>> described(f)
    ('Adds one.', {'a': 'a number, any number'})
    """
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise SignatureError("it has no docstring")
    first = _SECTION.search(text)
    sections = _SECTION.split(text)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    body = next((bodies[name] for name in ("Args", "Arguments", "Parameters") if name in bodies), "")
    return text[: first.start() if first else None].strip(), _parameters(body)


def parameters_schema(
    function: Callable[..., object], parameters: Sequence[inspect.Parameter], said: Mapping[str, str]
) -> dict[str, object]:
    """The JSON schema of these parameters. Raises `SignatureError` for one without a type or a description."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise SignatureError(f"its annotations cannot be read ({error})") from error
    fields: dict[str, object] = {}
    for parameter in parameters:
        name = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SignatureError(f"its parameter {name!r} cannot be given by name")
        if name not in hints:
            raise SignatureError(f"its parameter {name!r} has no type")
        if name not in said:
            raise SignatureError(f"its docstring has no line for the parameter {name!r} under Args:")
        kind: object = Annotated[hints[name], Field(description=said[name])]
        fields[name] = kind if parameter.default is parameter.empty else NotRequired[kind]
    made = TypedDict("made", fields)  # type: ignore[misc]
    try:
        schema = TypeAdapter(made).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        raise SignatureError(f"a type of its parameters is none of JSON ({str(error).splitlines()[0]})") from error
    return {"type": "object", "properties": {}} | {
        key: _without_titles(value) for key, value in schema.items() if key != "title"
    }


def _parameters(body: str) -> dict[str, str]:
    """``name: text`` of each parameter; lines that are indented further continue it."""
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(body).strip("\n").splitlines():
        match = _PARAMETER.match(line)
        if match is not None:
            name = match["name"]
            found[name] = match["text"].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


def _without_titles(value: object) -> object:
    """What pydantic derives from names tells a model nothing. A property may be called title: it has no text."""
    if isinstance(value, dict):
        return {
            key: _without_titles(item) for key, item in value.items() if key != "title" or not isinstance(item, str)
        }
    return [_without_titles(item) for item in value] if isinstance(value, list) else value
