"""The advantage estimators: values by hand, a slow reference written out, and the identities they must satisfy."""

import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, Advantages, compute_advantages

# Three trajectories of one problem. The third has an observation between two turns.
MASK = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 1, 0]]
REWARDS = [[0.0, 0, 1, 0, 0], [0.0, 0, 0, 0, 0], [0.0, 0, 0, 1, 0]]
ENERGY = [[1.0, 1, 1, 9, 9], [2.0, 2, 9, 9, 9], [1.0, 9, 9, 3, 9]]  # realized: 1 2 3 | 2 4 | 1 4


def example(**changes: Tensor) -> AdvantageInputs:
    tensors = {
        "rewards": torch.tensor(REWARDS, dtype=torch.float64),
        "response_mask": torch.tensor(MASK).bool(),
        "groups": torch.tensor([4, 4, 4]),
        "token_energy": torch.tensor(ENERGY, dtype=torch.float64),
    }
    return AdvantageInputs(**{**tensors, **changes})


def close(found: Tensor, expected: list[list[float]], tolerance: float = 1e-7) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


def test_tir_otb_by_hand():
    # k=0: W 1 2 1, G 1 0 1 -> b = 2/4.   k=1: W 2 4 4 -> b = 6/10.   k=2: the first is alone -> b = 0.
    result = compute_advantages("tir_otb", example())
    close(result.baselines, [[0.5, 0.6, 0, 0, 0], [0.5, 0.6, 0, 0, 0], [0.5, 0, 0, 0.6, 0]])
    close(result.advantages, [[0.5, 0.4, 1, 0, 0], [-0.5, -0.6, 0, 0, 0], [0.5, 0, 0, 0.4, 0]])
    close(result.returns, [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 1, 0]])


def test_otb_by_hand_mixes_columns_where_observations_stand():
    # column 1: W 2 4 of the first two -> b = 2/6; column 2 has the first alone, column 3 the third alone.
    result = compute_advantages("otb", example())
    close(result.baselines, [[0.5, 1 / 3, 0, 0, 0], [0.5, 1 / 3, 0, 0, 0], [0.5, 0, 0, 0, 0]])


def test_grpo_by_hand():
    # R = 1 0 1: mean 2/3, unbiased std sqrt(1/3)
    std = math.sqrt(1 / 3) + 1e-6
    up, down = (1 / 3) / std, (-2 / 3) / std
    result = compute_advantages("grpo", example())
    close(result.advantages, [[up, up, up, 0, 0], [down, down, 0, 0, 0], [up, 0, 0, up, 0]], 1e-12)
    close(result.baselines, [[2 / 3, 2 / 3, 2 / 3, 0, 0], [2 / 3, 2 / 3, 0, 0, 0], [2 / 3, 0, 0, 2 / 3, 0]], 1e-12)


def test_rloo_by_hand():
    result = compute_advantages("rloo", example())
    close(result.advantages, [[0.5, 0.5, 0.5, 0, 0], [-1, -1, 0, 0, 0], [0.5, 0, 0, 0.5, 0]], 1e-12)
    close(result.baselines, [[0.5, 0.5, 0.5, 0, 0], [1, 1, 0, 0, 0], [0.5, 0, 0, 0.5, 0]], 1e-12)


@pytest.mark.parametrize(
    ("tail", "first_row"),
    [("zero", [0.5, 0.4, 1.0, 0, 0]), ("carry", [0.5, 0.4, 0.4, 0, 0]), ("self", [0.5, 0.4, 0.0, 0, 0])],
)
def test_tail_of_a_unique_longest_trajectory(tail, first_row):
    close(compute_advantages("tir_otb", example(), tail=tail).advantages[:1], [first_row])


@pytest.mark.parametrize("tail", ["zero", "carry", "self"])
def test_no_tail_when_two_trajectories_are_longest(tail):
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    rewards = torch.tensor([[0.0, 0, 1], [0.0, 0, 0], [1.0, 0, 0]], dtype=torch.float64)
    inputs = AdvantageInputs(rewards=rewards, response_mask=mask, groups=torch.zeros(3, dtype=torch.int64))
    result = compute_advantages("tir_otb", inputs, tail=tail, energy="length")
    close(result.baselines, [[2 / 3, 0.5, 0.5], [2 / 3, 0.5, 0.5], [2 / 3, 0, 0]])


@pytest.mark.parametrize(
    ("tail", "expected"),
    # Column 0 is row 1's alone, with no shared column before it; column 2 is row 0's alone, in the middle.
    [
        ("zero", [[0, 0.5, 0, 0.5], [0, 0.5, 0, 0.5]]),
        ("carry", [[0, 0.5, 0.5, 0.5], [0, 0.5, 0, 0.5]]),
        ("self", [[0, 0.5, 1, 0.5], [0, 0.5, 0, 0.5]]),
    ],
)
def test_tail_rule_of_raw_otb_in_gaps(tail, expected):
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]]).bool()
    rewards = torch.tensor([[0.0, 0, 0, 1], [0.0, 0, 0, 0]], dtype=torch.float64)
    inputs = AdvantageInputs(rewards=rewards, response_mask=mask, groups=torch.zeros(2, dtype=torch.int64))
    # equal weights: row 0 has realized length 1 2 3, row 1 has 1 2 3 in columns 0 1 3, so scale them to be equal
    energy = torch.tensor([[0.0, 2, 0, 1], [1.0, 1, 0, 1]], dtype=torch.float64)
    inputs = AdvantageInputs(**{**vars(inputs), "token_energy": energy})
    close(compute_advantages("otb", inputs, tail=tail).baselines, expected)


