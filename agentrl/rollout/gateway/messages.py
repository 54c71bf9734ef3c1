"""Anthropic's Messages API: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from agentrl.rollout.gateway.wire import (
    AgentCall,
    AgentMessage,
    AgentRequest,
    ApiRequestBody,
    FindConversation,
    GatewayRequestError,
    Json,
    Reply,
    WireModel,
    join_text_parts,
    server_sent_event,
)

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_SIGNATURE = "unsigned"  # clients require a signature of reasoning; the gateway compares the text instead
_REQUIRED = {"text": "text", "tool_use": "name", "tool_result": "tool_use_id"}

_Text = Annotated[str, BeforeValidator(partial(join_text_parts, separator="\n"))]


class _ContentBlock(WireModel):
    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, object] = Field({})
    tool_use_id: str = ""
    content: _Text = ""

    @model_validator(mode="after")
    def _require_field_of_type(self) -> _ContentBlock:
        field = _REQUIRED.get(self.type, "type")
        if field not in self.model_fields_set:
            raise PydanticCustomError("block", "a {kind} block needs {field}", {"kind": self.type, "field": field})
        return self


class _Message(WireModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        tuple[_ContentBlock, ...],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if isinstance(value, str) else value),
    ]

    def to_agent_messages(self) -> Iterator[AgentMessage]:
        """Yield the message in the common form, in which each tool result is a separate message."""
        for block in self.content:
            if block.type == "tool_result":
                yield AgentMessage(role="tool", content=block.content, call_id=block.tool_use_id)
        texts = [block.text for block in self.content if block.type == "text"]
        if texts or self.role == "assistant":
            yield AgentMessage(
                role=self.role,
                content="\n".join(texts),
                reasoning="\n".join(block.thinking for block in self.content if block.type == "thinking") or None,
                calls=tuple(
                    AgentCall(name=block.name, arguments=json.dumps(block.input), id=block.id)
                    for block in self.content
                    if block.type == "tool_use"
                ),
            )


class _Tool(WireModel):
    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str = ""
    input_schema: dict[str, object] = Field({})


class _ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"] = "auto"


class _Thinking(WireModel):
    type: Literal["enabled", "adaptive", "disabled"] = "disabled"


class MessagesRequest(ApiRequestBody):
    """A request to the Messages API. Forced tool choices and output formats are accepted but not enforced."""

    unused: ClassVar = frozenset(
        (
            *("temperature", "top_p", "top_k", "metadata", "service_tier", "inference_geo", "speed", "cache_control"),
            *("output_config", "context_management", "diagnostics"),
        )
    )

    messages: tuple[_Message, ...] = Field(min_length=1)
    system: _Text = ""
    tools: tuple[_Tool, ...] = ()
    tool_choice: _ToolChoice = _ToolChoice()
    thinking: _Thinking = _Thinking()
    max_tokens: StrictInt | None = Field(None, ge=1)
    stop_sequences: tuple[Annotated[str, Field(min_length=1)], ...] = ()

    def to_agent_request(self, find_conversation: FindConversation) -> AgentRequest:
        if self.messages[-1].role == "assistant":
            raise GatewayRequestError(
                "the last message must not be the assistant's: replies cannot be prefilled", param="messages"
            )
        system = (AgentMessage(role="system", content=self.system),) if self.system else ()
        return AgentRequest(
            messages=(*system, *(one for message in self.messages for one in message.to_agent_messages())),
            tools=tuple(
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in self.tools
            ),
            parses_calls=self.tool_choice.type != "none",
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
        )

    def complete_response(self, reply: Reply) -> Json:
        calls, stopped_by = reply.message.calls, reply.stop_string
        reason = (
            "tool_use" if calls else "max_tokens" if reply.truncated else "stop_sequence" if stopped_by else "end_turn"
        )
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self._content_blocks(reply.message),
            "stop_reason": reason,
            "stop_sequence": stopped_by if reason == "stop_sequence" else None,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "output_tokens": reply.completion_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
            },
        }

    def stream_events(self, reply: Reply) -> Iterator[bytes]:
        whole = self.complete_response(reply)
        usage = {"input_tokens": reply.prompt_tokens, "output_tokens": 0}
        start = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        yield _encode_event("message_start", message=start)
        for index, block in enumerate(self._content_blocks(reply.message)):
            empty, deltas = _split_block_into_deltas(block)
            yield _encode_event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _encode_event("content_block_delta", index=index, delta=delta)
            yield _encode_event("content_block_stop", index=index)
        end = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
        yield _encode_event("message_delta", delta=end, usage=whole["usage"])
        yield _encode_event("message_stop")

    @classmethod
    def error_body(cls, error: GatewayRequestError) -> Json:
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error), "code": error.code}}

    def _content_blocks(self, message: AgentMessage) -> list[dict[str, object]]:
        """Return the blocks of a reply. As in the API, reasoning is sent only if the request enables it."""
        blocks: list[dict[str, object]] = []
        if message.reasoning and self.thinking.type != "disabled":
            blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": _SIGNATURE})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.parsed_arguments}
            for call in message.calls
        ]
        return blocks


def _split_block_into_deltas(block: Json) -> tuple[Json, list[Json]]:
    """Split a block into an empty block and the deltas that add its content."""
    if block["type"] == "thinking":
        empty = {**block, "thinking": "", "signature": ""}
        signed = {"type": "signature_delta", "signature": block["signature"]}
        return empty, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]


def _encode_event(kind: str, **fields: object) -> bytes:
    return server_sent_event(kind, {"type": kind, **fields})
