"""Load the problem sources in the settings: files, Hugging Face data sets, benchmarks and generators.

A LoadReport counts the rows that are left out (unanswered, repeated, excluded, in the other part of a split).

A model trained on one problem has practised every problem that differs from it only in numbers. Cold-start, training
and evaluation data are therefore kept disjoint by *masked* statements, in which numbers are replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.demonstrations import Demonstration, read_demonstrations
from agentrl.problems.exercises import SPLITS, ExerciseSource
from agentrl.problems.horizon import HorizonSource
from agentrl.problems.rows import (
    EmptyProblemsError,
    ProblemFieldError,
    ProblemFileError,
    ProblemLoadError,
    Row,
    problem_from_row,
    read_hub,
    read_jsonl,
    read_parquet,
    statement_from_row,
)
from agentrl.problems.sampler import FiniteSource, Mixture, ProblemSource, hash_problem_info
from agentrl.problems.settings import (
    BUILTIN,
    DEFAULT_SPLIT,
    FILE_KINDS,
    FORMULA,
    HARBOR,
    REASONING_GYM,
    ProblemSourceSettings,
)
from agentrl.problems.word_problems import NUMBER, formula_demonstrations
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem

GENERATORS: Mapping[str, type[ExerciseSource]] = {one.builtin: one for one in (ArithmeticSource, HorizonSource)}
"""Built-in sources of exercises by name."""


class SeedOnlyProblemSource:
    """Problems without content (``builtin:seeds``), for environments that generate a task from a seed.

    The environment derives the seed from the problem's id.

    >>> SeedOnlyProblemSource(split="heldout", seed=3).problem(7).id
    'seeds-heldout-3-7'
    """

    size = None

    def __init__(self, *, split: str = "train", seed: int = 0) -> None:
        """Create a source. Raises ProblemLoadError for an unknown split."""
        if split not in SPLITS:
            raise ProblemLoadError(
                f"builtin:seeds: unknown split {split!r}; valid: {', '.join(SPLITS)}{did_you_mean(split, SPLITS)}"
            )
        self.name = "seeds" if split == "train" else f"seeds:{split}"
        self.identity = f"seeds-{split}-{seed}"

    def problem(self, index: int) -> Problem:
        """Return problem ``index``. Its statement is its id, and it has no answer."""
        name = f"{self.identity}-{index}"
        return Problem(id=name, statement=name, answer=None, source=self.name)


_NON_WORD = re.compile(r"\W+")


def mask_numbers(statement: str) -> str:
    """Replace numbers (digits and words) with ``#``, convert to lower case and remove punctuation.

    >>> mask_numbers("Tom has 1,250 pens and twenty-six  cups!") == mask_numbers("tom has 3 pens, and 2 cups")
    True
    >>> mask_numbers("Tom has 1,250 pens and twenty-six  cups!")
    'tom has # pens and # cups'
    """
    # Mark numbers with `_number_` until punctuation is removed, because `#` would be removed as punctuation.
    masked = NUMBER.sub(" \0 ", statement.casefold())
    return _NON_WORD.sub(" ", masked.replace("\0", "_number_")).strip().replace("_number_", "#")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainHeldoutSplit:
    """Two parts without a common masked statement, in input order, and the number of excluded problems."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    excluded: int


def split_by_masked_statement(
    problems: Sequence[Problem], *, heldout_fraction: float, exclude: Iterable[str] = ()
) -> TrainHeldoutSplit:
    """Remove problems that match ``exclude`` when masked, and split all others by a hash of the masked statement.

    The part of a problem depends only on a hash of its masked statement and ``heldout_fraction`` (in [0, 1]). Files
    that are split separately are therefore consistent, and problems added to a file do not move the other problems.
    """
    if not 0 <= heldout_fraction <= 1:
        raise ValueError(f"heldout_fraction must be in [0, 1], got {heldout_fraction}")
    excluded_statements = {mask_numbers(statement) for statement in exclude}
    train: list[Problem] = []
    heldout: list[Problem] = []
    for problem in problems:
        masked = mask_numbers(problem.statement)
        if masked not in excluded_statements:
            (heldout if _hash_to_unit_interval(masked) < heldout_fraction else train).append(problem)
    excluded = len(problems) - len(train) - len(heldout)
    return TrainHeldoutSplit(train=tuple(train), heldout=tuple(heldout), excluded=excluded)


