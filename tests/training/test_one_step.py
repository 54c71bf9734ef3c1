"""One step on recorded trajectories is the same step, however it is split over micro-batches, ranks and ZeRO stages."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernels.cases import needs_triton
from ranks import finish, start_ranks

from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import read_step
from agentrl.viewer.what_if import recompute_advantages

from .step_on_record import ALONE, CASES, FEW_GROUPS, FOUR, ONE_FORWARD, SEQUENCE

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("step_on_record.py")
CRITIC = ("critic", "critic_zero3")
PER_MICRO_BATCH = {"policy/other_routes", "policy/engine_abs_diff_own_routes"}
"""Metrics of shared prefixes once for each micro-batch, or of the first micro-batch."""
HEAD_EXACT = ("token_mean", "seq_mean_token_sum")
Results = dict[str, dict[str, Any]]


def ways(names: Iterable[str]) -> list[tuple[str, str]]:
    """How each is split over micro-batches; the head-exact diagnostic takes whole groups."""
    return [(name, way) for name in names for way in ("groups", "rows") if way == "groups" or name not in HEAD_EXACT]


def start(output: Path, *, ranks: int) -> list[subprocess.Popen[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SCRIPT.parents[1]), prepend=os.pathsep)
        return start_ranks(SCRIPT, [output] * ranks)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank and what two ranks made of the record, run side by side; files of tokens by case and split."""
    folder = tmp_path_factory.mktemp("results")
    started = {ranks: start(folder / f"{ranks}.pt", ranks=ranks) for ranks in (1, 2)}
    for processes in started.values():
        finish(processes, seconds=900)
    return folder


@pytest.fixture(scope="module")
def results(stored: Path) -> dict[int, Results]:
    return {ranks: torch.load(stored / f"{ranks}.pt", weights_only=False) for ranks in (1, 2)}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    output = tmp_path_factory.mktemp("four") / "4.pt"
    finish(start(output, ranks=4), seconds=900)
    results: Results = torch.load(output, weights_only=False)
    return results


@pytest.fixture(scope="module")
def alone(results: dict[int, Results]) -> Results:
    return results[1]


@pytest.fixture(scope="module")
def pair(results: dict[int, Results]) -> Results:
    return results[2]


