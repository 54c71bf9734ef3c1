"""Value loss, controllers of beta, overlong penalty: by hand and against loops."""

import doctest
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import (
    AdaptiveKL,
    FixedKL,
    InvalidInputError,
    InvalidOptionError,
    MissingInputError,
    add_at_last_token,
    overlong_penalty,
    rewards,
    value_loss,
)
from agentrl.algorithms import kl as kl_penalties


@pytest.mark.parametrize("module", [kl_penalties, rewards])
def test_the_examples_of_the_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_value_loss_by_hand():
    """Returns 1, old values 0, c = 0.2: inside, moved too far to the target, moved too far from it."""
    values = torch.tensor([[0.1, 0.9, -0.9]], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    loss, metrics = value_loss(values, zeros + 1, torch.ones(1, 3), old_values=zeros, clip=0.2)
    assert loss.tolist()[0] == pytest.approx([0.405, 0.32, 1.805])
    assert torch.autograd.grad(loss.sum(), values)[0].tolist()[0] == pytest.approx([-0.9, 0.0, -1.9])
    assert float(metrics["value_clip_fraction"]) == pytest.approx(1 / 3)
    assert float(metrics["value_mean"]) == pytest.approx(0.1 / 3)
    assert float(metrics["squared_error"]) == pytest.approx((0.81 + 0.01 + 3.61) / 3)
    plain, _ = value_loss(values, zeros + 1, torch.ones(1, 3), clip=None)
    assert plain.tolist()[0] == pytest.approx([0.405, 0.005, 1.805])


@pytest.mark.parametrize("seed", range(10))
def test_value_loss_against_a_loop(seed):
    generator = torch.Generator().manual_seed(seed)
    values, returns, old = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(4, 6, generator=generator) < 0.6
    values.requires_grad_()
    loss = value_loss(values, returns, mask, old_values=old, clip=0.5)[0]
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    for i in range(4):
        for t in range(6):
            v, r, o = values[i, t].item(), float(returns[i, t]), float(old[i, t])
            held = min(max(v, o - 0.5), o + 0.5)
            first, second = (v - r) ** 2, (held - r) ** 2
            slope = 0.0 if second > first else v - r
            assert loss[i, t].item() == pytest.approx(max(first, second) / 2 * bool(mask[i, t]), abs=1e-10)
            assert float(gradient[i, t]) == pytest.approx(slope * bool(mask[i, t]), abs=1e-10)


def test_value_loss_gradcheck():
    generator = torch.Generator().manual_seed(0)
    values, returns, old = (torch.randn(2, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_loss(v, returns, mask, old_values=old, clip=0.3)[0], (values,))


def test_masked_garbage_reaches_neither_the_value_loss_nor_its_gradient():
    values = torch.tensor([[1.0, math.nan, math.inf]], requires_grad=True)
    garbage = torch.tensor([[0.0, math.inf, math.nan]], requires_grad=True)
    loss, metrics = value_loss(values, garbage, torch.tensor([[1, 0, 0]]), old_values=garbage)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0, 0.0]]
    assert garbage.grad is None
    assert all(bool(torch.isfinite(value)) for value in metrics.values())


def test_value_loss_refuses_what_makes_no_sense():
    zeros = torch.zeros(1, 2)
    with pytest.raises(InvalidOptionError, match="value clip=0 must be positive"):
        value_loss(zeros, zeros, zeros, old_values=zeros, clip=0)
    with pytest.raises(MissingInputError, match="needs old_values"):
        value_loss(zeros, zeros, zeros)
    with pytest.raises(InvalidInputError, match=r"returns must be \[B, T\] like values"):
        value_loss(zeros, torch.zeros(1, 3), zeros, old_values=zeros)
    with pytest.raises(InvalidInputError, match="old_values is nan at a model token: row 0, position 0"):
        value_loss(zeros, zeros, zeros + 1, old_values=zeros / 0)


