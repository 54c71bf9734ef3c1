"""Benchmarks of an evaluation: sources of their problems, expected counts, and checks of their data.

A wrong number of problems, a repeated problem or a problem without an answer would distort every score, so each is an
error. Benchmarks are not pinned to a Hugging Face commit; results record a hash of the problems instead.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import cast

from agentrl.errors import SettingsError
from agentrl.evaluation.formats import ProblemRow, ProblemSetRecord
from agentrl.evaluation.settings import EvaluationOptions, EvaluationSections
from agentrl.problems.rows import ProblemFieldError, ProblemLoadError
from agentrl.problems.sampler import hash_problem_info
from agentrl.problems.settings import FILE_KINDS, FieldName, ProblemSourceSettings
from agentrl.problems.sources import fixed_evaluation_problems, load_source, read_problems_with_locations
from agentrl.rollout.gateway.settings import is_agent_program
from agentrl.rollout.settings import environment_compares_answers
from agentrl.telemetry.console import Console
from agentrl_envs.grading import Grader
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem, Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark: its Hugging Face data set, and its file in a data folder.

    ``file`` is the name of the file without ``.jsonl`` or ``.parquet``.
    """

    name: str
    file: str
    hub_id: str
    split: str
    problems: int
    fields: Mapping[FieldName, str] = field(default_factory=dict)
    subset: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedBenchmark:
    """Problems of a benchmark in the order of the data, with their locations and data errors.

    A location is a file and line, or a data set and row. Every error starts with its location. Reference answers that
    cannot be graded are errors only in the result of :func:`check_benchmark`.
    """

    name: str
    problems: tuple[Problem, ...]
    locations: tuple[str, ...]
    errors: tuple[str, ...]

    def describe(self) -> list[str]:
        count = f"{len(self.errors) or 'no'} data error{'' if len(self.errors) == 1 else 's'}"
        return [f"{self.name}: {len(self.problems)} problems, {count}", *(f"  {error}" for error in self.errors)]


_DEFINITIONS = (
    Benchmark(name="aime24", file="aime24", hub_id="HuggingFaceH4/aime_2024", split="train", problems=30),
    Benchmark(name="aime25", file="aime25", hub_id="math-ai/aime25", split="test", problems=30),
    Benchmark(name="amc23", file="amc23", hub_id="math-ai/amc23", split="test", problems=40),
    Benchmark(name="math500", file="math500", hub_id="HuggingFaceH4/MATH-500", split="test", problems=500),
    Benchmark(name="hmmt25", file="hmmt25", hub_id="MathArena/hmmt_feb_2025", split="train", problems=30),
    Benchmark(
        name="olympiadbench",
        file="olympiadbench",
        hub_id="Hothan/OlympiadBench",
        subset="OE_TO_maths_en_COMP",  # open-ended, text only, mathematics, English, competition
        split="train",
        problems=674,
        fields={"problem": "question", "answer": "final_answer.0"},
    ),
    Benchmark(
        name="gsm8k",
        file="gsm8k_test",
        hub_id="openai/gsm8k",
        subset="main",
        split="test",
        problems=1319,
    ),
)

BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _DEFINITIONS}


def load_benchmark(name: str, *, data_dir: str | Path | None = None) -> list[Problem]:
    """Load the problems of a benchmark and check them for data errors.

    ``name`` is one of `BENCHMARKS` or the path of a ``.jsonl`` or ``.parquet`` file. Named benchmarks are read from
    ``data_dir`` if it is not None, otherwise from Hugging Face. Raises ProblemLoadError for an unknown name (with the
    nearest known name), a missing file, missing fields (with the fields that exist), a wrong number of problems, and a
    problem that is repeated, shares its id with another problem or has no answer.
    """
    loaded = load_benchmark_with_errors(name, data_dir=data_dir)
    if loaded.errors:
        more = len(loaded.errors) - 1
        rest = f" (and {more} more: list them with agentrl eval --check-data)" if more else ""
        raise ProblemLoadError(loaded.errors[0] + rest)
    return list(loaded.problems)


