"""kl_penalty: values by hand and the expected gradients that the docstring claims."""

import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import KL_ESTIMATORS, InvalidInputError, InvalidOptionError, kl_penalty

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


def expected_gradient(estimator: str) -> Tensor:
    """E_{y ~ p} of the gradient of the penalty at y, the draw not differentiated."""
    logits, reference = categorical()
    log_p = logits.log_softmax(-1)
    loss = (log_p.exp().detach() * kl_penalty(log_p, reference, estimator)).sum()
    return torch.autograd.grad(loss, logits)[0]


def exact_gradient(divergence: str) -> Tensor:
    logits, reference = categorical()
    log_p = logits.log_softmax(-1)
    p, q = log_p.exp(), reference.exp()
    value = {"reverse": p * (log_p - reference), "forward": q * (reference - log_p), "l1": (p - q).abs()}[divergence]
    return torch.autograd.grad(value.sum(), logits)[0]


@pytest.mark.parametrize(
    ("estimator", "divergence"),
    [("k2", "reverse"), ("k1+", "reverse"), ("abs+", "reverse"), ("k3+", "reverse"), ("k3", "forward")],
)
def test_expected_gradients_are_those_of_the_stated_divergence(estimator, divergence):
    torch.testing.assert_close(expected_gradient(estimator), exact_gradient(divergence))


def test_k1_as_a_loss_has_no_expected_gradient():
    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(3, dtype=torch.float64))


def test_abs_moves_every_token_by_the_sign_of_its_difference():
    # E_p[s_y grad ln p(y)] with s = sign(p - q) is the gradient of sum_v s_v p(v) = ||p - q||_1
    torch.testing.assert_close(expected_gradient("abs"), exact_gradient("l1"))


def test_the_exponent_of_k3_is_clamped_and_the_result_is_not():
    value = kl_penalty(torch.tensor([-100.0]), torch.tensor([0.0]), "k3")
    assert float(value) == pytest.approx(math.exp(20) - 101, rel=1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_masked_garbage_reaches_no_value_and_no_gradient(estimator):
    log_probs = torch.tensor([-1.0, torch.nan, -torch.inf], requires_grad=True)
    reference = torch.tensor([-1.5, 0.0, torch.inf], requires_grad=True)
    value = kl_penalty(log_probs, reference, estimator, mask=torch.tensor([True, False, False]))
    value.sum().backward()
    assert value[1:].tolist() == [0.0, 0.0]
    assert log_probs.grad is not None
    assert bool(torch.isfinite(log_probs.grad).all())
    assert reference.grad is None


def test_wrong_names_and_shapes():
    with pytest.raises(InvalidOptionError, match="KL estimator='k4' is none of"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    with pytest.raises(InvalidInputError, match="differ in shape"):
        kl_penalty(torch.zeros(1), torch.zeros(2), "k1")
