"""Environment with false numbers in its observations. A policy that reads its observations must fail in it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_envs.adapters.falsified import FalsifiedObservations
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Problem


@dataclass(frozen=True)
class FalsifiedEnvironment(Environment):
    """Wrapper that replaces all numbers in the observations of an environment.

    The owner of the wrapped environment opens and closes it.
    """

    environment: Environment
    seed: int

    def episode(self, problem: Problem) -> Episode:
        return FalsifiedObservations(self.environment.episode(problem), seed=self.seed)

    def describe(self) -> list[str]:
        return [*self.environment.describe(), "observations are falsified"]
