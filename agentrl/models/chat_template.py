"""A model's chat template, rendered with placeholders instead of the message contents.

As a result, contents can neither change the control flow of the template nor spell a special token. Sampled tokens
never change, although a template may strip the reasoning of earlier turns. Each sequence of roles is rendered once for
all conversations. Protocols use the texts between the placeholders (:func:`read_chat_format`). The gateway renders the
roles of each request (`agentrl.rollout.gateway.render`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.errors import SettingsError
from agentrl_envs.chat import CALL_ID_PLACEHOLDER, ChatFormat, MarkedText, Part, TemplateMark, TextsAroundMessages
from agentrl_envs.tool_call_formats import HERMES, TOOL_CALL_FORMATS, ToolCallFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # a JSON schema of a function

# Characters of the private use area do not occur in templates. `replace_special_tokens_in_json` replaces them in JSON.
_SLOT, _GUARD, _END = "\ue000", "\ue001", "\ue002"
# The quote in a slot is escaped if the template writes the content as a JSON string (Llama's tool responses). The word
# "Text" detects templates that alter contents, for example their case: an altered placeholder does not match.
_PLACEHOLDER = re.compile(f'({_SLOT}\\\\?"Text|{_GUARD})([0-9]+){_END}')
_OPENINGS = 256  # number of cached role sequences of prompts

PLAIN_TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor -%}"
    "{%- for message in messages %}{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor -%}"
    "{{ '\\n' }}{% endfor -%}"
)
"""Template for models without a chat template: the message contents, separated by newlines.

Newlines are written as expressions, because `transformers` removes a newline after a block of a template.
"""


class ChatTemplateError(ValueError):
    """A chat template cannot render a conversation."""


def content_placeholder(number: int) -> str:
    """Return the placeholder for the content of message ``number``."""
    return f'{_SLOT}"Text{number}{_END}'


@dataclass(frozen=True, kw_only=True)
class TemplateLayout:
    """The texts around the message contents of a rendered conversation.

    ``slots`` contains the indices of the messages in order of appearance. ``quoted`` is true for slots that the
    template writes as JSON strings.
    """

    texts: tuple[tuple[Part, ...], ...]
    slots: tuple[int, ...]
    quoted: tuple[bool, ...]

    def texts_before(self, message: int) -> tuple[str, ...] | None:
        """Return the texts before a message, or None if the message does not appear exactly once."""
        if self.slots.count(message) != 1:
            return None
        return self.text_strings[: self.slots.index(message) + 1]

    @cached_property
    def text_strings(self) -> tuple[str, ...]:
        """``texts`` as plain strings."""
        return tuple(str(MarkedText(*text)) for text in self.texts)

    def interleave_contents(self, contents: Sequence[str], first_text: int = 0) -> tuple[Part, ...]:
        """Return texts and contents in order, starting with the text at index ``first_text``."""
        parts = list(self.texts[first_text])
        rest = zip(self.texts[first_text + 1 :], self.slots[first_text:], self.quoted[first_text:], strict=True)
        for text, message, quoted in rest:
            parts += [json.dumps(contents[message], ensure_ascii=False)[1:-1] if quoted else contents[message], *text]
        return tuple(parts)

    def fill_slots(self, contents: Sequence[str]) -> str:
        """Return the rendered text with ``contents`` in the slots."""
        return str(MarkedText(*self.interleave_contents(contents)))


class ChatTemplate:
    """The chat template of one model: read from a file or from its tokenizer, or the plain template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        """Create a chat template. ``options`` are variables of the template."""
        self.is_plain = not (template or tokenizer.chat_template)
        self.options = dict(options or {})
        self._tokenizer = tokenizer
        self._template = PLAIN_TEMPLATE if self.is_plain else template
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
        """Return the conversation up to the start of the model's next turn.

        Raises ChatTemplateError if the template cannot render the conversation.
        """
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
    ) -> TemplateLayout:
        """Return the texts around the placeholders of the rendered ``messages``.

        Raises ChatTemplateError if the template cannot render the conversation.
        """
        pieces = _PLACEHOLDER.split(self.render(messages, tools, options))
        texts: list[list[Part]] = [[TemplateMark(pieces[0])] if pieces[0] else []]
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
                texts[-1].append(TemplateMark(text))
        return TemplateLayout(texts=tuple(map(tuple, texts)), slots=tuple(slots), quoted=tuple(quoted))

    def replace_special_tokens_in_json(self, value: object) -> object:
        """Replace special tokens in the strings of a JSON value with placeholders."""
        if isinstance(value, str):
            return self._unsafe.sub(lambda found: f"{_GUARD}{self._guarded.index(found[0])}{_END}", value)
        if isinstance(value, Mapping):
            return {
                str(self.replace_special_tokens_in_json(str(key))): self.replace_special_tokens_in_json(one)
                for key, one in value.items()
            }
        return [self.replace_special_tokens_in_json(one) for one in value] if isinstance(value, list) else value

    def leading_special_token(self, text: str) -> str:
        """Return the special token at the start of ``text``, or ""."""
        return next((token for token in self._special if text.startswith(token)), "")

    def first_special_token(self, text: str) -> str:
        """Return the first special token in ``text``, or ""."""
        found = [token for token in self._special if token in text]
        return min(found, key=lambda token: (text.index(token), -len(token)), default="")

    def tool_call_format(
        self, tool: str, tools: Sequence[Any], before: Sequence[Message] = ()
    ) -> ToolCallFormat | None:
        """Return the format in which the template writes a call to ``tool``, or None if no parser supports it."""
        rendered = self.render([*before, *_conversation(_assistant_call(tool, 1), _tool_message(tool, 2))], tools)
        schema = {"properties": {"place": {"type": "string"}}}
        for form in TOOL_CALL_FORMATS.values():
            found = form.find_calls(rendered.partition(content_placeholder(0))[2], lambda _: schema)
            if found and (found[0].name, found[0].arguments) == (tool, {"place": content_placeholder(1)}):
                return form
        return None


