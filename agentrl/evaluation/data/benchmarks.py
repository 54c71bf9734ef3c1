"""Public benchmarks by name and custom benchmarks by path: where to read the problems, and their expected number.

A wrong number of problems, a repeated problem or a problem without an answer would make every score wrong. Each is
therefore an error. Benchmarks are not pinned to a Hugging Face commit; results record a hash of the problems instead.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.problems.rows import ProblemError, ProblemFieldError
from agentrl.problems.settings import FieldName, ProblemSourceSettings
from agentrl.problems.sources import FILE_KINDS, read_places
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem, Verdict

if TYPE_CHECKING:
    from agentrl_envs.grading import Grader


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark with its file in a data folder (without ``.jsonl`` or ``.parquet``) and its Hugging Face data set."""

    name: str
    file: str
    hub_id: str
    split: str
    problems: int
    fields: Mapping[FieldName, str]
    subset: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBenchmark:
    """Problems in the order of the data, their locations, and all data errors except unreadable answers.

    A location is a file and line, or a data set and row. Every error starts with its location.
    """

    name: str
    path: str
    revision: str | None
    problems: tuple[Problem, ...]
    places: tuple[str, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCheck:
    """All errors in a benchmark's data. ``timeouts`` lists reference answers whose grading timed out."""

    name: str
    problems: int
    errors: tuple[str, ...]
    timeouts: tuple[str, ...] = field(default=())

    def describe(self) -> list[str]:
        wrong = [*self.errors, *self.timeouts]
        head = f"{self.name}: {self.problems} problems, {len(wrong) or 'no'} data error{'' if len(wrong) == 1 else 's'}"
        return [head, *(f"  {error}" for error in wrong)]


_PROBLEM: Mapping[FieldName, str] = {"problem": "problem", "answer": "answer"}
_QUESTION: Mapping[FieldName, str] = {"problem": "question", "answer": "answer"}
_FINAL_ANSWER: Mapping[FieldName, str] = {"problem": "question", "answer": "final_answer.0"}

_ALL = (
    Benchmark(
        name="aime24", file="aime24", hub_id="HuggingFaceH4/aime_2024", split="train", problems=30, fields=_PROBLEM
    ),
    Benchmark(name="aime25", file="aime25", hub_id="math-ai/aime25", split="test", problems=30, fields=_PROBLEM),
    Benchmark(name="amc23", file="amc23", hub_id="math-ai/amc23", split="test", problems=40, fields=_QUESTION),
    Benchmark(
        name="math500", file="math500", hub_id="HuggingFaceH4/MATH-500", split="test", problems=500, fields=_PROBLEM
    ),
    Benchmark(
        name="hmmt25", file="hmmt25", hub_id="MathArena/hmmt_feb_2025", split="train", problems=30, fields=_PROBLEM
    ),
    Benchmark(
        name="olympiadbench",
        file="olympiadbench",
        hub_id="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",  # open-ended, text only, mathematics, English, competition
        split="train",
        problems=674,
        fields=_FINAL_ANSWER,
    ),
    Benchmark(
        name="gsm8k",
        file="gsm8k_test",
        hub_id="openai/gsm8k",
        subset="main",
        split="test",
        problems=1319,
        fields=_QUESTION,
    ),
)

BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _ALL}


def load_benchmark(name: str, *, data_dir: str | Path | None = None) -> list[Problem]:
    """Load the problems of a benchmark and check them for data errors.

    ``name`` is one of `BENCHMARKS` or the path of a ``.jsonl`` or ``.parquet`` file. Named benchmarks are read from
    ``data_dir`` if it is not None, otherwise from Hugging Face. Raises ProblemError for an unknown name (with the
    nearest known name), a missing file, missing fields (with the fields that exist), a wrong number of problems, and a
    problem that is repeated, shares its id with another problem or has no answer.
    """
    loaded = read_benchmark(name, data_dir=data_dir)
    if loaded.errors:
        more = len(loaded.errors) - 1
        rest = f" (and {more} more: list them with agentrl eval --check-data)" if more else ""
        raise ProblemError(loaded.errors[0] + rest)
    return list(loaded.problems)


