"""The OpenAI chat format: validated requests, messages compared by content, complete and streamed responses."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from agentrl_envs.registry import did_you_mean

Json = Mapping[str, object]

FROZEN = ":frozen"
"""Suffix of the model's name for calls that are not trained."""
# Accepted but ignored, because sampling is configured by the run.
_SAMPLING = ("temperature", "top_p", "seed", "reasoning_effort", "verbosity")
_SERVICE = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
_UNUSED = frozenset((*_SAMPLING, *_SERVICE, "prompt_cache_retention"))
_FAULTS: Mapping[str, str] = {
    "model_type": "must be a JSON object",
    "dict_type": "must be a JSON object",
    "tuple_type": "must be a list",
    "too_short": "must contain at least one entry",
    "missing": "required, but missing",
}
_SAYS_NOTHING: tuple[object, ...] = ("", 0, False, [], {})


class WireError(Exception):
    """Raised to reject a request, with an HTTP status and the fields of OpenAI's error object."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self._fields = {"message": message, "type": kind or "invalid_request_error", "param": param, "code": code}

    def body(self) -> dict[str, object]:
        """Return the JSON of the response."""
        return {"error": self._fields}


@dataclass(frozen=True, kw_only=True)
class Access:
    """The address and key with which an agent accesses the policy. ``name`` identifies the rollout."""

    name: str
    base_url: str
    api_key: str
    model: str


class WireModel(BaseModel):
    """Base of models read from JSON. A null field counts as absent."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _present(cls, value: object) -> object:
        return {name: one for name, one in value.items() if one is not None} if isinstance(value, dict) else value