def _hash_to_unit_interval(text: str) -> float:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") / 2**64


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ENVIRONMENT_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Number of rows of a source that were kept, and number of rows that were left out for each reason."""

    name: str
    rows: int
    kept: int
    unanswered: int = 0
    repeated: int = 0
    excluded: int = 0
    other_part: int = 0
    beyond_limit: int = 0

    def describe(self) -> str:
        """Summarize the report in one line for the console, without counts of zero."""
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
    """A source with its report. ``report`` is None for endless generators."""

    source: ProblemSource
    report: LoadReport | None


def load_mixture(
    settings: Sequence[ProblemSourceSettings], *, seed: int = 0, answered: bool = True
) -> tuple[Mixture, tuple[LoadReport, ...]]:
    """Load every source and mix them by their weights. ``seed`` applies to generators without a seed.

    With ``answered``, every row needs an answer, because answers are graded. Raises ProblemLoadError or one of its
    subclasses, with a one-line message, if a source cannot be loaded.
    """
    loaded = [load_source(entry, seed=seed, answered=answered) for entry in settings]
    mixture = Mixture(
        sources=tuple(entry.source for entry in loaded), weights=tuple(entry.weight for entry in settings)
    )
    return mixture, tuple(entry.report for entry in loaded if entry.report is not None)


def load_source(settings: ProblemSourceSettings, *, seed: int = 0, answered: bool = True) -> LoadedSource:
    """Load one source. Each row needs an answer unless ``answered`` is False.

    Raises ProblemLoadError or one of its subclasses if the source cannot be loaded.
    """
    if settings.is_generated:
        return _load_generated_source(settings, seed)
    name = source_name(settings)
    # Drop repeats while reading, because rows may repeat hundreds of times. If answers are not graded, equal problems
    # must also have equal values in all other columns.
    distinct: dict[tuple[str, str | None, str], Problem] = {}
    rows = unanswered = 0
    for _, problem in read_problems_with_locations(settings, answered=answered):
        rows += 1
        if problem is None:
            unanswered += 1
        else:
            other = "" if answered else hash_problem_info(problem.info)
            distinct.setdefault((problem.statement.strip(), problem.answer, other), problem)
    if not rows:
        raise EmptyProblemsError(f"{settings.path}: the file contains no problems")
    if not distinct:
        raise EmptyProblemsError(f"{settings.path}: none of the {rows} problems has an answer")
    problems = _with_distinct_ids(distinct)
    split = split_by_masked_statement(
        problems,
        heldout_fraction=0.0 if settings.part == "all" else settings.heldout_fraction,
        exclude=[statement for path in settings.exclude for statement in _read_statements(path)],
    )
    kept = split.heldout if settings.part == "heldout" else split.train
    limited = kept[: settings.limit]
    report = LoadReport(
        name=name,
        rows=rows,
        kept=len(limited),
        unanswered=unanswered,
        repeated=rows - unanswered - len(problems),
        excluded=split.excluded,
        other_part=len(split.train) + len(split.heldout) - len(kept),
        beyond_limit=len(kept) - len(limited),
    )
    if not limited:
        raise EmptyProblemsError(f"no problems remain in {report.describe()}")
    return LoadedSource(source=FiniteSource(name, limited), report=report)


def read_problems_with_locations(
    settings: ProblemSourceSettings, *, answered: bool = True
) -> Iterator[tuple[str, Problem | None]]:
    """Yield the location and problem of every row, including repeats. Applies no split and no limit.

    The problem is None for rows that ``skip_unanswered`` leaves out. Each other row needs an answer unless ``answered``
    is False.
    """
    name = source_name(settings)
    for location, row in _read_rows(settings):
        problem = problem_from_row(
            row, location, source=name, fields=settings.fields, answered=answered or settings.skip_unanswered
        )
        if problem.answer is None and answered and not settings.skip_unanswered:
            raise ProblemFieldError(
                f"{location}: the problem has no answer; set skip_unanswered=true to skip such rows"
            )
        yield location, None if problem.answer is None and settings.skip_unanswered else problem


def fixed_evaluation_problems(source: ProblemSource, count: int) -> list[Problem]:
    """Return ``count`` fixed problems, evenly spaced if ``source`` is finite (all problems if it has fewer)."""
    if isinstance(source, ExerciseSource):
        return source.distinct_problems(count)
    if source.size is None:
        return [source.problem(index) for index in range(count)]
    taken = min(count, source.size)
    return [source.problem(index * source.size // taken) for index in range(taken)]


def expand_path(path: str) -> str:
    """Return ``path`` with ``~`` and ``$VARIABLES`` expanded. Raises ProblemFileError if a variable is not set."""
    for match in _ENVIRONMENT_VARIABLE.finditer(path):
        variable = match[1] or match[2]
        if variable not in os.environ:
            raise ProblemFileError(f"{path}: the environment variable {variable} is not set")
    return os.path.expanduser(os.path.expandvars(path))


def require_builtin_source(source: str, what: str, known: Sequence[str]) -> None:
    """Raise ProblemLoadError unless ``source`` is ``builtin:`` with one of the ``known`` names."""
    kind = source.removeprefix(BUILTIN)
    if kind not in known:
        valid = ", ".join(BUILTIN + name for name in known)
        raise ProblemLoadError(f"{source}: no such built-in {what}; valid: {valid}{did_you_mean(kind, known)}")


def _load_generated_source(settings: ProblemSourceSettings, seed: int) -> LoadedSource:
    endless = _make_generated_source(settings, seed if settings.seed is None else settings.seed)
    if settings.limit is None:
        return LoadedSource(source=endless, report=None)
    problems = fixed_evaluation_problems(endless, settings.limit)
    report = LoadReport(name=endless.name, rows=len(problems), kept=len(problems))
    return LoadedSource(source=FiniteSource(endless.name, problems), report=report)


def _make_generated_source(settings: ProblemSourceSettings, seed: int) -> ProblemSource:
    if settings.path.startswith(REASONING_GYM):
        from agentrl_envs.adapters.reasoning_gym import ReasoningGymSource

        name = settings.path.removeprefix(REASONING_GYM)
        return ReasoningGymSource(name, split=settings.split, seed=seed, options=settings.options)
    require_builtin_source(settings.path, "problems", (*GENERATORS, "seeds"))
    if settings.path == BUILTIN + "seeds":
        return SeedOnlyProblemSource(split=settings.split, seed=seed)
    made_by = GENERATORS[settings.path.removeprefix(BUILTIN)]
    return made_by(split=settings.split, seed=seed, families=settings.families)


def source_name(settings: ProblemSourceSettings) -> str:
    """Return ``Problem.source`` of the problems of a source, without reading files."""
    if settings.is_generated:
        return _make_generated_source(settings, 0).problem(0).source
    path = expand_path(settings.path)
    stem = Path(path).stem if _is_file(path) else path.rstrip("/")
    parts = [stem, settings.subset, None if settings.split == DEFAULT_SPLIT else settings.split]
    parts.append(None if settings.part == "all" else settings.part)
    return ":".join(part for part in parts if part)


def _is_file(path: str) -> bool:
    return Path(path).suffix.lower() in FILE_KINDS


def _with_distinct_ids(problems: Mapping[tuple[str, str | None, str], Problem]) -> list[Problem]:
    """Assign distinct ids to problems that differ only in ``info``, by appending a digest to all but the first."""
    seen: set[tuple[str, str, str | None]] = set()
    kept = []
    for (statement, answer, digest), problem in problems.items():
        known = (problem.id, statement, answer)
        kept.append(replace(problem, id=f"{problem.id}-{digest[:8]}") if known in seen else problem)
        seen.add(known)
    return kept


def _read_rows(settings: ProblemSourceSettings) -> Iterator[tuple[str, Row]]:
    path = expand_path(settings.path)
    if path.startswith(HARBOR):
        from agentrl_envs.adapters.harbor_tasks import read_task_rows

        return read_task_rows(path.removeprefix(HARBOR))
    file = Path(path)
    if _is_file(path):
        if settings.split != DEFAULT_SPLIT:
            raise ProblemLoadError(
                f"{settings.path}: split={settings.split!r} does not apply to a local file; remove it, "
                "or use part=heldout to read the held-out part of the file"
            )
        return read_jsonl(file) if file.suffix.lower() == ".jsonl" else read_parquet(file)
    if file.is_dir() or (_HUB_ID.fullmatch(path) and not file.exists()):
        return read_hub(path, split=settings.split, subset=settings.subset, revision=settings.revision)
    builtins = ", ".join(BUILTIN + name for name in GENERATORS)
    valid = f"{builtins}, a file ending in {' or '.join(FILE_KINDS)}, a folder, or an id OWNER/NAME"
    raise ProblemFileError(f"{settings.path}: not a source of problems; valid: {valid}")


def _read_statements(path: str) -> Iterator[str]:
    """Yield the statements of a file or data set, with or without answers."""
    for location, row in _read_rows(ProblemSourceSettings(path=path)):
        yield statement_from_row(row, location, fields={})


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedDemonstrations:
    """Demonstrations and their one-line description."""

    demonstrations: tuple[Demonstration, ...]
    description: str


def load_demonstrations(
    spec: str, *, count: int, variants: int, seed: int, families: Sequence[str] | None = None
) -> LoadedDemonstrations:
    """Load demonstrations from ``builtin:NAME``, ``formula:FILE.jsonl`` or a JSONL file of demonstrations.

    ``count`` and ``families`` (None for all) apply to generators. Generators use their training split. ``variants``
    applies to formulas. Raises ProblemLoadError or one of its subclasses if the demonstrations cannot be loaded.
    """
    if spec.startswith(BUILTIN):
        require_builtin_source(spec, "demonstrations", tuple(GENERATORS))
        source = GENERATORS[spec.removeprefix(BUILTIN)](split="train", seed=seed, families=families)
        made = source.demonstrations(count)
        return LoadedDemonstrations(demonstrations=tuple(made), description=f"{count} demonstrations of {spec}")
    if families is not None:
        raise ProblemLoadError(f"coldstart.families applies to generated demonstrations ({BUILTIN}NAME), not to {spec}")
    if spec.startswith(FORMULA):
        path = expand_path(spec.removeprefix(FORMULA))
        demonstrations, report = formula_demonstrations(path, variants=variants, seed=seed)
        return LoadedDemonstrations(demonstrations=tuple(demonstrations), description=f"{path}: {report.describe()}")
    if Path(spec).suffix.lower() != ".jsonl":
        raise ProblemFileError(
            f"{spec}: not a source of demonstrations; valid: {BUILTIN}arithmetic, {BUILTIN}horizon, "
            f"{FORMULA}FILE.jsonl or a .jsonl file"
        )
    read = read_demonstrations(expand_path(spec))
    return LoadedDemonstrations(demonstrations=tuple(read), description=f"{len(read)} demonstrations of {spec}")
