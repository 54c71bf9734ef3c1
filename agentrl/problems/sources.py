"""Loading of the sources in settings: files, Hugging Face data sets, benchmarks and built-in generators.

Rows that are left out (unanswered, repeated, excluded, in the other part of a split) are counted in a LoadReport; none
is dropped silently.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.problems.demonstrations.arithmetic import GENERATORS, ExerciseSource
from agentrl.problems.fields import problem_of, statement_of
from agentrl.problems.masking import MaskedSplit, split_by_masked_statement
from agentrl.problems.mixture import FiniteSource, Mixture, ProblemSource, digest_of
from agentrl.problems.problem_errors import (
    EmptyProblemsError,
    ProblemError,
    ProblemFieldError,
    ProblemFileError,
)
from agentrl.problems.rows import Row, read_hub, read_jsonl, read_parquet
from agentrl.problems.seeds import SeedSource
from agentrl.problems.settings import BUILTIN, DEFAULT_SPLIT, REASONING_GYM, ProblemSourceSettings
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem

FILE_KINDS = (".jsonl", ".parquet")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Numbers of rows of one source that were kept, and that were left out by reason."""

    name: str
    rows: int
    kept: int
    unanswered: int = 0
    repeated: int = 0
    excluded: int = 0
    other_part: int = 0
    beyond_limit: int = 0

    def describe(self) -> str:
        """Summarise the report in one line for the console, without counts of zero."""
        removed = {
            "without an answer": self.unanswered,
            "repeated": self.repeated,
            "excluded by their masked statement": self.excluded,
            "in the other part": self.other_part,
            "beyond the limit": self.beyond_limit,
        }
        reasons = "".join(f", {count} {reason}" for reason, count in removed.items() if count)
        return f"{self.name}: {self.kept} of {self.rows} problems{reasons}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSource:
    """A source with its report; ``report`` is None for endless generators."""

    source: ProblemSource
    report: LoadReport | None


def load_mixture(
    settings: Sequence[ProblemSourceSettings], *, seed: int = 0, answered: bool = True
) -> tuple[Mixture, tuple[LoadReport, ...]]:
    """Load every source and mix them by their weights. ``seed`` applies to generators without a seed.

    With ``answered``, answers are graded and a row without an answer is an error. Raises ProblemError or one of its
    subclasses, with a one-line message.
    """
    loaded = [load_source(entry, seed=seed, answered=answered) for entry in settings]
    mixture = Mixture(
        sources=tuple(entry.source for entry in loaded), weights=tuple(entry.weight for entry in settings)
    )
    return mixture, tuple(entry.report for entry in loaded if entry.report is not None)


def load_source(settings: ProblemSourceSettings, *, seed: int = 0, answered: bool = True) -> LoadedSource:
    """Load one source. Each row needs an answer unless ``answered`` is False. Raises ProblemError."""
    if settings.is_generated:
        return _generator(settings, seed)
    path = expand(settings.path)
    name = _name(settings, path)
    read = _read(settings, path, name, answered)
    if not read.rows:
        raise EmptyProblemsError(f"{settings.path}: the file contains no problems")
    if not read.problems:
        raise EmptyProblemsError(f"{settings.path}: none of the {read.rows} problems has an answer")
    split = _split(settings, read.problems)
    kept = split.heldout if settings.part == "heldout" else split.train
    limited = kept[: settings.limit]
    report = LoadReport(
        name=name,
        rows=read.rows,
        kept=len(limited),
        unanswered=read.unanswered,
        repeated=read.repeated,
        excluded=split.excluded,
        other_part=len(split.train) + len(split.heldout) - len(kept),
        beyond_limit=len(kept) - len(limited),
    )
    if not limited:
        raise EmptyProblemsError(f"no problems are left of {report.describe()}")
    return LoadedSource(source=FiniteSource(name, limited), report=report)


def read_places(settings: ProblemSourceSettings) -> Iterator[tuple[str, Problem | None]]:
    """Yield the location and problem of every row, including repeats, before splits and limits are applied.

    The problem is None for rows that ``skip_unanswered`` leaves out.
    """
    path = expand(settings.path)
    return _problems(settings, path, _name(settings, path), answered=True)


