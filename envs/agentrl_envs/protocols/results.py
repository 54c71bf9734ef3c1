"""What is shown of a program that ran: the same in every protocol, whatever is written around it."""

from __future__ import annotations

from agentrl_sandbox.client import Execution, Outcome

_NOTES = {
    Outcome.TIMEOUT: "TimeoutError: the program did not finish in time",
    Outcome.MEMORY_LIMIT: "MemoryError: the program needs more memory than it may use",
    Outcome.OUTPUT_LIMIT: "OutputLimitError: the program prints more than it may",
    Outcome.KILLED: "KilledError: the program was killed",
}
_CUT = "\n[... output cut ...]\n"


def shown(execution: Execution, limit: int) -> str:
    """The output, or what went wrong: the last line of stderr, or a note where a limit ended the program."""
    return clip(_NOTES.get(execution.outcome) or _last_line(execution.stderr) or execution.stdout.strip("\r\n"), limit)


def clip(output: str, limit: int) -> str:
    """``output``, or of a longer one its first and its last half of ``limit`` characters."""
    if len(output) <= limit:
        return output
    head = limit // 2
    return output[:head] + _CUT + output[len(output) - (limit - head) :]


def with_setup(setup: str, program: str) -> str:
    """The problem's setup and the program in one module."""
    return "\n".join(part for part in (setup, program) if part)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "").strip()
