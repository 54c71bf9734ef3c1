"""OpenAI's Responses API: ``POST /v1/responses``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import count
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StrictBool, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from agentrl.rollout.gateway.chat_completions import SAMPLING_FIELDS, SERVICE_FIELDS, ToolChoice
from agentrl.rollout.gateway.wire import (
    AgentCall,
    AgentMessage,
    AgentRequest,
    ApiRequestBody,
    FindConversation,
    GatewayRequestError,
    Reply,
    WireModel,
    join_text_parts,
    server_sent_event,
)

_REQUIRED = {
    "message": "role",
    "function_call": "name",
    "custom_tool_call": "name",
    "function_call_output": "call_id",
    "custom_tool_call_output": "call_id",
    "item_reference": "id",
}
# Order of the items of one reply. Only calls may follow an item with the same number.
_POSITIONS_IN_REPLY = {"reasoning": 0, "message": 1, "function_call": 2, "custom_tool_call": 2}
_FREE_TEXT_PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}

_Text = Annotated[str, BeforeValidator(partial(join_text_parts, separator="\n"))]


class _Item(WireModel):
    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
    ] = "message"
    id: str = ""
    role: Literal["user", "assistant", "system", "developer"] = "assistant"
    content: _Text = ""
    summary: _Text = ""
    call_id: str = ""
    name: str = ""
    namespace: str = ""
    arguments: str = ""
    input: str = ""
    output: _Text = ""

    @model_validator(mode="after")
    def _require_field_of_type(self) -> _Item:
        field = _REQUIRED.get(self.type, "")
        if field and field not in self.model_fields_set:
            raise PydanticCustomError("item", "a {kind} item needs {field}", {"kind": self.type, "field": field})
        return self

    @property
    def position_in_reply(self) -> int | None:
        """The item's number in `_POSITIONS_IN_REPLY`, or None if the item is not part of a reply."""
        return None if self.type == "message" and self.role != "assistant" else _POSITIONS_IN_REPLY.get(self.type)

    def to_call(self) -> AgentCall:
        """Return the item as a tool call."""
        custom = self.type == "custom_tool_call"
        arguments = json.dumps({"input": self.input}) if custom else self.arguments
        return AgentCall(name=_qualified_tool_name(self.namespace, self.name), arguments=arguments, id=self.call_id)


class _Tool(WireModel):
    type: Literal["function", "custom", "namespace"]
    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, object] = Field({})
    tools: tuple[_Tool, ...] = ()


def _qualified_tool_name(namespace: str, name: str) -> str:
    """Return the name under which the model sees a tool."""
    return f"{namespace}__{name}" if namespace else name


