"""OpenAI's Chat Completions API: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from agentrl.rollout.gateway.wire import (
    AgentMessage,
    AgentRequest,
    ApiRequestBody,
    FindConversation,
    GatewayRequestError,
    Json,
    Reply,
    WireModel,
    server_sent_event,
)

SAMPLING_FIELDS = ("temperature", "top_p", "seed")
"""Fields that are ignored because the run's settings control sampling."""
SERVICE_FIELDS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
"""Fields that are ignored because they concern OpenAI's service."""


class _Function(WireModel):
    name: str


class _Tool(WireModel):
    type: Literal["function"]
    function: _Function


_FORCED_CHOICES = ("function", "custom", "allowed_tools")

ToolChoice = Annotated[
    Literal["auto", "none", "required"],
    BeforeValidator(
        lambda value: "required" if isinstance(value, dict) and value.get("type") in _FORCED_CHOICES else value
    ),
]
"""A tool choice. A named tool is converted to ``required``."""


class _ResponseFormat(WireModel):
    type: Literal["text", "json_object", "json_schema"]


def _require_valid_tool(tool: object) -> object:
    _Tool.model_validate(tool)
    return tool


class ChatCompletionsRequest(ApiRequestBody):
    """A chat request. A field with a single valid value describes behaviour that cannot be changed.

    ``tool_choice``, ``parallel_tool_calls`` and ``response_format`` are accepted but do not constrain the reply. A
    constraint would change the sampling distribution, and the trainer could not recompute the probabilities.
    """

    unused: ClassVar = frozenset((*SAMPLING_FIELDS, *SERVICE_FIELDS, "reasoning_effort", "verbosity"))

    messages: tuple[AgentMessage, ...] = Field(min_length=1)
    tools: tuple[Annotated[dict[str, object], BeforeValidator(_require_valid_tool)], ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: StrictBool = True
    n: Literal[1] = 1
    response_format: _ResponseFormat | None = None
    modalities: tuple[Literal["text"]] = ("text",)
    chat_template_kwargs: dict[str, object] = Field({})
    max_tokens: StrictInt | None = Field(None, ge=1)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1)], ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) and value else value or ()),
    ] = ()
    stream_options: dict[str, object] = Field({})
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)

    def to_agent_request(self, find_conversation: FindConversation) -> AgentRequest:
        limit, old_limit = self.max_completion_tokens, self.max_tokens
        if None not in (limit, old_limit) and limit != old_limit:
            both = f"max_tokens={old_limit} and max_completion_tokens={limit}"
            raise GatewayRequestError(f"{both} set the same limit: send only one of them", param="max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise GatewayRequestError("top_logprobs requires logprobs=true", param="top_logprobs")
        return AgentRequest(
            messages=self.messages,
            tools=self.tools,
            parses_calls=self.tool_choice != "none",
            template_options=self.chat_template_kwargs,
            max_tokens=limit or old_limit,
            stop=self.stop,
        )

    def complete_response(self, reply: Reply) -> Json:
        content = None if reply.message.calls else ""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": content, **_message_fields(reply.message)},
            "finish_reason": _finish_reason(reply),
            "logprobs": self._logprobs(reply),
        }
        return {**self._common_fields(reply, "chat.completion"), "choices": [choice], "usage": _usage_fields(reply)}

    def stream_events(self, reply: Reply) -> Iterator[bytes]:
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        deltas += [{name: value} for name, value in _message_fields(reply.message, numbered=True).items()]
        choices: list[Json] = [{"delta": delta, "finish_reason": None} for delta in deltas]
        choices[-1] = {**choices[-1], "logprobs": self._logprobs(reply)}
        choices.append({"delta": {}, "finish_reason": _finish_reason(reply)})
        head = self._common_fields(reply, "chat.completion.chunk")
        for choice in choices:
            yield server_sent_event("", {**head, "choices": [{"index": 0, **choice}]})
        if self.stream_options.get("include_usage") is True:
            yield server_sent_event("", {**head, "choices": [], "usage": _usage_fields(reply)})
        yield b"data: [DONE]\n\n"

    @classmethod
    def error_event(cls, error: GatewayRequestError) -> bytes:
        return server_sent_event("", cls.error_body(error))

    def _logprobs(self, reply: Reply) -> Json | None:
        return {"content": reply.logprobs(self.top_logprobs)} if self.logprobs else None

    def _common_fields(self, reply: Reply, kind: str) -> dict[str, object]:
        return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": int(time.time()), "model": self.model}


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.calls else "length" if reply.truncated else "stop"


def _usage_fields(reply: Reply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _message_fields(message: AgentMessage, *, numbered: bool = False) -> dict[str, object]:
    """Return a message's reasoning, text and calls, if present. ``numbered``: number the calls, for a stream."""
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
