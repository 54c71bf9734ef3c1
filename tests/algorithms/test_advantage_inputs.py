"""What compute_advantages refuses, and what its messages say."""

import pytest
import torch

from agentrl.algorithms import (
    ESTIMATORS,
    AdvantageInputs,
    Advantages,
    AlgorithmError,
    EstimatorInputs,
    InvalidInputError,
    InvalidOptionError,
    MissingInputError,
    ScalarOptions,
    UnknownNameError,
    compute_advantages,
    estimator_needs,
    register_estimator,
)
from agentrl_envs.registry import NameTakenError


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
        ({"rewards": torch.zeros(2, 3, dtype=torch.int64)}, "rewards must be floating-point; got torch.int64"),
        ({"response_mask": torch.ones(2, 4)}, r"response_mask must be \(2, 3\) like rewards; got \(2, 4\)"),
        ({"response_mask": torch.full((2, 3), 2)}, "response_mask must be bool or contain only 0 and 1"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, r"groups must be \(2,\) like rewards; got \(3,\)"),
        ({"groups": torch.zeros(2)}, "groups must be int64"),
        ({"response_mask": torch.tensor([[1, 1, 0], [0, 0, 0]])}, "row 1 has no model token"),
        ({"rewards": at(1, 1, 0.5, 0.0)}, "rewards is 0.5 in row 1 at position 1, which is not a model token"),
        ({"rewards": at(1, 2, torch.nan, 0.0)}, "rewards is nan at a model token: row 1, position 2"),
        ({"token_energy": at(0, 1, torch.inf)}, "token_energy is inf at a model token: row 0, position 1"),
        ({"token_energy": at(0, 1, -0.5)}, "token_energy is -0.5 in row 0 at position 1; it must not be negative"),
        ({"importance_weights": at(1, 0, torch.nan)}, "importance_weights is nan at a model token: row 1, position 0"),
        ({"token_energy": torch.ones(2, 2)}, r"token_energy must be \(2, 3\)"),
        ({"groups": torch.tensor([[0, 0]])}, r"groups must be \(2,\) like rewards; got \(1, 2\)"),
        ({"loss_mask": torch.full((2, 3), 3)}, "loss_mask must be bool or contain only 0 and 1"),
        ({"loss_mask": torch.ones(3, 3)}, r"loss_mask must be \(2, 3\) like rewards"),
        ({"values": torch.ones(2, 3).long()}, "values must be floating-point; got torch.int64"),
        ({"greedy_returns": torch.ones(2, 3)}, r"greedy_returns must be \(2,\) like rewards; got \(2, 3\)"),
        ({"bootstrap_values": torch.ones(3)}, r"bootstrap_values must be \(2,\) like rewards"),
        ({"importance_weights": at(1, 2, -0.5)}, "importance_weights is -0.5 in row 1 at position 2"),
    ],
)
def test_tensors_that_cannot_be_right_are_named_with_the_place(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        compute_advantages("tir_otb", inputs(**changes))


@pytest.mark.parametrize(
    ("estimator", "changes", "message"),
    [
        ("gae", {"values": at(0, 1, torch.nan)}, "values is nan at a model token: row 0, position 1"),
        (
            "gae",
            {"values": torch.ones(2, 3), "bootstrap_values": torch.tensor([0.0, torch.inf])},
            "bootstrap_values is inf in row 1; it must be finite",
        ),
        ("remax", {"greedy_returns": torch.tensor([torch.nan, 0.0])}, "greedy_returns is nan in row 0"),
        ("eob", {"trajectory_energy": torch.tensor([1.0, -1.0])}, "trajectory_energy is -1.0 in row 1; .* negative"),
        ("grpo", {"importance_weights": at(1, 0, torch.inf)}, "importance_weights is inf at a model token: row 1"),
        ("gpg", {"rewards": at(0, 0, torch.inf, 0.0)}, "rewards is inf at a model token: row 0, position 0"),
    ],
)
def test_values_that_cannot_be_right_are_named_with_the_place(estimator, changes, message):
    with pytest.raises(InvalidInputError, match=message):
        compute_advantages(estimator, inputs(**changes))


@pytest.mark.parametrize(
    ("estimator", "name", "setting"),
    [
        ("gae", "values", "training adds one with algorithm.estimator=gae"),
        ("remax", "greedy_returns", "training samples one with algorithm.estimator=remax"),
        ("eob", "trajectory_energy", "training computes them with algorithm.estimator=eob"),
    ],
)
def test_a_required_input_is_named_with_what_provides_it(estimator, name, setting):
    with pytest.raises(MissingInputError, match=f"estimator '{estimator}' needs {name} .*{setting}"):
        compute_advantages(estimator, inputs())


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
        ("tir_otb", {"tail": "cary"}, InvalidOptionError, "tail='cary' is not one of .*; did you mean 'carry'"),
        ("tir_otb", {"energy": "head"}, InvalidOptionError, "energy='head' .*; did you mean 'head_exact'"),
        ("tir_otb", {"normalize": "std"}, InvalidOptionError, "normalize='std' is not one of None, group_std, whiten"),
        ("tir_otb", {"gamma": 1.5}, InvalidOptionError, "gamma=1.5 must be in"),
        ("tir_otb", {"epsilon": 0.0}, InvalidOptionError, "epsilon=0.0 must be positive"),
        ("tir_otb", {"loss_aggregation": "mean"}, InvalidOptionError, "loss_aggregation='mean'"),
        ("tir_otb", {"gamma": "0.9"}, InvalidOptionError, "gamma='0.9' must be in"),
        ("opo", {"leave_one_out": "no"}, InvalidOptionError, "leave_one_out='no' must be True or False"),
        ("opo", {"energy": "length"}, UnknownNameError, "unknown option 'energy' of estimator 'opo'"),
        ("eob", {"energy": "logit_proxy"}, InvalidOptionError, "energy='logit_proxy' is not one of exact"),
        ("gae", {"lam": float("nan")}, InvalidOptionError, "lam=nan must be in"),
        ("gae", {"lambda": 0.9}, UnknownNameError, "unknown option 'lambda' of estimator 'gae'; did you mean 'lam'"),
        ("reinforce_pp", {"normalize": "white"}, InvalidOptionError, "normalize='white' .*; did you mean 'whiten'"),
    ],
)
def test_names_and_options_that_do_not_exist_bring_the_nearest(estimator, options, error, message):
    with pytest.raises(error, match=message):
        compute_advantages(estimator, inputs(), **options)


