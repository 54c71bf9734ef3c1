"""kl_penalty and reward_kl: values by hand, and the expected gradients that the docstrings claim, by enumeration."""

import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import (
    KL_ESTIMATORS,
    REWARD_KL_ESTIMATORS,
    InvalidInputError,
    InvalidOptionError,
    MissingInputError,
    kl_penalty,
    reward_kl,
)

D = [0.3, -0.7]  # ln p_ref - ln p


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [-0.3, 0.7]),
        ("abs", [0.3, 0.7]),
        ("k2", [0.045, 0.245]),
        ("k3", [math.exp(0.3) - 1.3, math.exp(-0.7) - 0.3]),
    ],
)
def test_values_by_hand_and_plus_has_the_same_value_with_the_gradient_of_k2(estimator, expected):
    log_probs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = log_probs.detach() + torch.tensor(D, dtype=torch.float64)
    for name in (estimator, estimator + "+"):
        assert kl_penalty(log_probs, reference, name).tolist() == pytest.approx(expected)
    (plus,) = torch.autograd.grad(kl_penalty(log_probs, reference, estimator + "+").sum(), log_probs)
    assert plus.tolist() == pytest.approx([-0.3, 0.7])


def categorical() -> tuple[Tensor, Tensor]:
    logits = torch.tensor([0.2, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.6, 0.3, -0.4], dtype=torch.float64).log_softmax(-1)
    return logits, reference


def exact_kl(log_p: Tensor, reference: Tensor) -> Tensor:
    """KL(p || p_ref) at every outcome, with its gradient."""
    return (log_p.exp() * (log_p - reference)).sum().expand_as(log_p)


def expected_gradient(estimator: str, sampled_by: Tensor | None = None) -> Tensor:
    """E_{y ~ p} of the gradient of the penalty at y, the draw not differentiated; y from another policy if given."""
    logits, reference = categorical()
    log_p = logits.log_softmax(-1)
    full = exact_kl(log_p, reference)
    behaviour = log_p.detach().exp() if sampled_by is None else sampled_by
    ratio = None if sampled_by is None else log_p.exp() / sampled_by
    loss = (behaviour * kl_penalty(log_p, reference, estimator, full=full, ratio=ratio)).sum()
    return torch.autograd.grad(loss, logits)[0]


def exact_gradient(divergence: str) -> Tensor:
    logits, reference = categorical()
    log_p = logits.log_softmax(-1)
    p, q = log_p.exp(), reference.exp()
    value = {"reverse": p * (log_p - reference), "forward": q * (reference - log_p), "l1": (p - q).abs()}[divergence]
    return torch.autograd.grad(value.sum(), logits)[0]


OTHER_POLICY = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("sampled_by", [None, OTHER_POLICY], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [
        ("k2", "reverse"),
        ("full", "reverse"),
        *((name, "reverse") for name in KL_ESTIMATORS if name.endswith("+")),
        ("k3", "forward"),
        ("abs", "l1"),
    ],
)
def test_expected_gradients_are_those_of_the_stated_divergence(estimator, divergence, sampled_by):
    torch.testing.assert_close(expected_gradient(estimator, sampled_by), exact_gradient(divergence))


