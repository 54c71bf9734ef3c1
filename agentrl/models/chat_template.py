"""A model's chat template as strings: rendered once, around place-holders, and never over sampled text.

A template may strip the thoughts of earlier turns or write the last turn differently; sampled tokens must not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.errors import SettingsError
from agentrl_envs.chat.calls import CALL_FORMS, HERMES, CallForm
from agentrl_envs.chat.chat_format import CALL_ID, ChatFormat, MessageTexts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # a JSON schema of a function
Render = Callable[[Sequence[Message]], str]

# Private use: no template and no problem holds them. JSON writes the response in another way than it is.
_PROBLEM, _CALL, _RESPONSE = ("\ue000the problem\ue000", "\ue000the call\ue000", '\ue000the "response"\ue000')
_QUOTED = json.dumps(_RESPONSE, ensure_ascii=False)[1:-1]
_PLACE = re.compile("\ue000([0-9]+)\ue000")
_OPENINGS = 256  # shapes of prompts that are kept

_ASKED = {"role": "user", "content": _PROBLEM}
_SAID = {"role": "assistant", "content": _CALL}
_NEXT = {"role": "user", "content": _RESPONSE}


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
    template = _Template(tokenizer, name, tools, options, setting, system)
    before_problem, after_problem = template.pieces([_ASKED], [_PROBLEM])
    shown = before_problem + after_problem
    if missing := [tool for tool in template.tools if tool not in shown]:
        raise SettingsError(f"the chat template of {name} does not show the tools it is given: {missing}")
    before, behind, after = template.reply()
    calls, responses, end = HERMES, _Responses("", "", "", False), _turn_end(tokenizer, behind)
    if tools:
        calls = _calls(template)
        responses = template.responses()
        end = _turn_end(tokenizer, responses.before) or end
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


def call_form(render: Render, tool: str) -> CallForm | None:
    """The form in which a template writes a call of ``tool``; None for one that no reader knows."""
    rendered = render([_ASKED, _called(tool), _told(tool)]).partition(_PROBLEM)[2]
    schema = {"properties": {"place": {"type": "string"}}}
    for form in CALL_FORMS.values():
        found = form.find(rendered, lambda _: schema)
        if found and (found[0].name, found[0].arguments) == (tool, {"place": _CALL}):
            return form
    return None


class _Template:
    """Renders conversations and cuts them at their place-holders."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        setting: str,
        system: str,
    ) -> None:
        self.name = name
        self.setting = setting
        self.tools = [str(tool["function"]["name"]) for tool in tools]
        self._tokenizer = tokenizer
        self._schemas: list[Any] = [dict(tool) for tool in tools]
        self._options = dict(options)
        self._system = [{"role": "system", "content": system}] if system else []

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the model's next turn begins; the system prompt, unless it brings its own."""
        from jinja2 import TemplateError

        own = messages[0]["role"] == "system"
        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in (*([] if own else self._system), *messages)],
                tools=self._schemas or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise SettingsError(
                f"the chat template of {self.name} cannot write a conversation{self._with_tools}: {error}"
            ) from error
        return str(rendered)

    def pieces(self, messages: Sequence[Message], places: Sequence[str]) -> list[str]:
        """The text around the place-holders, all of which must appear, in this order and as often."""
        rendered = self.render(messages)
        pieces = []
        for place in places:
            piece, found, rendered = rendered.partition(place)
            if not found:
                break
            pieces.append(piece)
        pieces.append(rendered)
        if len(pieces) <= len(places) or any(place in piece for place in places for piece in pieces):
            raise SettingsError(
                f"the chat template of {self.name} does not write the messages of a conversation{self._with_tools} "
                f"once, in order and as they are: {self.setting} cannot use it"
            )
        return pieces

    def opening(self, roles: tuple[str, ...]) -> MessageTexts:
        """The texts around the messages of a prompt with these roles, wherever the template puts them."""
        messages = [{"role": role, "content": f"\ue000{number}\ue000"} for number, role in enumerate(roles)]
        pieces = _PLACE.split(self.render(messages))
        order = tuple(int(number) for number in pieces[1::2])
        if sorted(order) != list(range(len(roles))):
            raise SettingsError(
                f"the chat template of {self.name} does not write each message of a prompt with the roles "
                f"{', '.join(roles)} once: {self.setting} cannot use it"
            )
        return MessageTexts(texts=tuple(pieces[::2]), order=order)

    def reply(self) -> tuple[str, str, str]:
        """The texts before the problem, and around a user's message behind a turn; "" where the template has none."""
        try:
            first, _, before, after = self.pieces([_ASKED, _SAID, _NEXT], [_PROBLEM, _CALL, _RESPONSE])
        except SettingsError:
            return "", "", ""
        return first, before, after

    def responses(self) -> _Responses:
        """The texts behind a turn with calls. Raises SettingsError if they depend on the place in the conversation."""
        failed: SettingsError | None = None
        # A template may want a call before a response, write the response as JSON, or both.
        for turn in (_SAID, _called(self.tools[0])):
            for response in (_RESPONSE, _QUOTED):
                try:
                    return self._responses(turn, response)
                except SettingsError as error:
                    failed = failed or error
        assert failed is not None
        raise failed

    def _responses(self, turn: Message, response: str) -> _Responses:
        told = _told(self.tools[0])
        _, _, before, after = self.pieces([_ASKED, turn, told], [_PROBLEM, _CALL, response])
        places = [_PROBLEM, _CALL, response, response]
        _, _, before_first, between, after_last = self.pieces([_ASKED, turn, told, told], places)
        places = [_PROBLEM, _CALL, response, _CALL, response]
        _, _, before_early, _, before_late, after_late = self.pieces([_ASKED, turn, told, turn, told], places)
        if len({before, before_first, before_early, before_late}) > 1 or len({after, after_last, after_late}) > 1:
            raise SettingsError(
                f"the chat template of {self.name} writes a tool's response differently at different places of a "
                f"conversation: {self.setting} cannot render it once"
            )
        rest = before
        if turn is not _SAID:  # what closes the call is the model's to write
            end = _first_special(self._tokenizer, before)
            rest = before[before.index(end) :] if end else before
        return _Responses(rest, between, after, response is _QUOTED)

    @property
    def _with_tools(self) -> str:
        return " with tools" if self.tools else ""


def _called(tool: str) -> Message:
    function = {"name": tool, "arguments": {"place": _CALL}}
    call = {"id": CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _told(tool: str) -> Message:
    return {"role": "tool", "content": _RESPONSE, "name": tool, "tool_call_id": CALL_ID}


def _calls(template: _Template) -> CallForm:
    """The form of the template's calls. Raises SettingsError for one that no reader knows."""
    form = call_form(template.render, template.tools[0])
    if form is None:
        raise SettingsError(
            f"the chat template of {template.name} does not write a call in a form that can be read "
            f"({', '.join(CALL_FORMS)}): {template.setting} is for models of these forms"
        )
    return form


def _special(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def _turn_end(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The special token that ``text`` begins with, which the model itself writes at the end of a turn."""
    return max((token for token in _special(tokenizer) if text.startswith(token)), key=len, default="")


def _first_special(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The special token that stands first in ``text``; "" if none does."""
    found = [token for token in _special(tokenizer) if token in text]
    return min(found, key=lambda token: (text.index(token), -len(token)), default="")
