"""What compute_advantages refuses, and what its messages say."""

import pytest
import torch

from agentrl.algorithms import (
    ESTIMATORS,
    AdvantageInputs,
    AlgorithmError,
    Estimate,
    InvalidInputError,
    InvalidOptionError,
    MissingInputError,
    Rollouts,
    ScalarOptions,
    UnknownNameError,
    compute_advantages,
    register_estimator,
)


def inputs(**changes: object) -> AdvantageInputs:
    tensors = {
        "rewards": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 1]]),
        "groups": torch.tensor([0, 0]),
        "token_energy": torch.ones(2, 3),
    }
    return AdvantageInputs(**{**tensors, **changes})


def at(row: int, position: int, value: float, base: float = 1.0) -> torch.Tensor:
    tensor = torch.full((2, 3), base)
    tensor[row, position] = value
    return tensor


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32])
def test_masks_of_zeros_and_ones_are_accepted_in_any_dtype(dtype):
    expected = compute_advantages("tir_otb", inputs()).advantages
    mask = inputs().response_mask.to(dtype)
    assert torch.equal(compute_advantages("tir_otb", inputs(response_mask=mask)).advantages, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": torch.zeros(2)}, r"rewards must be \[B, T\]; got \(2,\)"),
        ({"rewards": torch.zeros(2, 3, dtype=torch.int64)}, "rewards must be floating; got torch.int64"),
        ({"response_mask": torch.ones(2, 4)}, r"response_mask must be \(2, 3\) as rewards; got \(2, 4\)"),
        ({"response_mask": torch.full((2, 3), 2)}, "response_mask must be bool or hold only 0 and 1"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, r"groups must be \(2,\) as rewards; got \(3,\)"),
        ({"groups": torch.zeros(2)}, "groups must be int64"),
        ({"response_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}, "row 1 has no model token"),
        ({"rewards": at(1, 1, 0.5, 0.0)}, "rewards holds 0.5 in row 1 at position 1, which is no model token"),
        ({"rewards": at(1, 2, torch.nan, 0.0)}, "rewards is nan at a model token: row 1, position 2"),
        ({"token_energy": at(0, 1, torch.inf)}, "token_energy is inf at a model token: row 0, position 1"),
        ({"token_energy": at(0, 1, -0.5)}, "token_energy is -0.5 in row 0 at position 1; it cannot be negative"),
        ({"importance_weights": at(1, 0, torch.nan)}, "importance_weights is nan at a model token: row 1, position 0"),
        ({"token_energy": torch.ones(2, 2)}, r"token_energy must be \(2, 3\)"),
    ],
)
def test_tensors_that_cannot_be_right_are_named_with_the_place(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        compute_advantages("tir_otb", inputs(**changes))


def test_what_the_estimator_does_not_use_is_not_asked_for():
    bare = inputs(token_energy=None)
    compute_advantages("grpo", bare)
    compute_advantages("tir_otb", bare, energy="length")


@pytest.mark.parametrize(
    ("changes", "energy", "message"),
    [
        ({}, "logit_proxy", "energy='logit_proxy' needs token_energy .* or log_probs and sum_pi_squared"),
        ({"log_probs": -torch.ones(2, 3)}, "logit_proxy", "needs sum_pi_squared"),
        ({"sum_pi_squared": torch.ones(2, 3)}, "logit_proxy", "needs log_probs"),
        ({"token_energy": torch.ones(2, 3)}, "head_exact", "energy='head_exact' needs hidden_norm_squared"),
    ],
)
def test_a_missing_input_is_named_with_the_setting(changes, energy, message):
    with pytest.raises(MissingInputError, match=message):
        compute_advantages("tir_otb", inputs(**{"token_energy": None, **changes}), energy=energy)


@pytest.mark.parametrize(
    ("estimator", "options", "error", "message"),
    [
        ("tirotb", {}, UnknownNameError, "unknown estimator 'tirotb'; did you mean 'tir_otb'"),
        (
            "tir_otb",
            {"gama": 1.0},
            UnknownNameError,
            "unknown option 'gama' of estimator 'tir_otb'; did you mean 'gamma'",
        ),
        ("grpo", {"tail": "zero"}, UnknownNameError, "unknown option 'tail' of estimator 'grpo'"),
        ("tir_otb", {"tail": "cary"}, InvalidOptionError, "tail='cary' is none of .*; did you mean 'carry'"),
        ("tir_otb", {"energy": "head"}, InvalidOptionError, "energy='head' .*; did you mean 'head_exact'"),
        ("tir_otb", {"normalize": "std"}, InvalidOptionError, "normalize='std' is none of None, group_std, whiten"),
        ("tir_otb", {"gamma": 1.5}, InvalidOptionError, "gamma=1.5 lies outside"),
        ("tir_otb", {"epsilon": 0.0}, InvalidOptionError, "epsilon=0.0 must be positive"),
        ("tir_otb", {"loss_aggregation": "mean"}, InvalidOptionError, "loss_aggregation='mean'"),
    ],
)
def test_names_and_options_that_do_not_exist_bring_the_nearest(estimator, options, error, message):
    with pytest.raises(error, match=message):
        compute_advantages(estimator, inputs(), **options)


def test_every_error_is_an_algorithm_error_and_a_value_error():
    for error in (UnknownNameError, InvalidOptionError, MissingInputError, InvalidInputError):
        assert issubclass(error, AlgorithmError)
    assert issubclass(AlgorithmError, ValueError)


def test_the_registered_estimators_and_their_options_are_known():
    assert set(ESTIMATORS.names()) >= {"grpo", "otb", "rloo", "tir_otb"}
    assert ESTIMATORS.option_names("grpo") == ("normalize",)
    assert set(ESTIMATORS.option_names("tir_otb")) == {
        "energy",
        "tail",
        "leave_one_out",
        "gamma",
        "normalize",
        "epsilon",
        "loss_aggregation",
    }


def test_user_code_adds_an_estimator_by_a_decorator_once():
    name = "plain_return_of_this_test"
    if name not in ESTIMATORS.names():

        @register_estimator(name, options=ScalarOptions)
        def plain(rollouts: Rollouts, options: ScalarOptions) -> Estimate:
            total = rollouts.rewards.sum(-1, keepdim=True)
            return Estimate(advantages=total, returns=total, baselines=torch.zeros_like(total))

    assert compute_advantages(name, inputs()).advantages.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    with pytest.raises(AlgorithmError, match="already registered"):
        register_estimator(name)(lambda rollouts, options: None)
