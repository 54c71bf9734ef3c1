"""Policy losses: values and gradients by hand, clipping at its edges, and masks that let nothing through."""

import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import (
    LOSSES,
    AlgorithmError,
    InvalidInputError,
    InvalidOptionError,
    LossInputs,
    NoOptions,
    PolicyLoss,
    UnknownNameError,
    policy_loss,
    register_loss,
)


def run(name: str, ratios: list[float], advantages: list[float], **options: float) -> tuple[PolicyLoss, Tensor]:
    """The loss of one row with these ratios, and the gradient of its sum with respect to the log-probabilities."""
    old = torch.full((1, len(ratios)), -0.5, dtype=torch.float64)
    log_probs = (old + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    loss = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=old,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        loss_mask=torch.ones(1, len(ratios), dtype=torch.bool),
        **options,
    )
    (gradient,) = torch.autograd.grad(loss.per_token.sum(), log_probs, allow_unused=True)
    return loss, gradient


def row(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_ppo_by_hand_for_both_signs_inside_and_outside_the_interval():
    ratios, advantages = [1.0, 1.1, 1.5, 0.5, 1.5, 0.5], [2.0, -1.0, 1.0, 1.0, -1.0, -1.0]
    loss, gradient = run("ppo", ratios, advantages, clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(loss.per_token, row([-2.0, 1.1, -1.28, -0.5, 1.5, 0.8]))
    # d(-A ratio)/d log p = -A ratio, and 0 where the clipped branch counts
    torch.testing.assert_close(gradient, row([-2.0, 1.1, 0.0, -0.5, 1.5, 0.0]))
    assert float(loss.metrics["clip_fraction_high"]) == pytest.approx(1 / 6)
    assert float(loss.metrics["clip_fraction_low"]) == pytest.approx(1 / 6)
    assert float(loss.metrics["ratio_max"]) == pytest.approx(1.5)
    assert float(loss.metrics["ratio_min"]) == pytest.approx(0.5)
    assert float(loss.metrics["ratio_mean"]) == pytest.approx(6.1 / 6)
    assert int(loss.metrics["tokens"]) == 6


def test_dual_clip_bounds_the_loss_of_negative_advantages():
    loss, gradient = run("dual_clip", [5.0, 5.0, 2.0, 0.5], [-1.0, 1.0, -1.0, -1.0], clip_high=0.28)
    torch.testing.assert_close(loss.per_token, row([3.0, -1.28, 2.0, 0.8]))
    torch.testing.assert_close(gradient, row([0.0, 0.0, 2.0, 0.0]))
    assert float(loss.metrics["dual_clip_fraction"]) == 0.25
    other, _ = run("dual_clip", [5.0], [-2.0], dual_clip=4.0)
    assert float(other.per_token.detach()) == pytest.approx(8.0)


def test_reinforce_has_the_gradient_of_ppo_at_ratio_one():
    advantages = [0.7, -1.3, 0.0]
    loss, gradient = run("reinforce", [1.0, 1.0, 1.0], advantages)
    _, of_ppo = run("ppo", [1.0, 1.0, 1.0], advantages)
    torch.testing.assert_close(loss.per_token, row([0.35, -0.65, 0.0]))
    torch.testing.assert_close(gradient, of_ppo)
    torch.testing.assert_close(gradient, -row(advantages))


def test_no_old_log_probs_means_ratio_one():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    arguments = {"advantages": torch.ones(1, 2), "loss_mask": torch.ones(1, 2).bool()}
    loss = policy_loss("ppo", log_probs=log_probs, old_log_probs=None, **arguments)
    assert loss.per_token.tolist() == [[-1.0, -1.0]]
    loss.per_token.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, -1.0]]


def test_the_log_ratio_is_clamped_so_nothing_overflows():
    old = torch.tensor([[-100.0, 0.0]])
    log_probs = torch.tensor([[0.0, -100.0]], requires_grad=True)
    loss = policy_loss(
        "ppo", log_probs=log_probs, old_log_probs=old, advantages=-torch.ones(1, 2), loss_mask=torch.ones(1, 2)
    )
    assert loss.per_token[0, 0].item() == pytest.approx(math.exp(20), rel=1e-6)
    loss.per_token.sum().backward()
    assert log_probs.grad is not None
    assert bool(torch.isfinite(log_probs.grad).all())


