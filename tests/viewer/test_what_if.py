"""A stored group under another estimator equals compute_advantages on the same statistics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from viewer.made_run import make_run

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages
from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import StoredStep, StoredTrajectory, read_step
from agentrl.viewer.calculations import CalculationHandlers
from agentrl.viewer.what_if import compute_what_if, list_estimator_forms

CHOICES = [
    ("rloo", {}),
    ("grpo", {"normalize": "group_std"}),
    ("opo", {"leave_one_out": True}),
    ("tir_otb", {"tail": "carry"}),
    ("tir_otb", {"tail": "self", "leave_one_out": True}),
    ("otb_isolated", {"gamma": 0.9}),
    ("reinforce_pp_baseline", {}),  # whitened over the step
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "first", groups=2, size=8)


@pytest.fixture(scope="module")
def step(run: RunDirectory) -> StoredStep:
    return read_step(run, 2)


def straight(step: StoredStep, kept: list[StoredTrajectory], name: str, options: dict[str, Any]) -> list[np.ndarray]:
    """Call compute_advantages on ``kept``, with padding after each row's model tokens."""
    rows = [item.tokens for item in kept if item.tokens is not None]
    width = max(map(len, rows))

    def padded(values: str) -> torch.Tensor:
        return torch.stack([torch.from_numpy(np.pad(getattr(row, values), (0, width - len(row)))) for row in rows])

    inputs = AdvantageInputs(
        rewards=padded("rewards"),
        response_mask=padded("loss_mask"),  # made_run rejects no token
        groups=torch.tensor([row.group for row in rows]),
        log_probs=padded("log_probs"),
        token_energy=padded("energy"),
        loss_mask=padded("loss_mask"),
    )
    made = compute_advantages(name, inputs, **options)
    return [made.advantages[place, : len(row)].numpy() for place, row in enumerate(rows)]


@pytest.mark.parametrize(("name", "options"), CHOICES)
def test_it_equals_compute_advantages(step: StoredStep, name: str, options: dict[str, Any]) -> None:
    chosen = step.trajectories[1]
    found = compute_what_if(step, chosen, estimator=name, options=options)
    trained = [item for item in step.trajectories if item.tokens is not None]
    wide = ESTIMATORS[name].requirements(ESTIMATORS[name].make_options(name, options)).step_wide
    group = trained if wide else step.trained_group(chosen)
    for item, expected in zip(group, straight(step, group, name, options), strict=True):
        if item.key in found.columns:
            np.testing.assert_array_equal(found.columns[item.key]["advantages"], expected)
    assert set(found.columns) == {item.key for item in step.trained_group(chosen)}


def test_of_n_rollouts_the_chosen_one_and_the_first_others_are_taken(step: StoredStep) -> None:
    chosen = step.trajectories[6]
    found = compute_what_if(step, chosen, estimator="rloo", size=3)
    kept = [item for item in step.trained_group(chosen) if item.key.sample in (0, 1, 6)]
    assert list(found.columns) == [item.key for item in kept]
    for item, expected in zip(kept, straight(step, kept, "rloo", {}), strict=True):
        np.testing.assert_array_equal(found.columns[item.key]["advantages"], expected)


def test_the_runs_own_estimator_changes_nothing(step: StoredStep) -> None:
    found = compute_what_if(step, step.trajectories[0], estimator="tir_otb")
    assert found.power == pytest.approx(found.power_before, rel=1e-12)


def test_what_cannot_be_computed_says_why(step: StoredStep) -> None:
    with pytest.raises(SettingsError, match="the step did not train on trajectory 2"):
        compute_what_if(step, step.trajectories[2], estimator="rloo")
    with pytest.raises(SettingsError, match="N must be 1 to 6"):
        compute_what_if(step, step.trajectories[0], estimator="rloo", size=7)


def test_the_forms_name_every_estimator_and_option() -> None:
    forms = list_estimator_forms()
    assert list(forms) == list(ESTIMATORS.names())
    (tail,) = (form for form in forms["tir_otb"] if form.name == "tail")
    assert (tail.default, tail.choices) == ("zero", ["zero", "carry", "self"])
    assert [form.choices for form in forms["opo"] if form.name == "leave_one_out"] == [[False, True]]


def test_requests_are_answered_in_json(run: RunDirectory, step: StoredStep) -> None:
    answers = CalculationHandlers(run)
    question = {"ask": "what_if", "step": 2, "trajectory": 1, "estimator": "rloo", "options": {}, "size": None}
    answer = json.loads(answers.answer(question))["answer"]
    expected = compute_what_if(step, step.trajectories[1], estimator="rloo").columns[step.trajectories[1].key]
    np.testing.assert_array_equal(np.float32(answer["fields"]["what_if_advantages"]), expected["advantages"])
    wide = json.loads(answers.answer(question | {"estimator": "reinforce_pp_baseline"}))["answer"]
    expected = compute_what_if(step, step.trajectories[1], estimator="reinforce_pp_baseline").columns[
        step.trajectories[1].key
    ]
    np.testing.assert_array_equal(np.float32(wide["fields"]["what_if_advantages"]), expected["advantages"])
    gone = json.loads(answers.answer(question | {"trajectory": 99}))
    assert "step 2 has no trajectory 99" in gone["error"]
    wrong = json.loads(answers.answer(question | {"estimator": "tir_otbb"}))
    assert "unknown estimator 'tir_otbb'" in wrong["error"]
    missing = json.loads(answers.answer(question | {"estimator": "gae"}))
    assert "estimator 'gae' needs values" in missing["error"]
    lines = json.loads(answers.answer({"ask": "explain", "step": 2, "trajectory": 1, "token": 0}))["answer"]
    assert lines[0].startswith("step 2, trajectory 1")


@pytest.mark.usefixtures("own_registries")
def test_what_a_plug_in_raises_is_one_message(tmp_path: Path) -> None:
    plugin = tmp_path / "raising_plugin.py"
    plugin.write_text(
        "from agentrl.algorithms import NoOptions, register_estimator\n"
        '@register_estimator("raising", options=NoOptions)\n'
        "def raising(inputs, options):\n    raise KeyError('x')\n"
    )
    run = make_run(tmp_path / "first", steps=1)
    run.config.write_text(f"plugins: [{plugin}, gone_plugin.py]\n")
    answers = CalculationHandlers(run)
    question = {"ask": "what_if", "step": 1, "trajectory": 0, "estimator": "raising", "options": {}, "size": None}
    assert "KeyError: 'x'" in json.loads(answers.answer(question))["error"]
    forms = json.loads(answers.answer({"ask": "estimators"}))["answer"]
    assert "raising" in forms["estimators"]
    assert "there is no file" in forms["warnings"][0]
