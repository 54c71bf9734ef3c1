"""An environment that shows false numbers: a policy that reads its observations must fail in it."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl_envs.adapters.falsified import FalsifiedObservations
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Problem


@dataclass(frozen=True)
class FalsifiedEnvironment:
    """An environment whose observations have all numbers replaced by others before the model reads them."""

    environment: Environment
    seed: int

    async def open(self) -> None:
        """Do nothing: the wrapped environment is already open."""

    def episode(self, problem: Problem) -> Episode:
        return FalsifiedObservations(self.environment.episode(problem), seed=self.seed)

    async def close(self) -> None:
        """Do nothing: the owner of the wrapped environment closes it."""

    def describe(self) -> list[str]:
        return [*self.environment.describe(), "observations are falsified"]
