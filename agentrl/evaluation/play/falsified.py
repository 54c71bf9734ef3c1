"""An environment that shows false numbers: a policy that reads its observations must fail there."""

from __future__ import annotations

from agentrl_envs.adapters.falsified import FalsifiedObservations
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.types import Problem


class FalsifiedEnvironment:
    """The same environment with every observation's numbers replaced by others before the model reads them."""

    def __init__(self, environment: Environment, seed: int) -> None:
        self._environment = environment
        self._seed = seed

    async def open(self) -> None:
        """The environment under it is open already."""

    def episode(self, problem: Problem) -> Episode:
        return FalsifiedObservations(self._environment.episode(problem), seed=self._seed)

    async def close(self) -> None:
        """The environment under it is closed by its owner."""

    def describe(self) -> list[str]:
        return [*self._environment.describe(), "observations are falsified"]
