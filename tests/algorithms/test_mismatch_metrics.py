"""mismatch_metrics: by hand, and as estimates of what they are said to estimate."""

import math

import pytest
import torch

from agentrl.algorithms import InvalidInputError, mismatch_metrics

MASK = [[1, 1, 0], [1, 0, 0]]


def test_by_hand():
    rollout = torch.tensor([[-1.0, -2.0, torch.nan], [-0.5, torch.nan, torch.inf]], dtype=torch.float64)
    rho = torch.tensor([[2.0, 0.5, 1.0], [4.0, 1.0, 1.0]], dtype=torch.float64)
    metrics = mismatch_metrics(rollout + rho.log(), rollout, torch.tensor(MASK))
    logs = [math.log(2), -math.log(2), math.log(4)]
    expected = {
        "mean_abs_difference": 4 * math.log(2) / 3,
        "kl_k1": -sum(logs) / 3,
        "kl_k3": (6.5 - sum(logs) - 3) / 3,
        "chi2": (4 + 0.25 + 16) / 3 - 1,
        "ess": 6.5**2 / (3 * 20.25),
        "log_ppl_gap": (0.0 + math.log(4)) / 2,
        "tokens": 3,
    }
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected)


def test_equal_policies_do_not_mismatch():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-0.1, -0.2, -0.3]])
    metrics = {name: float(value) for name, value in mismatch_metrics(log_probs, log_probs, torch.tensor(MASK)).items()}
    assert metrics.pop("ess") == 1.0
    assert metrics.pop("tokens") == 3.0
    assert set(metrics.values()) == {0.0}


def test_the_means_estimate_the_divergence_from_rollout_to_training():
    generator = torch.Generator().manual_seed(0)
    rollout = torch.tensor([0.3, 0.0, -0.4]).double().log_softmax(-1)
    train = torch.tensor([0.0, 0.1, -0.1]).double().log_softmax(-1)
    tokens = torch.multinomial(rollout.exp(), 200_000, replacement=True, generator=generator).view(1, -1)
    metrics = mismatch_metrics(train[tokens], rollout[tokens], torch.ones_like(tokens))
    kl = float((rollout.exp() * (rollout - train)).sum())
    assert float(metrics["kl_k3"]) == pytest.approx(kl, rel=0.02)
    assert float(metrics["kl_k1"]) == pytest.approx(kl, rel=0.05)


def test_no_model_token_is_no_mismatch():
    metrics = mismatch_metrics(torch.full((2, 2), torch.nan), torch.zeros(2, 2), torch.zeros(2, 2))
    assert {name: float(value) for name, value in metrics.items() if value != 0} == {"ess": 1.0}
    assert (
        float(mismatch_metrics(torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2))["mean_abs_difference"]) == 0.0
    )


def test_a_huge_ratio_stays_finite():
    metrics = mismatch_metrics(torch.tensor([[0.0]]), torch.tensor([[-900.0]]), torch.ones(1, 1))
    assert all(bool(torch.isfinite(value)) for value in metrics.values())


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_log_prob_at_a_model_token_is_an_error(which):
    tensors = [torch.zeros(2, 3), torch.zeros(2, 3)]
    tensors[which][1, 0] = torch.nan
    with pytest.raises(InvalidInputError, match=r"log_probs is nan at a model token: row 1, position 0"):
        mismatch_metrics(tensors[0], tensors[1], torch.tensor(MASK))


def test_shapes_must_agree():
    with pytest.raises(InvalidInputError, match=r"rollout_log_probs must be \[B, T\] like response_mask"):
        mismatch_metrics(torch.zeros(2, 3), torch.zeros(2, 2), torch.tensor(MASK))
