"""A model's chat template: rendered over the shape of a conversation, never over what was said.

Every content is a place-holder when a template is rendered. So a content can neither change the template's course nor
spell a special token, sampled tokens never change (a template may strip the thoughts of earlier turns), and a shape is
rendered once for all conversations that have it. Protocols read the texts between the place-holders once
(:func:`read_chat_format`); the gateway renders the shape of each request (`agentrl.rollout.gateway.render`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.errors import SettingsError
from agentrl_envs.chat import CALL_ID, ChatFormat, Mark, MarkedText, MessageTexts, Part
from agentrl_envs.tool_call_formats import CALL_FORMS, HERMES, CallForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # a JSON schema of a function

# Private use: no template holds them, and texts that do are guarded.
_SLOT, _GUARD, _END = "\ue000", "\ue001", "\ue002"
# The quote in a slot shows which contents a template writes as JSON texts (Llama's responses of tools).
# The word shows which contents a template alters: in another case it is no place-holder.
_PLACE = re.compile(f'({_SLOT}\\\\?"Text|{_GUARD})([0-9]+){_END}')
_OPENINGS = 256  # shapes of prompts that are kept

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


class ChatTemplateError(ValueError):
    """A chat template does not render a conversation."""


def slot(number: int) -> str:
    """The place-holder of the content of message ``number``."""
    return f'{_SLOT}"Text{number}{_END}'


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
        for text, message, quoted in places:
            parts += [json.dumps(contents[message], ensure_ascii=False)[1:-1] if quoted else contents[message], *text]
        return tuple(parts)

    def filled(self, contents: Sequence[str]) -> str:
        """The whole text."""
        return str(MarkedText(*self.parts(contents)))


class ChatTemplate:
    """The template of one model: a file's, the tokenizer's own, or with neither a plain one."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """``options`` are variables of the template."""
        self.plain = not (template or tokenizer.chat_template)
        self.options = dict(options or {})
        self._tokenizer = tokenizer
        self._template = PLAIN_TEMPLATE if self.plain else template
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special = sorted(added | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._guarded = [*self._special, _SLOT, _GUARD, _END]
        self._unsafe = re.compile("|".join(map(re.escape, self._guarded)))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        options: Mapping[str, object] | None = None,
    ) -> str:
        """The conversation up to where the model's next turn begins. Raises ChatTemplateError."""
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=self._template,
                **dict(self.options if options is None else options),  # type: ignore[arg-type]
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ChatTemplateError(str(error)) from error
        return str(rendered)

    def layout(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] = (),
        options: Mapping[str, object] | None = None,
    ) -> Layout:
        """The texts around the contents of ``messages``, which are place-holders. Raises ChatTemplateError."""
        pieces = _PLACE.split(self.render(messages, tools, options))
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

    def guard(self, value: object) -> object:
        """A JSON value in whose texts place-holders stand for what would be read as a special token."""
        if isinstance(value, str):
            return self._unsafe.sub(lambda found: f"{_GUARD}{self._guarded.index(found[0])}{_END}", value)
        if isinstance(value, Mapping):
            return {str(self.guard(str(key))): self.guard(one) for key, one in value.items()}
        return [self.guard(one) for one in value] if isinstance(value, list) else value

    def leading_special(self, text: str) -> str:
        """The special token that ``text`` begins with, which the model itself writes at the end of a turn; or ""."""
        return next((token for token in self._special if text.startswith(token)), "")

    def first_special(self, text: str) -> str:
        """The special token that stands first in ``text``; "" if none does."""
        found = [token for token in self._special if token in text]
        return min(found, key=lambda token: (text.index(token), -len(token)), default="")

    def call_form(self, tool: str, tools: Sequence[Any], before: Sequence[Message] = ()) -> CallForm | None:
        """Return the form in which the template writes a call of ``tool``; None if no reader supports it."""
        rendered = self.render([*before, *_conversation(_called(tool, 1), _told(tool, 2))], tools)
        schema = {"properties": {"place": {"type": "string"}}}
        for form in CALL_FORMS.values():
            found = form.find(rendered.partition(slot(0))[2], lambda _: schema)
            if found and (found[0].name, found[0].arguments) == (tool, {"place": slot(1)}):
                return form
        return None


def _conversation(*behind: Message) -> list[Message]:
    return [{"role": "user", "content": slot(0)}, *behind]


