"""Evaluation's own turns and tokens, put in the place of those of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config import Settings
    from agentrl.rollout.settings import RolloutSettings


def evaluation_rollout(settings: Settings) -> RolloutSettings:
    """``settings.rollout`` with the token limits and the temperature of evaluation."""
    own = settings.evaluation
    rollout = settings.rollout
    whole = rollout.max_response_tokens if own.max_response_tokens is None else own.max_response_tokens
    turn = rollout.max_turn_tokens if own.max_turn_tokens is None else own.max_turn_tokens
    return rollout.model_copy(
        update={
            "temperature": own.temperature,
            "max_response_tokens": whole,
            "max_turn_tokens": min(turn, whole),
        }
    )


def evaluation_settings(settings: Settings) -> Settings:
    """``settings`` whose environment and rollouts have the limits of evaluation.

    ``evaluation.max_turns`` is for simpletir; other environments bring a limit of their own.
    """
    update: dict[str, object] = {"rollout": evaluation_rollout(settings)}
    turns = settings.evaluation.max_turns
    if settings.env == "simpletir" and turns is not None:
        update["environment"] = settings.environment.model_copy(update={"max_turns": turns})
    return settings.model_copy(update=update)
