"""The grading process: ``python -m agentrl_envs.grading.worker DEADLINE_SECONDS MEMORY_MB``.

Reads one JSON object a line from stdin (``{"gold": ..., "answer": ...}``; with ``null`` for the answer the gold answer
is checked), writes ``{"verdict": ...}`` to stdout, and first ``{"ready": true}``. It ends at the end of stdin, so it
does not outlive its parent; and an alarm with the default action ends it in the middle of a comparison, C code
included, should the parent no longer be there to do it.
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
from typing import TextIO

_GRACE_SECONDS = 2.0  # the parent's deadline comes first


def main(deadline: float, memory_mb: int) -> None:
    """Answer requests until stdin ends."""
    replies = _private_stdout()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    from agentrl_envs.grading.comparison import check_gold, compare  # slow: before the first deadline runs

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, deadline + _GRACE_SECONDS)
        gold, answer = request["gold"], request["answer"]
        verdict = check_gold(gold) if answer is None else compare(answer, gold)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, {"verdict": verdict.value})


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
