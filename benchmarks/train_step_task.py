"""Common code of both sides of the benchmark: task, reward and connection to the parent. Standard library only."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

LEARNING_RATE = 1e-5
BETAS = (0.9, 0.999)
CLIP = 0.2
GRADIENT_CLIP = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """One step is ``prompts * samples`` trajectories of exactly ``new_tokens`` sampled tokens.

    ``folder`` contains ``model/`` (Qwen2 and its tokenizer), ``problems.jsonl`` and each side's scratch files. Each
    side trains in about ``micro_batches`` micro-batches; ``overrides`` are settings of agentrl.
    """

    folder: str
    prompts: int
    samples: int
    new_tokens: int
    threads: int
    steps: int
    micro_batches: int
    overrides: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Sampled tokens of one step."""
        return self.prompts * self.samples * self.new_tokens

    @property
    def model(self) -> str:
        return str(Path(self.folder) / "model")

    @property
    def problems(self) -> Path:
        return Path(self.folder) / "problems.jsonl"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        values = json.loads(text)
        return cls(**{**values, "overrides": tuple(values["overrides"])})


def reward(text: str) -> float:
    """Return the share of distinct characters in the sampled text.

    >>> reward("aab"), reward("")
    (0.6666666666666666, 0.0)
    """
    return len(set(text)) / len(text) if text else 0.0


class ParentLine:
    """Connection of a child to the parent. Waits for a message before each step, and reports the time of the step."""

    def __init__(self) -> None:
        """Use standard output for reports. The output of libraries goes to standard error."""
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began = self._cpu = 0.0

    def ready(self, **facts: object) -> None:
        """Report that set-up is complete, and wait for the first step."""
        self._send(facts)
        self._wait()

    def step_done(self, parts: Mapping[str, float] | None = None, *, last: bool = False) -> None:
        """Report a step (wall and CPU seconds since its start, and its ``parts``), and wait for the next step."""
        seconds, cpu = time.perf_counter() - self._began, cpu_seconds() - self._cpu
        self._send({"seconds": seconds, "cpu_seconds": cpu, "parts": dict(parts or {})})
        if not last:
            self._wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")

    def _wait(self) -> None:
        if not sys.stdin.readline():
            raise SystemExit("the parent has exited")
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()


def cpu_seconds() -> float:
    """Return the user and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
