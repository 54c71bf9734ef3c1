"""Sampling from an endpoint in an evaluation. Imports nothing heavy, to report a wrong endpoint within a second."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.evaluation.play.text_engine import TextEngine
from agentrl.evaluation.records.provenance import chosen_engine

if TYPE_CHECKING:
    from agentrl.evaluation.play.players import Player
    from agentrl.evaluation.settings import EvaluationSections
    from agentrl_envs.episode import Environment


async def open_endpoint(settings: EvaluationSections) -> OpenedEndpoint:
    """Open ``evaluation.endpoint`` and wait for its first response. Raises SettingsError or WorldError."""
    engine = TextEngine(settings.evaluation.endpoint)
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return OpenedEndpoint(engine=engine, settings=settings)


@dataclass(frozen=True, kw_only=True)
class OpenedEndpoint:
    engine: TextEngine
    settings: EvaluationSections

    @property
    def concurrency(self) -> int:
        return self.settings.evaluation.endpoint.concurrency

    def model(self) -> Mapping[str, object]:
        return {"name": self.engine.model, "fingerprint": self.engine.fingerprint()}

    def sampler(self) -> Mapping[str, object]:
        return chosen_engine(self.settings)

    def player(self, environment: Environment) -> Player:
        from agentrl.evaluation.play.players import TextPlayer  # heavy

        return TextPlayer(
            environment=environment,
            engine=self.engine,
            settings=self.settings.rollout,
            top_p=self.settings.evaluation.top_p,
            seed=self.settings.seed,
            concurrency=self.concurrency,
        )

    def without_room(self, prompts: Mapping[tuple[str, str], str]) -> Mapping[tuple[str, str], int]:
        """Return an empty mapping, because the endpoint itself rejects prompts that are too long."""
        return {}

    async def close(self) -> None:
        await self.engine.close()
