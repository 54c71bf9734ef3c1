r"""Tool calls in the model's own chat template.

The model writes one call or several in its family's format (`agentrl_envs.tool_call_formats`) and ends its turn itself,
with the template's end of turn. The responses come back in the order of the calls, as the template renders
messages of the role ``tool``, up to where the next turn begins. A turn without a call is the last one; the last
``\boxed{...}`` in it is the answer.

**Thinking.** What stands before the last ``</think>`` is neither call nor answer, and so is what follows a ``<think>``
that is never closed, be it the model's or the template's. It stays in the conversation, whatever the template would do
with it later.

**Malformed** is a call that is not closed, cannot be read, has no name or no arguments, names no tool that exists, or
whose arguments the tool does not take. It gets a response that says so; the other calls of the turn are made.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_envs.chat import ChatFormat
from agentrl_envs.protocols.base import MalformedCall, ParsedTurn, TextAnswerProtocol, ToolRequest, last_boxed
from agentrl_envs.tool_call_formats import ParsedCall
from agentrl_envs.tools import ToolSet
from agentrl_envs.types import Problem

_PLAIN_END = "</tool_call>"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class HermesProtocol(TextAnswerProtocol):
    """Tool calls in a chat template. Of one turn ``max_calls`` calls are answered; the rest get one error."""

    chat: ChatFormat
    tools: ToolSet
    max_calls: int

    @property
    def stop(self) -> tuple[str, ...]:
        """None: the model ends its turns itself, after one call or several."""
        return ()

    def message(self, statement: str) -> str:
        """Instruction and statement; the tools stand where the template puts them."""
        return "\n\n".join(part for part in (self.instruction, statement) if part)

    def prompt(self, problem: Problem) -> str:
        """The problem's messages, of which the one that poses it begins with the instruction."""
        return self.chat.prompt(problem, self.message)

    def turn_complete(self, text: str) -> bool:
        """False: no text ends a turn."""
        return False

    def parse(self, text: str) -> ParsedTurn:
        """The calls; where there are none, the answer."""
        said = self._said(text)
        calls = [self._request(found) for found in self._found(said)]
        if len(calls) > self.max_calls:
            calls[self.max_calls :] = [_error(f"more than {self.max_calls} calls in one turn; these were not made")]
        return ParsedTurn(program=None, answer=None if calls else last_boxed(said), calls=tuple(calls))

    def observation(self, text: str, results: Sequence[str]) -> str:
        """The responses in the template's marks; what they say is plain text, whatever it looks like."""
        return self.chat.responses(results, [found.id for found in self._found(self._said(text))])

    def reply(self, text: str) -> str:
        """What an environment says to a turn without a call: a user's message."""
        return self.chat.reply(text)

    def _said(self, text: str) -> str:
        return after_thinking(text, opened=self.chat.opens_thoughts)

    def _found(self, said: str) -> list[ParsedCall]:
        return self.chat.calls.find(said, self._parameters)

    def _parameters(self, name: str) -> Mapping[str, object] | None:
        schema = self.tools.schema(name)
        return None if schema is None else schema.parameters

    def _request(self, found: ParsedCall) -> ToolRequest | MalformedCall:
        if found.error:
            return _error(found.error)
        schema = self.tools.schema(found.name)
        if schema is None:
            known = ", ".join(tool.name for tool in self.tools.schemas)
            return _error(f"there is no tool {found.name[:64]!r}; there are: {known}")
        arguments = found.arguments
        if not isinstance(arguments, dict):
            return _error(f'the call of {schema.name} needs "{self.chat.calls.key}", a JSON object')
        if _LONE_SURROGATE.search(json.dumps(arguments, ensure_ascii=False)):
            return _error(f"the arguments of {schema.name} hold half of a surrogate pair, which is no character")
        refusal = schema.refusal(arguments)
        return _error(refusal) if refusal is not None else ToolRequest(name=schema.name, arguments=arguments)


class PlainCalls(HermesProtocol):
    """Calls in plain text: a turn ends with its first call."""

    @property
    def stop(self) -> tuple[str, ...]:
        """The end of a call."""
        return (_PLAIN_END,)

    def turn_complete(self, text: str) -> bool:
        """True once a call is closed."""
        return _PLAIN_END in text

    def parse(self, text: str) -> ParsedTurn:
        """The first call; what an engine sampled past it is none."""
        return super().parse(text[: text.index(_PLAIN_END) + len(_PLAIN_END)] if self.turn_complete(text) else text)


def after_thinking(text: str, *, opened: bool) -> str:
    """What is said; ``opened``: the template has begun the thoughts, so without an end everything is thought."""
    _, closed, said = text.rpartition("</think>")
    return "" if opened and not closed else said.partition("<think>")[0]


def _error(reason: str) -> MalformedCall:
    return MalformedCall(message=f"CallError: {reason}")
