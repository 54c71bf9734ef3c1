"""From messages to tokens behind place-holders, and from sampled text to a message.

A template is rendered over the *shape* of a conversation: every content is a place-holder, so what it says can neither
change the template's course nor spell a special token, and a shape is rendered once for all conversations that have it.
The text between the place-holders is encoded with its special tokens, each content as plain text of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from agentrl.models.chat_template import call_form
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.gateway.wire import AgentCall, AgentMessage, ChatRequest, WireError
from agentrl_envs.chat.calls import HERMES, CallForm, without_calls
from agentrl_envs.protocols.marked_text import Mark, MarkedText, Part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Private use: no template holds them, and texts that do are guarded.
_SLOT, _GUARD, _END = "\ue000", "\ue001", "\ue002"
# The quote in a slot shows which contents a template writes as JSON texts (Llama's responses of tools).
_PLACE = re.compile(f'({_SLOT}\\\\?"|{_GUARD})([0-9]+){_END}')
_SHAPES = 1024
_CALL_ID = "call00000"  # of the length that templates which check it ask for

PLAIN_TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor -%}"
    "{%- for message in messages %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor -%}"
    "{{ '\\n' }}{% endfor -%}"
)
"""For models without a chat template: the messages as they are, one below the other.

The ends of lines are written out: a newline behind a block is none in a template of `transformers`.
"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A rendered shape: ``texts`` around the place-holders of the messages ``slots``, in order of appearance.

    ``quoted``: which of ``slots`` hold JSON texts.
    """

    texts: tuple[tuple[Part, ...], ...]
    slots: tuple[int, ...]
    quoted: tuple[bool, ...]

    def before(self, message: int) -> tuple[str, ...] | None:
        """The texts before the only place of a message; None if it has none or several."""
        if self.slots.count(message) != 1:
            return None
        return self.strings[: self.slots.index(message) + 1]

    @cached_property
    def strings(self) -> tuple[str, ...]:
        """``texts`` as they read."""
        return tuple(str(MarkedText(*text)) for text in self.texts)

    def parts(self, contents: Sequence[str], start: int = 0) -> tuple[Part, ...]:
        """Texts and contents in order, from the text number ``start`` on."""
        parts = list(self.texts[start])
        places = zip(self.texts[start + 1 :], self.slots[start:], self.quoted[start:], strict=True)
        for text, slot, quoted in places:
            parts += [json.dumps(contents[slot], ensure_ascii=False)[1:-1] if quoted else contents[slot], *text]
        return tuple(parts)

    def filled(self, contents: Sequence[str]) -> str:
        """The whole text."""
        return str(MarkedText(*self.parts(contents)))


class ChatRenderer:
    """The chat template of one model. Raises WireError where the template refuses a conversation."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        codec: TextCodec,
        *,
        template: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """``template`` replaces the tokenizer's own; with neither, messages are written one below the other."""
        self.codec = codec
        plain = not (template or tokenizer.chat_template)
        self.prefix_ids = codec.prefix_ids if plain else ()
        self.longest_token = max(map(len, codec.table))  # in bytes
        self._tokenizer = tokenizer
        self._template = PLAIN_TEMPLATE if plain else template
        self._options = dict(options or {})
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._guarded = [*self._special, _SLOT, _GUARD, _END]
        self._unsafe = re.compile("|".join(map(re.escape, self._guarded)))
        self.calls = HERMES if plain else self._call_form()
        self._layout = lru_cache(maxsize=_SHAPES)(self._render)
        self._tools = lru_cache(maxsize=_SHAPES)(lambda text: json.dumps(self._guard(json.loads(text))))

    def layout(
        self, messages: Sequence[AgentMessage], request: ChatRequest, *, sampled: Collection[int] = ()
    ) -> Layout:
        """The shape of ``messages`` up to where the model's reply begins; those at ``sampled`` are the model's own."""
        shape = [self._shape(one, place, own=place in sampled) for place, one in enumerate(messages)]
        return self._layout(json.dumps(shape), *self._surroundings(request))

    def encode(self, parts: Sequence[Part]) -> tuple[int, ...]:
        """The tokens of a conversation from its beginning."""
        return self.prefix_ids + self.codec.encode_parts(parts)

    def turn_end(self) -> str:
        """The special token with which the template ends a turn of the model; "" if there is none."""
        user, reply = AgentMessage(role="user", content="?"), AgentMessage(role="assistant", content="!")
        shape = [self._shape(one, place, own=True) for place, one in enumerate((user, reply, user))]
        layout = self._layout(json.dumps(shape), "[]", json.dumps(self._options))
        behind = self.closing(layout.texts[layout.slots.index(1) + 1]) if 1 in layout.slots else ()
        return next((part.text for part in behind if isinstance(part, Mark) and part.ends_turn), "")

    def closing(self, text: tuple[Part, ...]) -> tuple[Part, ...]:
        """The text behind a sampled reply, with the special token at its beginning marked as the turn's end."""
        if not text or not isinstance(text[0], Mark):
            return text
        end = next((token for token in self._special if text[0].text.startswith(token)), "")
        if not end:
            return text
        rest = text[0].text.removeprefix(end)
        return (Mark(end, ends_turn=True), *([Mark(rest)] if rest else []), *text[1:])

    def _call_form(self) -> CallForm:
        """The form in which the template writes calls; that of Hermes if it writes none."""
        from jinja2 import TemplateError

        name = "look"
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        try:
            return call_form(lambda messages: self._applied(messages, [tool], self._options), name) or HERMES
        except (TemplateError, TypeError, ValueError):
            return HERMES

    def read(self, text: str, request: ChatRequest, *, before: str, prefix: str) -> AgentMessage:
        """The message that a sampled text is. Calls that cannot be read stay in the text; ids begin with ``prefix``."""
        if getattr(self._tokenizer, "response_template", None) is not None:
            return self._parsed(text, request, before=before, prefix=prefix)
        opened = before.rstrip().endswith("<think>")
        thoughts, closed, said = text.rpartition("</think>")
        if opened and not closed:
            return AgentMessage(role="assistant", content="", reasoning=text)
        said, open_again, more = said.partition("<think>")
        if closed or open_again:
            thoughts, said = f"{thoughts.strip().removeprefix('<think>')}{more}".strip(), said.strip()
        content, calls = read_calls(said, request, self.calls) if request.calls_allowed else (said, ())
        return _message(content, thoughts if closed or open_again else None, calls, prefix)

    def _parsed(self, text: str, request: ChatRequest, *, before: str, prefix: str) -> AgentMessage:
        """As the tokenizer's response template reads it; a text that it cannot read is the content."""
        try:
            said = self._tokenizer.parse_response(
                text, prefix=before, tools=[*map(dict, request.tools)] if request.calls_allowed else None
            )
            calls = tuple(
                (str(call["function"]["name"]), json.dumps(call["function"]["arguments"]))
                for call in (said.get("tool_calls") or [] if request.calls_allowed else [])
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return AgentMessage(role="assistant", content=text)
        thoughts = said.get("reasoning_content") or said.get("thinking")
        if said.get("tool_calls") and not calls:
            return AgentMessage(role="assistant", content=text)
        return _message(str(said.get("content") or ""), thoughts, calls, prefix)

    def _shape(self, message: AgentMessage, place: int, *, own: bool) -> dict[str, object]:
        """A message whose content is its place-holder. The calls of a sampled reply stand in what was sampled."""
        slot = f'{_SLOT}"{place}{_END}' if message.content or own else ""
        shape: dict[str, object] = {"role": message.role, "content": slot}
        if message.role == "tool":
            shape["tool_call_id"] = _CALL_ID
        if own:
            return shape
        if message.reasoning is not None:
            shape["reasoning_content"] = self._guard(message.reasoning)
        if message.calls:
            shape["tool_calls"] = [self._call_shape(call) for call in message.calls]
        return shape

    def _call_shape(self, call: AgentCall) -> dict[str, object]:
        arguments = call.parsed
        function = {"name": self._guard(call.name), "arguments": self._guard(arguments)}
        return {"type": "function", "id": _CALL_ID, "function": function}

    def _guard(self, value: object) -> object:
        """A JSON value in whose texts place-holders stand for what would be read as a special token."""
        if isinstance(value, str):
            return self._unsafe.sub(lambda found: f"{_GUARD}{self._guarded.index(found[0])}{_END}", value)
        if isinstance(value, Mapping):
            return {str(self._guard(str(key))): self._guard(one) for key, one in value.items()}
        return [self._guard(one) for one in value] if isinstance(value, list) else value

    def _surroundings(self, request: ChatRequest) -> tuple[str, str]:
        return self._tools(request.tools_json), json.dumps({**self._options, **request.chat_template_kwargs})

    def _render(self, shape: str, tools: str, options: str) -> Layout:
        from jinja2 import TemplateError

        try:
            rendered = self._applied(json.loads(shape), json.loads(tools), json.loads(options))
        except (TemplateError, TypeError, ValueError) as error:
            raise WireError(f"the model's chat template refuses this conversation: {error}", param="messages") from None
        pieces = _PLACE.split(rendered)
        texts: list[list[Part]] = [[Mark(pieces[0])] if pieces[0] else []]
        slots: list[int] = []
        quoted: list[bool] = []
        for kind, number, text in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
            if kind.startswith(_SLOT):
                slots.append(int(number))
                quoted.append("\\" in kind)
                texts.append([])
            else:
                texts[-1].append(self._guarded[int(number)])
            if text:
                texts[-1].append(Mark(text))
        return Layout(texts=tuple(map(tuple, texts)), slots=tuple(slots), quoted=tuple(quoted))

    def _applied(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object], options: Mapping[str, object]
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],  # type: ignore[arg-type]
                tools=list(tools) or None,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._template,
                **dict(options),  # type: ignore[arg-type]
            )
        )


def read_calls(said: str, request: ChatRequest, form: CallForm = HERMES) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text without its calls, and the name and arguments of each.

    If one of them names no tool of the request or cannot be read, all stay in the text, because calls are made
    together.
    """
    functions = [tool["function"] for tool in request.tools]
    known = {str(one["name"]): one.get("parameters") for one in functions if isinstance(one, Mapping)}

    def parameters(name: str) -> Mapping[str, object] | None:
        found = known.get(name)
        return found if isinstance(found, Mapping) else None

    found = form.find(said, parameters)
    if not found or any(one.error or one.name not in known or not isinstance(one.arguments, dict) for one in found):
        return said, ()
    return without_calls(said, found), tuple((one.name, json.dumps(one.arguments)) for one in found)


def _message(content: str, reasoning: str | None, calls: Sequence[tuple[str, str]], prefix: str) -> AgentMessage:
    made = tuple(
        AgentCall(name=name, arguments=arguments, id=f"{prefix}_{place}")
        for place, (name, arguments) in enumerate(calls)
    )
    return AgentMessage(role="assistant", content=content, reasoning=reasoning, calls=made)
