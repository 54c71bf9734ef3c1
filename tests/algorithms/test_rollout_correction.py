"""rollout_correction against loops, by hand, and split over micro-batches."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms import (
    DIVERGENCE_LEVELS,
    DIVERGENCES,
    RATIO_LEVELS,
    WEIGHT_BOUNDS,
    CorrectionOptions,
    InvalidInputError,
    InvalidOptionError,
    UnknownNameError,
    correction_weight_sums,
    mismatch_metrics,
    rollout_correction,
)


def from_ratios(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """(train, rollout) log-probabilities with these ratios."""
    rollout = torch.full((len(rows), len(rows[0])), -1.0, dtype=torch.float64)
    return rollout + torch.tensor(rows, dtype=torch.float64).log(), rollout


def problem(seed: int, rows: int = 6, width: int = 5, spread: float = 0.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(train, rollout, response mask, loss mask); the last row has no model token, NaN stands off the mask."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    train = rollout + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    model = torch.rand(rows, width, generator=generator) < 0.7
    model[-1] = False
    loss = model & (torch.rand(rows, width, generator=generator) < 0.8)
    garbage = torch.tensor(math.nan, dtype=torch.float64)
    return torch.where(model, train, garbage), torch.where(model, rollout, -garbage), model, loss


def loop(
    train: Tensor, rollout: Tensor, model: Tensor, loss: Tensor, o: CorrectionOptions
) -> tuple[list[list[float]], list[list[bool]]]:
    """Weights and loss mask, trajectory by trajectory with Python floats."""
    rows, width = model.shape
    weights = [[0.0] * width for _ in range(rows)]
    left = [[False] * width for _ in range(rows)]
    for i in range(rows):
        logs = {t: float(train[i, t]) - float(rollout[i, t]) for t in range(width) if model[i, t]}
        if not logs:
            continue
        total = sum(logs.values())
        by_level = {
            "token": {t: math.exp(x) for t, x in logs.items()},
            "sequence": dict.fromkeys(logs, math.exp(total)),
            "geometric": dict.fromkeys(logs, math.exp(total / len(logs))),
        }
        estimate = {t: x * x / 2 if o.divergence_mask == "k2" else math.exp(x) - x - 1 for t, x in logs.items()}
        if o.divergence_level == "sequence_mean":
            estimate = dict.fromkeys(logs, sum(estimate.values()) / len(estimate))
        elif o.divergence_level == "sequence_max":
            estimate = dict.fromkeys(logs, max(estimate.values()))
        for t in logs:
            weight = 1.0 if o.weights is None else by_level[o.weights][t]
            if o.weights is not None and o.weight_bound == "truncate":
                weight = min(weight, o.weight_high)
            elif o.weights is not None and not o.weight_low <= weight <= o.weight_high:
                weight = 0.0
            weights[i][t] = weight
            keep = o.ratio_mask is None or o.ratio_low <= by_level[o.ratio_mask][t] <= o.ratio_high
            keep = keep and (o.divergence_mask is None or estimate[t] <= o.divergence_high)
            left[i][t] = keep and bool(loss[i, t])
    if o.self_normalize:
        if o.weights == "token":
            used = [weights[i][t] for i in range(rows) for t in range(width) if left[i][t]]
        else:
            used = [next(weights[i][t] for t in range(width) if left[i][t]) for i in range(rows) if any(left[i])]
        mean = sum(used) / len(used) if sum(used) > 0 else 1.0
        weights = [[w / mean for w in row] for row in weights]
    return weights, left


CHOICES = {
    "weights": st.sampled_from([None, *RATIO_LEVELS]),
    "weight_bound": st.sampled_from(WEIGHT_BOUNDS),
    "self_normalize": st.booleans(),
    "ratio_mask": st.sampled_from([None, *RATIO_LEVELS]),
    "divergence_mask": st.sampled_from([None, *DIVERGENCES]),
    "divergence_level": st.sampled_from(DIVERGENCE_LEVELS),
}
BOUNDS = {
    "weight_low": 0.6, "weight_high": 1.4, "ratio_low": 0.5, "ratio_high": 1.5, "divergence_high": 0.15,
}  # fmt: skip


def options_of(**chosen: object) -> dict[str, object]:
    if chosen["weights"] is None:
        chosen["self_normalize"] = False
    return {**chosen, **BOUNDS}


@hypothesis_settings(deadline=None, max_examples=300)
@given(chosen=st.fixed_dictionaries(CHOICES), seed=st.integers(0, 10_000))
def test_weights_and_masks_are_those_of_the_loop(chosen, seed):
    options = options_of(**chosen)
    train, rollout, model, loss = problem(seed)
    result = rollout_correction(train, rollout, model, loss_mask=loss, **options)
    weights, left = loop(train, rollout, model, loss, CorrectionOptions(**options))
    torch.testing.assert_close(result.weights, torch.tensor(weights, dtype=torch.float64), rtol=0, atol=1e-10)
    assert result.loss_mask.tolist() == left
    expected = [[w * m for w, m in zip(*rows, strict=True)] for rows in zip(weights, left, strict=True)]
    torch.testing.assert_close(
        result.importance_weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10
    )


@hypothesis_settings(deadline=None, max_examples=100)
@given(
    chosen=st.fixed_dictionaries(CHOICES),
    seed=st.integers(0, 10_000),
    cuts=st.sets(st.integers(1, 5)),
    pad=st.integers(0, 3),
)
def test_micro_batches_order_and_padding_do_not_matter(chosen, seed, cuts, pad):
    options = options_of(**chosen)
    tensors = problem(seed)
    whole = rollout_correction(*tensors[:3], loss_mask=tensors[3], **options)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    parts = []
    for start, stop in pairwise([0, *sorted(cuts), 6]):
        padded = [
            torch.nn.functional.pad(x[order[start:stop]], (0, pad), value=math.inf if x.is_floating_point() else 0)
            for x in tensors
        ]
        parts.append((order[start:stop], padded))
    normalizer = sum(correction_weight_sums(*part[:3], loss_mask=part[3], **options) for _, part in parts)
    for rows, part in parts:
        result = rollout_correction(*part[:3], loss_mask=part[3], normalizer=normalizer, **options)
        torch.testing.assert_close(result.weights[:, :5], whole.weights[rows], rtol=1e-12, atol=1e-14)
        assert torch.equal(result.loss_mask[:, :5], whole.loss_mask[rows])
        assert not bool(result.loss_mask[:, 5:].any())
        assert float(result.weights[:, 5:].sum()) == 0.0


def test_a_ratio_of_1_8_is_rejected_and_0_6_kept_by_the_interval_from_0_5_to_1_5():
    train, rollout = from_ratios([[1.8, 0.6, 0.4, 1.0]])
    masked = rollout_correction(train, rollout, torch.ones(1, 4), ratio_mask="token", ratio_low=0.5, ratio_high=1.5)
    assert masked.loss_mask.tolist() == [[False, True, False, True]]
    assert masked.weights.tolist() == [[1.0] * 4]
    icepop = rollout_correction(
        train, rollout, torch.ones(1, 4), weights="token", weight_bound="icepop", weight_low=0.5, weight_high=1.5
    )
    assert icepop.weights.tolist()[0] == pytest.approx([0.0, 0.6, 0.0, 1.0])
    assert icepop.loss_mask.tolist() == [[True] * 4]
    truncated = rollout_correction(train, rollout, torch.ones(1, 4), weights="token", weight_high=1.5)
    assert truncated.weights.tolist()[0] == pytest.approx([1.5, 0.6, 0.4, 1.0])


def test_sequences_by_hand():
    """Ratios 2 and 0.5 multiply to 1; 2 and 2 to 4, their geometric mean being 2. The last token is no model token."""
    train, rollout = from_ratios([[2.0, 0.5, 9.0], [2.0, 2.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    for level, expected in {"token": [[2.0, 0.5], [2.0, 2.0]], "sequence": [[1.0] * 2, [4.0] * 2]}.items():
        weights = rollout_correction(train, rollout, mask, weights=level, weight_high=10.0).weights
        torch.testing.assert_close(weights[:, :2], torch.tensor(expected).double())
        assert weights[:, 2].tolist() == [0.0, 0.0]
    geometric = rollout_correction(train, rollout, mask, weights="geometric", weight_high=10.0).weights
    torch.testing.assert_close(geometric[:, 0], torch.tensor([1.0, 2.0]).double())
    kept = rollout_correction(train, rollout, mask, ratio_mask="sequence", ratio_high=3.0).loss_mask
    assert kept.tolist() == [[True, True, False], [False] * 3]


def test_the_sequence_ratio_is_over_all_model_tokens_also_of_those_left_out_of_the_loss():
    train, rollout = from_ratios([[2.0, 3.0]])
    result = rollout_correction(
        train, rollout, torch.ones(1, 2), loss_mask=torch.tensor([[1, 0]]), weights="sequence", weight_high=10.0
    )
    assert result.weights.tolist()[0] == pytest.approx([6.0, 6.0])
    assert result.loss_mask.tolist() == [[True, False]]


def test_divergences_by_hand():
    """log_rho = 1 and 0: k2 is 0.5 and 0, k3 is e - 2 and 0."""
    train, rollout = from_ratios([[math.e, 1.0]])

    def kept(estimate: str, level: str, high: float) -> list[bool]:
        return rollout_correction(
            train,
            rollout,
            torch.ones(1, 2),
            divergence_mask=estimate,
            divergence_level=level,
            divergence_high=high,
        ).loss_mask.tolist()[0]

    assert kept("k2", "token", 0.49) == [False, True]
    assert kept("k2", "token", 0.51) == [True, True]
    assert kept("k2", "sequence_mean", 0.24) == [False, False]
    assert kept("k2", "sequence_mean", 0.26) == [True, True]
    assert kept("k2", "sequence_max", 0.49) == [False, False]
    assert kept("k3", "token", 0.71) == [False, True]
    assert kept("k3", "sequence_max", 0.72) == [True, True]


def test_icepop_and_mis_give_a_baseline_the_same_weights():
    train, rollout, model, _ = problem(3)
    icepop = rollout_correction(
        train, rollout, model, weights="token", weight_bound="icepop", weight_low=0.7, weight_high=1.3
    )
    masked = rollout_correction(
        train, rollout, model, weights="token", weight_high=1e6, ratio_mask="token", ratio_low=0.7, ratio_high=1.3
    )
    torch.testing.assert_close(icepop.importance_weights, masked.importance_weights)
    assert int(masked.loss_mask.sum()) < int(icepop.loss_mask.sum())


def test_metrics_by_hand():
    train, rollout = from_ratios([[2.0, 0.5, 9.0], [4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    metrics = rollout_correction(
        train, rollout, mask, weights="token", weight_high=3.0, ratio_mask="token", ratio_low=0.6, ratio_high=10.0
    ).metrics
    expected = mismatch_metrics(train, rollout, mask)
    assert {name: float(metrics[name]) for name in expected} == {name: float(x) for name, x in expected.items()}
    assert float(metrics["rho_min"]) == pytest.approx(0.5)
    assert float(metrics["rho_max"]) == pytest.approx(4.0)
    assert float(metrics["truncated_fraction"]) == pytest.approx(1 / 3)
    assert float(metrics["masked_fraction"]) == pytest.approx(1 / 3)
    assert float(metrics["weight_mean"]) == pytest.approx((2 + 3) / 2)
    assert float(metrics["rollout_perplexity"]) == pytest.approx(math.e)
    # means of -ln p: 1 and 1 - ln 4
    assert float(metrics["train_perplexity"]) == pytest.approx((math.e + math.e / 4) / 2)
    assert int(metrics["trajectories"]) == 2


def test_nothing_to_correct():
    empty = torch.full((2, 3), math.nan)
    result = rollout_correction(
        empty, empty, torch.zeros(2, 3), weights="sequence", self_normalize=True, ratio_mask="geometric"
    )
    assert result.weights.tolist() == [[0.0] * 3] * 2
    assert not bool(result.loss_mask.any())
    assert all(bool(torch.isfinite(value)) for value in result.metrics.values())
    off = rollout_correction(torch.zeros(1, 2), torch.full((1, 2), -1.0), torch.ones(1, 2))
    assert off.weights.tolist() == [[1.0, 1.0]]
    assert off.weights.dtype == torch.float32


def test_weights_of_zero_are_not_normalised():
    train, rollout = from_ratios([[9.0, 9.0]])
    result = rollout_correction(
        train, rollout, torch.ones(1, 2), weights="token", weight_bound="icepop", self_normalize=True
    )
    assert result.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("gap", [900.0, -900.0])
@pytest.mark.parametrize("level", RATIO_LEVELS)
def test_extreme_ratios_stay_finite(gap, level):
    train = torch.full((1, 3), -1000.0)
    result = rollout_correction(
        train + max(gap, 0), train + max(-gap, 0), torch.ones(1, 3), weights=level, ratio_mask=level,
        divergence_mask="k3", divergence_level="sequence_mean",
    )  # fmt: skip
    assert result.weights.tolist() == [[2.0 if gap > 0 else 0.0] * 3]
    assert not bool(result.loss_mask.any())
    assert all(bool(torch.isfinite(value)) for value in result.metrics.values())


def test_no_gradient_flows():
    train = torch.zeros(1, 2, requires_grad=True)
    result = rollout_correction(train, torch.zeros(1, 2), torch.ones(1, 2), weights="token")
    assert not result.weights.requires_grad


def test_what_needs_a_statistics_pass():
    assert not CorrectionOptions().step_wide
    assert not CorrectionOptions(weights="sequence", weight_bound="icepop").step_wide
    assert CorrectionOptions(weights="token", self_normalize=True).step_wide
    assert CorrectionOptions(ratio_mask="geometric").step_wide
    assert CorrectionOptions(divergence_mask="k3").step_wide


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": "token"}, UnknownNameError, "unknown option 'weight' of the rollout correction; did you mean"),
        ({"weights": "tokens"}, InvalidOptionError, "weights='tokens' is not one of .* did you mean 'token'"),
        ({"weight_bound": "tis"}, InvalidOptionError, "weight_bound='tis' is not one of truncate, icepop"),
        ({"weight_bound": "icepop", "weight_low": 3.0}, InvalidOptionError, "weight_low=3.0 is above weight_high=2.0"),
        ({"weight_high": 0.0}, InvalidOptionError, "weight_high=0.0 must be positive"),
        ({"ratio_mask": "k2"}, InvalidOptionError, "ratio_mask='k2' is not one of"),
        ({"ratio_low": 1.5, "ratio_high": 0.5}, InvalidOptionError, "ratio_low=1.5 is above ratio_high=0.5"),
        ({"ratio_low": -0.5}, InvalidOptionError, "ratio_low=-0.5 must be at least 0"),
        ({"divergence_mask": "k1"}, InvalidOptionError, "divergence_mask='k1' is not one of"),
        ({"divergence_level": "mean"}, InvalidOptionError, "divergence_level='mean' is not one of"),
        ({"divergence_high": math.nan}, InvalidOptionError, "divergence_high=nan"),
        ({"self_normalize": True}, InvalidOptionError, "self_normalize=True has no weights to normalize"),
    ],
)
def test_options_that_make_no_sense(options, error, message):
    with pytest.raises(error, match=message):
        rollout_correction(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1), **options)


def test_inputs_that_make_no_sense():
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    with pytest.raises(InvalidInputError, match=r"like response_mask; got \(2, 3\) and \(2, 2\)"):
        rollout_correction(zeros, zeros, torch.ones(2, 2))
    with pytest.raises(InvalidInputError, match="loss_mask is True at tokens where response_mask is False"):
        rollout_correction(zeros, zeros, zeros, loss_mask=ones)
    broken = zeros.clone()
    broken[1, 2] = -math.inf
    with pytest.raises(InvalidInputError, match="rollout_log_probs is -inf at a model token: row 1, position 2"):
        rollout_correction(zeros, broken, ones)
