from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from viewer.made_run import make_tokenizer

from agentrl.algorithms import (
    AdvantageInputs,
    Advantages,
    EstimatorInputs,
    ScalarOptions,
    compute_advantages,
    register_estimator,
)
from agentrl.api.run import Run
from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import TokenMetadata, TrajectoryTokens, write_tokens
from agentrl.viewer.explain import (
    compute_baseline_weights,
    explain_command,
    explain_token,
    loss_log_prob_gradients,
)
from agentrl_envs.registry import UnknownNameError

# Two turns of the model around an observation of two tokens, and one turn.
MASKS = ([True, True, False, False, True], [True, True, True, False, False])
REWARDS = ([0.0, 0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.25, 0.0, 0.0])
ENERGIES = ([0.5, 0.3, 0.0, 0.0, 0.7], [0.2, 0.9, 0.4, 0.0, 0.0])


def inputs() -> AdvantageInputs:
    return AdvantageInputs(
        rewards=torch.tensor(REWARDS),
        response_mask=torch.tensor(MASKS),
        groups=torch.tensor([4, 4]),
        token_energy=torch.tensor(ENERGIES),
    )


def record(sample: int) -> dict[str, Any]:
    model = {"origin": "model", "text": "a", "reward": 0.0}
    seen = {"origin": "observation", "token_ids": [8, 8], "log_probs": [], "version_spans": [], "text": "", "reward": 0}
    two = model | {"token_ids": [5, 6], "log_probs": [-0.1, -0.4], "version_spans": [[2, 2]]}
    one = model | {"token_ids": [7], "log_probs": [-0.2], "version_spans": [[2, 1]], "reward": 1.0}
    three = model | {"token_ids": [5, 6, 7], "log_probs": [-0.1] * 3, "version_spans": [[2, 3]], "reward": 0.25}
    segments = [two, seen, one] if sample == 0 else [three]
    return {"group": 4, "sample": sample, "branch": 0, "ended": "answered", "segments": segments}


