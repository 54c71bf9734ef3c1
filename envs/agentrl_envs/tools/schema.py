"""Tool schemas, derived from signatures and docstrings. They validate the model's arguments.

For types that ``transformers.utils.get_json_schema`` supports too, the schemas are equal. That function is not used
because it imports torch.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NotRequired

from jsonschema import Draft202012Validator, SchemaError
from pydantic import Field, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError
from typing_extensions import TypedDict

from agentrl_envs.registry import PluginError

_DOCSTRING_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE
)
_DOCSTRING_PARAMETER = re.compile(r"^(?P<name>\w+)[ \t]*(\([^)]*\))?:[ \t]*(?P<text>.*)$")


class SignatureError(ValueError):
    """A signature or docstring lacks information for the schema."""


def parse_docstring(function: Callable[..., object]) -> tuple[str, Mapping[str, str]]:
    """Return a docstring's description (Google style) and the descriptions of its parameters.

    >>> def f(a):
    ...     '''Adds one.
    ...
    ...     Args:
    ...         a: a number,
    ...             any number
    ...     '''
    >>> parse_docstring(f)
    ('Adds one.', {'a': 'a number, any number'})
    """
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise SignatureError("it has no docstring")
    first = _DOCSTRING_SECTION.search(text)
    sections = _DOCSTRING_SECTION.split(text)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    body = next((bodies[name] for name in ("Args", "Arguments", "Parameters") if name in bodies), "")
    return text[: first.start() if first else None].strip(), _parse_parameter_section(body)


def parameters_schema(
    function: Callable[..., object], parameters: Sequence[inspect.Parameter], descriptions: Mapping[str, str]
) -> dict[str, object]:
    """Return the JSON schema of the parameters. Raises SignatureError if a parameter has no type or no description."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise SignatureError(f"its annotations cannot be evaluated ({error})") from error
    fields: dict[str, object] = {}
    for parameter in parameters:
        name = parameter.name
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise SignatureError(f"its parameter {name!r} cannot be passed by name")
        if name not in hints:
            raise SignatureError(f"its parameter {name!r} has no type")
        if name not in descriptions:
            raise SignatureError(f"its docstring does not describe the parameter {name!r} under Args:")
        kind: object = Annotated[hints[name], Field(description=descriptions[name])]
        fields[name] = kind if parameter.default is parameter.empty else NotRequired[kind]
    made = TypedDict("made", fields)  # type: ignore[misc]
    try:
        schema = TypeAdapter(made).json_schema()
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema) as error:
        raise SignatureError(f"the type of a parameter has no JSON schema ({str(error).splitlines()[0]})") from error
    return {"type": "object", "properties": {}} | {
        key: _remove_titles(value) for key, value in schema.items() if key != "title"
    }


def _parse_parameter_section(body: str) -> dict[str, str]:
    """Parse ``name: text`` for each parameter. Lines that are indented further continue the text."""
    descriptions: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(body).strip("\n").splitlines():
        match = _DOCSTRING_PARAMETER.match(line)
        if match is not None:
            name = match["name"]
            descriptions[name] = match["text"].strip()
        elif name and line.strip():
            descriptions[name] = f"{descriptions[name]} {line.strip()}".strip()
    return descriptions


def _remove_titles(value: object) -> object:
    """Remove the titles that pydantic derives from names.

    Keeps a property named ``title``: its value is not a string.
    """
    if isinstance(value, dict):
        return {key: _remove_titles(item) for key, item in value.items() if key != "title" or not isinstance(item, str)}
    return [_remove_titles(item) for item in value] if isinstance(value, list) else value


PYTHON = "python"
INJECTED_PARAMETERS = ("problem", "sandbox")
"""Parameters that receive objects of the episode instead of arguments of the model."""

_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_MAX_ERROR_CHARACTERS = 300  # per message, because jsonschema includes the whole value in its messages


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSchema:
    """Name, description and parameters of a tool.

    ``forbids_other_arguments`` rejects arguments that are not in ``parameters``.
    """

    name: str
    description: str
    parameters: Mapping[str, object]
    forbids_other_arguments: bool = False

    def as_openai_function(self) -> dict[str, object]:
        """Return the schema in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def find_argument_error(self, arguments: Mapping[str, object]) -> str | None:
        """Return the reason why the arguments are invalid, or None."""
        parameters = (
            {**self.parameters, "additionalProperties": False} if self.forbids_other_arguments else self.parameters
        )
        error = next(Draft202012Validator(parameters).iter_errors(arguments), None)
        if error is None:
            return None
        location = f"argument {error.json_path.removeprefix('$.')}" if error.absolute_path else "arguments"
        return f"{location} of {self.name}: {error.message[:_MAX_ERROR_CHARACTERS]}"


PYTHON_SCHEMA = ToolSchema(
    name=PYTHON,
    description="Runs a Python program in a fresh interpreter and returns what it prints.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "the program; print what you want to see"}},
        "required": ["code"],
    },
)
SESSION_PYTHON_SCHEMA = ToolSchema(
    name=PYTHON,
    description="Runs a Python program in an interpreter that keeps variables, and returns what it prints.",
    parameters=PYTHON_SCHEMA.parameters,
)


def function_schema(function: Callable[..., object], path: str, *, method: bool = False) -> ToolSchema:
    """Return the schema of a function from its signature and docstring (Google style), without injected parameters.

    Raises PluginError, with ``path`` in the message, if a parameter lacks a type or a description.
    """
    parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    visible = [parameter for parameter in parameters if parameter.name not in INJECTED_PARAMETERS]
    try:
        description, descriptions = parse_docstring(function)
        properties = parameters_schema(function, visible, descriptions)
    except SignatureError as error:
        raise PluginError(
            f"{path} cannot be a tool: {error}. Annotate each parameter with a type, and write a docstring that "
            "describes the tool and, under Args:, each parameter"
        ) from error
    schema = ToolSchema(
        name=function.__name__, description=description, parameters=properties, forbids_other_arguments=True
    )
    check_schema(schema, path)
    return schema


def check_schema(schema: ToolSchema, path: str) -> None:
    """Raise PluginError, with ``path`` in the message, if the schema is invalid."""
    problem = _schema_problem(schema)
    if problem is not None:
        raise PluginError(f"{path} cannot be a tool: {problem}")


def injected_parameters(function: Callable[..., object], names: Sequence[str] = INJECTED_PARAMETERS) -> tuple[str, ...]:
    """Return the ``names`` that are parameters of the function; none if the signature is unknown."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # C functions may have no signature
        return ()
    return tuple(name for name in names if name in signature.parameters)


def _schema_problem(schema: ToolSchema) -> str | None:
    if not isinstance(schema.name, str) or not _TOOL_NAME.fullmatch(schema.name):
        return (
            f"its name {schema.name!r} must consist of at most 64 letters, digits, '_', '.' and '-', and begin with a "
            "letter or '_'"
        )
    if not isinstance(schema.description, str):
        return "its description must be a string"
    if not isinstance(schema.parameters, Mapping) or schema.parameters.get("type") != "object":
        return 'its parameters must be a JSON schema with "type": "object"'
    try:
        Draft202012Validator.check_schema(schema.parameters)
    except SchemaError as error:
        return f"its parameters are not a JSON schema: {error.message}"
    return None
