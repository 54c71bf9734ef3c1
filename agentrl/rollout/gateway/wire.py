"""The OpenAI chat format: requests read and checked, messages compared, replies written whole or as events."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from agentrl_envs.registry import did_you_mean

Json = Mapping[str, object]

_SAID_NOTHING: tuple[object, ...] = (None, "", 0, 0.0, False, [], {})
_READ = ("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream")
_READ_TOO = ("stream_options", "logprobs", "chat_template_kwargs")
# Without effect on what is sampled: sampling belongs to the run.
_NOTED = ("temperature", "top_p", "seed", "user", "metadata", "store", "service_tier", "safety_identifier")
_NOTED_TOO = ("prompt_cache_key", "prompt_cache_retention", "verbosity", "reasoning_effort")
_TAKEN = frozenset((*_READ, *_READ_TOO, *_NOTED, *_NOTED_TOO))
# What these ask for by default is what everybody gets; any other value is refused.
_FIXED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
FROZEN = ":frozen"
"""What follows the model's name in calls that are not to be trained."""


class WireError(Exception):
    """A request that gets an error: the HTTP status, and the fields of OpenAI's error object."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self._fields = {"message": message, "type": kind or "invalid_request_error", "param": param, "code": code}

    def body(self) -> dict[str, object]:
        """The JSON of the answer."""
        return {"error": self._fields}


@dataclass(frozen=True, kw_only=True)
class Access:
    """What an agent needs to reach the policy. ``name`` is the rollout's."""

    name: str
    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, kw_only=True)
class AgentCall:
    """A call of a tool; ``arguments`` is the JSON text that was sent or is to be sent."""

    name: str
    arguments: str
    id: str = ""

    @property
    def parsed(self) -> object:
        """The arguments as JSON, or as the text where they are none; an empty text is an empty object."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True, kw_only=True)
class AgentMessage:
    """One message. Two are equal to the gateway if their keys are: outer blanks, call ids and formatting do not count.

    >>> one = AgentMessage(role="assistant", content=" 4\\n", calls=(AgentCall(name="f", arguments='{"b":1, "a":2}'),))
    >>> two = AgentMessage(role="assistant", content="4", calls=(AgentCall(name="f", arguments='{"a": 2, "b": 1}'),))
    >>> one.key == two.key
    True
    """

    role: str
    content: str
    reasoning: str | None = None
    calls: tuple[AgentCall, ...] = ()
    call_id: str = ""

    @cached_property
    def key(self) -> str:
        """Equal for messages that say the same; thoughts are compared apart."""
        calls = [[call.name, call.parsed] for call in self.calls]
        return json.dumps([self.role, self.content.strip(), calls], sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request as the gateway understands it. ``tools_json`` and ``options`` must be equal for a history to match."""

    messages: tuple[AgentMessage, ...]
    tools: tuple[Json, ...] = ()
    tools_json: str = "[]"
    options: Json = field(default_factory=dict)
    calls_allowed: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_event: bool = False
    logprobs: bool = False
    trainable: bool = True

    @property
    def digest(self) -> str:
        """What must be equal beside the messages."""
        return hashlib.sha256(f"{self.tools_json}\0{json.dumps(self.options, sort_keys=True)}".encode()).hexdigest()


