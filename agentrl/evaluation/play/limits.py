"""Replacement of the turn and token limits of training by the limits of evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl_envs.episode import Environment
from agentrl_envs.settings import SimpleTIRSettings

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections
    from agentrl.rollout.settings import RolloutSettings


def evaluation_rollout(settings: EvaluationSections) -> RolloutSettings:
    """Copy of ``settings.rollout`` with the token limits and the temperature of evaluation."""
    evaluation = settings.evaluation
    rollout = settings.rollout
    whole = rollout.max_response_tokens if evaluation.max_response_tokens is None else evaluation.max_response_tokens
    turn = rollout.max_turn_tokens if evaluation.max_turn_tokens is None else evaluation.max_turn_tokens
    return rollout.model_copy(
        update={
            "temperature": evaluation.temperature,
            "max_response_tokens": whole,
            "max_turn_tokens": min(turn, whole),
        }
    )


def evaluation_settings(settings: EvaluationSections) -> EvaluationSections:
    """Copy of ``settings`` with the limits of evaluation for environment and rollouts.

    ``evaluation.max_turns`` applies to episodes with tools; other environments have their own limit.
    """
    update: dict[str, object] = {"rollout": evaluation_rollout(settings)}
    turns = settings.evaluation.max_turns
    if isinstance(settings.environment, SimpleTIRSettings) and turns is not None:
        update["environment"] = settings.environment.model_copy(update={"max_turns": turns})
    return settings.model_copy(update=update)


def evaluation_environment(environment: Environment, settings: EvaluationSections) -> Environment:
    """Return an open ``environment`` with evaluation's turn limit. The original must still be closed."""
    turns = settings.evaluation.max_turns
    return environment if turns is None else environment.with_turns(turns)