def assert_same_step(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Parameters' changes and gradient norm to 2e-6 relative; what was measured, summed in float32, to 2e-5.

    A second update starts from parameters that differ in their last digits, which it magnifies.
    """
    bound = 2e-6 if one["metrics"]["policy/updates"] == 1 else 1e-5
    distance = float((one["delta"] - other["delta"]).norm() / one["delta"].norm())
    assert distance < bound
    assert float(one["delta"].norm()) > 1e-2
    assert one["state"].get("kl", {}) == pytest.approx(other["state"].get("kl", {}), rel=bound)
    if float(one["critic_delta"].norm()) > 0:
        assert float((one["critic_delta"] - other["critic_delta"]).norm() / one["critic_delta"].norm()) < bound
    for name in one["metrics"].keys() - PER_MICRO_BATCH:
        value = one["metrics"][name]
        assert other["metrics"][name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    norms = [item["metrics"]["policy/gradient_norm"] for item in (one, other)]
    assert norms[0] == pytest.approx(norms[1], rel=bound)


@pytest.mark.parametrize(("case", "way"), ways(ALONE))
def test_micro_batches_do_not_change_the_step(alone: Results, case: str, way: str) -> None:
    whole, parts = alone[f"{case}/whole"], alone[f"{case}/{way}"]
    assert max(whole["micro_batches"]) == 1
    assert sum(parts["micro_batches"]) >= 3
    assert_same_step(whole, parts)


@pytest.mark.parametrize(("case", "way"), ways(CASES))
def test_neither_do_two_ranks(alone: Results, pair: Results, case: str, way: str) -> None:
    """Each has several micro-batches: of whole groups, or of rows where a group does not fit."""
    parts = pair[f"{case}/{way}"]
    assert sum(parts["micro_batches"]) >= 2
    assert_same_step(alone[f"{case}/whole"], parts)


@pytest.mark.parametrize(("case", "way"), ways(SEQUENCE))
def test_neither_do_two_ranks_that_share_rows(alone: Results, pair: Results, case: str, way: str) -> None:
    shared = pair[f"{case}/2/{way}"]
    assert sum(shared["micro_batches"]) >= 3
    assert_same_step(alone[f"{case}/whole"], shared)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("case", "way"), ways(FOUR))
def test_neither_do_two_pairs_and_four(alone: Results, four: Results, case: str, size: int, way: str) -> None:
    assert_same_step(alone[f"{case}/whole"], four[f"{case}/{size}/{way}"])


def test_a_single_group_is_shared(alone: Results, pair: Results) -> None:
    assert_same_step(alone["zero3/one_group"], pair["one_group/2"])


@needs_triton
@pytest.mark.parametrize("tied", [True, False])
def test_the_triton_backend_makes_the_step_of_the_chunked(alone: Results, tied: bool) -> None:
    assert_same_step(alone[f"chunked/{tied}"], alone[f"triton/{tied}"])


@pytest.mark.parametrize("case", FEW_GROUPS)
def test_a_rank_without_data_takes_part_and_weighs_nothing(alone: Results, pair: Results, case: str) -> None:
    assert_same_step(alone[f"{case}/one_group"], pair[f"{case}/one_group"])


@pytest.mark.parametrize("case", FEW_GROUPS)
def test_a_step_without_groups_changes_nothing(alone: Results, pair: Results, case: str) -> None:
    for results in (alone, pair):
        empty = results[f"{case}/none"]
        assert float(empty["delta"].abs().max()) == 0.0
        assert empty["metrics"]["policy/updates"] == 0
        assert "policy/loss" not in empty["metrics"]
        assert "policy/entropy" not in empty["metrics"]


@pytest.mark.parametrize("case", ONE_FORWARD)
def test_a_statistics_pass_does_not_change_a_step_of_one_forward(alone: Results, case: str) -> None:
    assert alone[f"{case}/whole"]["one_forward"]
    assert not alone[f"{case}/two_passes"]["one_forward"]
    assert_same_step(alone[f"{case}/whole"], alone[f"{case}/two_passes"])


def test_one_forward_is_taken_where_it_serves(alone: Results) -> None:
    assert alone["token_mean/groups"]["one_forward"]
    assert alone["void_rows/rows"]["one_forward"]  # groups that do not fit one micro-batch stay on one rank
    assert alone["void_rows/groups"]["one_forward"]
    assert not alone["whitened/whole"]["one_forward"]
    assert alone["two_updates/whole"]["metrics"]["policy/updates"] == 2


def test_what_the_settings_ask_for_takes_part(alone: Results) -> None:
    """Each of these would pass the tests above by doing nothing."""
    plain = alone["token_mean/whole"]["delta"]

    def metrics(case: str) -> dict[str, float]:
        return alone[f"{case}/whole"]["metrics"]

    def moved(case: str, other: torch.Tensor = plain) -> bool:
        return float((alone[f"{case}/whole"]["delta"] - other).norm() / other.norm()) > 0.01

    for case in (
        "kl_loss",
        "kl_full",
        "kl_full_reward",
        "kl_reward",
        "teacher",
        "teachers",
        "teachers_one_served",
        "teacher_hint",
        "teacher_sampled",
        "token_weights",
        "weighted_remax",
        "summed_masks",
        "normalized_weights",
        "masks",
        "gpg",
        "pooled",
        "remax",
        "overlong",
    ):
        assert moved(case), case
    for case in ("teacher_hint_adapters", "teacher_hint_sampled"):  # without rewards, only the teacher moves adapters
        assert float(alone[f"{case}/whole"]["delta"].norm()) > 0, case
    assert metrics("kl_loss")["kl/mean"] > 0.01
    exact = [metrics(case)["kl/mean"] for case in ("kl_full", "kl_full_reward", "kl_full_two_updates")]
    assert exact == pytest.approx([exact[0]] * 3, rel=1e-6)
    assert 0 < exact[0] != pytest.approx(metrics("kl_loss")["kl/mean"], rel=1e-3)
    assert metrics("kl_reward")["kl/coefficient"] == 0.1
    assert metrics("teacher")["teacher/divergence"] > 0.01
    assert 0 < metrics("teachers")["teacher/divergence/even"] != metrics("teachers")["teacher/divergence"]
    assert metrics("teacher_sampled")["teacher/coefficient"] == 0.5
    # Below the target by more than the largest step: 0.1 * (1 - 0.2 * 20 / 100). (No policy sampled the record, so k1
    # may be negative.)
    assert metrics("kl_reward")["kl/mean"] < 0.08
    assert alone["kl_reward/whole"]["state"] == {"kl": {"beta": pytest.approx(0.096)}}
    assert 0.1 < metrics("token_weights")["correction/truncated_fraction"] < 0.9
    assert 0.1 < metrics("masks")["correction/masked_fraction"] < 0.9
    assert 0.05 < metrics("clip_cov")["policy/selected_fraction"] < 0.25
    assert 0.05 < metrics("kl_cov")["policy/selected_fraction"] < 0.15
    assert metrics("gspo")["policy/clip_fraction_high"] > 0
    assert metrics("overlong")["reward/overlong_penalty"] < -0.1
    assert 0 < metrics("overlong")["reward/overlong_share"] < 1
    for case in CRITIC:
        assert float(alone[f"{case}/whole"]["critic_delta"].norm()) > 0.01
        assert metrics(case)["critic/loss"] > 0
        assert metrics(case)["critic/explained_variance"] < 1
    assert metrics("critic_zero3")["critic/value_clip_fraction"] > 0


def test_the_critic_learns_what_the_record_returns(alone: Results) -> None:
    first, last = alone["critic_learns"]["first"], alone["critic_learns"]["last"]
    assert first["critic/explained_variance"] == 0.0
    assert first["critic/value_mean"] == 0.0
    assert last["critic/explained_variance"] > 0.5
    assert last["critic/loss"] < first["critic/loss"] / 2


def test_effective_sample_size_is_that_of_the_step_however_it_was_split(alone: Results, pair: Results) -> None:
    whole = alone["token_weights/whole"]["metrics"]["correction/ess"]
    assert 0.5 < whole < 0.999
    for way in ("groups", "rows"):
        assert pair[f"token_weights/{way}"]["metrics"]["correction/ess"] == pytest.approx(whole, rel=1e-6)


def test_head_exact_variance_is_that_of_all_ranks_groups(alone: Results, pair: Results) -> None:
    one, two = (results["token_mean/groups"]["metrics"] for results in (alone, pair))
    assert one["variance/head_exact_total_power"] > one["variance/head_exact_signal_strength"] > 0
    for name in (
        "variance/head_exact_total_power",
        "variance/head_exact_signal_strength",
        "variance/head_exact_pure_noise",
    ):
        assert two[name] == pytest.approx(one[name], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_trains(results: dict[int, Results], ranks: int, stage: int) -> None:
    step = results[ranks][f"bfloat16/{stage}"]
    exact = results[1]["token_mean/whole"]
    cosine = torch.nn.functional.cosine_similarity(exact["delta"], step["delta"], dim=0)
    assert float(cosine) > 0.98
    assert step["metrics"]["policy/gradient_norm"] == pytest.approx(exact["metrics"]["policy/gradient_norm"], rel=0.1)


def test_the_fidelity_gate_passes_the_policy_that_sampled(alone: Results) -> None:
    assert alone["gate/same"]["error"] is None
    assert alone["gate/same"]["difference"] < 1e-5


def test_one_trajectory_that_is_off_stops_the_step_though_the_average_hides_it(alone: Results) -> None:
    stopped = alone["gate/one row"]
    assert "0.004 nats on average over one trajectory (bound 0.001)" in stopped["error"]
    assert stopped["changed"] == 0.0


def test_a_turn_under_which_the_weights_changed_is_not_held_to_either_of_them(alone: Results) -> None:
    assert alone["gate/weights changed under it"]["error"] is None
    assert alone["gate/weights changed under it"]["difference"] < 1e-5


@pytest.mark.parametrize("wrong", ["temperature", "weights"])
def test_the_fidelity_gate_stops_before_the_step(alone: Results, wrong: str) -> None:
    stopped = alone[f"gate/{wrong}"]
    assert stopped["error"].startswith("the training forward and the engine disagree")
    assert wrong in stopped["error"]
    assert stopped["changed"] == 0.0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", ["1/whole", "2/rows", "2/groups"])
def test_advantages_follow_from_the_stored_statistics_to_the_last_digit(stored: Path, case: str, split: str) -> None:
    ranks, part = split.split("/")
    folder = stored / ranks / case / part
    if not folder.exists():
        assert part == "rows"  # a case with whole groups only
        return
    step = read_step(RunDirectory(folder), 1)
    assert not step.warnings
    trained = [item for item in step.trajectories if item.tokens is not None]
    assert len(trained) == (40 if CASES[case].forked else 20)
    made = recompute_advantages(step, trained)
    for item in trained:
        assert item.tokens is not None
        assert len(item.tokens) == len(item.model_token_positions)
        for name, values in made[item.key].items():
            np.testing.assert_array_equal(values, getattr(item.tokens, name), err_msg=f"{item.key} {name}")


@pytest.mark.parametrize("case", CASES)
def test_the_stored_statistics_do_not_depend_on_the_split(stored: Path, alone: Results, case: str) -> None:
    whole, groups = (read_step(RunDirectory(stored / part), 1) for part in (f"1/{case}/whole", f"2/{case}/groups"))
    assert whole.rows.keys() == groups.rows.keys()
    for key, one in whole.rows.items():
        other = groups.rows[key]
        assert one.loss_weight == pytest.approx(other.loss_weight, rel=1e-12)
        for name, values in one.columns().items():
            tolerance = 2e-3 if name == "entropy" else 2e-5  # entropy has 11 bits
            np.testing.assert_allclose(values, other.columns()[name], rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    "case", ["token_mean", "seq_mean_token_mean", "token_sum", "void_rows", "two_updates", "trees"]
)
def test_stored_statistics_add_up_to_the_metrics(stored: Path, alone: Results, case: str) -> None:
    step, metrics = read_step(RunDirectory(stored / "1" / case / "whole"), 1), alone[f"{case}/whole"]["metrics"]
    rows = list(step.rows.values())
    entropy = np.concatenate([row.entropy for row in rows]).astype(float)
    assert entropy.mean() == pytest.approx(metrics["policy/entropy"], rel=1e-3)
    rollouts = sum(row.share for row in rows)
    power = (
        sum(float((row.energy.astype(float) * (row.path_weight * row.advantages) ** 2).sum()) for row in rows)
        / rollouts
    )
    assert power == pytest.approx(metrics["variance/total_power"], rel=1e-6)
    assert (signal := metrics["variance/signal_strength"]) == metrics["policy/gradient_norm"] ** 2 > 0
    assert metrics["variance/pure_noise"] == pytest.approx((power - signal) / (rollouts - 1), rel=1e-6)
    assert sum(len(row) for row in rows) == metrics["policy/tokens"]
    if case in ("token_mean", "void_rows"):
        assert sum(row.loss_weight * row.loss_mask.sum() for row in rows) == pytest.approx(1.0)
