"""A model's chat template as fixed strings, and text that separates template marks from content.

`ChatFormat` contains the strings that the template writes around messages, model turns and tool responses. These
strings are rendered once, from a synthetic conversation, where the tokenizer is available
(`agentrl.models.chat_template`). A conversation is then written by joining the strings with texts. Model turns are
therefore never rendered again, and never lose text that the template would strip.

The result is a `MarkedText`, a ``str`` that also stores its parts. The tokenizer encodes marks with special tokens. All
other text (statements, program output) is encoded as plain text.

>>> end, start = TemplateMark("<|im_end|>", ends_turn=True), TemplateMark("\\n<|im_start|>user\\n")
>>> text = MarkedText(end, start, "<|im_end|> is text here")
>>> text == "<|im_end|>\\n<|im_start|>user\\n<|im_end|> is text here"
True
>>> split_marked_text(text)[2], split_marked_text("plain <|im_end|>")
('<|im_end|> is text here', ('plain <|im_end|>',))
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.tool_call_formats import HERMES, ToolCallFormat
from agentrl_envs.types import ChatMessage, Problem


@dataclass(frozen=True, slots=True)
class TemplateMark:
    """Text of a chat template. Only protocols create marks, never a model, a data set or a program.

    ``ends_turn`` is true for the end-of-turn marker, which is omitted if the model has already sampled it.
    """

    text: str
    ends_turn: bool = False


Part = str | TemplateMark


class MarkedText(str):
    """A `str` that keeps the parts from which it was joined. Slices and other `str` operations return plain text.

    ``messages`` contains the same content as chat messages, if the text consists of whole messages.
    """

    parts: tuple[Part, ...]
    messages: tuple[ChatMessage, ...]

    def __new__(cls, *parts: Part, messages: Sequence[ChatMessage] = ()) -> MarkedText:
        text = super().__new__(cls, "".join(part.text if isinstance(part, TemplateMark) else part for part in parts))
        text.parts = parts
        text.messages = tuple(messages)
        return text

    def map_unmarked(self, change: Callable[[str], str]) -> MarkedText:
        """Return a copy with ``change`` applied to the parts that are not marks."""
        return MarkedText(
            *(part if isinstance(part, TemplateMark) else change(part) for part in self.parts),
            messages=[{"role": one["role"], "content": change(one["content"])} for one in self.messages],
        )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(MarkedText, messages=self.messages), self.parts


def split_marked_text(text: str) -> tuple[Part, ...]:
    """Return the plain parts and the template marks of a text. Plain text is a single part."""
    return text.parts if isinstance(text, MarkedText) else (text,)


def split_reasoning(text: str, *, opened: bool) -> tuple[str | None, str]:
    """Split a reply into its reasoning (None if there is none) and the text outside the reasoning.

    ``opened`` is true if the template writes the opening ``<think>``. Reasoning that is not closed ends with the reply.

    >>> split_reasoning("<think>2 + 2</think>4", opened=False)
    ('2 + 2', '4')
    """
    thoughts, closed, rest = text.rpartition("</think>")
    if opened and not closed:
        return text, ""
    visible, reopened, more = rest.partition("<think>")
    if not closed and not reopened:
        return None, visible
    return f"{thoughts.strip().removeprefix('<think>')}{more}".strip(), visible


CALL_ID_PLACEHOLDER = "\ue001call-id\ue001"
"""Placeholder of a tool call's id. It has nine characters, because some templates check the length."""

