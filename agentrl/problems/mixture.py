"""Sources of problems and weighted mixtures of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.problems.problem_errors import EmptyProblemsError, ProblemError
from agentrl_envs.types import Problem


def digest_of(info: Mapping[str, object]) -> str:
    """Hash of a row's other columns, or "" if there are none."""
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest() if info else ""


class ProblemSource(Protocol):
    """Problems by index: a finite set of ``size`` problems, or an endless generator (``size`` None).

    ``name`` identifies the source in messages and in saved positions. ``problem`` always returns the same problem for
    an index. Sources with equal ``identity`` return the same problems at every index.
    """

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int | None: ...
    @property
    def identity(self) -> str: ...
    def problem(self, index: int) -> Problem: ...


class FiniteSource:
    """Problems held in memory.

    >>> source = FiniteSource("toy", [Problem(id="a", statement="1+1?", answer="2", source="toy")])
    >>> source.size, source.problem(0).id
    (1, 'a')
    """

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        """Raises EmptyProblemsError if there are no problems and ProblemError if two problems share an id."""
        if not problems:
            raise EmptyProblemsError(f"{name}: the source contains no problems")
        seen: set[str] = set()
        for problem in problems:
            if problem.id in seen:
                raise ProblemError(
                    f"{name}: two different problems have the id {problem.id!r}; map another field with fields.id"
                )
            seen.add(problem.id)
        self.name = name
        self.problems = tuple(problems)

    @property
    def size(self) -> int:
        return len(self.problems)

    @property
    def identity(self) -> str:
        digest = hashlib.sha256()
        for problem in self.problems:
            digest.update(f"{problem.id}\0{problem.statement}\0{problem.answer}\0{digest_of(problem.info)}".encode())
        return f"{self.name}:{len(self.problems)}:{digest.hexdigest()[:16]}"

    def problem(self, index: int) -> Problem:
        return self.problems[index]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources with their sampling weights (positive, of any scale)."""

    sources: tuple[ProblemSource, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise EmptyProblemsError("a mixture needs at least one source of problems")
        if len(self.weights) != len(self.sources):
            raise ProblemError(f"a mixture of {len(self.sources)} sources has {len(self.weights)} weights")
        for source, weight in zip(self.sources, self.weights, strict=True):
            if not 0 < weight < float("inf"):
                raise ProblemError(f"{source.name}: weight must be positive and finite, got {weight}")
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ProblemError(f"a mixture contains {repeated[0]!r} twice; use one entry with the summed weight")

    @classmethod
    def of(cls, source: ProblemSource) -> Mixture:
        """Return a mixture of one source."""
        return cls(sources=(source,), weights=(1.0,))