def evaluation_set(source: ProblemSource, count: int) -> list[Problem]:
    """Return ``count`` fixed problems, evenly spaced if ``source`` is finite (all of them if it has fewer)."""
    if isinstance(source, ExerciseSource):
        return source.distinct(count)
    if source.size is None:
        return [source.problem(index) for index in range(count)]
    taken = min(count, source.size)
    return [source.problem(index * source.size // taken) for index in range(taken)]


def expand(path: str) -> str:
    """Return ``path`` with ``~`` and ``$VARIABLES`` expanded. Raises ProblemFileError if a variable is not set."""
    for match in _VARIABLE.finditer(path):
        variable = match[1] or match[2]
        if variable not in os.environ:
            raise ProblemFileError(f"{path}: the environment variable {variable} is not set")
    return os.path.expanduser(os.path.expandvars(path))


def check_builtin(path: str, what: str, known: Sequence[str]) -> None:
    """Raise ProblemError unless ``path`` names one of the ``known`` generators."""
    kind = path.removeprefix(BUILTIN)
    if kind not in known:
        valid = ", ".join(BUILTIN + name for name in known)
        raise ProblemError(f"{path}: no such built-in {what}; valid: {valid}{did_you_mean(kind, known)}")


def _generator(settings: ProblemSourceSettings, seed: int) -> LoadedSource:
    endless = _generated(settings, seed if settings.seed is None else settings.seed)
    if settings.limit is None:
        return LoadedSource(source=endless, report=None)
    problems = evaluation_set(endless, settings.limit)
    report = LoadReport(name=endless.name, rows=len(problems), kept=len(problems))
    return LoadedSource(source=FiniteSource(endless.name, problems), report=report)


def _generated(settings: ProblemSourceSettings, seed: int) -> ProblemSource:
    if settings.path.startswith(REASONING_GYM):
        from agentrl_envs.adapters.reasoning_gym import ReasoningGymSource

        name = settings.path.removeprefix(REASONING_GYM)
        return ReasoningGymSource(name, split=settings.split, seed=seed, options=settings.options)
    check_builtin(settings.path, "problems", (*GENERATORS, "seeds"))
    if settings.path == BUILTIN + "seeds":
        return SeedSource(split=settings.split, seed=seed)
    made_by = GENERATORS[settings.path.removeprefix(BUILTIN)]
    return made_by(split=settings.split, seed=seed, families=settings.families)


def _name(settings: ProblemSourceSettings, path: str) -> str:
    stem = Path(path).stem if _is_file(path) else path.rstrip("/")
    parts = [stem, settings.subset, None if settings.split == DEFAULT_SPLIT else settings.split]
    parts.append(None if settings.part == "all" else settings.part)
    return ":".join(part for part in parts if part)


def _is_file(path: str) -> bool:
    return Path(path).suffix.lower() in FILE_KINDS


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    problems: list[Problem]
    rows: int
    unanswered: int
    repeated: int


def _read(settings: ProblemSourceSettings, path: str, name: str, answered: bool) -> _Read:
    """Distinct problems of a source. Rows may repeat hundreds of times, so repeats are dropped while reading.

    Problems are equal if statement and answer are; without grading, all other columns must be equal, too.
    """
    problems: dict[tuple[str, str | None, str], Problem] = {}
    rows = unanswered = 0
    for _, problem in _problems(settings, path, name, answered=answered):
        rows += 1
        if problem is None:
            unanswered += 1
        else:
            other = "" if answered else digest_of(problem.info)
            problems.setdefault((problem.statement.strip(), problem.answer, other), problem)
    kept = _with_distinct_ids(problems)
    return _Read(problems=kept, rows=rows, unanswered=unanswered, repeated=rows - unanswered - len(kept))


def _with_distinct_ids(problems: Mapping[tuple[str, str | None, str], Problem]) -> list[Problem]:
    """Give distinct ids to problems that differ only in ``info``: all but the first get a digest of it appended."""
    seen: set[tuple[str, str, str | None]] = set()
    kept = []
    for (statement, answer, digest), problem in problems.items():
        known = (problem.id, statement, answer)
        kept.append(replace(problem, id=f"{problem.id}-{digest[:8]}") if known in seen else problem)
        seen.add(known)
    return kept


def _problems(
    settings: ProblemSourceSettings, path: str, name: str, *, answered: bool
) -> Iterator[tuple[str, Problem | None]]:
    """Location and problem of every row; None for a row without an answer if the settings skip such rows."""
    for location, row in _rows(settings, path):
        problem = problem_of(
            row, location, source=name, fields=settings.fields, answered=answered or settings.skip_unanswered
        )
        if problem.answer is None and answered and not settings.skip_unanswered:
            raise ProblemFieldError(f"{location}: the problem has no answer; skip_unanswered=true skips such rows")
        yield location, None if problem.answer is None and settings.skip_unanswered else problem


def _rows(settings: ProblemSourceSettings, path: str) -> Iterator[tuple[str, Row]]:
    file = Path(path)
    if _is_file(path):
        if settings.split != DEFAULT_SPLIT:
            raise ProblemError(f"{settings.path}: a file has no split {settings.split!r}; use part=heldout to split it")
        return read_jsonl(file) if file.suffix.lower() == ".jsonl" else read_parquet(file)
    if file.is_dir() or (_HUB_ID.fullmatch(path) and not file.exists()):
        return read_hub(path, split=settings.split, subset=settings.subset, revision=settings.revision)
    builtins = ", ".join(BUILTIN + name for name in GENERATORS)
    valid = f"{builtins}, a file ending in {' or '.join(FILE_KINDS)}, a folder, or an id OWNER/NAME"
    raise ProblemFileError(f"{settings.path}: not a source of problems; valid: {valid}")


def _split(settings: ProblemSourceSettings, problems: Sequence[Problem]) -> MaskedSplit:
    fraction = 0.0 if settings.part == "all" else settings.heldout_fraction
    exclude = [statement for path in settings.exclude for statement in _statements(path)]
    return split_by_masked_statement(problems, heldout_fraction=fraction, exclude=exclude)


def _statements(path: str) -> Iterator[str]:
    """Statements of a file or data set, with or without answers."""
    for location, row in _rows(ProblemSourceSettings(path=path), expand(path)):
        yield statement_of(row, location, fields={})