def _as_text(value: object) -> object:
    """Join the parts of a message's content."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") or "text" if isinstance(part, dict) else "text"
        text = part.get(kind) if isinstance(part, dict) and kind in ("text", "refusal") else part
        if not isinstance(text, str):
            raise PydanticCustomError(
                "part", "contains a part of type {kind}, but the model supports text only", {"kind": kind}
            )
        texts.append(text)
    return "".join(texts)


class AgentCall(WireModel):
    """A tool call. ``arguments`` is the JSON text as received or to be sent."""

    name: str = Field(validation_alias=AliasPath("function", "name"))
    arguments: Annotated[
        str, BeforeValidator(lambda value: json.dumps(value) if isinstance(value, dict) else value or "")
    ] = Field("", validation_alias=AliasPath("function", "arguments"))
    id: str = ""

    @cached_property
    def parsed(self) -> object:
        """The parsed arguments, or their text if it is not valid JSON. Empty text is parsed as an empty object."""
        try:
            return from_json(self.arguments or "{}")
        except ValueError:
            return self.arguments


class AgentMessage(WireModel):
    """A message. Messages match if their keys are equal, which ignores outer whitespace, call ids and JSON formatting.

    >>> one = AgentMessage(role="assistant", content=" 4\\n", calls=(AgentCall(name="f", arguments='{"b":1, "a":2}'),))
    >>> two = AgentMessage(role="assistant", content="4", calls=(AgentCall(name="f", arguments='{"a": 2, "b": 1}'),))
    >>> one.key == two.key
    True
    """

    role: Annotated[
        Literal["system", "user", "assistant", "tool"],
        BeforeValidator(lambda value: "system" if value == "developer" else value),
    ]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    reasoning: Annotated[str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)] = Field(
        None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    calls: tuple[AgentCall, ...] = Field((), validation_alias="tool_calls")
    call_id: str = Field("", validation_alias="tool_call_id")
    function_call: None = None

    @cached_property
    def key(self) -> str:
        """A key that is equal for messages with equal content. Reasoning is compared separately."""
        calls = [[call.name, call.parsed] for call in self.calls]
        return json.dumps([self.role, self.content.strip(), calls], sort_keys=True)


class _Function(WireModel):
    name: str


class _Tool(WireModel):
    type: Literal["function"]
    function: _Function


def _checked_tool(tool: object) -> object:
    _Tool.model_validate(tool)
    return tool


class ChatRequest(WireModel):
    """A validated chat request. A field with a single valid value describes behaviour that cannot be changed."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    messages: tuple[AgentMessage, ...] = Field(min_length=1)
    tools: tuple[Annotated[dict[str, object], BeforeValidator(_checked_tool)], ...] = ()
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: Literal[True] = True
    n: Literal[1] = 1
    response_format: dict[Literal["type"], Literal["text"]] = {}
    modalities: tuple[Literal["text"]] = ("text",)
    chat_template_kwargs: dict[str, object] = {}
    max_tokens: StrictInt | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) and value else value or ()),
    ] = ()
    stream: StrictBool = False
    stream_options: dict[str, object] = {}
    logprobs: StrictBool = False

    @property
    def trainable(self) -> bool:
        """True if the reply is trained."""
        return not self.model.endswith(FROZEN)

    @property
    def calls_allowed(self) -> bool:
        """True if the reply may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @cached_property
    def tools_json(self) -> str:
        """The tools as JSON text."""
        return json.dumps(self.tools)

    @cached_property
    def digest(self) -> str:
        """Digest of tools and template options, which must be equal for a history to match."""
        options = json.dumps(self.chat_template_kwargs, sort_keys=True)
        return hashlib.sha256(f"{self.tools_json}\0{options}".encode()).hexdigest()


_Model = TypeVar("_Model", bound=WireModel)


def read_body(kind: type[_Model], body: bytes) -> _Model:
    """Parse and validate the body of a request. Raises WireError with the name of the invalid field."""
    try:
        return kind.model_validate(
            from_json(body or b"{}"), by_alias=True, by_name=False
        )  # rejects excessive nesting and lone surrogates
    except ValidationError as error:
        raise _refusal(error) from None
    except ValueError as error:
        raise WireError(f"the body is not valid JSON: {error}") from None


def read_request(body: bytes, *, model: str, header_train: str | None = None) -> ChatRequest:
    """Read the body of a chat request for ``model``. Raises WireError with the name of the invalid field."""
    request = read_body(ChatRequest, body)
    extra = request.model_extra or {}
    if "max_tokens" in extra:  # the limit was already read from max_completion_tokens
        message = "max_tokens and max_completion_tokens set the same limit: send only one of them"
        raise WireError(message, param="max_tokens")
    for name, value in extra.items():
        if name not in _UNUSED and value not in _SAYS_NOTHING:
            hint = did_you_mean(name, {*ChatRequest.model_fields, *_UNUSED})
            raise WireError(f"the field {name} is not supported by this gateway{hint}", param=name)
    if request.model not in (model, model + FROZEN):
        raise WireError(f"this gateway serves {model!r}, not {request.model!r}", param="model", code="model_not_found")
    return request.model_copy(update={"model": model + FROZEN}) if header_train == "0" else request


def _refusal(error: ValidationError) -> WireError:
    """Return an error for the first invalid field."""
    fault = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in fault["loc"]).removeprefix(".")
    text = json.dumps(fault["input"])
    value = "" if fault["type"] == "missing" else f"={text if len(text) <= 60 else f'{text[:57]}...'}"
    problem = _FAULTS.get(fault["type"], fault["msg"])
    return WireError(f"{path or 'the body'}{value}: {problem}", param=path or None)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """A complete reply. ``logprobs``: the log-probabilities of its tokens, if requested."""

    id: str
    model: str
    message: AgentMessage
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Json | None

    def whole(self) -> dict[str, object]:
        """Return the JSON of a response that is not streamed."""
        content = None if self.message.calls else ""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content, **self._reply_fields()},
            "finish_reason": self.finish_reason,
            "logprobs": self.logprobs,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def events(self, *, usage: bool) -> Iterator[bytes]:
        """Yield the events of a streamed response."""
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        deltas += [{name: value} for name, value in self._reply_fields(numbered=True).items()]
        choices: list[Json] = [{"delta": delta, "finish_reason": None} for delta in deltas]
        choices[-1] = {**choices[-1], "logprobs": self.logprobs}
        choices.append({"delta": {}, "finish_reason": self.finish_reason})
        head = self._head("chat.completion.chunk")
        for choice in choices:
            yield _event({**head, "choices": [{"index": 0, **choice}]})
        if usage:
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _reply_fields(self, *, numbered: bool = False) -> dict[str, object]:
        """Return reasoning, text and calls, if present. Calls are numbered in a stream."""
        message = self.message
        calls = [
            {
                **({"index": index} if numbered else {}),
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(message.calls)
        ]
        fields = {
            "reasoning_content": message.reasoning,
            "content": message.content or None,
            "tool_calls": calls or None,
        }
        return {name: value for name, value in fields.items() if value is not None}


def _event(values: Json) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"
