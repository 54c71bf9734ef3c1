"""Algorithms end to end: rollouts, greedy rollouts, rounds of sampling, critic, reference policy, and resuming."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from warm import run_warm

from agentrl.telemetry.metrics import EVERY_STEP, METRICS, SECTIONS, find_metric
from agentrl.telemetry.run_directory import RunDirectory

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("runs_in_one_process.py")
NAMES = (
    "ppo",
    "ppo_in_two",
    "distilled",
    "hinted",
    "dapo",
    "remax",
    "eob",
    "kl_cov",
    "adapters",
    "adapters_in_two",
    "ppo_adapters",
)
TIMINGS = ("time/", "tokens_per_s", "rollout/seconds")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, random_policy: Path) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("algorithms")
    play(random_policy, folder, *NAMES)
    return folder


def play(policy: Path, folder: Path, *names: str) -> None:
    """The runs ``names`` of a policy, in ``folder``."""
    paths = [str(SCRIPT.parent), os.environ.get("PYTHONPATH", "")]
    done = run_warm(
        [sys.executable, str(SCRIPT), str(policy), str(folder), *names],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=folder,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    assert "Warning" not in done.stdout


def test_a_mixture_of_experts_trains_with_the_routes_of_the_engine_and_of_its_first_forward(
    random_policy: Path, tmp_path: Path
) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=300, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=8, sliding_window=None, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    shutil.copytree(random_policy, tmp_path / "experts")
    MixtralForCausalLM(config).save_pretrained(tmp_path / "experts")
    play(tmp_path / "experts", tmp_path, "routes_of_engine", "routes_of_trainer")
    for row in steps(tmp_path / "routes_of_engine"):
        assert row["policy/other_routes"] < 0.01
        assert row["policy/engine_abs_diff"] < 1e-5
        assert row["policy/engine_abs_diff_own_routes"] < 1e-3
    assert [row["policy/updates"] for row in steps(tmp_path / "routes_of_trainer")] == [2, 2]


def steps(run: Path) -> list[dict[str, Any]]:
    return [row for row in RunDirectory(run).metrics() if "policy/updates" in row]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith(TIMINGS)} for row in rows]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "policy" / "model.safetensors")


def test_every_metric_is_in_the_catalogue_and_every_unconditional_one_in_every_step(runs: Path) -> None:
    trained = [set(row) for name in NAMES for row in steps(runs / name)]
    assert {key for row in trained for key in row if find_metric(key) is None} == set()
    always = {metric.name for metric in METRICS.values() if metric.when == EVERY_STEP}
    assert set.intersection(*trained) >= always
    every = {key for name in NAMES for row in RunDirectory(runs / name).metrics() for key in row}
    assert {key for key in every if find_metric(key) is None} == set()
    complete = ("Reward", "Groups", "Rollout correction", "Critic", "Reference policy", "Teacher", "Time")
    listed = {metric.name for section in complete for metric in SECTIONS[section]}
    assert listed - every == {"rewards/{function}", "teacher/divergence/{source}"}


def test_ppo_trains_a_critic_and_adapts_its_penalty(runs: Path) -> None:
    rows = steps(runs / "ppo")
    assert [row["policy/updates"] for row in rows] == [2, 2, 2]
    assert rows[0]["critic/explained_variance"] == 0.0  # the value head starts at 0
    assert all(row["critic/explained_variance"] != 0.0 for row in rows[1:])
    assert all(row["critic/loss"] > 0 and row["critic/gradient_norm"] > 0 for row in rows)
    # At first the policy is the reference: the distance is below the target, and the weight falls by most it may.
    assert rows[0]["kl/mean"] == 0.0
    coefficients = [row["kl/coefficient"] for row in rows]
    assert coefficients[:2] == [0.05, pytest.approx(0.05 * (1 - 0.2 * 12 / 100))]
    assert all(abs(row["kl/mean"]) > 0 for row in rows[1:])


def test_a_teacher_alone_trains_until_its_weight_is_zero(runs: Path) -> None:
    first, second, last = steps(runs / "distilled")
    assert [row["teacher/coefficient"] for row in (first, second, last)] == [1.0, 0.5, 0.0]
    assert first["policy/loss"] == pytest.approx(first["teacher/divergence"], rel=1e-5)
    assert first["policy/gradient_norm"] > 0.0 == last["policy/gradient_norm"]
    assert "teacher/divergence" not in last


def test_a_hint_moves_the_policy_away_from_its_own_teacher(runs: Path) -> None:
    assert all(row["teacher/divergence"] > 1e-6 for row in steps(runs / "hinted"))


def test_a_resumed_run_continues_critic_reference_and_penalty_bit_by_bit(runs: Path) -> None:
    whole, resumed = runs / "ppo", runs / "ppo_in_two"
    assert untimed(steps(resumed)) == untimed(steps(whole))
    one, other = weights(whole), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    state = json.loads((resumed / "checkpoints" / "step-000003" / "state.json").read_text())["state"]
    assert state["reference"].endswith("policy")
    assert state["trainer"]["kl"]["beta"] != 0.05
    assert list((resumed / "checkpoints" / "step-000003" / "critic").iterdir())


def test_dapo_samples_on_and_penalises_length(runs: Path) -> None:
    rows = steps(runs / "dapo")
    assert sum(row["groups/extra_rounds"] for row in rows) >= 1
    for row in rows:
        assert (row["groups/issued"] > 6) == (row["groups/extra_rounds"] > 0)
        ends = ("trained", "surplus", "dropped_accuracy", "dropped_zero_variance")
        assert sum(row[f"groups/{end}"] for end in ends) == row["groups/issued"]
        assert -1 <= row["reward/overlong_penalty"] < 0
        assert row["policy/updates"] == 1


def test_remax_plays_each_problem_once_more_and_trains_the_others(runs: Path) -> None:
    for row in steps(runs / "remax"):
        assert (row["rollout/greedy"], row["reward/count"], row["groups/issued"]) == (3, 3, 3)
    first = next(iter(RunDirectory(runs / "remax").steps_with_trajectories()))
    rows = list(RunDirectory(runs / "remax").read_trajectories(first))
    greedy = [row for row in rows if row["sample"] == 1]
    assert len(greedy) == 3
    assert all(value == 0.0 for row in greedy for part in row["segments"] for value in part["log_probs"])


def test_exact_energies_and_step_wide_losses_train(runs: Path) -> None:
    for name in ("eob", "kl_cov"):
        rows = steps(runs / name)
        assert [row["policy/updates"] for row in rows] == [1, 1]
        assert all(row["policy/gradient_norm"] > 0 for row in rows)
        assert all(row["correction/ess"] == pytest.approx(1.0, abs=1e-6) for row in rows)
    last = steps(runs / "kl_cov")[-1]
    assert last["policy/selected_fraction"] > 0
    assert last["kl/mean"] != 0
    assert last["correction/masked_fraction"] == 0


def test_adapters_train_against_the_model_beneath_and_resume_to_the_same(runs: Path, random_policy: Path) -> None:
    rows = steps(runs / "adapters")
    assert rows[0]["kl/mean"] == 0.0  # the adapters start as nothing
    assert all(row["kl/mean"] > 0 for row in rows[1:])
    assert untimed(steps(runs / "adapters_in_two")) == untimed(rows)
    start, trained, again = (
        load_file(random_policy / "model.safetensors"),
        *map(weights, (runs / "adapters", runs / "adapters_in_two")),
    )
    assert all(torch.equal(trained[name], again[name]) for name in trained)
    moved = {name for name in start if not torch.equal(start[name], trained[name])}
    assert moved == {name for name in start if "_proj.weight" in name}
    exported = load_file(runs / "adapters" / "policy" / "adapter" / "adapter_model.safetensors")
    for name in moved:
        first, second = (exported[f"base_model.model.{name.replace('.weight', f'.lora_{one}.weight')}"] for one in "AB")
        torch.testing.assert_close(trained[name], start[name] + 8 * second @ first)


def test_a_critic_learns_with_adapters_of_its_own(runs: Path) -> None:
    rows = steps(runs / "ppo_adapters")
    assert all(row["critic/gradient_norm"] > 0 for row in rows)
    assert rows[0]["kl/mean"] == 0.0
    assert rows[1]["kl/mean"] != 0.0


def test_adapters_learn_from_a_cold_start_in_twenty_steps(cold_policy: Path, tmp_path: Path) -> None:
    """Letters pay; the learning rate is ten times the setting."""
    play(cold_policy, tmp_path, "learning_adapters")
    rows = steps(tmp_path / "learning_adapters")
    assert {row["optimizer/learning_rate"] for row in rows} == {1e-2}
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[-8:]) > fmean(rewards[:2]) + 0.15
