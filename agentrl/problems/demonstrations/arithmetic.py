"""``builtin:arithmetic`` and ``builtin:horizon``: endless, seeded sources of problems with demonstrations.

Training and held-out problems are disjoint by construction: a hash of the family and of the numbers in the statement
determines the split of a problem. Seed, phrasing, names and hidden values do not enter the hash, so no seed can move a
statement from one split to the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import ClassVar, Literal

from agentrl.problems.demonstrations.demonstration import Demonstration
from agentrl.problems.demonstrations.exercises import FAMILIES, ExerciseFamily, Numbers
from agentrl.problems.demonstrations.horizon import DEFAULT_FAMILIES, HORIZON_FAMILIES
from agentrl.problems.problem_errors import EmptyProblemsError, ProblemError
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem

Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
HELDOUT_SHARE = 8  # one in eight combinations of family and numbers is held out


class ExerciseSource:
    """Generates problem ``i`` of a split, seed and choice of families for any ``i`` >= 0. Stores no problems."""

    builtin: ClassVar[str]
    all_families: ClassVar[Mapping[str, ExerciseFamily]]
    default_families: ClassVar[Sequence[str]]
    size = None

    def __init__(self, *, split: str = "train", seed: int = 0, families: Sequence[str] | None = None) -> None:
        """Raises ProblemError for an unknown split or family, and if ``families`` is empty or has duplicates."""
        if split not in SPLITS:
            raise ProblemError(
                f"builtin:{self.builtin}: unknown split {split!r}; valid: {', '.join(SPLITS)}"
                f"{did_you_mean(split, SPLITS)}"
            )
        chosen = tuple(self.default_families if families is None else families)
        for name in chosen:
            if name not in self.all_families:
                raise ProblemError(
                    f"builtin:{self.builtin}: unknown family {name!r}; valid: {', '.join(self.all_families)}"
                    f"{did_you_mean(name, self.all_families)}"
                )
        if not chosen or len(set(chosen)) != len(chosen):
            raise ProblemError(
                f"builtin:{self.builtin}: families must be one or more distinct names, got {list(chosen)}"
            )
        self.split, self.seed, self.families = split, seed, chosen
        self.name = f"{self.builtin}-{split}-{seed}"

    @property
    def identity(self) -> str:
        """Text that is equal for sources that return the same problem at every index."""
        return f"{self.name}:{','.join(self.families)}"

    def problem(self, index: int) -> Problem:
        """Return problem ``index``. The families alternate, so every range of consecutive problems is balanced."""
        return self.demonstration(index).problem

    def demonstration(self, index: int) -> Demonstration:
        """Return problem ``index`` with the turns of its solution."""
        if index < 0:
            raise IndexError(f"problem index must not be negative, got {index}")
        family = self.all_families[self.families[index % len(self.families)]]
        rng = Random(f"{self.seed}:{family.name}:{index}")
        exercise = family.exercise(rng, self._draw(family, rng))
        problem = Problem(
            id=f"{self.name}-{index}",
            statement=exercise.statement,
            answer=str(exercise.answer),
            source=self.builtin,
            family=family.name,
            setup=exercise.setup,
        )
        return Demonstration(problem=problem, turns=exercise.turns)

    def demonstrations(self, count: int, *, start: int = 0) -> list[Demonstration]:
        """Demonstrations ``start`` to ``start + count - 1``."""
        return [self.demonstration(index) for index in range(start, start + count)]

    def distinct(self, count: int) -> list[Problem]:
        """Return the first ``count`` problems with distinct statements, for a fixed evaluation set.

        Raises EmptyProblemsError if the chosen families have fewer.
        """
        problems: dict[str, Problem] = {}
        for index in range(20 * count):
            problem = self.problem(index)
            problems.setdefault(problem.statement, problem)
            if len(problems) == count:
                return list(problems.values())
        raise EmptyProblemsError(
            f"builtin:{self.builtin}: only {len(problems)} of the requested {count} {self.split} statements are "
            "distinct; choose more families or a smaller limit"
        )

    def _draw(self, family: ExerciseFamily, rng: Random) -> Numbers:
        while True:
            numbers = family.draw(rng)
            if split_of(family.name, numbers) == self.split:
                return numbers


class ArithmeticSource(ExerciseSource):
    """Word problems of one to three turns.

    >>> source = ArithmeticSource(split="train", seed=0, families=["box_take"])
    >>> source.problem(3) == source.problem(3)
    True
    >>> source.demonstration(3).problem == source.problem(3)
    True
    """

    builtin = "arithmetic"
    all_families = FAMILIES
    default_families = tuple(FAMILIES)


class HorizonSource(ExerciseSource):
    """Tasks of graded difficulty that need one to ten turns."""

    builtin = "horizon"
    all_families = HORIZON_FAMILIES
    default_families = DEFAULT_FAMILIES


GENERATORS: Mapping[str, type[ExerciseSource]] = {one.builtin: one for one in (ArithmeticSource, HorizonSource)}


def split_of(family: str, numbers: Numbers) -> Split:
    """Split of the problems of ``family`` with these numbers in the statement, independent of the seed."""
    content = family + "|" + ",".join(f"{key}={numbers[key]}" for key in sorted(numbers))
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_SHARE == 0 else "train"
