"""Generated exercises: families of problems with solutions, and seeded, endless problem sources.

Training and held-out problems are disjoint by construction: a hash of the family and of the numbers in the statement
determines the split of a problem. Seed, phrasing, names and hidden values do not enter the hash, so a statement is in
the same split for every seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Literal, NamedTuple

from agentrl.problems.demonstrations import Demonstration, DemonstrationTurn, format_observation, format_program
from agentrl.problems.rows import EmptyProblemsError, ProblemLoadError
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem

Numbers = dict[str, int]

NAMES = ("Ann", "Ben", "Tom", "Sam", "Mia", "Leo", "Eva", "Max", "Ida", "Kim")
THINGS = ("coins", "apples", "books", "pens", "cards", "stones", "eggs", "nuts", "cups", "balls")
SECRET_RANGE = (10, 99)


class Solution(NamedTuple):
    """The answer of an exercise, the turns of a solution, and the hidden definitions (``Problem.setup``)."""

    answer: int
    turns: tuple[DemonstrationTurn, ...]
    setup: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExerciseFamily:
    """A family of problems: samples the numbers of a statement, writes the statement and solves the problem.

    ``draw`` returns the numbers in the statement. ``solve`` receives a random generator, for hidden values and style,
    and these numbers.
    """

    name: str
    phrasings: tuple[str, ...]
    draw: Callable[[Random], Numbers]
    solve: Callable[[Random, Numbers], Solution]

    def statement(self, rng: Random, numbers: Numbers) -> str:
        """Write a statement about ``numbers`` with random names and objects."""
        first, second = rng.sample(NAMES, 2)
        words = {"n": first, "m": second, "t": rng.choice(THINGS)}
        return rng.choice(self.phrasings).format(**words, **numbers)


def call_turn(call: str, output: object) -> DemonstrationTurn:
    """Return the turn that runs ``call``, with ``output`` as its observation."""
    return DemonstrationTurn(model=format_program(call), observation=format_observation(str(output)))


def draw_descending_pair(rng: Random) -> Numbers:
    """Draw two distinct numbers from 2 to 99 with a > b."""
    b, a = sorted(rng.sample(range(2, 100), 2))
    return {"a": a, "b": b}


def lookup_function_code(function: str, values: Mapping[int, int] | Mapping[int, str]) -> str:
    """Return Python code that defines ``function(n)``, which prints the value of ``n`` or ``empty``.

    >>> lookup_function_code("box", {7: 48})
    "def box(n):\\n    print({7: 48}.get(n, 'empty'))\\n"
    """
    return f"def {function}(n):\n    print({dict(values)!r}.get(n, 'empty'))\n"


Split = Literal["train", "heldout"]
SPLITS: tuple[Split, ...] = ("train", "heldout")
HELDOUT_DIVISOR = 8  # one in this many combinations of family and numbers is held out


class ExerciseSource:
    """Generates problem ``i`` >= 0 of a split, a seed and selected families. Stores no problems."""

    builtin: ClassVar[str]
    all_families: ClassVar[Mapping[str, ExerciseFamily]]
    default_families: ClassVar[Sequence[str]]
    size = None

    def __init__(self, *, split: str = "train", seed: int = 0, families: Sequence[str] | None = None) -> None:
        """Create a source. Raises ProblemLoadError for unknown, empty or repeated ``families`` and an unknown split."""
        if split not in SPLITS:
            raise ProblemLoadError(
                f"builtin:{self.builtin}: unknown split {split!r}; valid: {', '.join(SPLITS)}"
                f"{did_you_mean(split, SPLITS)}"
            )
        chosen = tuple(self.default_families if families is None else families)
        for name in chosen:
            if name not in self.all_families:
                raise ProblemLoadError(
                    f"builtin:{self.builtin}: unknown family {name!r}; valid: {', '.join(self.all_families)}"
                    f"{did_you_mean(name, self.all_families)}"
                )
        if not chosen or len(set(chosen)) != len(chosen):
            raise ProblemLoadError(
                f"builtin:{self.builtin}: families must be one or more distinct names; got {list(chosen)}"
            )
        self.split, self.seed, self.families = split, seed, chosen
        self.name = f"{self.builtin}-{split}-{seed}"

    @property
    def identity(self) -> str:
        """Identifier of the generated sequence: equal for sources that return the same problem at every index."""
        return f"{self.name}:{','.join(self.families)}"

    def problem(self, index: int) -> Problem:
        """Return problem ``index``. The families alternate, so consecutive problems are balanced."""
        return self.demonstration(index).problem

    def demonstration(self, index: int) -> Demonstration:
        """Return problem ``index`` with the turns of its solution."""
        if index < 0:
            raise IndexError(f"problem index must not be negative, got {index}")
        family = self.all_families[self.families[index % len(self.families)]]
        rng = Random(f"{self.seed}:{family.name}:{index}")
        numbers = self._draw(family, rng)
        statement = family.statement(rng, numbers)
        solution = family.solve(rng, numbers)
        problem = Problem(
            id=f"{self.name}-{index}",
            statement=statement,
            answer=str(solution.answer),
            source=self.builtin,
            family=family.name,
            setup=solution.setup,
        )
        return Demonstration(problem=problem, turns=solution.turns)

    def demonstrations(self, count: int) -> list[Demonstration]:
        """Return the first ``count`` demonstrations."""
        return [self.demonstration(index) for index in range(count)]

    def distinct_problems(self, count: int) -> list[Problem]:
        """Return the first ``count`` problems with distinct statements, for a fixed evaluation set.

        Raises EmptyProblemsError if the chosen families have fewer distinct statements.
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
            if split_of_numbers(family.name, numbers) == self.split:
                return numbers


def split_of_numbers(family: str, numbers: Numbers) -> Split:
    """Return the split of a problem. Depends only on the family and on the numbers in the statement."""
    content = family + "|" + ",".join(f"{key}={numbers[key]}" for key in sorted(numbers))
    digest = hashlib.blake2b(content.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_DIVISOR == 0 else "train"