def test_leave_one_out_by_hand_and_its_tails():
    # k=0 without own: (2*0 + 1*1)/3, (1+1)/2, (1+0)/3;   k=1: 4/8, 6/6, 2/6
    result = compute_advantages("tir_otb", example(), leave_one_out=True)
    close(result.baselines, [[1 / 3, 0.5, 0, 0, 0], [1, 1, 0, 0, 0], [1 / 3, 0, 0, 1 / 3, 0]])
    carried = compute_advantages("tir_otb", example(), leave_one_out=True, tail="carry")
    close(carried.baselines[:1], [[1 / 3, 0.5, 0.5, 0, 0]])
    own = compute_advantages("tir_otb", example(), leave_one_out=True, tail="self")
    close(own.advantages[:1], [[2 / 3, 0.5, 0, 0, 0]])


def test_leave_one_out_keeps_its_accuracy_when_one_weight_is_nearly_all():
    # The others weigh 1e-8 each: total minus own would be rounding noise.
    rewards = torch.tensor([[0.3], [1.0], [0.0], [0.0]], dtype=torch.float64)
    inputs = AdvantageInputs(
        rewards=rewards,
        response_mask=torch.ones(4, 1, dtype=torch.bool),
        groups=torch.zeros(4, dtype=torch.int64),
        token_energy=torch.tensor([[1e9], [0.0], [0.0], [0.0]], dtype=torch.float64),
    )
    result = compute_advantages("tir_otb", inputs, leave_one_out=True)
    assert float(result.baselines[0, 0]) == pytest.approx(1 / 3, abs=1e-12)
    assert float(result.baselines[1, 0]) == pytest.approx(0.3, abs=1e-9)


@pytest.mark.parametrize("estimator", ["tir_otb", "otb", "grpo", "rloo"])
@pytest.mark.parametrize("normalize", [None, "group_std"])
def test_a_group_of_one_gets_its_return(estimator, normalize):
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.25, 0.0, 0.5]]),
        response_mask=torch.tensor([[1, 0, 1]]),
        groups=torch.tensor([9]),
        token_energy=torch.tensor([[1.0, torch.nan, 1.0]]),
    )
    expected = [[0.75, 0.0, 0.5]] if "otb" in estimator else [[0.75, 0.0, 0.75]]
    result = compute_advantages(estimator, inputs, normalize=normalize)
    assert result.advantages.tolist() == expected
    assert result.baselines.tolist() == [[0.0, 0.0, 0.0]]


def test_a_group_of_one_has_no_tail_rule():
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 1.0]]), response_mask=torch.ones(1, 2).bool(), groups=torch.tensor([0])
    )
    for tail in ("zero", "carry", "self"):
        result = compute_advantages("tir_otb", inputs, tail=tail, energy="length")
        assert result.advantages.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("reward", [1.0, 0.7, -0.1])
@pytest.mark.parametrize("miss", [1e-4, 1e-5, 1e-9])
def test_eight_equal_answers_of_a_sure_policy_have_exactly_no_advantage(reward, miss):
    lengths = torch.tensor([3, 5, 5, 4, 2, 5, 1, 3])
    mask = torch.arange(5) < lengths.unsqueeze(-1)
    rewards = torch.zeros(8, 5).scatter(1, (lengths - 1).unsqueeze(-1), reward)
    inputs = AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        groups=torch.full((8,), 3),
        token_energy=torch.full((8, 5), 2 * miss**2),
    )
    for estimator in ("tir_otb", "otb", "grpo", "rloo"):
        assert compute_advantages(estimator, inputs).advantages.abs().max() == 0.0
    assert compute_advantages("tir_otb", inputs, leave_one_out=True).advantages.abs().max() == 0.0


def test_reward_to_go_discounts_by_model_tokens_not_by_positions():
    result = compute_advantages("tir_otb", example(), gamma=0.5)
    close(result.returns, [[0.25, 0.5, 1, 0, 0], [0, 0, 0, 0, 0], [0.5, 0, 0, 1, 0]], 1e-12)
    assert compute_advantages("tir_otb", example(), gamma=0.0).returns.sum() == 2.0


def test_rewards_of_several_turns_add_up_from_behind():
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 0.5, 0.0, 0.0, 1.0]], dtype=torch.float64),
        response_mask=torch.tensor([[1, 1, 0, 1, 1]]),
        groups=torch.tensor([0]),
    )
    result = compute_advantages("tir_otb", inputs, gamma=0.5, energy="length")
    close(result.returns, [[0.25 + 0.125, 0.5 + 0.25, 0, 0.5, 1.0]], 1e-12)


