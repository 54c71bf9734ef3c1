"""An endpoint as what samples in an evaluation. Light to import: an endpoint that is wrong is said within a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.evaluation.play.text_engine import TextEngine
from agentrl.evaluation.records.provenance import chosen_engine

if TYPE_CHECKING:
    from agentrl.evaluation.play.players import Player
    from agentrl.evaluation.settings import EvaluationSections
    from agentrl_envs.episode import Environment


async def open_endpoint(settings: EvaluationSections) -> OpenedEndpoint:
    """The endpoint ``evaluation.endpoint``, once it has answered. SettingsError and WorldError say what fails."""
    engine = TextEngine(settings.evaluation.endpoint)
    try:
        await engine.open()
    except BaseException:
        await engine.close()
        raise
    return OpenedEndpoint(engine=engine, settings=settings)


@dataclass(frozen=True, kw_only=True)
class OpenedEndpoint:
    """An endpoint that has answered."""

    engine: TextEngine
    settings: EvaluationSections

    @property
    def concurrency(self) -> int:
        return self.settings.evaluation.endpoint.concurrency

    def model(self) -> Mapping[str, Any]:
        return {"name": self.engine.model, "fingerprint": self.engine.fingerprint()}

    def sampler(self) -> Mapping[str, Any]:
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

    def without_room(self, prompts: Sequence[str]) -> Mapping[str, int]:
        """None: the endpoint says itself what it cannot read."""
        return {}

    async def close(self) -> None:
        await self.engine.close()