def _conversation(*behind: Message) -> list[Message]:
    return [{"role": "user", "content": content_placeholder(0)}, *behind]


def _assistant_call(tool: str, number: int) -> Message:
    function = {"name": tool, "arguments": {"place": content_placeholder(number)}}
    call = {"id": CALL_ID_PLACEHOLDER, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _tool_message(tool: str, number: int) -> Message:
    return {"role": "tool", "content": content_placeholder(number), "name": tool, "tool_call_id": CALL_ID_PLACEHOLDER}


class _ToolResponseTexts(NamedTuple):
    """The texts around tool responses after a turn with calls."""

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
    """Render the chat format of the model ``name`` for conversations with ``tools``.

    ``options`` are variables of the template, ``system`` is the text of a system message, and ``setting`` is the
    setting that requires a template. Raises SettingsError if the template is missing, changes messages, depends on
    their position, or writes calls in an unsupported format.
    """
    if not tokenizer.chat_template:
        plain = "environment.protocol=simpletir, retool or torl" if "hermes" in setting else "environment.chat=auto"
        raise SettingsError(
            f"{setting}, but the tokenizer of {name} has no chat template; use an instruction-tuned model, or set "
            f"{plain}"
        )
    template = _TemplateReader(ChatTemplate(tokenizer, options=options), name, tools, setting, system)
    before_problem, after_problem = template.layout_in_message_order(_conversation()).text_strings
    shown = before_problem + after_problem
    if missing := [tool for tool in template.tools if tool not in shown]:
        raise SettingsError(f"the chat template of {name} does not render the tools {missing}: choose another model")
    before, behind, after = template.problem_and_reply_texts()
    calls, responses, end = HERMES, _ToolResponseTexts("", "", "", False), template.chat.leading_special_token(behind)
    if tools:
        calls = template.require_tool_call_format()
        responses = template.tool_response_texts()
        end = template.chat.leading_special_token(responses.before) or end
    return ChatFormat(
        before_problem=before_problem,
        after_problem=after_problem,
        turn_end=end,
        before_response=responses.before.removeprefix(end),
        between_responses=responses.between,
        after_response=responses.after,
        user=(behind.removeprefix(end), after) if before == before_problem else None,
        opening=lru_cache(maxsize=_OPENINGS)(template.prompt_texts),
        calls=calls,
        quoted=responses.quoted,
        system=system,
    )


class _TemplateReader:
    """Extracts the texts of a template from synthetic conversations.

    Raises SettingsError if the template is unsuitable.
    """

    def __init__(self, chat: ChatTemplate, name: str, tools: Sequence[Tool], setting: str, system: str) -> None:
        self.chat = chat
        self.name = name
        self.setting = setting
        self.tools = [str(tool["function"]["name"]) for tool in tools]
        self._schemas = [dict(tool) for tool in tools]
        self._system = [{"role": "system", "content": system}] if system else []

    def layout_after_system_prompt(self, messages: Sequence[Message]) -> TemplateLayout:
        """Return the layout after the system prompt, unless ``messages`` start with a system message."""
        own = messages[0]["role"] == "system"
        try:
            return self.chat.layout([*([] if own else self._system), *messages], self._schemas)
        except ChatTemplateError as error:
            raise SettingsError(
                f"the chat template of {self.name} cannot render a conversation{self._tools_suffix}: {error}"
            ) from error

    def layout_in_message_order(self, messages: Sequence[Message]) -> TemplateLayout:
        """Return the layout of messages. Raises SettingsError unless each message appears once and in order."""
        layout = self.layout_after_system_prompt(messages)
        if layout.slots != tuple(range(len(messages))):
            raise SettingsError(
                f"the chat template of {self.name} does not render each message of a conversation{self._tools_suffix} "
                f"unchanged, once and in order, so {self.setting} cannot use it: choose another model"
            )
        return layout

    def prompt_texts(self, roles: tuple[str, ...]) -> TextsAroundMessages:
        """Return the texts around the messages of a prompt with these ``roles``, in the template's order."""
        layout = self.layout_after_system_prompt(
            [{"role": role, "content": content_placeholder(number)} for number, role in enumerate(roles)]
        )
        if sorted(layout.slots) != list(range(len(roles))):
            raise SettingsError(
                f"the chat template of {self.name} does not render each message of a prompt with the roles "
                f"{', '.join(roles)} exactly once, so {self.setting} cannot use it: change the prompt or the model"
            )
        return TextsAroundMessages(texts=layout.text_strings, order=layout.slots)

    def problem_and_reply_texts(self) -> tuple[str, str, str]:
        """Return the text before the problem, and the texts before and after a user message that follows a turn.

        All three are "" if the template does not support such a message.
        """
        said, user = (
            {"role": "assistant", "content": content_placeholder(1)},
            {"role": "user", "content": content_placeholder(2)},
        )
        try:
            first, _, before, after = self.layout_in_message_order(_conversation(said, user)).text_strings
        except SettingsError:
            return "", "", ""
        return first, before, after

    def require_tool_call_format(self) -> ToolCallFormat:
        """Return the format of the template's tool calls. Raises SettingsError if it is not supported."""
        try:
            form = self.chat.tool_call_format(self.tools[0], self._schemas, self._system)
        except ChatTemplateError as error:
            raise SettingsError(
                f"the chat template of {self.name} cannot render a conversation{self._tools_suffix}: {error}"
            ) from error
        if form is None:
            raise SettingsError(
                f"the chat template of {self.name} does not write tool calls in a supported format "
                f"({', '.join(TOOL_CALL_FORMATS)}), which {self.setting} requires: choose another model"
            )
        return form

    def tool_response_texts(self) -> _ToolResponseTexts:
        """Return the template's texts around the responses to a turn's tool calls.

        Raises SettingsError if the texts depend on the position in the conversation.
        """
        try:
            return self._read_tool_response_texts(called=False)
        except SettingsError as error:
            try:
                return self._read_tool_response_texts(called=True)  # some templates require a call before a response
            except SettingsError:
                raise error from None

    def _read_tool_response_texts(self, *, called: bool) -> _ToolResponseTexts:
        tool = self.tools[0]

        def turn(number: int) -> Message:
            return (
                _assistant_call(tool, number)
                if called
                else {"role": "assistant", "content": content_placeholder(number)}
            )

        one = self.layout_in_message_order(_conversation(turn(1), _tool_message(tool, 2)))
        two = self.layout_in_message_order(_conversation(turn(1), _tool_message(tool, 2), _tool_message(tool, 3)))
        later = self.layout_in_message_order(
            _conversation(turn(1), _tool_message(tool, 2), turn(3), _tool_message(tool, 4))
        )
        before = {one.text_strings[2], two.text_strings[2], later.text_strings[2], later.text_strings[4]}
        after = {one.text_strings[3], two.text_strings[4], later.text_strings[5]}
        if len(before) > 1 or len(after) > 1 or one.quoted[2] != two.quoted[3]:
            raise SettingsError(
                f"the chat template of {self.name} renders a tool response differently depending on its position in "
                f"the conversation, so {self.setting} cannot use it: choose another model"
            )
        rest = one.text_strings[2]
        if called:  # the model writes the text that closes the call
            end = self.chat.first_special_token(rest)
            rest = rest[rest.index(end) :] if end else rest
        return _ToolResponseTexts(rest, two.text_strings[3], one.text_strings[3], one.quoted[2])

    @property
    def _tools_suffix(self) -> str:
        return " with tools" if self.tools else ""