@pytest.mark.parametrize("name", ["reinforce", "ppo", "dual_clip"])
def test_garbage_off_the_mask_reaches_no_value_and_no_gradient(name):
    log_probs = torch.tensor([[-1.0, torch.nan, -torch.inf, torch.inf]], requires_grad=True)
    loss = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=torch.tensor([[-1.0, 0.0, torch.nan, -torch.inf]]),
        advantages=torch.tensor([[1.0, torch.inf, torch.nan, 3.0]]),
        loss_mask=torch.tensor([[1, 0, 0, 0]]),
    )
    loss.per_token.sum().backward()
    assert loss.per_token[0, 1:].tolist() == [0.0, 0.0, 0.0]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, 0.0, 0.0, 0.0]]
    assert all(bool(torch.isfinite(value)) for value in loss.metrics.values())
    assert float(loss.metrics["ratio_max"]) == 1.0


@pytest.mark.parametrize("name", ["reinforce", "ppo", "dual_clip"])
def test_an_empty_mask_gives_a_zero_connected_to_the_graph(name):
    log_probs = torch.full((2, 3), torch.nan, requires_grad=True)
    loss = policy_loss(
        name,
        log_probs=log_probs,
        old_log_probs=torch.zeros(2, 3),
        advantages=torch.zeros(2, 3),
        loss_mask=torch.zeros(2, 3).bool(),
    )
    loss.per_token.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.abs().sum() == 0.0
    assert float(loss.metrics["approx_kl"]) == 0.0
    assert float(loss.metrics["ratio_min"]) == 1.0


def test_advantages_and_old_log_probs_get_no_gradient():
    tensors = {name: torch.zeros(1, 2, requires_grad=True) for name in ("log_probs", "old_log_probs", "advantages")}
    loss = policy_loss("ppo", loss_mask=torch.ones(1, 2), **tensors)
    loss.per_token.sum().backward()
    assert tensors["old_log_probs"].grad is None
    assert tensors["advantages"].grad is None
    assert not any(metric.requires_grad for metric in loss.metrics.values())


def test_approx_kl_is_k3_of_old_against_new():
    loss, _ = run("reinforce", [0.5, 2.0], [1.0, 1.0])
    expected = ((0.5 - 1 - math.log(0.5)) + (2.0 - 1 - math.log(2.0))) / 2
    assert float(loss.metrics["approx_kl"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("pppo", {}, UnknownNameError, "unknown loss 'pppo'; did you mean 'ppo'"),
        ("reinforce", {"clip_low": 0.1}, UnknownNameError, "unknown option 'clip_low' of loss 'reinforce'"),
        ("ppo", {"clip_hi": 0.1}, UnknownNameError, "did you mean 'clip_high'"),
        ("ppo", {"clip_low": 1.5}, InvalidOptionError, "clip_low=1.5"),
        ("ppo", {"clip_high": -0.1}, InvalidOptionError, "clip_high=-0.1"),
        ("dual_clip", {"dual_clip": 1.0}, InvalidOptionError, "dual_clip=1.0 must be greater than 1"),
        ("dual_clip", {"clip_low": -1.0}, InvalidOptionError, "clip_low=-1.0"),
    ],
)
def test_wrong_names_and_options_are_named(name, options, error, message):
    with pytest.raises(error, match=message):
        run(name, [1.0], [1.0], **options)


@pytest.mark.parametrize("which", ["old_log_probs", "advantages", "loss_mask"])
def test_shapes_must_agree(which):
    tensors = {name: torch.ones(2, 3) for name in ("log_probs", "old_log_probs", "advantages", "loss_mask")}
    with pytest.raises(InvalidInputError, match=rf"{which} must be \[B, T\] as log_probs; got \(2, 4\)"):
        policy_loss("ppo", **{**tensors, which: torch.ones(2, 4)})


def test_user_code_adds_a_loss_by_a_decorator():
    if "squared_of_this_test" not in LOSSES.names():

        @register_loss("squared_of_this_test")
        def squared(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
            return inputs.log_probs.square(), {}

    loss, _ = run("squared_of_this_test", [1.0], [1.0])
    assert float(loss.per_token.detach()) == 0.25
    with pytest.raises(AlgorithmError, match="already registered"):
        register_loss("ppo")(lambda inputs, options: (inputs.log_probs, {}))
