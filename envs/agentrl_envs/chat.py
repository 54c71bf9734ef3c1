"""What a model's chat template writes around messages, the model's turns and the responses of tools.

The strings are rendered once, in a synthetic conversation, by whoever holds the model's tokenizer
(`agentrl.models.chat_template`); a conversation is then written by putting texts between them. So what the model has
said is never rendered again, whatever the template would strip from it later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.tool_call_formats import HERMES, CallForm
from agentrl_envs.types import ChatMessage, Problem


@dataclass(frozen=True, slots=True)
class Mark:
    """A piece that a protocol wrote, never anybody else.

    ``ends_turn``: what the model ends its turn with; it is left out where the model has sampled it.
    """

    text: str
    ends_turn: bool = False


Part = str | Mark


class MarkedText(str):
    """The text that its parts give one after the other. Slices and other operations of ``str`` give plain text.

    ``messages`` say the same without a template's marks, where the text is whole messages.
    """

    parts: tuple[Part, ...]
    messages: tuple[ChatMessage, ...]

    def __new__(cls, *parts: Part, messages: Sequence[ChatMessage] = ()) -> MarkedText:
        text = super().__new__(cls, "".join(part.text if isinstance(part, Mark) else part for part in parts))
        text.parts = parts
        text.messages = tuple(messages)
        return text

    def map_plain(self, change: Callable[[str], str]) -> MarkedText:
        """The same marks around changed plain parts."""
        return MarkedText(
            *(part if isinstance(part, Mark) else change(part) for part in self.parts),
            messages=[{"role": one["role"], "content": change(one["content"])} for one in self.messages],
        )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(MarkedText, messages=self.messages), self.parts


def parts_of(text: str) -> tuple[Part, ...]:
    """The parts of any text; a plain one is its own only part."""
    return text.parts if isinstance(text, MarkedText) else (text,)


CALL_ID = "\ue001call-id\ue001"
"""The place of a call's id. Nine characters, as templates that check an id ask for."""

_DEFAULT_ID = "call00000"
_ID = re.compile(r"[A-Za-z0-9]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageTexts:
    """The texts before, between and behind the contents of messages, which stand in ``order``."""

    texts: tuple[str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """A template as strings. All of them may hold special tokens.

    ``turn_end`` is what the model itself writes at its turn's end ("" where the template has none);
    ``before_response`` begins behind it, with whatever the template puts there and the model does not sample.
    ``user`` stands around a user's message behind a turn of the model; None if the template has no place for it.
    ``opening`` gives the texts around a prompt of several messages; None where one text holds them all.
    ``quoted``: the template writes a response as a JSON text. ``system``: the text of the system message.

    >>> chat = ChatFormat(before_problem="<u>", after_problem="<a>", turn_end="<e>", before_response=".<t>",
    ...                   between_responses="|", after_response="</t><a>", user=(".<u>", "<a>"))
    >>> chat.responses(["4", "5"]), chat.reply("Go on.")
    ('<e>.<t>4|5</t><a>', '<e>.<u>Go on.<a>')
    """

    before_problem: str
    after_problem: str
    turn_end: str
    before_response: str = ""
    between_responses: str = ""
    after_response: str = ""
    user: tuple[str, str] | None = None
    opening: Callable[[tuple[str, ...]], MessageTexts] | None = None
    calls: CallForm = HERMES
    quoted: bool = False
    system: str = ""

    def prompt(self, problem: Problem, write: Callable[[str], str] = str) -> MarkedText:
        """The problem's messages up to where the model's reply begins; ``write`` frames the one that poses it.

        That is the last message of a user. A problem without messages is one message of a user.
        """
        if not problem.messages or self.opening is None:
            posed = write(problem.statement)
            messages = self._with_system([{"role": "user", "content": posed}])
            return MarkedText(Mark(self.before_problem), posed, Mark(self.after_problem), messages=messages)
        roles = tuple(message["role"] for message in problem.messages)
        contents = [message["content"] for message in problem.messages]
        asked = max((place for place, role in enumerate(roles) if role == "user"), default=len(roles) - 1)
        contents[asked] = write(contents[asked])
        around = self.opening(roles)
        parts: list[Part] = [Mark(around.texts[0])]
        for place, text in zip(around.order, around.texts[1:], strict=True):
            parts += [contents[place], Mark(text)]
        told: list[ChatMessage] = [{"role": role, "content": one} for role, one in zip(roles, contents, strict=True)]
        return MarkedText(*parts, messages=self._with_system(told))

    def _with_system(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        own = not self.system or messages[0]["role"] == "system"
        return messages if own else [{"role": "system", "content": self.system}, *messages]

    @property
    def opens_thoughts(self) -> bool:
        """Whether the template begins the model's thoughts for it."""
        return self.after_problem.rstrip().endswith("<think>")

    def responses(self, texts: Sequence[str], ids: Sequence[str] = ()) -> MarkedText:
        """From the end of the model's turn over the tools' responses to where its next turn begins.

        ``ids``: those that the model gave its calls, where it did.
        """
        parts = self._ending()
        leads = CALL_ID in self.before_response  # an id stands before its response, not behind it
        last = _DEFAULT_ID
        for number, text in enumerate(texts):
            own = ids[number] if number < len(ids) and _ID.fullmatch(ids[number]) else _DEFAULT_ID
            mark = self.between_responses if number else self.before_response
            parts.append(Mark(mark.replace(CALL_ID, own if leads else last)))
            parts.append(json.dumps(text, ensure_ascii=False)[1:-1] if self.quoted else text)
            last = own
        messages: list[ChatMessage] = [{"role": "tool", "content": text} for text in texts]
        return MarkedText(*parts, Mark(self.after_response.replace(CALL_ID, last)), messages=messages)

    def reply(self, text: str) -> MarkedText:
        """From the end of the model's turn over a user's message to where its next turn begins."""
        if self.user is None:
            raise EpisodeUsageError("this chat format has no user= for a message behind a turn of the model")
        before, after = self.user
        told: ChatMessage = {"role": "user", "content": text}
        return MarkedText(*self._ending(), Mark(before), text, Mark(after), messages=[told])

    def _ending(self) -> list[Part]:
        return [Mark(self.turn_end, ends_turn=True)] if self.turn_end else []


def plain_format(tools: Sequence[Mapping[str, object]], *, system: str = "") -> ChatFormat:
    """The same without a chat template: the tools as lines of JSON, calls and responses in plain tags."""
    lines = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    told = f"{system}\n\n" if system else ""
    if tools:
        told += (
            f"You may call these tools:\n{lines}A call is\n"
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\n\n'
        )
    return ChatFormat(
        before_problem=told,
        after_problem="\n",
        turn_end="",
        before_response="\n<tool_response>\n",
        between_responses="\n</tool_response>\n<tool_response>\n",
        after_response="\n</tool_response>\n",
        user=("\n<tool_response>\n", "\n</tool_response>\n"),
    )