def test_a_long_discounted_row_does_not_underflow():
    length = 30_000
    rewards = torch.zeros(1, length, dtype=torch.float64)
    rewards[0, -1] = 1.0
    inputs = AdvantageInputs(rewards=rewards, response_mask=torch.ones(1, length).bool(), groups=torch.tensor([0]))
    returns = compute_advantages("tir_otb", inputs, gamma=0.9, energy="length").returns[0]
    assert float(returns[-3]) == pytest.approx(0.81, rel=1e-12)
    assert float(returns[length - 1001]) == pytest.approx(0.9**1000, rel=1e-9)


def test_importance_weights_stand_inside_the_realized_energy():
    # Row 1 (R = 0) has its first token rejected: W = 0 4 with rho 1, and 0 8 with rho^2 = 2 on the second.
    weights = torch.ones(3, 5, dtype=torch.float64)
    weights[1, 0], weights[1, 1] = 0.0, math.sqrt(2.0)
    result = compute_advantages("tir_otb", example(importance_weights=weights))
    # k=0: W 1 0 1 -> 1;  k=1: W 2 4 4 -> 6/10
    close(result.baselines, [[1, 0.6, 0, 0, 0], [1, 0.6, 0, 0, 0], [1, 0, 0, 0.6, 0]])


def test_head_exact_multiplies_by_the_hidden_norm_and_scales_epsilon():
    norms = torch.tensor(ENERGY, dtype=torch.float64)
    squares = compute_advantages("tir_otb", example(hidden_norm_squared=norms), energy="head_exact")
    # w = E^2: W 1 2 3 | 4 8 | 1 10 -> k=0: 2/6, k=1: 12/20
    close(squares.baselines[:1], [[1 / 3, 0.6, 0, 0, 0]])
    nothing = example(hidden_norm_squared=norms, token_energy=torch.zeros(3, 5, dtype=torch.float64))
    # all energies 0: the plain mean
    close(compute_advantages("tir_otb", nothing, energy="head_exact").baselines[:1], [[2 / 3, 2 / 3, 0, 0, 0]])


def test_without_token_energy_it_is_formed_from_log_probs_and_sum_pi_squared():
    log_probs = torch.full((3, 5), 0.75, dtype=torch.float64).log()
    squares = torch.full((3, 5), 0.625, dtype=torch.float64)
    formed = compute_advantages("tir_otb", example(token_energy=None, log_probs=log_probs, sum_pi_squared=squares))
    given = compute_advantages("tir_otb", example(token_energy=torch.full((3, 5), 0.125, dtype=torch.float64)))
    torch.testing.assert_close(formed.advantages, given.advantages, rtol=0, atol=1e-15)


def test_a_mean_over_sequences_divides_the_weights_by_the_squared_length():
    result = compute_advantages("tir_otb", example(), loss_aggregation="seq_mean_token_mean")
    # k=0: W/K^2 = 1/9 2/4 1/4 -> (13/36)/(31/36)
    assert float(result.baselines[0, 0]) == pytest.approx(13 / 31, abs=1e-7)


def test_group_std_divides_by_the_unbiased_spread_of_the_groups_tokens():
    plain = compute_advantages("tir_otb", example()).advantages
    tokens = plain[torch.tensor(MASK).bool()]
    found = compute_advantages("tir_otb", example(), normalize="group_std").advantages
    torch.testing.assert_close(found, plain / (tokens.std() + 1e-6), rtol=1e-12, atol=1e-12)


def test_whitening_centres_and_scales_over_all_model_tokens():
    plain = compute_advantages("tir_otb", example()).advantages
    tokens = plain[torch.tensor(MASK).bool()]
    whitened = compute_advantages("tir_otb", example(), normalize="whiten").advantages
    expected = (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
    torch.testing.assert_close(whitened[torch.tensor(MASK).bool()], expected, rtol=1e-12, atol=1e-12)
    assert bool((whitened[~torch.tensor(MASK).bool()] == 0).all())


def test_whitening_leaves_a_single_token_alone():
    inputs = AdvantageInputs(
        rewards=torch.tensor([[1.0, 0.0]]), response_mask=torch.tensor([[1, 0]]), groups=torch.tensor([0])
    )
    assert compute_advantages("grpo", inputs, normalize="whiten").advantages.tolist() == [[1.0, 0.0]]


def test_results_are_detached_and_float32_unless_the_rewards_are_float64():
    energy = torch.tensor(ENERGY, requires_grad=True)
    result = compute_advantages("tir_otb", example(rewards=torch.tensor(REWARDS), token_energy=energy))
    assert isinstance(result, Advantages)
    for tensor in vars(result).values():
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad
    assert compute_advantages("grpo", example()).advantages.dtype == torch.float64


def test_an_empty_batch_gives_empty_advantages():
    inputs = AdvantageInputs(
        rewards=torch.zeros(0, 4), response_mask=torch.zeros(0, 4).bool(), groups=torch.zeros(0, dtype=torch.int64)
    )
    for estimator in ("tir_otb", "otb", "grpo", "rloo"):
        options = {"energy": "length"} if "otb" in estimator else {}
        assert compute_advantages(estimator, inputs, **options).advantages.shape == (0, 4)