def load_benchmark_with_errors(name: str, *, data_dir: str | Path | None = None) -> LoadedBenchmark:
    """Load a benchmark and collect the errors of individual rows. Omits rows without an answer.

    Raises ProblemLoadError if the data cannot be read (unknown name, missing or broken file, missing fields).
    """
    benchmark = BENCHMARKS.get(name)
    settings = _file_source(name) if benchmark is None else _benchmark_source(benchmark, data_dir)
    problems, locations, unanswered = [], [], []
    try:
        for location, problem in read_problems_with_locations(settings):
            if problem is None or problem.answer is None:
                unanswered.append(f"{location}: the problem has no answer")
            else:
                problems.append(problem)
                locations.append(location)
    except ProblemFieldError as error:
        left_out = re.search(r"fields\.\S+=null$", str(error))
        fields = [left_out[0]] if left_out else ["fields.problem=FIELD", "fields.answer=FIELD"]
        overrides = " ".join(f"data.eval.0.{key}" for key in (f"path={settings.path}", *fields))
        raise ProblemFieldError(f"{error}: use {overrides} instead of --benchmarks") from error
    rows = len(problems) + len(unanswered)
    return LoadedBenchmark(
        name=name,
        problems=tuple(problems),
        locations=tuple(locations),
        errors=(
            *_check_problem_count(name, settings.path, rows, None if benchmark is None else benchmark.problems),
            *unanswered,
            *_repetition_errors(locations, [problem.statement.strip() for problem in problems], "the problem"),
            *_repetition_errors(locations, [problem.id for problem in problems], "the id"),
        ),
    )


async def check_benchmark(name: str, grader: Grader, *, data_dir: str | Path | None = None) -> LoadedBenchmark:
    """Load a benchmark and collect its errors, including reference answers not graded as equal to themselves."""
    loaded = load_benchmark_with_errors(name, data_dir=data_dir)
    references = [str(problem.answer) for problem in loaded.problems]
    verdicts = await asyncio.gather(*(grader.check_reference(reference) for reference in references))
    errors = list(loaded.errors)
    for location, reference, verdict in zip(loaded.locations, references, verdicts, strict=True):
        answer = reference if len(reference) <= 60 else reference[:60] + "..."
        if verdict is Verdict.GRADER_TIMEOUT:
            errors.append(f"{location}: grading the answer {answer!r} timed out")
        elif verdict is not Verdict.CORRECT:
            errors.append(f"{location}: the answer {answer!r} cannot be read ({verdict.value})")
    return replace(loaded, errors=tuple(errors))


def _benchmark_source(benchmark: Benchmark, data_dir: str | Path | None) -> ProblemSourceSettings:
    if data_dir is None:
        return ProblemSourceSettings(
            path=benchmark.hub_id,
            split=benchmark.split,
            subset=benchmark.subset,
            fields=dict(benchmark.fields),
            skip_unanswered=True,
        )
    # Copies in a data folder usually have the fields `problem` and `answer`, regardless of the original's field names.
    files = [Path(data_dir) / (benchmark.file + kind) for kind in FILE_KINDS]
    existing = next((file for file in files if file.exists()), files[0])
    return ProblemSourceSettings(path=str(existing), skip_unanswered=True)


def _file_source(path: str) -> ProblemSourceSettings:
    if Path(path).suffix.lower() not in FILE_KINDS:
        raise ProblemLoadError(
            f"unknown benchmark {path!r}; valid: {', '.join(BENCHMARKS)}, or a file ending in {' or '.join(FILE_KINDS)}"
            f"{did_you_mean(path, BENCHMARKS)}"
        )
    return ProblemSourceSettings(path=path, skip_unanswered=True)


def _check_problem_count(name: str, path: str, rows: int, expected: int | None) -> list[str]:
    if expected is None:
        return [] if rows else [f"{path}: the file contains no problems"]
    if rows == expected:
        return []
    return [f"{path}: {name} should have {expected} problems, but the data has {rows}"]


def _repetition_errors(locations: Sequence[str], keys: Iterable[str], what: str) -> list[str]:
    """Return an error for each key shared by several rows, with the location of the second row."""
    rows: dict[str, list[int]] = defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return [
        f"{locations[same[1]]}: {what} {key[:60]!r} occurs {len(same)} times, first in {locations[same[0]]}"
        for key, same in rows.items()
        if len(same) > 1
    ]


