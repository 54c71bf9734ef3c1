"""step_selection: which tokens clip_cov and kl_cov choose over a whole step, whoever holds the rows."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms import (
    AlgorithmError,
    InvalidInputError,
    InvalidOptionError,
    UnknownNameError,
    aggregate,
    policy_loss,
    step_selection,
)
from agentrl.algorithms.losses.compute import random_integers_by_token

NAMES = ["clip_cov", "kl_cov"]
OPTIONS = {
    "clip_cov": {"covariance_fraction": 0.1, "covariance_low": 0.1, "covariance_high": 2.0},
    "kl_cov": {"covariance_fraction": 0.1},
}


def step(seed: int, rows: int = 8, width: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    return {
        "log_probs": old + 0.2 * torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "old_log_probs": old,
        "advantages": torch.randn(rows, width, generator=generator, dtype=torch.float64),
        "loss_mask": torch.rand(rows, width, generator=generator) < 0.7,
    }


def covariances(tensors: dict[str, Tensor]) -> dict[tuple[int, int], float]:
    """(row, position) -> (A - mean A)(ln p - mean ln p), with Python sums."""
    tokens = [(i, t) for i, t in tensors["loss_mask"].nonzero().tolist()]
    pairs = {at: (float(tensors["advantages"][at]), float(tensors["log_probs"][at])) for at in tokens}
    mean_a = math.fsum(a for a, _ in pairs.values()) / len(pairs)
    mean_p = math.fsum(p for _, p in pairs.values()) / len(pairs)
    return {at: (a - mean_a) * (p - mean_p) for at, (a, p) in pairs.items()}


def chosen(mask: Tensor) -> set[tuple[int, int]]:
    return {(i, t) for i, t in mask.nonzero().tolist()}


@pytest.mark.parametrize("seed", range(8))
def test_kl_cov_chooses_the_largest_covariances(seed):
    tensors = step(seed)
    by_size = sorted(covariances(tensors).items(), key=lambda item: -item[1])
    count = int(0.1 * len(by_size))
    expected = {at for at, _ in by_size[:count]}
    assert chosen(step_selection("kl_cov", **tensors, covariance_fraction=0.1)) == expected


@pytest.mark.parametrize("seed", range(8))
def test_clip_cov_draws_from_the_unclipped_tokens_between_the_bounds(seed):
    tensors = step(seed)
    ratio, advantages = (tensors["log_probs"] - tensors["old_log_probs"]).exp(), tensors["advantages"]
    covariance = covariances(tensors)
    eligible = set()
    for at, value in covariance.items():
        a, r = float(advantages[at]), float(ratio[at])
        clipped = max(-a * r, -a * min(max(r, 0.8), 1.2)) > -a * r
        if 0.1 < value < 2.0 and not clipped:
            eligible.add(at)
    few = step_selection("clip_cov", **tensors, **OPTIONS["clip_cov"])
    assert chosen(few) <= eligible
    assert len(chosen(few)) == min(int(0.1 * len(covariance)), len(eligible))
    everything = {**OPTIONS["clip_cov"], "covariance_fraction": 1.0}
    assert chosen(step_selection("clip_cov", **tensors, **everything)) == eligible


def test_other_seeds_draw_other_tokens_of_clip_cov_each_as_often():
    tensors = step(0)
    options = {"covariance_fraction": 0.02, "covariance_low": -10.0, "covariance_high": 10.0, "clip_high": 9.0}
    tensors["old_log_probs"] = tensors["log_probs"]
    counts = sum(step_selection("clip_cov", **tensors, seed=seed, **options).double() for seed in range(2000))
    tokens = int(tensors["loss_mask"].sum())
    assert int(0.02 * tokens) <= 1
    expected = 2000 / tokens
    inside = counts[tensors["loss_mask"]]
    statistic = float(((inside - expected) ** 2 / expected).sum())  # chi-squared with tokens - 1 degrees of freedom
    assert abs(statistic - (tokens - 1)) < 4 * math.sqrt(2 * tokens)
    assert float(counts[~tensors["loss_mask"]].sum()) == 0.0


@hypothesis_settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 10_000), pad=st.integers(0, 4))
def test_order_and_padding_change_nothing(name, seed, pad):
    tensors = step(seed)
    tensors["advantages"] = tensors["advantages"].sign()  # many equal covariances
    tensors["log_probs"] = (tensors["log_probs"] * 2).round() / 2
    keys = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:8]
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed + 1))
    padded = {
        key: torch.nn.functional.pad(value[order], (0, pad), value=math.nan if value.is_floating_point() else 0)
        for key, value in tensors.items()
    }
    whole = step_selection(name, **tensors, trajectory_ids=keys, seed=seed, **OPTIONS[name])
    other = step_selection(name, **padded, trajectory_ids=keys[order], seed=seed, **OPTIONS[name])
    assert torch.equal(other[:, :9], whole[order])
    assert not bool(other[:, 9:].any())


@hypothesis_settings(deadline=None, max_examples=30)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 7)))
def test_micro_batches_with_the_selection_of_the_step_add_up_to_it(name, seed, cuts):
    tensors = step(seed)
    whole, _ = policy_loss(name, **tensors, **OPTIONS[name])
    selected = step_selection(name, **tensors, **OPTIONS[name])
    assert bool(selected.any())
    tokens = tensors["loss_mask"].sum()
    total = torch.zeros((), dtype=torch.float64)
    for start, stop in pairwise([0, *sorted(cuts), 8]):
        part = {key: value[start:stop] for key, value in tensors.items()}
        loss, _ = policy_loss(name, **part, selected=selected[start:stop], **OPTIONS[name])
        total += aggregate(loss, part["loss_mask"], "token_mean", normalizer=tokens)
    torch.testing.assert_close(total, aggregate(whole, tensors["loss_mask"], "token_mean"))


@pytest.mark.parametrize("name", NAMES)
def test_at_least_one_token_is_chosen_if_there_is_one(name):
    tensors = step(0, rows=1, width=3)
    wide = {"clip_cov": {"covariance_low": -100.0, "covariance_high": 100.0, "clip_high": 9.0}}.get(name, {})
    tensors["old_log_probs"] = tensors["log_probs"]
    tensors["loss_mask"] = torch.ones(1, 3).bool()
    assert int(step_selection(name, **tensors, **wide).sum()) == 1
    tensors["loss_mask"] = torch.zeros(1, 3).bool()
    assert int(step_selection(name, **tensors, **wide).sum()) == 0


def test_a_share_is_rounded_down_past_rounding_errors():
    """0.29 * 100 is 28.999999999999996 in floating point."""
    tensors = step(0, rows=10, width=10)
    tensors["loss_mask"] = torch.ones(10, 10).bool()
    assert int(step_selection("kl_cov", **tensors, covariance_fraction=0.29).sum()) == 29
    assert int(step_selection("kl_cov", **tensors, covariance_fraction=0.299).sum()) == 29


def test_what_the_losses_do_with_the_selected_tokens():
    """Ratio 1.1 and A = 2 on both tokens; the second is selected."""
    old = torch.full((1, 2), -1.0, dtype=torch.float64)
    log_probs = (old + math.log(1.1)).requires_grad_()
    arguments = {
        "log_probs": log_probs,
        "old_log_probs": old,
        "advantages": torch.full((1, 2), 2.0, dtype=torch.float64),
        "loss_mask": torch.ones(1, 2).bool(),
        "selected": torch.tensor([[False, True]]),
    }
    clipped, _ = policy_loss("clip_cov", **arguments)
    assert clipped.tolist()[0] == pytest.approx([-2.2, 0.0])
    assert torch.autograd.grad(clipped.sum(), log_probs)[0].tolist()[0] == pytest.approx([-2.2, 0.0])
    held, metrics = policy_loss("kl_cov", **arguments, kl_coefficient=3.0)
    assert held.tolist()[0] == pytest.approx([-2.2, -2.2 + 3 * math.log(1.1)])
    assert torch.autograd.grad(held.sum(), log_probs)[0].tolist()[0] == pytest.approx([-2.2, 0.8])
    assert float(metrics["selected_fraction"]) == 0.5


def test_a_selection_off_the_loss_mask_does_not_count():
    arguments = step(0, rows=1, width=2)
    arguments["loss_mask"] = torch.tensor([[True, False]])
    loss, metrics = policy_loss("kl_cov", **arguments, selected=torch.tensor([[False, True]]))
    assert float(metrics["selected_fraction"]) == 0.0
    assert float(loss[0, 1]) == 0.0


def test_the_draws_are_splitmix64():
    """The generator's published sequence from state 0 begins with these numbers."""
    first = 0xE220A8397B1DCDAF
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    assert mix(0) == first
    draws = random_integers_by_token(torch.tensor([3, -7]), 3, seed=5)
    for row, key in enumerate([3, -7]):
        for t in range(3):
            assert int(draws[row, t]) & mask == mix(mix(mix(5) ^ (key & mask)) ^ t)


@pytest.mark.parametrize(
    ("name", "more", "error", "message"),
    [
        ("ppo", {}, AlgorithmError, "loss 'ppo' selects no tokens"),
        ("kl_cvo", {}, UnknownNameError, "did you mean 'kl_cov'"),
        (
            "kl_cov",
            {"trajectory_ids": torch.zeros(8, dtype=torch.int64)},
            InvalidInputError,
            "trajectory_ids must be unique",
        ),
        (
            "kl_cov",
            {"trajectory_ids": torch.arange(7)},
            InvalidInputError,
            r"trajectory_ids must be \[8\] int64; got \(7,\)",
        ),
        ("kl_cov", {"trajectory_ids": torch.arange(8.0)}, InvalidInputError, "got .* torch.float32"),
        ("kl_cov", {"covariance_fraction": 1.5}, InvalidOptionError, "covariance_fraction=1.5"),
    ],
)
def test_what_cannot_be_selected(name, more, error, message):
    with pytest.raises(error, match=message):
        step_selection(name, **step(0), **more)
