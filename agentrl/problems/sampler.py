"""Problem sources, weighted mixtures of sources, and an endless sampler whose position can be saved.

The source of the n-th draw and the order of a finite source in its k-th epoch depend only on the seed. A position
therefore consists of a few numbers, and an endless source is never materialized. With a curriculum, draws also depend
on the posteriors of the problems. The saved position contains the posteriors.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol, TypedDict

from agentrl.problems.posterior import Posteriors, PosteriorState
from agentrl.problems.rows import EmptyProblemsError, ProblemLoadError, SamplerStateError
from agentrl.problems.settings import Curriculum
from agentrl_envs.types import Problem


def hash_problem_info(info: Mapping[str, object]) -> str:
    """Return a hash of ``Problem.info``, or "" if it is empty."""
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest() if info else ""


class ProblemSource(Protocol):
    """Problems by index: a finite set of ``size`` problems, or an endless generator (``size`` is None).

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
    """A finite list of problems in memory.

    >>> source = FiniteSource("toy", [Problem(id="a", statement="1+1?", answer="2", source="toy")])
    >>> source.size, source.problem(0).id
    (1, 'a')
    """

    def __init__(self, name: str, problems: Sequence[Problem]) -> None:
        """Create a source. Raises EmptyProblemsError without problems, and ProblemLoadError for a repeated id."""
        if not problems:
            raise EmptyProblemsError(f"{name}: the source contains no problems")
        seen: set[str] = set()
        for problem in problems:
            if problem.id in seen:
                raise ProblemLoadError(
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
            digest.update(
                f"{problem.id}\0{problem.statement}\0{problem.answer}\0{hash_problem_info(problem.info)}".encode()
            )
        return f"{self.name}:{len(self.problems)}:{digest.hexdigest()[:16]}"

    def problem(self, index: int) -> Problem:
        return self.problems[index]


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources with their sampling weights. The weights are positive and need not sum to 1."""

    sources: tuple[ProblemSource, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sources:
            raise EmptyProblemsError("a mixture needs at least one source of problems")
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ProblemLoadError(
                f"two sources of a mixture are named {repeated[0]!r}: use one entry with the sum of the weights or, "
                "for different files, different file names"
            )


def _variance_priority(random: Random, alpha: float, beta: float) -> float:
    # The problems with the largest values are a weighted sample without replacement (Efraimidis and Spirakis 2006).
    return math.log(1 - random.random()) * (alpha + beta) ** 2 / (alpha * beta)


def _thompson_priority(random: Random, alpha: float, beta: float) -> float:
    success = random.betavariate(alpha, beta)
    return success * (1 - success)


_PRIORITIES: Final[dict[Curriculum, Callable[[Random, float, float], float]]] = {
    "variance": _variance_priority,
    "thompson": _thompson_priority,
}
"""Random priority of a problem by its Beta posterior. The problems with the highest priorities are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnProblem:
    """A problem from the sampler, and the ``key`` of its posterior.

    Each problem of a finite source has a separate key. Problems of an endless source never repeat, so all problems of a
    family share a key.
    """

    problem: Problem
    key: str


class SamplerState(TypedDict):
    """Position of a sampler. Loading compares ``sources``, to reject a position that refers to other problems."""

    seed: int
    drawn: int
    positions: list[int]
    weights: list[float]
    sources: list[str]
    posteriors: PosteriorState
    left_out: list[str]


class ProblemSampler:
    """Draws problems from a mixture. Not thread-safe.

    With the uniform ``curriculum``, every problem of a finite source is drawn once before any is drawn again, in an
    order that changes every epoch. The other curricula draw problems by their ``posteriors``. "variance" draws with
    weights ``p (1 - p)``, where ``p`` is the posterior mean of the success probability. "thompson" samples ``p`` from
    each posterior and draws the problems with the largest ``p (1 - p)``. With these curricula, a call draws a problem
    twice only if a source has too few problems. ``decay``: see :class:`.Posteriors`.

    >>> from agentrl.problems.arithmetic import ArithmeticSource
    >>> sampler = ProblemSampler(ArithmeticSource(seed=1), seed=5)
    >>> first = sampler.next(3)
    >>> position = sampler.state_dict()
    >>> expected = sampler.next(2)
    >>> resumed = ProblemSampler(ArithmeticSource(seed=1), seed=5)
    >>> resumed.load_state_dict(position)
    >>> resumed.next(2) == expected
    True
    """

    def __init__(
        self,
        problems: Mixture | ProblemSource,
        *,
        seed: int,
        curriculum: Curriculum = "uniform",
        decay: float = 1.0,
    ) -> None:
        """Create a sampler. Raises ProblemLoadError for a curriculum over an endless source."""
        self._mixture = problems if isinstance(problems, Mixture) else Mixture(sources=(problems,), weights=(1.0,))
        self._cumulative = list(itertools.accumulate(self._mixture.weights))
        self._seed = seed
        self._curriculum = curriculum
        self._drawn = 0
        self._positions = [0] * len(self._mixture.sources)
        self._orders: dict[int, tuple[int, array[int]]] = {}  # source -> (epoch, order), for the current epoch only
        self._left_out: set[str] = set()
        self.posteriors = Posteriors(decay=decay)
        endless = [source.name for source in self._mixture.sources if source.size is None]
        if curriculum != "uniform" and endless:
            raise ProblemLoadError(
                f"curriculum={curriculum}: the problems of {endless[0]} never repeat, so they have no posteriors; "
                "limit this source, or use the uniform curriculum"
            )

    def next(self, count: int) -> list[Problem]:
        """Return the next ``count`` problems."""
        return [draw.problem for draw in self.draw(count)]

    def draw(self, count: int) -> list[DrawnProblem]:
        """Return the next ``count`` problems with the keys of their posteriors."""
        sources = [self._source_of_draw(self._drawn + number) for number in range(count)]
        self._drawn += count
        indices = {
            source_index: iter(self._next_indices(source_index, among))
            for source_index, among in sorted(Counter(sources).items())
        }
        return [self._draw_at(source_index, next(indices[source_index])) for source_index in sources]

    def exclude_problem(self, key: str) -> None:
        """Exclude the problem of a posterior from further draws by posterior, because its prompt is too long."""
        if self._curriculum != "uniform":
            self._left_out.add(key)

    def state_dict(self) -> SamplerState:
        """Return the current position, for `load_state_dict`."""
        return {
            "seed": self._seed,
            "drawn": self._drawn,
            "positions": list(self._positions),
            "weights": list(self._mixture.weights),
            "sources": [source.identity for source in self._mixture.sources],
            "posteriors": self.posteriors.state_dict(),
            "left_out": sorted(self._left_out),
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue from a saved position. Raises SamplerStateError if the position refers to other problems."""
        ours, saved = dict[str, object](self.state_dict()), dict[str, object](state)
        missing = sorted(ours.keys() - saved.keys())
        if missing:
            raise SamplerStateError(f"the saved sampler position lacks {', '.join(missing)}")
        for key in ("seed", "sources", "weights"):
            if saved[key] != ours[key]:
                raise SamplerStateError(
                    f"the saved sampler position differs in {key}: saved {saved[key]!r}, now {ours[key]!r}"
                )
        self._drawn = int(state["drawn"])
        self._positions = [int(position) for position in state["positions"]]
        self.posteriors.load_state_dict(state["posteriors"])
        self._left_out = set(state["left_out"])

    def _source_of_draw(self, draw: int) -> int:
        if len(self._cumulative) == 1:
            return 0
        # Seed with the index of the draw, so that a saved position needs no random state.
        point = Random(f"{self._seed}:draw:{draw}").random() * self._cumulative[-1]
        return next(source_index for source_index, edge in enumerate(self._cumulative) if point < edge)

    def _next_indices(self, source_index: int, count: int) -> list[int]:
        """Return the indices of the next ``count`` problems of a source."""
        position, size = self._positions[source_index], self._mixture.sources[source_index].size
        self._positions[source_index] += count
        positions = range(position, position + count)
        if size is None:
            return list(positions)
        if self._curriculum == "uniform":
            return [self._epoch_order(source_index, one // size, size)[one % size] for one in positions]
        return self._indices_by_posterior(source_index, position, count)

    def _indices_by_posterior(self, source_index: int, position: int, count: int) -> list[int]:
        source, priority = self._mixture.sources[source_index], _PRIORITIES[self._curriculum]
        random = Random(f"{self._seed}:{source.name}:curriculum:{position}")
        keys = {index: _posterior_key(source, index) for index in range(source.size or 0)}
        ranked = [
            (priority(random, *self.posteriors.beta_parameters(key)), -index)
            for index, key in keys.items()
            if key not in self._left_out
        ]
        if not ranked:
            raise EmptyProblemsError(f"{source.name}: the prompts of all problems exceed rollout.max_prompt_tokens")
        chosen = [-index for _, index in heapq.nlargest(count, ranked)]
        return [chosen[number % len(chosen)] for number in range(count)]

    def _draw_at(self, source_index: int, index: int) -> DrawnProblem:
        source = self._mixture.sources[source_index]
        problem = source.problem(index)
        key = _posterior_key(source, index if source.size is not None else problem.family)
        return DrawnProblem(problem=problem, key=key)

    def _epoch_order(self, source_index: int, epoch: int, size: int) -> array[int]:
        cached = self._orders.get(source_index)
        if cached is None or cached[0] != epoch:
            order = array("q", range(size))
            Random(f"{self._seed}:{self._mixture.sources[source_index].name}:epoch:{epoch}").shuffle(order)
            cached = self._orders[source_index] = (epoch, order)
        return cached[1]


def _posterior_key(source: ProblemSource, index_or_family: int | str) -> str:
    return f"{source.name}/{index_or_family}"