PLUGIN = """
from agentrl.algorithms import Advantages, NoOptions, register_estimator

@register_estimator("explained_half", options=NoOptions, group_based=True)
def half(inputs, options):
    returns = inputs.rewards.flip(1).cumsum(1).flip(1)
    return Advantages(advantages=returns / 2, returns=returns, baselines=returns / 2)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return make_run(tmp_path / "x", "tir_otb")


def make_run(folder: Path, estimator: str, *, said: str = "", config: str = "name: x\n") -> RunDirectory:
    """Write a step computed by ``estimator``, which the files name ``said``."""
    made = RunDirectory.create(folder, config)
    made.tokens.mkdir()
    advantages = compute_advantages(estimator, inputs())
    rows = []
    for sample, mask in enumerate(MASKS):
        own = np.array(mask)
        columns = {name: values[sample].numpy()[own] for name, values in vars(advantages).items()}
        rows.append(
            TrajectoryTokens(
                group=4,
                sample=sample,
                branch=0,
                parent=-1,
                fork=0,
                share=1.0,
                update=0,
                loss_weight=1 / 6,
                log_probs=np.full(3, -0.5, dtype=np.float32),
                entropy=np.zeros(3, dtype=np.float16),
                energy=np.array(ENERGIES[sample], dtype=np.float32)[own],
                rewards=np.array(REWARDS[sample], dtype=np.float32)[own],
                loss_mask=np.ones(3, dtype=bool),
                **columns,
            )
        )
    facts = TokenMetadata(
        step=3,
        version=2,
        rank=0,
        ranks=1,
        estimator=said or estimator,
        loss="reinforce",
        aggregation="token_mean",
    )
    made.write_trajectories(3, [record(0), record(1), record(2)])
    write_tokens(made.token_statistics_file(3, 0), facts, rows)
    return made


def test_the_chain_agrees_with_compute_advantages(run: RunDirectory) -> None:
    made = compute_advantages("tir_otb", inputs())
    for position, index in ((0, 0), (1, 1), (4, 2)):
        found = explain_token(run, step=3, trajectory=0, token=position)
        assert found.index == index
        said = "\n".join(found.lines())
        assert f"A = {float(made.advantages[0, position]):.9g}" in said
        assert f"b = {float(made.baselines[0, position]):.9g}" in said
        assert "compute_advantages on the stored statistics returns the same value" in said
        assert f"d loss / d log p = {-float(made.advantages[0, position]):.9g}" in said


@pytest.mark.parametrize("name", ["tir_otb", "otb_isolated", "rloo", "opo", "grpo"])
def test_every_number_is_that_of_compute_advantages_to_the_last_digit(tmp_path: Path, name: str) -> None:
    run, made = make_run(tmp_path / "x", name), compute_advantages(name, inputs())
    for sample, mask in enumerate(MASKS):
        for position in np.flatnonzero(mask):
            said = "\n".join(explain_token(run, step=3, trajectory=sample, token=int(position)).lines())
            for label, values in (
                ("advantage: A", made.advantages),
                ("baseline: b", made.baselines),
                ("; return G", made.returns),
            ):
                (shown,) = re.findall(rf"{label} = (\S+)", said)
                assert np.float32(shown) == values[sample, position].numpy(), label


def test_the_text_of_the_token_stands_beside_its_id(run: RunDirectory) -> None:
    tokenizer = make_tokenizer()
    tokenizer.save(str(run.path / "tokenizer.json"))
    ids = tokenizer.encode("2 + 3\u202e\n").ids
    three = {**record(1), "segments": [{**record(1)["segments"][0], "token_ids": ids[:3]}]}
    run.write_trajectories(3, [record(0), {**three, "prompt_ids": []}, record(2)])
    texts = [tokenizer.decode([token]) for token in ids[:3]]
    said = "\n".join(explain_token(run, step=3, trajectory=1, token=1).lines())
    assert f"id {ids[1]}, {texts[1]!r}\n  after {texts[0]!r}, before {texts[2]!r}" in said


@pytest.mark.usefixtures("own_registries")
def test_an_estimator_of_a_plug_in_is_explained(tmp_path: Path) -> None:
    plugin = tmp_path / "explained_plugin.py"
    plugin.write_text(PLUGIN)
    run = make_run(tmp_path / "x", "rloo", said="explained_half", config=f"plugins: [{plugin}]\n")
    with pytest.raises(UnknownNameError, match="explained_half"):
        list(explain_token(run, step=3, trajectory=0, token=0).lines())
    lines = "\n".join(explain_command(run.path, step=3, trajectory=0, token=0))
    assert "b = " in lines
    assert "by explained_half" in lines
    gone = make_run(tmp_path / "y", "rloo", said="explained_gone", config="plugins: [gone_plugin.py]\n")
    with pytest.raises(SettingsError, match=r"unknown estimator 'explained_gone'.*there is no file .*gone_plugin\.py"):
        explain_command(gone.path, step=3, trajectory=0, token=0)


def test_a_run_brings_no_code_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "sent", "rloo", said="explained_sent")
    inside = run.path / "sent_plugin.py"
    inside.write_text(f"raise SystemExit({str(tmp_path)!r})\n")
    run.config.write_text(f"plugins: [{inside}]\n")
    with pytest.raises(SettingsError, match=r"sent_plugin\.py.*not loaded, because it is inside the run directory"):
        explain_command(run.path, step=3, trajectory=0, token=0)


def test_the_weights_of_the_siblings_make_the_baseline(run: RunDirectory) -> None:
    found = explain_token(run, step=3, trajectory=0, token=4)
    weights = list(compute_baseline_weights(found.step, found.trajectory, 2).values())
    assert weights == pytest.approx([1.5 / 3.0, 1.5 / 3.0], rel=1e-6)  # W_2 is 1.5 in both
    first = explain_token(run, step=3, trajectory=0, token=0)
    weights = list(compute_baseline_weights(first.step, first.trajectory, 0).values())
    assert weights == pytest.approx([0.5 / 0.7, 0.2 / 0.7], rel=1e-6)
    assert sum(np.array(weights) * [1.0, 0.25]) == pytest.approx(first.value_at_token(first.tokens.baselines), rel=1e-6)


def test_a_baseline_that_is_not_a_weighted_mean_is_said_to_be_none(tmp_path: Path, own_registries: None) -> None:
    @register_estimator("best", options=ScalarOptions, group_based=True)
    def best(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
        totals = inputs.totals.unsqueeze(-1)
        most = -inputs.groups.broadcast_group_min(-inputs.totals).unsqueeze(-1)
        return Advantages(advantages=totals - most, returns=totals, baselines=most)

    made = make_run(tmp_path / "best", "best")
    lines = list(explain_token(made, step=3, trajectory=0, token=0).lines())
    assert "  no weights: b is not a weighted mean of the group's returns" in lines
    assert not any(line.startswith("  weight ") for line in lines)


def test_an_estimator_without_a_group_says_why_it_lists_no_weights(tmp_path: Path) -> None:
    lines = list(explain_token(make_run(tmp_path / "x", "reinforce_pp"), step=3, trajectory=0, token=0).lines())
    assert "  no weights: b is not computed from the returns of the group" in lines
    assert not any(line.startswith("  weight ") for line in lines)


def test_weights_on_returns_make_the_stored_baseline(tmp_path: Path, own_registries: None) -> None:
    """For squares, the weights from returns of 0 and 1 fit equal returns, but no other returns."""

    @register_estimator("squares", options=ScalarOptions, group_based=True)
    def squares(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
        totals = inputs.totals.unsqueeze(-1)
        mean = inputs.groups.broadcast_group_mean(inputs.totals.square()).unsqueeze(-1)
        return Advantages(advantages=totals - mean, returns=totals, baselines=mean)

    lines = list(explain_token(make_run(tmp_path / "x", "squares"), step=3, trajectory=0, token=0).lines())
    assert "  no weights: b is not a weighted mean of the group's returns" in lines


@pytest.mark.filterwarnings("error")
def test_a_frame_of_tokens_is_printed_without_warnings(run: RunDirectory) -> None:
    frame = Run(run.path).tokens(3)
    assert "entropy" in frame.head().to_string()  # of float16, where the bounds of pandas overflow
    assert frame.loc[(0, 4), "returns"] == 1.0
    assert len(frame) == 9  # three trajectories of three model tokens


def test_shares_of_the_power_sum_to_one(run: RunDirectory) -> None:
    step = explain_token(run, step=3, trajectory=0, token=0).step
    assert sum(row.gradient_power.sum() for row in step.rows.values()) == pytest.approx(step.total_gradient_power)


def test_a_clipped_token_has_no_gradient(run: RunDirectory) -> None:
    found = explain_token(run, step=3, trajectory=0, token=4)
    facts = TokenMetadata(step=3, version=2, rank=0, ranks=1, estimator="tir_otb", loss="ppo", aggregation="token_mean")
    moved = np.array([-0.5, -0.45, 0.0], dtype=np.float32)
    row = TrajectoryTokens(**(vars(found.tokens) | {"update_log_probs": moved, "update": 1}))
    factors = loss_log_prob_gradients(facts, row)
    assert factors is not None
    assert factors[1] == pytest.approx(-row.advantages[1] * np.exp(0.05), rel=1e-5)
    assert factors[2] == 0.0  # the ratio e^0.5 is above 1.2 and the advantage positive


@pytest.mark.parametrize(
    ("step", "trajectory", "token", "message"),
    [
        (9, 0, 0, "has no trajectories of step 9; stored steps: 3 to 3"),
        (3, 5, 0, "step 3 has no trajectory 5; valid: 0 to 2"),
        (3, 0, 5, "trajectory 0 has no token 5; valid: 0 to 4"),
        (3, 0, 2, "token 2 of trajectory 0 belongs to an observation .* the nearest model token is 1"),
        (3, 2, 0, "step 3 did not train on trajectory 2: a filter removed it"),
    ],
)
def test_what_cannot_be_explained_says_why(
    run: RunDirectory, step: int, trajectory: int, token: int, message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        explain_token(run, step=step, trajectory=trajectory, token=token)


def test_steps_without_statistics_and_folders_without_a_run(run: RunDirectory, tmp_path: Path) -> None:
    run.token_statistics_file(3, 0).unlink()
    with pytest.raises(SettingsError, match=r"step 3 has no token statistics: telemetry\.tokens_every skips it"):
        explain_token(run, step=3, trajectory=0, token=0)
    with pytest.raises(SettingsError, match="is not a run directory"):
        explain_command(tmp_path / "none", step=1, trajectory=0, token=0)


def test_a_token_that_no_sibling_reaches_names_the_rule_of_tails(tmp_path: Path) -> None:
    run = make_run(tmp_path / "x", "tir_otb")
    for sample in (0, 1):  # both have three model tokens
        assert "tail=" not in "\n".join(explain_token(run, step=3, trajectory=sample, token=0).lines())
    run = make_run(tmp_path / "y", "otb")  # by position: the second response ends before the first one's last token
    said = "\n".join(explain_token(run, step=3, trajectory=0, token=4).lines())
    assert "b = 0 by otb" in said
    assert "no other trajectory of the group has a model token 2" in said
    assert "tail=zero sets the baseline: b = 0" in said