FALSIFIED_SUFFIX = " (observations falsified)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """Problems that are scored together. The loaders ensure that problem ids are unique.

    ``sha256`` is a hash of ids, statements, answers and setups in order, and of messages and other columns if there are
    any.
    """

    name: str
    problems: tuple[Problem, ...]
    revision: str
    falsified: bool = False

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(repr((problem.id, problem.statement, problem.answer, problem.setup)).encode())
            if problem.info or problem.messages:
                digest.update(hash_problem_info({"info": problem.info, "messages": problem.messages}).encode())
        return digest.hexdigest()

    def record(self) -> ProblemSetRecord:
        return {"revision": self.revision, "sha256": self.sha256, "problems": len(self.problems)}


def load_problem_sets(settings: EvaluationSections, names: Sequence[str], data_dir: Path | None) -> list[ProblemSet]:
    """Load the benchmarks in ``names`` or, if it is empty, the sources in ``data.eval``.

    ``evaluation.falsified`` adds a falsified copy of each set. Raises SettingsError if there are no problems, a name is
    repeated, or a benchmark has data errors.
    """
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise SettingsError(f"--benchmarks lists {', '.join(sorted(repeated))} more than once: list each name once")
    answered = environment_compares_answers(settings)
    sets = (
        [_load_benchmark_set(name, data_dir, answered=answered) for name in names]
        if names
        else _load_held_out_sets(settings)
    )
    if not any(one.problems for one in sets):
        raise SettingsError("no problems to evaluate on: use --benchmarks (such as aime24,math500) or set data.eval")
    # An agent program receives the output of its tools directly, so the output cannot be falsified here.
    falsified = settings.evaluation.falsified and not is_agent_program(settings.env)
    # The observations of problems without a setup reveal no value.
    return sets + [
        ProblemSet(name=one.name + FALSIFIED_SUFFIX, problems=revealing, revision=one.revision, falsified=True)
        for one in sets
        if falsified and (revealing := tuple(problem for problem in one.problems if problem.setup))
    ]


def load_held_out_problems(settings: EvaluationSections) -> list[Problem]:
    """Load ``evaluation.problems`` problems of each source in ``data.eval``."""
    return [problem for one in _load_held_out_sets(settings) for problem in one.problems]


def _load_held_out_sets(settings: EvaluationSections) -> list[ProblemSet]:
    """Load a set for each source in ``data.eval``, named after the source. Repeated names are numbered."""
    sets: dict[str, ProblemSet] = {}
    for entry in settings.data.eval:
        source = load_source(entry, seed=settings.seed, answered=environment_compares_answers(settings)).source
        problems = tuple(fixed_evaluation_problems(source, settings.evaluation.problems))
        same = sum(name == source.name or name.startswith(f"{source.name} #") for name in sets)
        name = f"{source.name} #{same + 1}" if same else source.name
        sets[name] = ProblemSet(name=name, problems=problems, revision=entry.revision or "")
    return list(sets.values())


def build_problem_records(sets: Sequence[ProblemSet], prompts: dict[tuple[str, str], str]) -> list[ProblemRow]:
    """Build one record per problem, so that rollouts can be read and regraded without the data files."""
    return [
        cast(
            ProblemRow,
            {"benchmark": one.name, "falsified": one.falsified}
            | {entry.name: getattr(problem, entry.name) for entry in fields(problem)}
            | {"prompt": prompts[one.name, problem.id]},
        )
        for one in sets
        for problem in one.problems
    ]


def _load_benchmark_set(name: str, data_dir: Path | None, *, answered: bool) -> ProblemSet:
    """Load a benchmark, or a file as a set named after the file's stem.

    Rows of a file need answers only if ``answered``.
    """
    if not answered and name.lower().endswith(FILE_KINDS):
        source = load_source(ProblemSourceSettings(path=name), answered=False).source
        problems = tuple(fixed_evaluation_problems(source, source.size or 0))
        return ProblemSet(name=Path(name).stem, problems=problems, revision="")
    problems = tuple(load_benchmark(name, data_dir=data_dir))
    return ProblemSet(name=name if name in BENCHMARKS else Path(name).stem, problems=problems, revision="")


def check_benchmarks_command(settings: EvaluationSections, request: EvaluationOptions) -> None:
    """Print the errors in the data of each benchmark, as found by :func:`check_benchmark`.

    Raises SettingsError if there is an error.
    """
    if not request.benchmarks:
        raise SettingsError("--check-data requires --benchmarks with names, or with files (.jsonl or .parquet)")
    console = Console(settings.telemetry)

    async def check_all() -> list[LoadedBenchmark]:
        grader = Grader(settings.grader)
        try:
            return [await check_benchmark(name, grader, data_dir=request.data_dir) for name in request.benchmarks]
        finally:
            await grader.close()

    checked = asyncio.run(check_all())
    for benchmark in checked:
        for line in benchmark.describe():
            console.note(line)
    wrong = ", ".join(f"{benchmark.name} ({len(benchmark.errors)})" for benchmark in checked if benchmark.errors)
    if wrong:
        raise SettingsError(f"the data contains errors, as listed above: {wrong}")