def test_every_error_is_an_algorithm_error_and_a_value_error():
    for error in (InvalidOptionError, MissingInputError, InvalidInputError):
        assert issubclass(error, AlgorithmError)
    assert issubclass(AlgorithmError, ValueError)
    assert issubclass(UnknownNameError, ValueError)


def test_the_registered_estimators_and_their_options_are_known():
    assert ESTIMATORS.option_names("grpo") == ("normalize",)
    common = {"tail", "leave_one_out", "gamma", "normalize", "epsilon", "loss_aggregation"}
    assert set(ESTIMATORS.option_names("tir_otb")) == {"energy", "siblings", "sibling_pool", *common}
    assert set(ESTIMATORS.option_names("gae")) == {"gamma", "lam", "normalize"}


@pytest.mark.parametrize(
    ("estimator", "options", "needed", "step_wide"),
    [
        ("grpo", {}, set(), False),
        ("grpo", {"normalize": "whiten"}, set(), True),
        ("reinforce_pp", {}, set(), True),
        ("reinforce_pp_baseline", {"normalize": None}, set(), False),
        ("gpg", {}, set(), True),
        ("gae", {}, {"values"}, True),
        ("remax", {}, {"greedy_returns"}, False),
        ("eob", {}, {"trajectory_energy"}, False),
        ("tir_otb", {}, {"token_energy"}, False),
        ("ogb", {"energy": "head_exact"}, {"token_energy", "hidden_norm_squared"}, False),
        ("otb", {"energy": "length"}, set(), False),
    ],
)
def test_an_estimator_says_what_it_needs(estimator, options, needed, step_wide):
    needs = estimator_needs(estimator, **options)
    assert (needs.inputs, needs.step_wide) == (needed, step_wide)
    assert bool(needs.reason) == step_wide


def test_user_code_adds_an_estimator_by_a_decorator_once(own_registries):
    @register_estimator("plain", options=ScalarOptions)
    def plain(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
        total = inputs.rewards.sum(-1, keepdim=True)
        return Advantages(advantages=total, returns=total, baselines=torch.zeros_like(total))

    assert compute_advantages("plain", inputs()).advantages.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    with pytest.raises(NameTakenError, match="already registered"):
        register_estimator("plain")(lambda inputs, options: None)


def test_an_estimator_that_reads_the_corrections_weights_says_so(own_registries):
    def masked(inputs: EstimatorInputs, options: object) -> Advantages:
        ratio = inputs.masked_importance_weights
        return Advantages(advantages=ratio, returns=ratio, baselines=torch.zeros_like(ratio))

    register_estimator("undeclared")(masked)
    register_estimator("declared", weighted=True)(masked)
    weights = inputs(importance_weights=torch.full((2, 3), 0.5))
    with pytest.raises(MissingInputError, match="register it with weighted=True"):
        compute_advantages("undeclared", weights)
    assert compute_advantages("declared", weights).advantages.tolist() == [[0.5, 0.5, 0.0], [0.5, 0.0, 0.5]]
    assert estimator_needs("declared").weighted
    assert not estimator_needs("rloo").weighted


def test_user_code_says_what_its_estimator_needs(own_registries):
    name = "mean_of_the_step"

    @register_estimator(name, requires=("values", "greedy_returns"), span="step")
    def mean_of_the_step(inputs: EstimatorInputs, options: object) -> Advantages:
        mean = inputs.totals.mean().expand(len(inputs.rows), 1)
        return Advantages(advantages=inputs.totals.unsqueeze(-1) - mean, returns=mean, baselines=mean)

    assert estimator_needs(name).step_wide
    assert estimator_needs(name).inputs == {"values", "greedy_returns"}
    with pytest.raises(MissingInputError, match="needs greedy_returns"):
        compute_advantages(name, inputs(values=torch.ones(2, 3)))
    apart = inputs(values=torch.ones(2, 3), greedy_returns=torch.ones(2), groups=torch.tensor([0, 1]))
    assert compute_advantages(name, apart).advantages.tolist() == [[0.5, 0.5, 0.0], [-0.5, 0.0, -0.5]]
    with pytest.raises(UnknownNameError, match=r"unknown input 'value' of AdvantageInputs, .*; did you mean 'values'"):
        register_estimator("never", requires=("value",))
    with pytest.raises(InvalidOptionError, match=r"span of estimator 'never'='batch' is not one of group, step, ranks"):
        register_estimator("never", span="batch")
    with pytest.raises(InvalidOptionError, match=r"aggregation of estimator 'never'='token_meen' .*'token_mean'"):
        register_estimator("never", aggregation="token_meen")