def _called(tool: str, number: int) -> Message:
    function = {"name": tool, "arguments": {"place": slot(number)}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _told(tool: str, number: int) -> Message:
    return {"role": "tool", "content": slot(number), "name": tool, "tool_call_id": CALL_ID}


class _Responses(NamedTuple):
    """The texts behind a turn with calls, around the responses."""

    before: str
    between: str
    after: str
    quoted: bool


def read_chat_format(
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    tools: Sequence[Tool] = (),
    options: Mapping[str, Any],
    system: str = "",
    setting: str = "environment.protocol=hermes",
) -> ChatFormat:
    """The template of the model ``name`` for conversations with ``tools``; ``options`` are variables of the template.

    ``system`` is the text of a system message, ``setting`` what asks for the template. Raises SettingsError for none,
    and for one that alters messages, depends on their place, or writes calls that cannot be read.
    """
    if not tokenizer.chat_template:
        plain = "environment.protocol=simpletir, retool or torl" if "hermes" in setting else "environment.chat=auto"
        raise SettingsError(
            f"{setting}, but the tokenizer of {name} has no chat template; take an instruction-tuned model, or {plain}"
        )
    template = _Reader(ChatTemplate(tokenizer, options=options), name, tools, setting, system)
    before_problem, after_problem = template.pieces(_conversation()).strings
    shown = before_problem + after_problem
    if missing := [tool for tool in template.tools if tool not in shown]:
        raise SettingsError(f"the chat template of {name} does not show the tools it is given: {missing}")
    before, behind, after = template.reply()
    calls, responses, end = HERMES, _Responses("", "", "", False), template.chat.leading_special(behind)
    if tools:
        calls = template.calls()
        responses = template.responses()
        end = template.chat.leading_special(responses.before) or end
    return ChatFormat(
        before_problem=before_problem,
        after_problem=after_problem,
        turn_end=end,
        before_response=responses.before.removeprefix(end),
        between_responses=responses.between,
        after_response=responses.after,
        user=(behind.removeprefix(end), after) if before == before_problem else None,
        opening=lru_cache(maxsize=_OPENINGS)(template.opening),
        calls=calls,
        quoted=responses.quoted,
        system=system,
    )


class _Reader:
    """Reads the texts of a template from synthetic conversations. Raises SettingsError for a template unfit for it."""

    def __init__(self, chat: ChatTemplate, name: str, tools: Sequence[Tool], setting: str, system: str) -> None:
        self.chat = chat
        self.name = name
        self.setting = setting
        self.tools = [str(tool["function"]["name"]) for tool in tools]
        self._schemas = [dict(tool) for tool in tools]
        self._system = [{"role": "system", "content": system}] if system else []

    def layout(self, messages: Sequence[Message]) -> Layout:
        """The layout behind the system prompt, unless ``messages`` bring their own."""
        own = messages[0]["role"] == "system"
        try:
            return self.chat.layout([*([] if own else self._system), *messages], self._schemas)
        except ChatTemplateError as error:
            raise SettingsError(
                f"the chat template of {self.name} cannot write a conversation{self._with_tools}: {error}"
            ) from error

    def pieces(self, messages: Sequence[Message]) -> Layout:
        """The layout of messages, all of which must appear once and in order."""
        layout = self.layout(messages)
        if layout.slots != tuple(range(len(messages))):
            raise SettingsError(
                f"the chat template of {self.name} does not write the messages of a conversation{self._with_tools} "
                f"once, in order and as they are: {self.setting} cannot use it"
            )
        return layout

    def opening(self, roles: tuple[str, ...]) -> MessageTexts:
        """The texts around the messages of a prompt with these roles, wherever the template puts them."""
        layout = self.layout([{"role": role, "content": slot(number)} for number, role in enumerate(roles)])
        if sorted(layout.slots) != list(range(len(roles))):
            raise SettingsError(
                f"the chat template of {self.name} does not write each message of a prompt with the roles "
                f"{', '.join(roles)} once: {self.setting} cannot use it"
            )
        return MessageTexts(texts=layout.strings, order=layout.slots)

    def reply(self) -> tuple[str, str, str]:
        """The texts before the problem, and around a user's message behind a turn; "" where the template has none."""
        said, user = {"role": "assistant", "content": slot(1)}, {"role": "user", "content": slot(2)}
        try:
            first, _, before, after = self.pieces(_conversation(said, user)).strings
        except SettingsError:
            return "", "", ""
        return first, before, after

    def calls(self) -> CallForm:
        """The form of the template's calls."""
        try:
            form = self.chat.call_form(self.tools[0], self._schemas, self._system)
        except ChatTemplateError as error:
            raise SettingsError(
                f"the chat template of {self.name} cannot write a conversation{self._with_tools}: {error}"
            ) from error
        if form is None:
            raise SettingsError(
                f"the chat template of {self.name} does not write a call in a form that can be read "
                f"({', '.join(CALL_FORMS)}): {self.setting} is for models of these forms"
            )
        return form

    def responses(self) -> _Responses:
        """The texts behind a turn with calls. Raises SettingsError if they depend on the place in the conversation."""
        try:
            return self._responses(called=False)
        except SettingsError as error:
            try:
                return self._responses(called=True)  # a template may want a call before a response
            except SettingsError:
                raise error from None

    def _responses(self, *, called: bool) -> _Responses:
        tool = self.tools[0]

        def turn(number: int) -> Message:
            return _called(tool, number) if called else {"role": "assistant", "content": slot(number)}

        one = self.pieces(_conversation(turn(1), _told(tool, 2)))
        two = self.pieces(_conversation(turn(1), _told(tool, 2), _told(tool, 3)))
        later = self.pieces(_conversation(turn(1), _told(tool, 2), turn(3), _told(tool, 4)))
        before = {one.strings[2], two.strings[2], later.strings[2], later.strings[4]}
        after = {one.strings[3], two.strings[4], later.strings[5]}
        if len(before) > 1 or len(after) > 1 or one.quoted[2] != two.quoted[3]:
            raise SettingsError(
                f"the chat template of {self.name} writes a tool's response differently at different places of a "
                f"conversation: {self.setting} cannot render it once"
            )
        rest = one.strings[2]
        if called:  # what closes the call is the model's to write
            end = self.chat.first_special(rest)
            rest = rest[rest.index(end) :] if end else rest
        return _Responses(rest, two.strings[3], one.strings[3], one.quoted[2])

    @property
    def _with_tools(self) -> str:
        return " with tools" if self.tools else ""
