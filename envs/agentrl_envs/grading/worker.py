"""The grading process: ``python -m agentrl_envs.grading.worker DEADLINE START_DEADLINE HANG_DEADLINE MEMORY_MB``.

The process writes ``{"ready": true}`` to stdout. It then reads JSON objects from stdin, one per line
(``{"reference": ..., "answer": ...}``), and responds to each with ``{"verdict": ...}``. A ``null`` answer checks the
reference answer. The process exits at the end of stdin, so it does not outlive its parent.

The deadlines are in CPU seconds, so that no verdict depends on the load of the machine. At a deadline, the kernel kills
the process with SIGPROF, even inside C code, and the exit status reports the signal to the parent. A wall-clock alarm
ends a process that hangs without a parent. The timeouts of math-verify (SIGALRM handlers) are disabled.
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

_GRACE_SECONDS = 2.0  # added to hang_deadline, so that the parent's wall-clock deadline expires first


def main(deadline: float, start_deadline: float, hang_deadline: float, memory_mb: int) -> None:
    """Respond to requests until stdin ends. Deadlines are in seconds."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    _limit_cpu_time(start_deadline)
    replies = _redirect_stdout()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent handles it
    from agentrl_envs.grading.comparison import (  # slow imports, which count toward start_deadline
        cache_reference,
        check_reference,
        compare,
    )

    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_cpu_time(0)
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        reference, answer = request["reference"], request["answer"]
        signal.setitimer(signal.ITIMER_REAL, hang_deadline + _GRACE_SECONDS)
        _limit_cpu_time(deadline)
        if answer is None:
            verdict = check_reference(reference)
        else:
            cache_reference(reference)
            _limit_cpu_time(deadline)
            verdict = compare(answer, reference)
        _limit_cpu_time(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, {"verdict": verdict.value})


def _limit_cpu_time(seconds: float) -> None:
    """Limit the CPU time to ``seconds`` from now. 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _redirect_stdout() -> TextIO:
    """Return the pipe to the parent, and redirect stdout to stderr, so that libraries cannot write into the pipe."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _reply(replies: TextIO, message: dict[str, object]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