@pytest.mark.parametrize("sampled_by", [None, OTHER_POLICY], ids=["on-policy", "off-policy"])
def test_k1_as_a_loss_has_no_expected_gradient(sampled_by):
    torch.testing.assert_close(expected_gradient("k1", sampled_by), torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+", "full"])
def test_k1_and_k3_expect_the_exact_divergence(estimator):
    logits, reference = categorical()
    log_p = logits.detach().log_softmax(-1)
    full = exact_kl(log_p, reference)
    expectation = (log_p.exp() * kl_penalty(log_p, reference, estimator, full=full)).sum()
    torch.testing.assert_close(expectation, full[0])


def test_the_exponent_of_k3_is_clamped_and_the_result_is_not():
    value = kl_penalty(torch.tensor([-100.0]), torch.tensor([0.0]), "k3")
    assert float(value) == pytest.approx(math.exp(20) - 101, rel=1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_masked_garbage_reaches_no_value_and_no_gradient(estimator):
    log_probs = torch.tensor([-1.0, torch.nan, -torch.inf], requires_grad=True)
    reference = torch.tensor([-1.5, 0.0, torch.inf], requires_grad=True)
    full, ratio = (torch.tensor([0.5, torch.nan, torch.inf], requires_grad=True) for _ in range(2))
    mask = torch.tensor([True, False, False])
    value = kl_penalty(log_probs, reference, estimator, mask=mask, full=full, ratio=ratio)
    value.sum().backward()
    assert value[1:].tolist() == [0.0, 0.0]
    assert log_probs.grad is not None or estimator == "full"
    assert log_probs.grad is None or bool(torch.isfinite(log_probs.grad).all())
    assert reference.grad is None
    assert ratio.grad is None
    assert full.grad is None or full.grad.tolist() == [0.5, 0.0, 0.0]


def test_wrong_names_and_shapes():
    with pytest.raises(InvalidOptionError, match="KL estimator='k4' is not one of"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(InvalidInputError, match="must have the same shape"):
        kl_penalty(torch.zeros(1), torch.zeros(2), "k1")
    with pytest.raises(InvalidInputError, match=r"log_probs and ratio must have the same shape; got \(1,\) and \(3,\)"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k1", ratio=torch.ones(3))
    with pytest.raises(MissingInputError, match="'full' needs the tensor `full`: compute it with agentrl"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full+")


def test_penalties_and_their_gradients_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    p, q, full, ratio = (torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    p.requires_grad_()
    for estimator in KL_ESTIMATORS:
        value = kl_penalty(p, q, estimator, full=full, ratio=ratio)
        (gradient,) = torch.autograd.grad((value + 0 * p).sum(), p)
        for i in range(3):
            for t in range(4):
                d, r = float(q[i, t]) - p[i, t].item(), float(ratio[i, t])
                values = {
                    "k1": -d,
                    "abs": abs(d),
                    "k2": d * d / 2,
                    "k3": math.exp(d) - d - 1,
                    "full": float(full[i, t]),
                }
                slopes = {"k1": 1.0, "abs": math.copysign(1, -d), "k2": -d, "k3": 1 - math.exp(d), "full": 0.0}
                slope = -d if estimator.endswith("+") else slopes[estimator]
                assert value[i, t].item() == pytest.approx(r * values[estimator.removesuffix("+")], abs=1e-10)
                assert float(gradient[i, t]) == pytest.approx(r * slope, abs=1e-10)


def test_reward_kl_by_hand():
    """Model tokens at 0 and 2; beta 0.1; k1 = ln p - ln p_ref = 0.5 and -1."""
    result = reward_kl(
        torch.tensor([[0.0, 0.0, 1.0, 0.0]]),
        torch.tensor([[-1.0, torch.nan, -2.0, torch.inf]], requires_grad=True),
        torch.tensor([[-1.5, 0.0, -1.0, torch.nan]]),
        torch.tensor([[1, 0, 1, 0]]),
        beta=0.1,
    )
    assert result.rewards.tolist()[0] == pytest.approx([-0.05, 0.0, 1.1, 0.0])
    assert result.kl.tolist()[0] == pytest.approx([0.5, 0.0, -1.0, 0.0])
    assert not result.rewards.requires_grad


def two_token_policy() -> tuple[Tensor, Tensor]:
    """Logits of the first token and, given it, of the second: [2] and [2, 2] in one tensor; and a reference."""
    logits = torch.tensor([[0.3, -0.2], [0.9, 0.1], [-0.6, 0.4]], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([[-0.5, 0.2], [0.0, 0.3], [0.7, -0.1]], dtype=torch.float64).log_softmax(-1)
    return logits, reference


def two_token_gradients(estimator: str) -> tuple[Tensor, Tensor]:
    """(expected policy gradient of the penalised reward, gradient of -KL of the trajectories), the task reward 0."""
    logits, reference = two_token_policy()
    log_p = logits.log_softmax(-1)
    surrogate = torch.zeros((), dtype=torch.float64)
    divergence = torch.zeros((), dtype=torch.float64)
    states = [float(exact_kl(log_p[s].detach(), reference[s])[0]) for s in range(3)]
    for first in range(2):
        for second in range(2):
            tokens = torch.stack([log_p[0, first], log_p[1 + first, second]]).unsqueeze(0)
            others = torch.stack([reference[0, first], reference[1 + first, second]]).unsqueeze(0)
            full = torch.tensor([[states[0], states[1 + first]]], dtype=torch.float64)
            rewards = reward_kl(
                torch.zeros(1, 2).double(), tokens, others, torch.ones(1, 2), beta=1.0, estimator=estimator, full=full
            ).rewards
            probability = tokens.detach().sum().exp()
            to_go = rewards.flip(-1).cumsum(-1).flip(-1)
            surrogate = surrogate + probability * (to_go * tokens).sum()
            divergence = divergence - tokens.sum().exp() * (tokens - others).sum()
    return torch.autograd.grad(surrogate, logits, retain_graph=True)[0], torch.autograd.grad(divergence, logits)[0]


@pytest.mark.parametrize("estimator", REWARD_KL_ESTIMATORS)
def test_in_the_reward_only_k1_has_the_gradient_of_the_trajectories_divergence(estimator):
    policy_gradient, exact = two_token_gradients(estimator)
    assert torch.allclose(policy_gradient, exact, atol=1e-12) == (estimator == "k1")


def test_reward_kl_refuses_what_makes_no_sense():
    zeros = torch.zeros(1, 2)
    with pytest.raises(InvalidOptionError, match=r"KL estimator in the reward='k3\+' is not one of"):
        reward_kl(zeros, zeros, zeros, zeros + 1, beta=0.1, estimator="k3+")
    with pytest.raises(InvalidOptionError, match=r"beta=-0.1 must be at least 0"):
        reward_kl(zeros, zeros, zeros, zeros + 1, beta=-0.1)
    with pytest.raises(InvalidInputError, match=r"log_probs must be \[B, T\] like rewards"):
        reward_kl(torch.zeros(1, 3), zeros, zeros, zeros + 1, beta=0.1)
    with pytest.raises(InvalidInputError, match="the KL penalty is nan at a model token: row 0, position 1"):
        reward_kl(zeros, torch.tensor([[0.0, torch.nan]]), zeros, zeros + 1, beta=0.1)