def read_benchmark(name: str, *, data_dir: str | Path | None = None) -> LoadedBenchmark:
    """Load a benchmark like `load_benchmark`, but list errors in single rows and leave out rows without an answer.

    Raises ProblemError if the data cannot be read: unknown name, missing or broken file, missing fields.
    """
    benchmark = BENCHMARKS.get(name)
    settings = _source_of_file(name) if benchmark is None else _source(benchmark, data_dir)
    problems, places, unanswered = [], [], []
    try:
        for location, problem in read_places(settings):
            if problem is None or problem.answer is None:
                unanswered.append(f"{location}: the problem has no answer")
            else:
                problems.append(problem)
                places.append(location)
    except ProblemFieldError as error:
        left_out = re.search(r"fields\.\S+=null$", str(error))
        fields = [left_out[0]] if left_out else ["fields.problem=FIELD", "fields.answer=FIELD"]
        overrides = " ".join(f"data.eval.0.{key}" for key in (f"path={settings.path}", *fields))
        raise ProblemFieldError(f"{error}: use {overrides} instead of --benchmarks") from error
    rows = len(problems) + len(unanswered)
    return LoadedBenchmark(
        name=name,
        path=settings.path,
        revision=settings.revision,
        problems=tuple(problems),
        places=tuple(places),
        errors=(
            *_miscounted(name, settings.path, rows, None if benchmark is None else benchmark.problems),
            *unanswered,
            *_repeated(places, [problem.statement.strip() for problem in problems], "the problem"),
            *_repeated(places, [problem.id for problem in problems], "the id"),
        ),
    )


async def check_benchmark(name: str, grader: Grader, *, data_dir: str | Path | None = None) -> DataCheck:
    """Collect all errors in a benchmark's data, including reference answers that are not graded equal to themselves."""
    loaded = read_benchmark(name, data_dir=data_dir)
    answers = [str(problem.answer) for problem in loaded.problems]
    verdicts = await asyncio.gather(*(grader.check_gold(answer) for answer in answers))
    unreadable, timeouts = [], []
    for location, gold, verdict in zip(loaded.places, answers, verdicts, strict=True):
        answer = gold if len(gold) <= 60 else gold[:60] + "..."
        if verdict is Verdict.GRADER_TIMEOUT:
            timeouts.append(f"{location}: grading the answer {answer!r} timed out")
        elif verdict is not Verdict.CORRECT:
            unreadable.append(f"{location}: the answer {answer!r} cannot be read ({verdict.value})")
    errors = (*loaded.errors, *unreadable)
    return DataCheck(name=name, problems=len(loaded.problems), errors=errors, timeouts=tuple(timeouts))


def _source(benchmark: Benchmark, data_dir: str | Path | None) -> ProblemSourceSettings:
    if data_dir is None:
        return ProblemSourceSettings(
            path=benchmark.hub_id,
            split=benchmark.split,
            subset=benchmark.subset,
            revision=benchmark.revision,
            fields=dict(benchmark.fields),
            skip_unanswered=True,
        )
    # Copies in a data folder usually have `problem` and `answer`, whatever the field names of the original.
    files = [Path(data_dir) / (benchmark.file + kind) for kind in FILE_KINDS]
    existing = next((file for file in files if file.exists()), files[0])
    return ProblemSourceSettings(path=str(existing), skip_unanswered=True)


def _source_of_file(path: str) -> ProblemSourceSettings:
    if Path(path).suffix.lower() not in FILE_KINDS:
        raise ProblemError(
            f"unknown benchmark {path!r}; valid: {', '.join(BENCHMARKS)}, or a file ending in {' or '.join(FILE_KINDS)}"
            f"{did_you_mean(path, BENCHMARKS)}"
        )
    return ProblemSourceSettings(path=path, skip_unanswered=True)


def _miscounted(name: str, path: str, rows: int, expected: int | None) -> list[str]:
    if expected is None:
        return [] if rows else [f"{path}: the file contains no problems"]
    if rows == expected:
        return []
    return [f"{path}: {name} should have {expected} problems, but the data has {rows}"]


def _repeated(places: Sequence[str], keys: Iterable[str], what: str) -> list[str]:
    """One error for each key that several rows share, with the location of the second row."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return [
        f"{places[same[1]]}: {what} {key[:60]!r} occurs {len(same)} times, first in {places[same[0]]}"
        for key, same in rows.items()
        if len(same) > 1
    ]
