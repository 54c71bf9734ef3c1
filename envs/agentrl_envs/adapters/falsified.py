"""Ablation that falsifies every number in the observations, to test whether the policy reads observations."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from agentrl_envs.chat import MarkedText
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Problem, Step

_DIGITS = re.compile(r"[0-9]+")


def falsify_numbers(text: str, seed: int) -> str:
    """Replace each sequence of digits with a different sequence of the same length. Equal sequences stay equal.

    >>> falsify_numbers("12 apples", 0) != "12 apples", len(falsify_numbers("12 apples", 0))
    (True, 9)
    """
    return _DIGITS.sub(lambda match: _other_digits(match.group(), seed), text)


def _other_digits(digits: str, seed: int) -> str:
    rng = random.Random(f"{seed}:{digits}")
    lowest = 1 if len(digits) > 1 and digits[0] != "0" else 0  # no new leading zero: 42 never becomes 07
    while True:
        other = str(rng.randint(lowest, 9)) + "".join(str(rng.randint(0, 9)) for _ in digits[1:])
        if other != digits:
            return other


class FalsifiedEpisode:
    """Wraps an `Episode` and falsifies the text that the model reads. Grading is unchanged."""

    def __init__(self, episode: Episode, seed: int) -> None:
        self._episode = episode
        self._seed = seed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings of the wrapped episode."""
        return self._episode.stop_strings

    def turn_complete(self, text: str) -> bool:
        """Return True if the turn is complete in the wrapped episode."""
        return self._episode.turn_complete(text)

    async def start(self) -> str:
        """Return the unchanged prompt of the wrapped episode."""
        return await self._episode.start()

    async def step(self, action: str) -> Step:
        """Return the wrapped episode's step with falsified numbers in its observation."""
        step = await self._episode.step(action)
        return replace(step, observation=self._falsified(step.observation))

    def _falsified(self, observation: str) -> str:
        if isinstance(observation, MarkedText):
            return observation.map_unmarked(lambda part: falsify_numbers(part, self._seed))
        return falsify_numbers(observation, self._seed)

    async def fork(self) -> FalsifiedEpisode:
        """Return a fork with the same replacements."""
        return FalsifiedEpisode(await self._episode.fork(), self._seed)

    async def close(self) -> None:
        """Close the wrapped episode."""
        await self._episode.close()


@dataclass(frozen=True)
class FalsifiedObservationsEnvironment(Environment):
    """Environment wrapper that replaces all numbers in observations.

    The owner of the wrapped environment opens and closes it.
    """

    environment: Environment
    seed: int

    def episode(self, problem: Problem) -> Episode:
        return FalsifiedEpisode(self.environment.episode(problem), seed=self.seed)

    def describe(self) -> list[str]:
        return [*self.environment.describe(), "observations are falsified"]