class ResponsesRequest(ApiRequestBody):
    """A request to the Responses API.

    ``tool_choice``, ``parallel_tool_calls`` and ``text.format`` are accepted but not enforced. A custom tool is
    shown to the model as a function with one argument, ``input``, and a tool of a namespace as ``NAMESPACE__NAME``.
    """

    unused: ClassVar = frozenset(
        (
            *SAMPLING_FIELDS,
            *SERVICE_FIELDS,
            *("text", "reasoning", "truncation", "max_tool_calls", "stream_options", "client_metadata"),
        )
    )

    input: tuple[_Item, ...]
    instructions: str = ""
    previous_response_id: str = ""
    tools: tuple[_Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: StrictBool = True
    background: Literal[False] = False
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    include: tuple[str, ...] = ()
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)

    @model_validator(mode="before")
    @classmethod
    def _wrap_text_input(cls, value: object) -> object:
        if isinstance(value, dict) and isinstance(value.get("input"), str):
            return {**value, "input": [{"role": "user", "content": value["input"]}]}
        return value

    def to_agent_request(self, find_conversation: FindConversation) -> AgentRequest:
        instructions = (AgentMessage(role="system", content=self.instructions),) if self.instructions else ()
        history = find_conversation(self.previous_response_id) if self.previous_response_id else ()
        messages = (*instructions, *history, *self._messages(find_conversation))
        if not messages:
            raise GatewayRequestError("input=[]: must contain at least one entry", param="input")
        return AgentRequest(
            messages=messages,
            tools=tuple(
                {
                    "type": "function",
                    "function": {
                        "name": name,
                        "description": tool.description,
                        "parameters": _FREE_TEXT_PARAMETERS if tool.type == "custom" else tool.parameters,
                    },
                }
                for name, (_, tool) in self._tools_by_qualified_name.items()
            ),
            parses_calls=self.tool_choice != "none",
            max_tokens=self.max_output_tokens,
            starts_with_instructions=bool(instructions),
        )

    @cached_property
    def _tools_by_qualified_name(self) -> dict[str, tuple[str, _Tool]]:
        """The tools and their namespaces, by the names that the model sees."""
        found: dict[str, tuple[str, _Tool]] = {}
        for tool in self.tools:
            namespace, members = (tool.name, tool.tools) if tool.type == "namespace" else ("", (tool,))
            found |= {_qualified_tool_name(namespace, one.name): (namespace, one) for one in members}
        return found

    def _messages(self, find_conversation: FindConversation) -> Iterator[AgentMessage]:
        """Yield the messages of the input. Consecutive items of one reply become one message."""
        reply: list[_Item] = []
        for listed in self.input:
            item = self._find_referenced_item(listed, find_conversation) if listed.type == "item_reference" else listed
            last = reply[-1].position_in_reply if reply else None
            if last is not None and (
                item.position_in_reply is None
                or item.position_in_reply < last
                or item.position_in_reply == last < _POSITIONS_IN_REPLY["function_call"]
            ):
                yield _items_to_message(reply)
                reply = []
            if item.position_in_reply is not None:
                reply.append(item)
            elif item.type == "message":
                yield AgentMessage(role=item.role, content=item.content)
            else:
                yield AgentMessage(role="tool", content=item.output, call_id=item.call_id)
        if reply:
            yield _items_to_message(reply)

    def _find_referenced_item(self, item: _Item, find_conversation: FindConversation) -> _Item:
        """Return the item of an earlier reply to which ``item`` refers.

        Raises GatewayRequestError for an unknown id.
        """
        kind, _, rest = item.id.partition("_")
        reply_id = rest.rpartition("/")[0] if kind == "fc" else rest
        for one in self._output_items(reply_id, find_conversation(item.id)[-1]):
            if one["id"] == item.id:
                return _Item.model_validate(one)
        raise GatewayRequestError(f"the item {item.id!r} does not exist", param="input", status=404)

    def _output_items(self, reply_id: str, message: AgentMessage) -> list[dict[str, Any]]:
        """Return the items of a reply. A reply without text or calls has an empty message."""
        items: list[dict[str, Any]] = []
        done = {"status": "completed"}
        if message.reasoning:
            thoughts = [{"type": "reasoning_text", "text": message.reasoning}]
            items.append({"type": "reasoning", "id": f"rs_{reply_id}", "summary": [], "content": thoughts, **done})
        if message.content or not message.calls:
            text = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
            items.append({"type": "message", "id": f"msg_{reply_id}", "role": "assistant", "content": [text], **done})
        for number, call in enumerate(message.calls):
            namespace, tool = self._tools_by_qualified_name.get(call.name, ("", None))
            item = {
                "id": f"fc_{reply_id}/{number}",
                "call_id": call.id,
                "name": call.name if tool is None else tool.name,
                **({"namespace": namespace} if namespace else {}),
                **done,
            }
            if tool is not None and tool.type == "custom" and isinstance(call.parsed_arguments, dict):
                items.append({"type": "custom_tool_call", "input": str(call.parsed_arguments.get("input", "")), **item})
            else:
                items.append({"type": "function_call", "arguments": call.arguments, **item})
        return items

    def complete_response(self, reply: Reply) -> dict[str, Any]:
        items = self._output_items(reply.id, reply.message)
        if "message.output_text.logprobs" in self.include or self.top_logprobs is not None:
            for part in (part for item in items if item["type"] == "message" for part in item["content"]):
                part["logprobs"] = reply.logprobs(self.top_logprobs)
        truncated = reply.truncated and not reply.message.calls
        return {
            "id": f"resp_{reply.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "status": "incomplete" if truncated else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "previous_response_id": self.previous_response_id or None,
            "output": items,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": reply.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
        }

    def stream_events(self, reply: Reply) -> Iterator[bytes]:
        numbers = count()

        def event(kind: str, **fields: object) -> bytes:
            return server_sent_event(kind, {"type": kind, "sequence_number": next(numbers), **fields})

        whole = self.complete_response(reply)
        started = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield event("response.created", response=started)
        yield event("response.in_progress", response=started)
        for index, item in enumerate(whole["output"]):
            position = {"item_id": item["id"], "output_index": index}
            field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"], "content")
            empty = {**item, "status": "in_progress", field: [] if field == "content" else ""}
            yield event("response.output_item.added", output_index=index, item=empty)
            if field == "content":
                part = item["content"][0]
                position["content_index"] = 0
                logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield event("response.content_part.added", **position, part={**part, "text": ""})
                yield event(f"response.{part['type']}.delta", **position, delta=part["text"], **logprobs)
                yield event(f"response.{part['type']}.done", **position, text=part["text"], **logprobs)
                yield event("response.content_part.done", **position, part=part)
            else:
                kind = "function_call_arguments" if field == "arguments" else "custom_tool_call_input"
                yield event(f"response.{kind}.delta", **position, delta=item[field])
                yield event(f"response.{kind}.done", **position, **{field: item[field], "name": item["name"]})
            yield event("response.output_item.done", output_index=index, item=item)
        yield event(f"response.{whole['status']}", response=whole)


def _items_to_message(items: list[_Item]) -> AgentMessage:
    """Merge the items of one reply into a message."""
    content = [item.content for item in items if item.type == "message"]
    thoughts = [item.content or item.summary for item in items if item.type == "reasoning"]
    return AgentMessage(
        role="assistant",
        content="".join(content),
        reasoning="".join(thoughts) or None,
        calls=tuple(item.to_call() for item in items if item.type in ("function_call", "custom_tool_call")),
    )
