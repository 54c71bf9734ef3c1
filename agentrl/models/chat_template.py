"""A model's chat template as strings: rendered once, around place-holders, and never over sampled text.

A template may strip the thoughts of earlier turns or write the last turn differently; sampled tokens must not change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.errors import SettingsError
from agentrl_envs.protocols.chat import ChatFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # a JSON schema of a function

# Private use: no template and no problem holds them.
_PROBLEM, _CALL, _RESPONSE = ("\ue000the problem\ue000", "\ue000the call\ue000", "\ue000the response\ue000")
_CALL_FORM = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def read_chat_format(
    tokenizer: PreTrainedTokenizerBase, *, name: str, tools: Sequence[Tool], options: Mapping[str, Any]
) -> ChatFormat:
    """The template of the model ``name`` for conversations with ``tools``; ``options`` are variables of the template.

    Raises SettingsError for none, and for one that alters messages, depends on their place, or writes other calls.
    """
    if not tokenizer.chat_template:
        raise SettingsError(
            f"environment.protocol=hermes, but the tokenizer of {name} has no chat template; take an instruction-tuned "
            "model, or environment.protocol=simpletir, retool or torl"
        )
    template = _Template(tokenizer, name, tools, options)
    user = {"role": "user", "content": _PROBLEM}
    said = {"role": "assistant", "content": _CALL}
    told = {"role": "tool", "content": _RESPONSE, "name": str(tools[0]["function"]["name"])}
    before_problem, after_problem = template.pieces([user], [_PROBLEM])
    names = [str(tool["function"]["name"]) for tool in tools]
    missing = [tool for tool in names if tool not in before_problem + after_problem]
    if missing:
        raise SettingsError(f"the chat template of {name} does not show the tools it is given: {missing}")
    _check_calls(template, user, told, tools)
    _, _, before, after = template.pieces([user, said, told], [_PROBLEM, _CALL, _RESPONSE])
    places = [_PROBLEM, _CALL, _RESPONSE, _RESPONSE]
    _, _, before_first, between, after_last = template.pieces([user, said, told, told], places)
    places = [_PROBLEM, _CALL, _RESPONSE, _CALL, _RESPONSE]
    _, _, before_early, _, before_late, after_late = template.pieces([user, said, told, said, told], places)
    if len({before, before_first, before_early, before_late}) > 1 or len({after, after_last, after_late}) > 1:
        raise SettingsError(
            f"the chat template of {name} writes a tool's response differently at different places of a conversation: "
            "environment.protocol=hermes cannot render it once"
        )
    end = _turn_end(tokenizer, before)
    return ChatFormat(
        before_problem=before_problem,
        after_problem=after_problem,
        turn_end=end,
        before_response=before.removeprefix(end),
        between_responses=between,
        after_response=after,
    )


class _Template:
    """Renders conversations and cuts them at their place-holders."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str, tools: Sequence[Tool], options: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._options = dict(options)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the model's next turn begins."""
        from jinja2 import TemplateError

        try:
            rendered = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise SettingsError(
                f"the chat template of {self.name} cannot write a conversation with tools: {error}"
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
                f"the chat template of {self.name} does not write the messages of a conversation with tools once, in "
                "order and as they are: environment.protocol=hermes cannot use it"
            )
        return pieces


def _check_calls(template: _Template, user: Message, told: Message, tools: Sequence[Tool]) -> None:
    """Raise SettingsError unless the template writes a call as the protocol reads it."""
    name = str(tools[0]["function"]["name"])
    wanted = {"name": name, "arguments": {"place": _CALL}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": wanted}]}
    rendered = template.render([user, called, told])
    form = _CALL_FORM.search(rendered.partition(_PROBLEM)[2])
    try:
        read = None if form is None else json.loads(form[1])
    except ValueError:
        read = None
    if not isinstance(read, dict) or {key: read.get(key) for key in wanted} != wanted:
        raise SettingsError(
            f"the chat template of {template.name} does not write a call as <tool_call>, a JSON object with name and "
            "arguments, </tool_call>: environment.protocol=hermes is for models of that form"
        )


def _turn_end(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The special token that ``text`` begins with, which the model itself writes at the end of a turn."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return max((token for token in special if text.startswith(token)), key=len, default="")