def test_the_adaptive_controller_by_hand_and_saved():
    controller = AdaptiveKL(0.2, target=0.1, horizon=1000)
    controller.update(0.105, trajectories=100)  # an error of 0.05
    assert controller.beta == pytest.approx(0.2 * (1 + 0.05 * 0.1))
    controller.update(0.0, trajectories=500)  # -1, cut at -0.2
    assert controller.beta == pytest.approx(0.2 * 1.005 * 0.9)
    controller.update(-3.0, trajectories=0)
    state = json.loads(json.dumps(controller.state_dict()))
    other = AdaptiveKL(0.7, target=0.1, horizon=1000)
    other.load_state_dict(state)
    assert other.beta == controller.beta
    assert other.state_dict() == state


@given(kls=st.lists(st.floats(-1, 100), max_size=20))
def test_beta_stays_positive(kls):
    controller = AdaptiveKL(1.0, target=0.5, horizon=100)
    for measured in kls:
        controller.update(measured, trajectories=100)
    assert 0 < controller.beta <= 1.2 ** len(kls) * 1.001


def test_a_fixed_controller_stays():
    controller = FixedKL(0.3)
    controller.update(5.0, trajectories=10)
    controller.load_state_dict({"beta": 0.9})
    assert controller.beta == 0.3
    assert controller.state_dict() == {"beta": 0.3}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedKL(-0.1), "beta=-0.1 must be at least 0"),
        (lambda: AdaptiveKL(0.0, target=1.0, horizon=10), "beta=0.0 must be positive"),
        (lambda: AdaptiveKL(0.1, target=0.0, horizon=10), "target=0.0 must be positive"),
        (lambda: AdaptiveKL(0.1, target=1.0, horizon=math.nan), "horizon=nan must be positive"),
    ],
)
def test_controllers_that_make_no_sense(make, message):
    with pytest.raises(InvalidOptionError, match=message):
        make()


def test_measurements_that_make_no_sense():
    for controller in (FixedKL(0.1), AdaptiveKL(0.1, target=1.0, horizon=10)):
        with pytest.raises(InvalidInputError, match="kl must be finite"):
            controller.update(math.nan, trajectories=1)
    with pytest.raises(InvalidInputError, match="a step of 50 trajectories is too large for a KL horizon of 10"):
        AdaptiveKL(0.1, target=1.0, horizon=10).update(0.0, trajectories=50)


@given(length=st.integers(0, 300), buffer=st.integers(1, 100))
def test_the_overlong_penalty_is_the_formula(length, buffer):
    penalty = float(overlong_penalty(torch.tensor([length]), max_length=100, buffer=buffer))
    if length <= 100 - buffer:
        expected = 0.0
    elif length <= 100:
        expected = (100 - buffer - length) / buffer
    else:
        expected = -1.0
    assert penalty == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("buffer", [0, -5, 101, math.nan])
def test_a_buffer_lies_within_the_longest_length(buffer):
    with pytest.raises(InvalidOptionError, match="buffer"):
        overlong_penalty(torch.tensor([1]), max_length=100, buffer=buffer)


def test_amounts_are_added_at_the_last_model_token_also_before_a_final_observation():
    result = add_at_last_token(
        torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]),
        torch.tensor([[1, 1, 0], [1, 0, 1]]),
        torch.tensor([-0.5, -1.0]),
    )
    assert result.tolist() == [[0.0, 0.5, 0.0], [0.0, 0.0, 1.0]]
    with pytest.raises(InvalidInputError, match="row 1 has no model token"):
        add_at_last_token(torch.zeros(2, 2), torch.tensor([[1, 0], [0, 0]]), torch.zeros(2))
    with pytest.raises(InvalidInputError, match=r"amounts must be \[B\] = \(2,\); got \(3,\)"):
        add_at_last_token(torch.zeros(2, 2), torch.ones(2, 2), torch.zeros(3))
