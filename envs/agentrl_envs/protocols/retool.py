r"""The ReTool protocol: fenced programs in ``<code>``, outputs in ``<interpreter>`` and the answer in ``<answer>``.

A turn ends at the first ``</code>`` or ``</answer>``. Text that the engine sampled after the tag is ignored. ``<code>``
contains a fence with ``py``, ``python`` or ``python3``. The program ends at the last fence before ``</code>``. The
answer is the last ``\boxed{...}`` between ``<answer>`` and ``</answer>``, or the last ``\boxed{...}`` in a turn that
ends without either tag.

**Malformed turns.** A turn is malformed if ``</code>`` has no preceding ``<code>``, if ``<code>`` is not closed, or if
``<code>`` contains no closed fence or only an empty fence. The model then reads an error message instead of the output.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl_envs.protocols.base import ParsedTurn, TextProtocol, malformed_turn
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.types import Problem

_CLOSE_CODE, _CLOSE_ANSWER = "</code>", "</answer>"
_CLOSING_TAG = re.compile(f"{_CLOSE_CODE}|{_CLOSE_ANSWER}")
_FENCE = re.compile(r"```(?:py|python|python3)[ \t]*\r?\n(?P<program>.*)```", re.DOTALL | re.IGNORECASE)
_ANSWER_FORMAT = "\n\nThe last part of your reply must be\n<answer>\n\\boxed{your final answer}\n</answer>"
_NOT_OPENED = "ToolCallError: </code> without <code> before it"
_NOT_CLOSED = "ToolCallError: <code> is not closed by </code>"
_NO_FENCE = "ToolCallError: there is no closed ```python block between <code> and </code>"
_EMPTY_PROGRAM = "ToolCallError: the ```python block is empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReToolProtocol(TextProtocol):
    """The ReTool protocol: programs, outputs and answers in tags.

    >>> protocol = ReToolProtocol(instruction="", observation_limit=512)
    >>> turn = "<code>\\n```python\\nprint(2+3)\\n```\\n</code>"
    >>> protocol.turn_complete(turn), protocol.parse(turn).program, protocol.observation(turn, ["5"])
    (True, 'print(2+3)\\n', '\\n\\n<interpreter>\\n5\\n</interpreter>\\n\\n')
    """

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The closing tags of a program and of an answer."""
        return (_CLOSE_CODE, _CLOSE_ANSWER)

    def user_message(self, statement: str) -> str:
        """Return the instruction, statement and answer format. Without an instruction, return only the statement."""
        return f"{self.instruction}\n\nProblem:\n{statement}{_ANSWER_FORMAT}" if self.instruction else statement

    def plain_prompt(self, problem: Problem) -> str:
        """Return the message, followed by an empty line if it has an instruction."""
        return self.user_message(problem.statement) + ("\n\n" if self.instruction else "\n")

    def turn_complete(self, text: str) -> bool:
        """Return True if the text contains a closing tag, with or without its opening tag."""
        return _CLOSING_TAG.search(text) is not None

    def parse(self, text: str) -> ParsedTurn:
        """Parse the text before the first closing tag: a program, an answer, or a malformed call."""
        end = _CLOSING_TAG.search(text)
        before = text if end is None else text[: end.start()]
        opened = before.rfind("<code>")
        if end is None or end.group() == _CLOSE_ANSWER:
            if end is None and opened >= 0:
                return malformed_turn(_NOT_CLOSED)
            return ParsedTurn(program=None, answer=last_boxed_answer(before[max(before.rfind("<answer>"), 0) :]))
        if opened < 0:
            return malformed_turn(_NOT_OPENED)
        fence = _FENCE.search(before, opened)
        if fence is None:
            return malformed_turn(_NO_FENCE)
        program = fence["program"].replace("\r\n", "\n")
        return ParsedTurn(program=program, answer=None) if program.strip() else malformed_turn(_EMPTY_PROGRAM)

    def format_results(self, text: str, results: Sequence[str]) -> str:
        """Return the result between its tags. A printed ``</interpreter>`` is not escaped."""
        return f"\n\n<interpreter>\n{' '.join(results)}\n</interpreter>\n\n"
