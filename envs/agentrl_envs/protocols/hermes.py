r"""Protocol for tool calls, with messages rendered by the model's chat template.

The model writes one or more calls in the format of its model family (`agentrl_envs.tool_call_formats`) and ends its
turn with the template's end-of-turn marker. The responses follow in the order of the calls, rendered by the template as
messages of the role ``tool``. A turn without a call is the last turn. Its last ``\boxed{...}`` is the answer.

**Reasoning.** Text before the last ``</think>`` and text after an unclosed ``<think>`` contain neither calls nor
answers. It does not matter whether the model or the template wrote the tag. Reasoning remains in the conversation, even
if the template would remove it from later turns.

**Malformed calls.** A call is malformed if it is not closed, cannot be parsed, lacks a name or arguments, names an
unknown tool, or has invalid arguments. The response is an error message. The other calls of the turn are executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_envs.chat import ChatFormat, plain_text_format, split_reasoning
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.protocols.base import MalformedCall, ParsedTurn, TextProtocol, ToolRequest
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.tool_call_formats import ParsedCall
from agentrl_envs.tools import ToolSet

_CALL_END = "</tool_call>"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class HermesProtocol(TextProtocol):
    """Protocol for tool calls in a conversation rendered by a chat template.

    Executes the first ``max_calls`` calls of a turn, and responds to all other calls with one error message.
    """

    chat: ChatFormat
    tools: ToolSet
    max_calls: int

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Empty, because the model itself ends its turn, after any number of calls."""
        return ()

    def turn_complete(self, text: str) -> bool:
        """Return False, because no text ends a turn."""
        return False

    def parse(self, text: str) -> ParsedTurn:
        """Return the turn's calls or, without calls, its answer."""
        visible = self._text_outside_reasoning(text)
        calls = [self._check_call(call) for call in self._find_calls(visible)]
        if len(calls) > self.max_calls:
            calls[self.max_calls :] = [
                _malformed_call(f"more than {self.max_calls} calls in one turn; the other calls were not run")
            ]
        return ParsedTurn(program=None, answer=None if calls else last_boxed_answer(visible), calls=tuple(calls))

    def format_results(self, text: str, results: Sequence[str]) -> str:
        """Return the responses between template marks. The content of the responses is encoded as plain text."""
        return self.chat.format_tool_responses(
            results, [call.id for call in self._find_calls(self._text_outside_reasoning(text))]
        )

    def observation(self, text: str, results: Sequence[str]) -> str:
        """Return the responses between template marks, however the turn ended."""
        return self.format_results(text, results)

    def format_user_reply(self, text: str) -> str:
        """Return an environment's response to a turn without a call, as a user message."""
        return self.chat.format_user_reply(text)

    def _text_outside_reasoning(self, text: str) -> str:
        return split_reasoning(text, opened=self.chat.opens_reasoning)[1]

    def _find_calls(self, visible: str) -> list[ParsedCall]:
        return self.chat.calls.find_calls(visible, self._parameter_schema)

    def _parameter_schema(self, name: str) -> Mapping[str, object] | None:
        schema = self.tools.schema(name)
        return None if schema is None else schema.parameters

    def _check_call(self, call: ParsedCall) -> ToolRequest | MalformedCall:
        if call.error:
            return _malformed_call(call.error)
        schema = self.tools.schema(call.name)
        if schema is None:
            known = ", ".join(tool.name for tool in self.tools.schemas)
            return _malformed_call(f"there is no tool {call.name[:64]!r}; the tools are: {known}")
        arguments = call.arguments
        if not isinstance(arguments, dict):
            return _malformed_call(f'the call to {schema.name} needs "{self.chat.calls.key}", a JSON object')
        if _LONE_SURROGATE.search(json.dumps(arguments, ensure_ascii=False)):
            return _malformed_call(
                f"the arguments of {schema.name} contain half of a surrogate pair, which is not a valid character"
            )
        refusal = schema.find_argument_error(arguments)
        return _malformed_call(refusal) if refusal is not None else ToolRequest(name=schema.name, arguments=arguments)


class PlainTextCallsProtocol(HermesProtocol):
    """Protocol for tool calls in plain text. A turn ends with its first call."""

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The closing tag of a call."""
        return (_CALL_END,)

    def turn_complete(self, text: str) -> bool:
        """Return True if a call is closed."""
        return _CALL_END in text

    def parse(self, text: str) -> ParsedTurn:
        """Return the first call. Ignores text that the engine sampled after the call."""
        return super().parse(text[: text.index(_CALL_END) + len(_CALL_END)] if self.turn_complete(text) else text)


def _malformed_call(reason: str) -> MalformedCall:
    return MalformedCall(message=f"ToolCallError: {reason}")


def make_hermes_protocol(settings: SimpleTIRSettings, chat: ChatFormat | None, tools: ToolSet) -> HermesProtocol:
    """Create the protocol hermes, or its plain-text variant if ``environment.chat`` is ``never``.

    Raises EpisodeUsageError if the protocol requires ``chat`` and ``chat`` is None.
    """
    plain = settings.chat == "never"
    if plain:
        chat = plain_text_format(
            [schema.as_openai_function() for schema in tools.schemas], system=settings.system_prompt
        )
    if chat is None:
        raise EpisodeUsageError("protocol hermes requires the policy's chat template: pass it as chat")
    return (PlainTextCallsProtocol if plain else HermesProtocol)(
        instruction=settings.effective_instruction,
        observation_limit=settings.observation_limit,
        chat=chat,
        tools=tools,
        max_calls=settings.max_calls,
    )
