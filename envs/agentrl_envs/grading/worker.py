"""The grading process: ``python -m agentrl_envs.grading.worker DEADLINE_SECONDS MEMORY_MB``.

Reads one JSON object a line from stdin (``{"gold": ..., "answer": ...}``), writes ``{"verdict": ...}`` to stdout,
and first ``{"ready": true}``. It ends at the end of stdin, so it does not outlive its parent; and an alarm with the
default action ends it in the middle of a comparison, C code included, should the parent no longer be there to do it.
math-verify's own timeouts (SIGALRM handlers) are off.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import warnings
from typing import Any, TextIO

from agentrl_envs.types import Verdict

_GRACE_SECONDS = 2.0  # the parent's deadline comes first


def main(deadline: float, memory_mb: int) -> None:
    """Answer requests until stdin ends."""
    replies = _private_stdout()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    import math_verify  # noqa: F401  (slow: before the first deadline runs)

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, deadline + _GRACE_SECONDS)
        verdict = compare(request["answer"], request["gold"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, {"verdict": verdict.value})


def compare(answer: str, gold: str) -> Verdict:
    """The verdict of math-verify, the gold answer given first. A comparison that needs too much memory times out."""
    from math_verify import verify

    try:
        gold_forms = _forms(gold)
        answer_forms = _forms(answer)
        if verify(gold_forms, answer_forms, timeout_seconds=None):
            return Verdict.CORRECT
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT
    if not _understood(gold_forms):
        return Verdict.UNPARSABLE_GOLD
    return Verdict.INCORRECT if _understood(answer_forms) else Verdict.UNPARSABLE_ANSWER


def _forms(text: str) -> list[Any]:
    """Every reading of a text: LaTeX and plain numbers by math-verify, Python notation by us."""
    from math_verify import parse

    from agentrl_envs.grading.notation import python_notation

    in_python = python_notation(text)
    forms = parse("\\boxed{" + text + "}", parsing_timeout=None)
    return forms if in_python is None else [in_python, *forms]


def _understood(forms: list[Any]) -> bool:
    """Whether some reading is more than the bare string that math-verify falls back to."""
    return any(not isinstance(form, str) for form in forms)


def _private_stdout() -> TextIO:
    """The pipe to the parent; whatever libraries print goes to stderr instead."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