_DEFAULT_CALL_ID = "call00000"
_VALID_CALL_ID = re.compile(r"[A-Za-z0-9]{1,64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextsAroundMessages:
    """The template texts before, between and after message contents, and the order in which the contents appear."""

    texts: tuple[str, ...]
    order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """A chat template as strings, which may contain special tokens.

    ``turn_end`` is the end-of-turn marker of the model, or "". ``before_response`` is the template's text between
    ``turn_end`` and a tool response. ``user`` contains the texts around a user message that follows a model turn, or
    None if the template does not support such a message. ``opening`` returns the texts around a prompt of several
    messages. It is None if such prompts are written as one text. ``quoted`` is true if the template writes tool
    responses as JSON strings. ``system`` is the text of the system message.

    >>> chat = ChatFormat(before_problem="<u>", after_problem="<a>", turn_end="<e>", before_response=".<t>",
    ...                   between_responses="|", after_response="</t><a>", user=(".<u>", "<a>"))
    >>> chat.format_tool_responses(["4", "5"]), chat.format_user_reply("Go on.")
    ('<e>.<t>4|5</t><a>', '<e>.<u>Go on.<a>')
    """

    before_problem: str
    after_problem: str
    turn_end: str
    before_response: str = ""
    between_responses: str = ""
    after_response: str = ""
    user: tuple[str, str] | None = None
    opening: Callable[[tuple[str, ...]], TextsAroundMessages] | None = None
    calls: ToolCallFormat = HERMES
    quoted: bool = False
    system: str = ""

    def prompt(self, problem: Problem, add_instruction: Callable[[str], str] = str) -> MarkedText:
        """Return the problem's messages up to the start of the model's reply.

        ``add_instruction`` adds the instruction to the last user message, which poses the problem. A problem without
        messages becomes one user message.
        """
        if not problem.messages or self.opening is None:
            posed = add_instruction(problem.statement)
            whole = self._with_system([{"role": "user", "content": posed}])
            return MarkedText(
                TemplateMark(self.before_problem), posed, TemplateMark(self.after_problem), messages=whole
            )
        roles = tuple(message["role"] for message in problem.messages)
        contents = [message["content"] for message in problem.messages]
        asked = max((index for index, role in enumerate(roles) if role == "user"), default=len(roles) - 1)
        contents[asked] = add_instruction(contents[asked])
        around = self.opening(roles)
        parts: list[Part] = [TemplateMark(around.texts[0])]
        for index, text in zip(around.order, around.texts[1:], strict=True):
            parts += [contents[index], TemplateMark(text)]
        messages: list[ChatMessage] = [
            {"role": role, "content": one} for role, one in zip(roles, contents, strict=True)
        ]
        return MarkedText(*parts, messages=self._with_system(messages))

    def _with_system(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        if not self.system or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    @property
    def opens_reasoning(self) -> bool:
        """True if the template writes the opening ``<think>`` of the model's turn."""
        return self.after_problem.rstrip().endswith("<think>")

    def format_tool_responses(self, texts: Sequence[str], ids: Sequence[str] = ()) -> MarkedText:
        """Return the text between two model turns: the turn's end, tool responses, and the start of the next turn.

        ``ids`` are the call ids that the model wrote, if any.
        """
        parts = self._turn_end_parts()
        # Some templates write a call's id before the response, others write it after the response.
        id_comes_first = CALL_ID_PLACEHOLDER in self.before_response
        previous_id = _DEFAULT_CALL_ID
        for number, text in enumerate(texts):
            valid = number < len(ids) and _VALID_CALL_ID.fullmatch(ids[number])
            call_id = ids[number] if valid else _DEFAULT_CALL_ID
            mark = self.between_responses if number else self.before_response
            parts.append(_mark_with_id(mark, call_id if id_comes_first else previous_id))
            parts.append(json.dumps(text, ensure_ascii=False)[1:-1] if self.quoted else text)
            previous_id = call_id
        messages: list[ChatMessage] = [{"role": "tool", "content": text} for text in texts]
        return MarkedText(*parts, _mark_with_id(self.after_response, previous_id), messages=messages)

    def format_user_reply(self, text: str) -> MarkedText:
        """Return the text between two model turns: the turn's end, a user message, and the start of the next turn."""
        if self.user is None:
            raise EpisodeUsageError("the chat format has no user message after a model turn: set ChatFormat.user")
        before, after = self.user
        message: ChatMessage = {"role": "user", "content": text}
        return MarkedText(*self._turn_end_parts(), TemplateMark(before), text, TemplateMark(after), messages=[message])

    def _turn_end_parts(self) -> list[Part]:
        return [TemplateMark(self.turn_end, ends_turn=True)] if self.turn_end else []


def _mark_with_id(mark: str, call_id: str) -> TemplateMark:
    return TemplateMark(mark.replace(CALL_ID_PLACEHOLDER, call_id))


def plain_text_format(tools: Sequence[Mapping[str, object]], *, system: str = "") -> ChatFormat:
    """Return a format without a chat template: tools as lines of JSON, calls and responses in plain tags."""
    lines = "".join(f"{json.dumps(tool, ensure_ascii=False)}\n" for tool in tools)
    preamble = f"{system}\n\n" if system else ""
    if tools:
        preamble += (
            f"You may call these tools:\n{lines}A call is\n"
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>\n\n'
        )
    return ChatFormat(
        before_problem=preamble,
        after_problem="\n",
        turn_end="",
        before_response="\n<tool_response>\n",
        between_responses="\n</tool_response>\n<tool_response>\n",
        after_response="\n</tool_response>\n",
        user=("\n<tool_response>\n", "\n</tool_response>\n"),
    )
