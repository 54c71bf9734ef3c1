"""Limits of evaluation replace the limits of training in evaluations only."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.evaluation.settings import (
    PRESETS,
    evaluation_rollout_settings,
    with_evaluation_limits,
    with_evaluation_turn_limit,
)
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment

TRAINING = ("environment.max_turns=5", "rollout.max_turn_tokens=100", "rollout.max_response_tokens=200")


def test_without_limits_of_its_own_evaluation_has_those_of_training() -> None:
    settings = load_settings(overrides=[*TRAINING, "model.path=a/b", "evaluation.temperature=0.5"], command="eval")
    rollout = evaluation_rollout_settings(settings)
    assert (rollout.max_turn_tokens, rollout.max_response_tokens, rollout.temperature) == (100, 200, 0.5)
    assert with_evaluation_limits(settings).environment == settings.environment


def test_its_own_limits_replace_them() -> None:
    own = ["evaluation.max_turns=10", "evaluation.max_turn_tokens=1200", "evaluation.max_response_tokens=3600"]
    settings = load_settings(overrides=[*TRAINING, *own, "model.path=a/b"], command="eval")
    changed = with_evaluation_limits(settings)
    assert (changed.rollout.max_turn_tokens, changed.rollout.max_response_tokens) == (1200, 3600)
    assert isinstance(changed.environment, SimpleTIRSettings)
    assert changed.environment.max_turns == 10
    assert changed.model_copy(update={"rollout": settings.rollout, "environment": settings.environment}) == settings


def test_a_turn_is_never_longer_than_its_conversation() -> None:
    settings = load_settings(
        overrides=[*TRAINING, "evaluation.max_response_tokens=50", "model.path=a/b"], command="eval"
    )
    assert evaluation_rollout_settings(settings).max_turn_tokens == 50
    with pytest.raises(SettingsError, match="max_turn_tokens=9 exceeds max_response_tokens=5"):
        load_settings(
            overrides=["evaluation.max_turn_tokens=9", "evaluation.max_response_tokens=5", "model.path=a/b"],
            command="eval",
        )


def test_an_open_environment_is_shared_with_other_turns() -> None:
    environment = SimpleTIREnvironment(SimpleTIRSettings(max_turns=5))
    settings = load_settings(overrides=["evaluation.max_turns=10", "model.path=a/b"], command="eval")
    longer = with_evaluation_turn_limit(environment, settings)
    assert isinstance(longer, SimpleTIREnvironment)
    assert (longer.settings.max_turns, environment.settings.max_turns) == (10, 5)
    assert (
        with_evaluation_turn_limit(environment, load_settings(overrides=["model.path=a/b"], command="eval"))
        is environment
    )


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_settings(name: str) -> None:
    given = [f"{key}={value}" for key, value in PRESETS[name].items()]
    settings = load_settings(overrides=[*given, "model.path=a/b"], command="eval")
    values = {key: str(getattr(settings.evaluation, key.removeprefix("evaluation."))) for key in PRESETS[name]}
    assert values == PRESETS[name]


def test_the_page_has_the_values_of_the_presets() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/evaluation.md").read_text(encoding="utf-8")
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:3] == "| `"]
    found = {row[0]: row[1:7] for row in rows if row[0] in PRESETS}
    assert found == {name: list(values.values()) for name, values in PRESETS.items()}
