"""What a model's chat template writes around a problem, the model's turns and the responses of tools.

The strings are rendered once, in a synthetic conversation, by whoever holds the model's tokenizer
(`agentrl.models.chat_template`); a conversation is then written by putting texts between them. So what the model has
said is never rendered again, whatever the template would strip from it later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_envs.protocols.marked_text import Mark, MarkedText, Part


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """A template as strings. All of them may hold special tokens.

    ``turn_end`` is what the model itself writes at its turn's end ("" where the template has none);
    ``before_response`` begins behind it, with whatever the template puts there and the model does not sample.

    >>> chat = ChatFormat(before_problem="<u>", after_problem="<a>", turn_end="<e>", before_response=".<t>",
    ...                   between_responses="|", after_response="</t><a>")
    >>> chat.prompt("2 + 3?"), chat.responses(["4", "5"])
    ('<u>2 + 3?<a>', '<e>.<t>4|5</t><a>')
    """

    before_problem: str
    after_problem: str
    turn_end: str
    before_response: str
    between_responses: str
    after_response: str

    def prompt(self, text: str) -> MarkedText:
        """A user's message, up to where the model's reply begins."""
        return MarkedText(Mark(self.before_problem), text, Mark(self.after_problem))

    def responses(self, texts: Sequence[str]) -> MarkedText:
        """From the end of the model's turn over the tools' responses to where its next turn begins."""
        parts: list[Part] = [Mark(self.turn_end, ends_turn=True)] if self.turn_end else []
        for number, text in enumerate(texts):
            parts += [Mark(self.between_responses if number else self.before_response), text]
        return MarkedText(*parts, Mark(self.after_response))


def plain_format(tools: Sequence[Mapping[str, object]]) -> ChatFormat:
    """The same for a model without a chat template: the tools as lines of JSON, calls and responses in plain tags."""
    lines = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    told = (
        f"You may call these tools:\n{lines}A call is\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\n\n'
    )
    return ChatFormat(
        before_problem=told if tools else "",
        after_problem="\n",
        turn_end="",
        before_response="\n<tool_response>\n",
        between_responses="\n</tool_response>\n<tool_response>\n",
        after_response="\n</tool_response>\n",
    )