def read_request(body: bytes, *, model: str, header_train: str | None = None) -> ChatRequest:
    """Read the body of a chat request. Raises WireError that names the field at fault."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise WireError("the body must be a JSON object")
    _check_fields(values)
    named = values.get("model")
    if named not in (model, model + FROZEN):
        raise WireError(f"this gateway serves {model!r}, not {named!r}", param="model", code="model_not_found")
    tools = tuple(_objects(values.get("tools") or [], "tools"))
    options = values.get("chat_template_kwargs") or {}
    stop = values.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise WireError("stop must be a text or a list of texts", param="stop")
    stream_options = values.get("stream_options") or {}
    return ChatRequest(
        messages=_messages(values.get("messages")),
        tools=tuple(_checked_tool(tool, place) for place, tool in enumerate(tools)),
        tools_json=json.dumps(tools),
        options=_object(options, "chat_template_kwargs"),
        calls_allowed=bool(tools) and values.get("tool_choice") != "none",
        max_tokens=_limit(values),
        stop=tuple(stop),
        stream=values.get("stream") is True,
        usage_event=_object(stream_options, "stream_options").get("include_usage") is True,
        logprobs=values.get("logprobs") is True,
        trainable=named == model and header_train != "0",
    )


def _check_fields(values: Json) -> None:
    for name, value in values.items():
        if name in _FIXED:
            if value is not None and value not in _FIXED[name]:
                valid = " or ".join(json.dumps(one) for one in _FIXED[name])
                raise WireError(f"{name}={_short(value)} is not supported; valid: {valid}", param=name)
        elif name not in _TAKEN and value not in _SAID_NOTHING:
            hint = did_you_mean(name, _TAKEN)
            raise WireError(f"the field {name} is not supported by this gateway{hint}", param=name)


def _limit(values: Json) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = values.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise WireError(f"{name}={_short(value)}: it must be a positive integer", param=name)
            return value
    return None


def _messages(values: object) -> tuple[AgentMessage, ...]:
    if not isinstance(values, list) or not values:
        raise WireError("messages must be a list with at least one message", param="messages")
    return tuple(_message(value, f"messages[{place}]") for place, value in enumerate(values))


def _message(value: object, place: str) -> AgentMessage:
    fields = _object(value, place)
    role = fields.get("role")
    if role not in _ROLES:
        raise WireError(f"{place}.role={_short(role)}; valid: {', '.join(sorted(_ROLES))}", param=f"{place}.role")
    thoughts = fields.get("reasoning_content") or fields.get("reasoning")
    message = AgentMessage(
        role="system" if role == "developer" else str(role),
        content=_text(fields.get("content"), f"{place}.content"),
        reasoning=thoughts if isinstance(thoughts, str) else None,
        calls=tuple(_call(one, f"{place}.tool_calls") for one in _objects(fields.get("tool_calls") or [], place)),
        call_id=str(fields.get("tool_call_id") or ""),
    )
    if fields.get("function_call") is not None:
        raise WireError(f"{place}.function_call is not supported; use tool_calls", param=f"{place}.function_call")
    for text in (message.content, message.reasoning or "", *(call.arguments for call in message.calls)):
        if _LONE_SURROGATE.search(text):
            raise WireError(f"{place} holds half of a surrogate pair, which is no character", param=place)
    return message


def _text(value: object, place: str) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise WireError(f"{place} must be a text or a list of text parts", param=place)
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else part
        if kind not in ("text", "refusal", None) or not isinstance(text, str):
            raise WireError(f"{place} holds a part of type {_short(kind)}; this model reads text alone", param=place)
        texts.append(text)
    return "".join(texts)


def _call(value: Json, place: str) -> AgentCall:
    function = _object(value.get("function"), f"{place}.function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str | dict | None):
        raise WireError(f"{place}: a call has a function with a text name and text arguments", param=place)
    text = json.dumps(arguments) if isinstance(arguments, dict) else arguments or ""
    return AgentCall(name=name, arguments=text, id=str(value.get("id") or ""))


def _checked_tool(tool: Json, place: int) -> Json:
    function = _object(tool.get("function"), f"tools[{place}].function")
    if tool.get("type") != "function" or not isinstance(function.get("name"), str):
        raise WireError(f"tools[{place}] must be of type function and have a name", param=f"tools[{place}]")
    return tool


def _object(value: object, place: str) -> Json:
    if not isinstance(value, dict):
        raise WireError(f"{place} must be a JSON object", param=place)
    return value


def _objects(value: object, place: str) -> list[Json]:
    if not isinstance(value, list):
        raise WireError(f"{place} must be a list", param=place)
    return [_object(one, place) for one in value]


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- replies ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What a client is sent of a generation."""

    id: str
    model: str
    message: AgentMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    tokens: tuple[tuple[str, bytes, float], ...]  # text, bytes and log-probability of each

    @property
    def usage(self) -> dict[str, int]:
        """Token counts."""
        sampled = len(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }


def whole(reply: Delivery, request: ChatRequest) -> dict[str, object]:
    """The JSON of an answer that is not streamed."""
    said: dict[str, object] = {"role": "assistant", "content": None if reply.message.calls else "", **_said(reply)}
    choice = {"index": 0, "message": said, "finish_reason": reply.finish_reason, "logprobs": _logprobs(reply, request)}
    return {**_head(reply, "chat.completion"), "choices": [choice], "usage": reply.usage}


def events(reply: Delivery, request: ChatRequest) -> Iterator[bytes]:
    """The events of a streamed answer. The reply is whole when the first one is sent."""
    head = _head(reply, "chat.completion.chunk")
    deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: value} for name, value in _said(reply, streamed=True).items()]
    for place, delta in enumerate(deltas):
        logprobs = _logprobs(reply, request) if place == len(deltas) - 1 else None
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": reply.finish_reason}]})
    if request.usage_event:
        yield _event({**head, "choices": [], "usage": reply.usage})
    yield b"data: [DONE]\n\n"


def _said(reply: Delivery, *, streamed: bool = False) -> dict[str, object]:
    """What the reply says: its thoughts, its text and its calls, where it has them. Calls in a stream have numbers."""
    message = reply.message
    calls = [
        {
            **({"index": place} if streamed else {}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(message.calls)
    ]
    said = {"reasoning_content": message.reasoning, "content": message.content or None, "tool_calls": calls or None}
    return {name: value for name, value in said.items() if value is not None}


def _event(values: Json) -> bytes:
    return b"data: " + json.dumps(values).encode() + b"\n\n"


def _head(reply: Delivery, kind: str) -> dict[str, object]:
    return {"id": reply.id, "object": kind, "created": int(time.time()), "model": reply.model}


def _logprobs(reply: Delivery, request: ChatRequest) -> dict[str, object] | None:
    if not request.logprobs:
        return None
    content = [
        {"token": text, "bytes": list(raw), "logprob": value, "top_logprobs": []} for text, raw, value in reply.tokens
    ]
    return {"content": content}
