r"""Tool calls as Hermes and Qwen models write them, in the model's own chat template.

The model writes ``<tool_call>`` and a JSON object with ``name`` and ``arguments``, once or several times; its turn ends
where it ends itself (the template's end of turn). The responses come back in the order of the calls, as the template
renders messages of the role ``tool``, up to where the next turn begins. A turn without a call is the last one; the last
``\boxed{...}`` in it is the answer.

**Thinking.** What stands before the last ``</think>`` is neither call nor answer, and so is what follows a ``<think>``
that is never closed, be it the model's or the template's. It stays in the conversation, whatever the template would do
with it later.

**Malformed** is a call that is not closed, is not JSON, has no name or no arguments, names no tool that exists, or
whose arguments the tool does not take. It gets a response that says so; the other calls of the turn are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from agentrl_envs.answers import last_boxed
from agentrl_envs.protocols.answer_text import AnswerInText
from agentrl_envs.protocols.base import MalformedCall, ParsedTurn, ToolRequest
from agentrl_envs.protocols.chat import ChatFormat
from agentrl_envs.tools import ToolSet
from agentrl_envs.types import Problem

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, kw_only=True, slots=True)
class HermesProtocol(AnswerInText):
    """Tool calls in a chat template. Of one turn ``max_calls`` calls are answered; the rest get one error."""

    chat: ChatFormat
    tools: ToolSet
    max_calls: int

    @property
    def stop(self) -> tuple[str, ...]:
        """None: the model ends its turns itself, after one call or several."""
        return ()

    def prompt(self, problem: Problem) -> str:
        """Instruction and statement as a user's message; the tools stand where the template puts them."""
        return self.chat.prompt("\n\n".join(part for part in (self.instruction, problem.statement) if part))

    def turn_complete(self, text: str) -> bool:
        """False: no text ends a turn."""
        return False

    def parse(self, text: str) -> ParsedTurn:
        """The calls; where there are none, the answer."""
        said = _after_thinking(text, opened=self.chat.after_problem.rstrip().endswith("<think>"))
        calls = list(self._calls(said))
        if len(calls) > self.max_calls:
            calls[self.max_calls :] = [_error(f"more than {self.max_calls} calls in one turn; these were not made")]
        return ParsedTurn(program=None, answer=None if calls else last_boxed(said), calls=tuple(calls))

    def observation(self, text: str, results: Sequence[str]) -> str:
        """The responses in the template's marks; what they say is plain text, whatever it looks like."""
        return self.chat.responses(results)

    def _calls(self, said: str) -> Iterator[ToolRequest | MalformedCall]:
        position = 0
        while (start := said.find(_OPEN, position)) >= 0:
            position = start + len(_OPEN)
            value, end = _read(said, position)
            close = said.find(_CLOSE, position if end is None else end)
            if close < 0:
                yield _error(f"{_OPEN} is not closed by {_CLOSE}")
                return
            if end is None or said[end:close].strip():
                yield _error(f"between {_OPEN} and {_CLOSE} there must be one JSON object")
            else:
                yield self._request(value)
            position = close + len(_CLOSE)

    def _request(self, value: object) -> ToolRequest | MalformedCall:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return _error('a call is a JSON object with a text "name" and an object "arguments"')
        schema = self.tools.schema(value["name"])
        if schema is None:
            known = ", ".join(tool.name for tool in self.tools.schemas)
            return _error(f"there is no tool {value['name'][:64]!r}; there are: {known}")
        arguments = value.get("arguments")
        if not isinstance(arguments, dict):
            return _error(f'the call of {schema.name} needs "arguments", a JSON object')
        if _LONE_SURROGATE.search(json.dumps(arguments, ensure_ascii=False)):
            return _error(f"the arguments of {schema.name} hold half of a surrogate pair, which is no character")
        refusal = schema.refusal(arguments)
        return _error(refusal) if refusal is not None else ToolRequest(name=schema.name, arguments=arguments)


def _no_number(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_number)


def _read(text: str, start: int) -> tuple[object, int | None]:
    """The JSON value at ``start``, blanks before it skipped, and where it ends; None where there is none.

    So a ``</tool_call>`` inside a string does not end the call.
    """
    blanks = _BLANKS.match(text, start)
    try:
        return _DECODER.raw_decode(text, start if blanks is None else blanks.end())
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, or a thousand brackets
        return None, None


def _after_thinking(text: str, *, opened: bool) -> str:
    """What is said; ``opened``: the template has begun the thoughts, so without an end everything is thought."""
    _, closed, said = text.rpartition("</think>")
    return "" if opened and not closed else said.partition("<think>")[0]


def _error(reason: str) -> MalformedCall:
    return MalformedCall(message=f"CallError: {reason}")
