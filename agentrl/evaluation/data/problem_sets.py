"""Problems of an evaluation: named benchmarks, files, or the held-out sources in a run's settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, cast

from agentrl.errors import SettingsError
from agentrl.evaluation.data.benchmarks import BENCHMARKS, load_benchmark
from agentrl.evaluation.formats import ProblemRow, SetRecord
from agentrl.problems.sampler import digest_of
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import FILE_KINDS, evaluation_set, load_source
from agentrl.rollout.gateway.settings import is_agent
from agentrl.rollout.settings import compares_answers
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections

FALSIFIED = " (observations falsified)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemSet:
    """Problems that are scored together. Their ids are unique, which the code that loads them ensures.

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
                digest.update(digest_of({"info": problem.info, "messages": problem.messages}).encode())
        return digest.hexdigest()

    def record(self) -> SetRecord:
        return {"revision": self.revision, "sha256": self.sha256, "problems": len(self.problems)}


def problem_sets(settings: EvaluationSections, names: Sequence[str], data_dir: Path | None) -> list[ProblemSet]:
    """Load the benchmarks in ``names``, or by default the sources in ``data.eval``.

    ``evaluation.falsified`` adds a falsified copy of each. Raises SettingsError if there are no problems, a name is
    repeated, or a benchmark has data errors.
    """
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise SettingsError(f"--benchmarks names {', '.join(sorted(repeated))} more than once")
    answered = compares_answers(settings)
    sets = [_benchmark(name, data_dir, answered=answered) for name in names] if names else _held_out(settings)
    if not any(one.problems for one in sets):
        raise SettingsError("no problems to evaluate on: use --benchmarks (such as aime24,math500) or set data.eval")
    # The tools of an agent answer it directly, so their output cannot be falsified here.
    falsified = settings.evaluation.falsified and not is_agent(settings.env)
    return sets + (_falsified(sets) if falsified else [])


def held_out_problems(settings: EvaluationSections) -> list[Problem]:
    """Load ``evaluation.problems`` problems of each source in ``data.eval``."""
    return [problem for one in _held_out(settings) for problem in one.problems]


def _held_out(settings: EvaluationSections) -> list[ProblemSet]:
    """One set for each source in ``data.eval``, with its name. Repeated names are numbered."""
    sets: dict[str, ProblemSet] = {}
    for entry in settings.data.eval:
        source = load_source(entry, seed=settings.seed, answered=compares_answers(settings)).source
        problems = tuple(evaluation_set(source, settings.evaluation.problems))
        same = sum(name == source.name or name.startswith(f"{source.name} #") for name in sets)
        name = f"{source.name} #{same + 1}" if same else source.name
        sets[name] = ProblemSet(name=name, problems=problems, revision=entry.revision or "")
    return list(sets.values())


def problem_records(sets: Sequence[ProblemSet], prompts: dict[tuple[str, str], str]) -> list[ProblemRow]:
    """Build one record per problem for the evaluation directory, to read and regrade rollouts without the data."""
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


def _benchmark(name: str, data_dir: Path | None, *, answered: bool) -> ProblemSet:
    """One benchmark, or a file with its stem as name. Rows need answers only if answers are compared."""
    if not answered and name.lower().endswith(FILE_KINDS):
        source = load_source(ProblemSourceSettings(path=name), answered=False).source
        problems = tuple(evaluation_set(source, source.size or 0))
        return ProblemSet(name=Path(name).stem, problems=problems, revision="")
    problems = tuple(load_benchmark(name, data_dir=data_dir))
    known = BENCHMARKS.get(name)
    if known is None:
        return ProblemSet(name=Path(name).stem, problems=problems, revision="")
    return ProblemSet(name=name, problems=problems, revision=known.revision or "")


def _falsified(sets: Sequence[ProblemSet]) -> list[ProblemSet]:
    """Copies of the problems that reveal a value by execution. Their rollouts receive false numbers."""
    revealing = [(one, tuple(problem for problem in one.problems if problem.setup)) for one in sets]
    return [
        ProblemSet(name=one.name + FALSIFIED, problems=problems, revision=one.revision, falsified=True)
        for one, problems in revealing
        if problems
    ]
