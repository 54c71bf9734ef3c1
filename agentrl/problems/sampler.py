"""Endless stream of problems with a position that can be saved.

The source of the n-th draw and the order of a finite source in its k-th epoch depend only on the seed. A position
therefore consists of a few numbers, and an endless source is never materialized.
"""

from __future__ import annotations

import itertools
from array import array
from random import Random
from typing import TypedDict

from agentrl.problems.mixture import Mixture, ProblemSource
from agentrl.problems.problem_errors import SamplerStateError
from agentrl_envs.types import Problem


class SamplerState(TypedDict):
    """Position of a sampler. ``sources`` is compared when a position is loaded, to reject one of other problems."""

    seed: int
    drawn: int
    positions: list[int]
    weights: list[float]
    sources: list[str]


class ProblemSampler:
    """Draws problems from a mixture and reshuffles each finite source every epoch.

    Every problem of a finite source is drawn once before any is drawn again. Not thread-safe.

    >>> from agentrl.problems.demonstrations.arithmetic import ArithmeticSource
    >>> sampler = ProblemSampler(ArithmeticSource(seed=1), seed=5)
    >>> first = sampler.next(3)
    >>> position = sampler.state_dict()
    >>> expected = sampler.next(2)
    >>> resumed = ProblemSampler(ArithmeticSource(seed=1), seed=5)
    >>> resumed.load_state_dict(position)
    >>> resumed.next(2) == expected
    True
    """

    def __init__(self, problems: Mixture | ProblemSource, *, seed: int) -> None:
        self._mixture = problems if isinstance(problems, Mixture) else Mixture.of(problems)
        self._cumulative = list(itertools.accumulate(self._mixture.weights))
        self._seed = seed
        self._drawn = 0
        self._positions = [0] * len(self._mixture.sources)
        self._orders: dict[int, tuple[int, array[int]]] = {}  # source -> (epoch, order); only one epoch is kept

    def next(self, count: int) -> list[Problem]:
        """Return the next ``count`` problems."""
        return [self._draw() for _ in range(count)]

    def state_dict(self) -> SamplerState:
        """Return the position."""
        return {
            "seed": self._seed,
            "drawn": self._drawn,
            "positions": list(self._positions),
            "weights": list(self._mixture.weights),
            "sources": [source.identity for source in self._mixture.sources],
        }

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue from the saved position. Raises SamplerStateError if it was made with other problems."""
        ours, saved = dict[str, object](self.state_dict()), dict[str, object](state)
        missing = sorted(ours.keys() - saved.keys())
        if missing:
            raise SamplerStateError(f"the saved sampler position lacks {', '.join(missing)}")
        for key in ("seed", "sources", "weights"):
            if saved[key] != ours[key]:
                raise SamplerStateError(
                    f"the saved sampler position was made with other {key}: saved {saved[key]!r}, now {ours[key]!r}"
                )
        self._drawn = int(state["drawn"])
        self._positions = [int(position) for position in state["positions"]]

    def _draw(self) -> Problem:
        which = self._choose(self._drawn)
        source, position = self._mixture.sources[which], self._positions[which]
        self._drawn += 1
        self._positions[which] += 1
        if source.size is None:
            return source.problem(position)
        epoch, offset = divmod(position, source.size)
        return source.problem(self._order(which, epoch, source.size)[offset])

    def _choose(self, draw: int) -> int:
        if len(self._cumulative) == 1:
            return 0
        # Seeded by the number of the draw, so that a saved position needs no random state.
        point = Random(f"{self._seed}:draw:{draw}").random() * self._cumulative[-1]
        return next(which for which, edge in enumerate(self._cumulative) if point < edge)

    def _order(self, which: int, epoch: int, size: int) -> array[int]:
        cached = self._orders.get(which)
        if cached is None or cached[0] != epoch:
            order = array("q", range(size))
            Random(f"{self._seed}:{self._mixture.sources[which].name}:epoch:{epoch}").shuffle(order)
            cached = self._orders[which] = (epoch, order)
        return cached[1]
