"""The public benchmarks by name: where their problems are, and how many there must be.

A wrong number of problems or a repeated one would make every score wrong, so both are errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.problems.errors import ProblemError, did_you_mean
from agentrl.problems.settings import FieldName, ProblemSourceSettings
from agentrl.problems.sources import read_problems
from agentrl_envs.types import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """One benchmark: its file name in a data folder, and its Hugging Face id for where there is none."""

    name: str
    file: str
    hub_id: str
    split: str
    problems: int
    subset: str | None = None
    fields: Mapping[FieldName, str]


_PROBLEM: Mapping[FieldName, str] = {"problem": "problem", "answer": "answer"}
_QUESTION: Mapping[FieldName, str] = {"problem": "question", "answer": "answer"}

_ALL = (
    Benchmark(
        name="aime24",
        file="aime24.jsonl",
        hub_id="HuggingFaceH4/aime_2024",
        split="train",
        problems=30,
        fields=_PROBLEM,
    ),
    Benchmark(name="aime25", file="aime25.jsonl", hub_id="math-ai/aime25", split="test", problems=30, fields=_PROBLEM),
    Benchmark(name="amc23", file="amc23.jsonl", hub_id="math-ai/amc23", split="test", problems=40, fields=_QUESTION),
    Benchmark(
        name="math500",
        file="math500.jsonl",
        hub_id="HuggingFaceH4/MATH-500",
        split="test",
        problems=500,
        fields=_PROBLEM,
    ),
    Benchmark(
        name="gsm8k",
        file="gsm8k_test.jsonl",
        hub_id="openai/gsm8k",
        subset="main",
        split="test",
        problems=1319,
        fields=_QUESTION,
    ),
)

BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}


def load_benchmark(name: str, *, data_dir: str | Path | None = None) -> list[Problem]:
    """The problems of a benchmark, from its file in ``data_dir`` or, without one, from its Hugging Face id.

    Raises ProblemError on an unknown name (it says the nearest), a missing file, a problem without answer, a number of
    problems other than the benchmark's, and a repeated statement.
    """
    if name not in BENCHMARKS:
        raise ProblemError(
            f"unknown benchmark {name!r}; valid: {', '.join(BENCHMARKS)}{did_you_mean(name, BENCHMARKS)}"
        )
    benchmark = BENCHMARKS[name]
    if data_dir is not None:
        # The copies in a data folder all say ``problem`` and ``answer``, whatever the original's fields.
        settings = ProblemSourceSettings(path=str(Path(data_dir) / benchmark.file))
    else:
        settings = ProblemSourceSettings(
            path=benchmark.hub_id, split=benchmark.split, subset=benchmark.subset, fields=dict(benchmark.fields)
        )
    problems = read_problems(settings)
    if len(problems) != benchmark.problems:
        raise ProblemError(f"{settings.path}: {name} has {benchmark.problems} problems, found {len(problems)}")
    statement, times = Counter(problem.statement.strip() for problem in problems).most_common(1)[0]
    if times > 1:
        raise ProblemError(f"{settings.path}: {name} holds a problem {times} times: {statement[:60]!r}")
    return problems
