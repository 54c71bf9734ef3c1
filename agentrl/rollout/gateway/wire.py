"""The common form of requests and replies, and the base class of the APIs that agents use.

Messages are compared by content. Each API is an :class:`ApiRequestBody`: :mod:`.chat_completions`, :mod:`.messages` and
:mod:`.responses`.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from agentrl_envs.registry import did_you_mean

Json = Mapping[str, object]

FROZEN = ":frozen"
"""Suffix of the model's name for calls whose replies are not trained on."""
_ERROR_MESSAGES: Mapping[str, str] = {
    "model_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "tuple_type": "must be a list",
    "too_short": "must contain at least one entry",
    "missing": "required, but missing",
}
# Types of text parts, each with the field that contains its text.
_TEXT_PARTS = {
    "refusal": "refusal",
    **dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text"),
}
_EMPTY_VALUES: tuple[object, ...] = ("", 0, False, [], {})


class GatewayRequestError(Exception):
    """Raised to reject a request, with an HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self._fields = {"message": message, "type": kind or "invalid_request_error", "param": param, "code": code}

    def openai_body(self) -> dict[str, object]:
        """Return the JSON of the response in OpenAI's form."""
        return {"error": self._fields}


@dataclass(frozen=True, kw_only=True)
class GatewayAccess:
    """The address and key with which an agent accesses the policy. ``name`` identifies the rollout."""

    name: str
    base_url: str
    api_key: str
    model: str


