"""Rendering of messages into token ids, and parsing of sampled text into messages."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from pydantic_core import from_json

from agentrl.models.chat_template import ChatTemplate, ChatTemplateError, TemplateLayout, content_placeholder
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.gateway.wire import AgentCall, AgentMessage, AgentRequest, GatewayRequestError
from agentrl_envs.chat import Part, TemplateMark, split_reasoning
from agentrl_envs.tool_call_formats import HERMES, ToolCallFormat, remove_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_CACHED_LAYOUTS = 1024
_CALL_ID = "call00000"  # has the length that some templates require


def find_turn_end(chat: ChatTemplate) -> str:
    """Return the special token with which a template ends a model turn, or "" if there is no such token."""
    roles = ("user", "assistant", "user")
    layout = chat.layout([{"role": role, "content": content_placeholder(n)} for n, role in enumerate(roles)])
    behind = layout.texts[layout.slots.index(1) + 1] if 1 in layout.slots else ()
    return chat.leading_special_token(behind[0].text) if behind and isinstance(behind[0], TemplateMark) else ""


def find_call_format(chat: ChatTemplate) -> ToolCallFormat:
    """Return a template's tool-call format, or Hermes' format if the template has none."""
    if chat.is_plain:
        return HERMES
    tool = {"type": "function", "function": {"name": "search", "description": "", "parameters": {"type": "object"}}}
    try:
        return chat.tool_call_format("search", [tool]) or HERMES
    except ChatTemplateError:
        return HERMES


class ChatRenderer:
    """Renders conversations with a model's chat template.

    Raises GatewayRequestError if the template rejects a conversation.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        codec: TextCodec,
        *,
        template: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Create a renderer.

        ``template``: replaces the tokenizer's template. Without any template, messages are written line by line.
        """
        self.codec = codec
        self._chat = ChatTemplate(tokenizer, template=template, options=options)
        self.prefix_ids = codec.prefix_ids if self._chat.is_plain else ()
        self.longest_token = max(map(len, codec.token_bytes))  # in bytes
        self._tokenizer = tokenizer
        self.call_format = find_call_format(self._chat)
        self._cached_layout = lru_cache(maxsize=_MAX_CACHED_LAYOUTS)(self._render_layout)
        self._escaped_tools = lru_cache(maxsize=_MAX_CACHED_LAYOUTS)(
            lambda text: json.dumps(self._chat.replace_special_tokens_in_json(json.loads(text)))
        )

    def layout(
        self, messages: Sequence[AgentMessage], request: AgentRequest, *, sampled: Collection[int] = ()
    ) -> TemplateLayout:
        """Return the layout of ``messages`` up to the next reply. ``sampled``: positions of sampled replies."""
        shape = [
            self._message_with_placeholder(one, index, sampled=index in sampled) for index, one in enumerate(messages)
        ]
        options = json.dumps({**self._chat.options, **request.template_options})
        return self._cached_layout(json.dumps(shape), self._escaped_tools(request.tools_json), options)

    def encode(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """Return the tokens of a conversation from its beginning."""
        return self.prefix_ids + self.codec.encode_parts(parts)

    def mark_leading_token_as_turn_end(self, text_after_reply: tuple[Part, ...]) -> tuple[Part, ...]:
        """Return the text after a sampled reply, with its leading special token marked as the end of the turn."""
        if not text_after_reply or not isinstance(text_after_reply[0], TemplateMark):
            return text_after_reply
        end = self._chat.leading_special_token(text_after_reply[0].text)
        if not end:
            return text_after_reply
        rest = text_after_reply[0].text.removeprefix(end)
        return (TemplateMark(end, ends_turn=True), *([TemplateMark(rest)] if rest else []), *text_after_reply[1:])

    def parse_reply(self, text: str, request: AgentRequest, *, before: str, call_id_prefix: str) -> AgentMessage:
        """Parse sampled text into a message. Invalid calls stay in the text. Call ids begin with ``call_id_prefix``."""
        if getattr(self._tokenizer, "response_template", None) is not None:
            return self._parse_with_tokenizer(text, request, before=before, call_id_prefix=call_id_prefix)
        reasoning, answer = split_reasoning(text, opened=before.rstrip().endswith("<think>"))
        if reasoning is not None:
            answer = answer.strip()
        content, calls = parse_tool_calls(answer, request, self.call_format) if request.calls_allowed else (answer, ())
        return _build_message(content, reasoning, calls, call_id_prefix)

    def _parse_with_tokenizer(
        self, text: str, request: AgentRequest, *, before: str, call_id_prefix: str
    ) -> AgentMessage:
        """Parse text with the tokenizer's response template. Invalid text becomes the content."""
        try:
            parsed = self._tokenizer.parse_response(
                text, prefix=before, tools=[*map(dict, request.tools)] if request.calls_allowed else None
            )
            calls = tuple(
                (str(call["function"]["name"]), _arguments_as_json(call["function"]["arguments"]))
                for call in (parsed.get("tool_calls") or [] if request.calls_allowed else [])
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return AgentMessage(role="assistant", content=text)
        thoughts = parsed.get("reasoning_content") or parsed.get("thinking")
        if parsed.get("tool_calls") and not calls:
            return AgentMessage(role="assistant", content=text)
        return _build_message(str(parsed.get("content") or ""), thoughts, calls, call_id_prefix)

    def _message_with_placeholder(self, message: AgentMessage, index: int, *, sampled: bool) -> dict[str, object]:
        """Return a message with a placeholder as content. A sampled reply keeps its calls in the sampled text."""
        shape: dict[str, object] = {
            "role": message.role,
            "content": content_placeholder(index) if message.content or sampled else "",
        }
        if message.role == "tool":
            shape["tool_call_id"] = _CALL_ID
        if sampled:
            return shape
        if message.reasoning is not None:
            shape["reasoning_content"] = self._chat.replace_special_tokens_in_json(message.reasoning)
        if message.calls:
            shape["tool_calls"] = [self._template_call(call) for call in message.calls]
        return shape

    def _template_call(self, call: AgentCall) -> dict[str, object]:
        arguments = call.parsed_arguments
        function = {
            "name": self._chat.replace_special_tokens_in_json(call.name),
            "arguments": self._chat.replace_special_tokens_in_json(arguments),
        }
        return {"type": "function", "id": _CALL_ID, "function": function}

    def _render_layout(self, shape: str, tools: str, options: str) -> TemplateLayout:
        try:
            return self._chat.layout(json.loads(shape), json.loads(tools), json.loads(options))
        except ChatTemplateError as error:
            raise GatewayRequestError(
                f"the model's chat template rejects this conversation: {error}", param="messages"
            ) from None


def parse_tool_calls(
    text: str, request: AgentRequest, call_format: ToolCallFormat = HERMES
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the text without tool calls, and the name and arguments of each tool call.

    If a call is invalid, names an unknown tool, or has arguments that a reply cannot contain, all calls stay in the
    text, because calls are executed together.
    """
    functions = [tool["function"] for tool in request.tools]
    known = {str(one["name"]): one.get("parameters") for one in functions if isinstance(one, Mapping)}

    def parameters(name: str) -> Mapping[str, object] | None:
        found = known.get(name)
        return found if isinstance(found, Mapping) else None

    found = call_format.find_calls(text, parameters)
    if not found or any(one.error or one.name not in known or not isinstance(one.arguments, dict) for one in found):
        return text, ()
    try:
        calls = tuple((one.name, _arguments_as_json(one.arguments)) for one in found)
    except ValueError:
        return text, ()
    return remove_calls(text, found), calls


def _arguments_as_json(value: object) -> str:
    """Return a call's arguments as JSON text.

    Clients send calls back in later requests. Therefore, values that requests reject raise ValueError: infinite
    numbers, lone surrogates and excessive nesting.
    """
    text = json.dumps(value, allow_nan=False)
    from_json(text)  # rejects lone surrogates and excessive nesting
    return text


def _build_message(
    content: str, reasoning: str | None, calls: Sequence[tuple[str, str]], call_id_prefix: str
) -> AgentMessage:
    made = tuple(
        AgentCall(name=name, arguments=arguments, id=f"{call_id_prefix}_{index}")
        for index, (name, arguments) in enumerate(calls)
    )
    return AgentMessage(role="assistant", content=content, reasoning=reasoning, calls=made)