class WireModel(BaseModel):
    """Base class for models parsed from JSON. A null field counts as absent."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null_fields(cls, value: object) -> object:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def join_text_parts(value: object, separator: str = "") -> object:
    """Join the text parts of a message's content."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") or "text" if isinstance(part, dict) else "text"
        text = part.get(_TEXT_PARTS.get(str(kind), "")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise PydanticCustomError(
                "part", "contains a part of type {kind}, but the model supports text only", {"kind": kind}
            )
        texts.append(text)
    return separator.join(texts)


class AgentCall(WireModel):
    """A tool call. ``arguments`` is the JSON text as received or to be sent."""

    name: str = Field(validation_alias=AliasPath("function", "name"))
    arguments: Annotated[
        str, BeforeValidator(lambda value: json.dumps(value) if isinstance(value, dict) else value or "")
    ] = Field("", validation_alias=AliasPath("function", "arguments"))
    id: str = ""

    @cached_property
    def parsed_arguments(self) -> object:
        """The parsed arguments, or their text if it is not valid JSON. Empty text is parsed as an empty object."""
        try:
            return from_json(self.arguments or "{}")
        except ValueError:
            return self.arguments


class AgentMessage(WireModel):
    """A message. Messages with equal keys match. Keys ignore outer whitespace, call ids and JSON formatting.

    >>> one = AgentMessage(role="assistant", content=" 4\\n", calls=(AgentCall(name="f", arguments='{"b":1, "a":2}'),))
    >>> two = AgentMessage(role="assistant", content="4", calls=(AgentCall(name="f", arguments='{"a": 2, "b": 1}'),))
    >>> one.content_key == two.content_key
    True
    """

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda value: "system" if value == "developer" else value),
    ]
    content: Annotated[str, BeforeValidator(join_text_parts)] = ""
    reasoning: Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)] = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    calls: tuple[AgentCall, ...] = Field((), validation_alias="tool_calls")
    call_id: str = Field("", validation_alias="tool_call_id")
    function_call: None = None

    @cached_property
    def content_key(self) -> str:
        """A key that is equal for messages with equal content. Reasoning is compared separately."""
        calls = [[call.name, call.parsed_arguments] for call in self.calls]
        return json.dumps([self.role, self.content.strip(), calls], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class AgentRequest:
    """A request in the form that all APIs share.

    ``tools``: function schemas as chat templates expect them. ``starts_with_instructions``: the first message contains
    instructions that apply to this request only. ``parses_calls``: calls are parsed from the reply. ``trainable``: the
    policy may be trained on the reply.
    """

    messages: tuple[AgentMessage, ...]
    tools: tuple[Json, ...] = ()
    parses_calls: bool = True
    template_options: Json = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    starts_with_instructions: bool = False
    trainable: bool = True

    @property
    def calls_allowed(self) -> bool:
        """True if the reply may contain tool calls."""
        return bool(self.tools) and self.parses_calls

    @cached_property
    def tools_json(self) -> str:
        """The tools as JSON text."""
        return json.dumps(self.tools)

    @cached_property
    def tools_digest(self) -> str:
        """Digest of tools and template options, which must be equal for a history to match."""
        options = json.dumps(self.template_options, sort_keys=True)
        return hashlib.sha256(f"{self.tools_json}\0{options}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A complete reply. ``stop_string``: the request's stop string that ended the reply, or None.

    ``tokens``: text, bytes and log-probability of each sampled token, computed on demand.
    """

    id: str
    message: AgentMessage
    truncated: bool
    stop_string: str | None
    prompt_tokens: int
    completion_tokens: int
    tokens: Callable[[], Iterable[tuple[str, bytes, float]]]

    def logprobs(self, top: int | None) -> list[Json]:
        """Return the log-probabilities in OpenAI's form. Engines return them for sampled tokens only.

        ``top``: maximum number of alternatives per token. The only alternative is the sampled token.
        """
        ones = [{"token": text, "bytes": list(raw), "logprob": value} for text, raw, value in self.tokens()]
        return [{**one, "top_logprobs": [one][: top or 0]} for one in ones]


FindConversation = Callable[[str], tuple[AgentMessage, ...]]
"""Returns the conversation up to the reply with an id, without instructions.

Raises GatewayRequestError for an unknown id.
"""


class ApiRequestBody(WireModel, ABC):
    """The body of a request in one API. Reads the request, and writes replies and errors in the API's form."""

    model_config = ConfigDict(extra="allow")

    unused: ClassVar[frozenset[str]] = frozenset()
    """Fields that are accepted but ignored."""

    model: str = ""
    stream: StrictBool = False

    @abstractmethod
    def to_agent_request(self, find_conversation: FindConversation) -> AgentRequest:
        """Return the request in the common form, marked as trainable. Raises GatewayRequestError if it is invalid."""

    @abstractmethod
    def complete_response(self, reply: Reply) -> Json:
        """Return the JSON of a response that is not streamed."""

    @abstractmethod
    def stream_events(self, reply: Reply) -> Iterator[bytes]:
        """Yield the events of a streamed response."""

    @classmethod
    def error_body(cls, error: GatewayRequestError) -> Json:
        """Return the JSON of an error."""
        return error.openai_body()

    @classmethod
    def error_event(cls, error: GatewayRequestError) -> bytes:
        """Return the event of an error in a stream."""
        return server_sent_event("error", {"type": "error", **cls.error_body(error)})


def server_sent_event(name: str, values: Json) -> bytes:
    """Return a server-sent event, without an event name if ``name`` is empty."""
    return (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(values).encode() + b"\n\n"


_Model = TypeVar("_Model", bound=WireModel)


def parse_body(kind: type[_Model], body: bytes) -> _Model:
    """Parse and validate the body of a request. Raises GatewayRequestError with the name of the invalid field."""
    try:
        return kind.model_validate(
            from_json(body or b"{}"), by_alias=True, by_name=False
        )  # rejects excessive nesting and lone surrogates
    except ValidationError as error:
        raise _error_for_first_invalid_field(error) from None
    except ValueError as error:
        raise GatewayRequestError(f"the body is not valid JSON: {error}") from None


_Dialect = TypeVar("_Dialect", bound=ApiRequestBody)


def parse_api_request(kind: type[_Dialect], body: bytes, *, model: str) -> _Dialect:
    """Read the body of a request for ``model``. Raises GatewayRequestError with the name of the invalid field."""
    call = parse_body(kind, body)
    for name, value in (call.model_extra or {}).items():
        if name not in kind.unused and value not in _EMPTY_VALUES:
            hint = did_you_mean(name, {*kind.model_fields, *kind.unused})
            raise GatewayRequestError(f"the field {name} is not supported by this gateway{hint}", param=name)
    if call.model not in (model, model + FROZEN):
        raise GatewayRequestError(
            f"this gateway serves {model!r}, not {call.model!r}", param="model", code="model_not_found"
        )
    return call


def _error_for_first_invalid_field(error: ValidationError) -> GatewayRequestError:
    """Return an error for the first invalid field of a request."""
    fault = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in fault["loc"]).removeprefix(".")
    text = json.dumps(fault["input"])
    value = "" if fault["type"] == "missing" else f"={text if len(text) <= 60 else f'{text[:57]}...'}"
    problem = _ERROR_MESSAGES.get(fault["type"], fault["msg"])
    return GatewayRequestError(f"{path or 'the body'}{value}: {problem}", param=path or None)
