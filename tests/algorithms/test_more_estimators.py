"""The other estimators: values by hand, edge cases, and what a leave-one-out baseline is for."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages
from agentrl.lab.sample import cross_energy

# Three trajectories of one problem with R = 1 0 1 and K = 3 2 2. The third ends in an observation.
MASK = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 1, 0]]
REWARDS = [[0.0, 0, 1, 0, 0], [0.0, 0, 0, 0, 0], [0.0, 0, 0, 1, 0]]
ENERGY = [[1.0, 1, 1, 9, 9], [2.0, 2, 9, 9, 9], [1.0, 9, 9, 3, 9]]  # realized: 1 2 3 | 2 4 | 1 4


def tensor(values: list) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def example(**changes: object) -> AdvantageInputs:
    tensors = {
        "rewards": tensor(REWARDS),
        "response_mask": torch.tensor(MASK).bool(),
        "groups": torch.tensor([4, 4, 4]),
        "token_energy": tensor(ENERGY),
    }
    return AdvantageInputs(**{**tensors, **changes})


def one_turn(rewards: list[float], groups: list[int], **changes: object) -> AdvantageInputs:
    """Trajectories of one token."""
    count = len(rewards)
    mask = torch.ones(count, 1, dtype=torch.bool)
    return AdvantageInputs(
        rewards=tensor(rewards).unsqueeze(-1), response_mask=mask, groups=torch.tensor(groups), **changes
    )


def spread(values: list[float]) -> Tensor:
    """One number a trajectory, on every model token of the example."""
    return tensor(values).unsqueeze(-1) * tensor(MASK)


def close(found: Tensor, expected: Tensor | list, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=found.dtype), rtol=0, atol=tolerance)


def test_none_has_returns_and_no_advantage():
    result = compute_advantages("none", example())
    assert bool(result.returns.any())
    assert not bool(result.advantages.any())


def test_dr_grpo_by_hand():
    result = compute_advantages("dr_grpo", example())
    close(result.advantages, spread([1 / 3, -2 / 3, 1 / 3]))
    close(result.baselines, spread([2 / 3, 2 / 3, 2 / 3]))
    close(result.returns, spread([1, 0, 1]))


def test_reinforce_pp_baseline_whitens_the_centred_outcome_over_all_tokens():
    # 3 tokens of 1/3, 2 of -2/3, 2 of 1/3: mean 1/21, squares 5/9 + 8/9 - 7/441
    deviation = math.sqrt((13 / 9 - 7 / 441) / 6 + 1e-8)
    high, low = (1 / 3 - 1 / 21) / deviation, (-2 / 3 - 1 / 21) / deviation
    close(compute_advantages("reinforce_pp_baseline", example()).advantages, spread([high, low, high]))
    plain = compute_advantages("reinforce_pp_baseline", example(), normalize=None)
    close(plain.advantages, spread([1 / 3, -2 / 3, 1 / 3]))


def test_remax_subtracts_the_greedy_return():
    result = compute_advantages("remax", example(greedy_returns=tensor([0.5, 0.5, 0.5])))
    close(result.advantages, spread([0.5, -0.5, 0.5]))
    close(result.baselines, spread([0.5, 0.5, 0.5]))


def test_remax_needs_no_group():
    alone = one_turn([1.0], [3], greedy_returns=tensor([0.25]))
    assert compute_advantages("remax", alone).advantages.tolist() == [[0.75]]


def test_gpg_scales_by_the_share_of_trajectories_whose_group_differs():
    # groups: 1 0 (differ), 1 1 (equal), 0.5 (alone): c = 5 / 2
    inputs = one_turn([1.0, 1.0, 0.0, 1.0, 0.5], [1, 2, 1, 2, 3])
    result = compute_advantages("gpg", inputs)
    close(result.advantages.squeeze(-1), [1.25, 0.0, -1.25, 0.0, 1.25])
    close(result.baselines.squeeze(-1), [0.5, 1.0, 0.5, 1.0, 0.0])
    nothing = compute_advantages("gpg", one_turn([1.0, 1.0], [0, 0]))
    assert nothing.advantages.tolist() == [[0.0], [0.0]]


def test_gpg_does_not_take_rounding_for_a_difference():
    # 0.1 + 0.2 and 0.3 are one reward in two ways.
    rewards = tensor([[0.1, 0.2], [0.0, 0.3], [1.0, 0.0], [0.0, 0.0]])
    inputs = AdvantageInputs(rewards=rewards, response_mask=torch.ones(4, 2).bool(), groups=torch.tensor([0, 0, 1, 1]))
    close(compute_advantages("gpg", inputs).advantages[2:], [[1.0, 1.0], [-1.0, -1.0]])


def test_opo_by_hand():
    result = compute_advantages("opo", example())
    close(result.baselines, spread([5 / 7] * 3), 1e-8)
    left_out = compute_advantages("opo", example(), leave_one_out=True)
    close(left_out.baselines, spread([2 / 4, 5 / 5, 3 / 5]), 1e-8)


def test_ogb_by_hand():
    # W_K = 3 4 4
    result = compute_advantages("ogb", example())
    close(result.baselines, spread([7 / 11] * 3), 1e-8)
    left_out = compute_advantages("ogb", example(), leave_one_out=True)
    close(left_out.baselines, spread([4 / 8, 7 / 7, 3 / 7]), 1e-8)
    # a mean over sequences: W / K^2 = 1/3 1 1
    averaged = compute_advantages("ogb", example(), loss_aggregation="seq_mean_token_mean")
    close(averaged.baselines, spread([4 / 7] * 3), 1e-8)


def test_ogb_counts_what_the_loss_keeps():
    # the second keeps its first token only, the third has rho^2 = 4 on its last: W = 3 2 13
    weights = tensor([[1.0, 1, 1, 9, 9], [1.0, 1, 9, 9, 9], [1.0, 9, 9, 2, 9]])
    kept = torch.tensor(MASK).bool()
    kept[1, 1] = False
    result = compute_advantages("ogb", example(importance_weights=weights, loss_mask=kept))
    close(result.baselines, spread([16 / 18] * 3), 1e-8)


def test_eob_by_hand():
    inputs = example(trajectory_energy=tensor([1.0, 2.0, 5.0]))
    close(compute_advantages("eob", inputs).baselines, spread([6 / 8] * 3), 1e-8)
    left_out = compute_advantages("eob", inputs, leave_one_out=True, energy="exact")
    close(left_out.baselines, spread([5 / 7, 6 / 6, 1 / 3]), 1e-7)
    averaged = compute_advantages("eob", inputs, loss_aggregation="seq_mean_token_mean")  # 1/9 1/2 5/4
    close(averaged.baselines, spread([49 / 67] * 3), 1e-8)


@pytest.mark.parametrize("unit", [1e-20, 1.0, 1e20])
def test_eob_does_not_depend_on_the_unit_of_the_energy(unit):
    inputs = example(trajectory_energy=tensor([1.0, 2.0, 5.0]) * unit)
    close(compute_advantages("eob", inputs).baselines, spread([0.75] * 3), 1e-8)


@pytest.mark.parametrize("estimator", ["ogb", "eob", "otb", "tir_otb", "otb_isolated", "otb_total"])
def test_without_any_energy_the_mean_is_plain(estimator):
    zeros = torch.zeros(3, 5, dtype=torch.float64)
    inputs = example(token_energy=zeros, trajectory_energy=zeros[:, 0])
    first = compute_advantages(estimator, inputs).baselines[:, 0]
    close(first, [2 / 3] * 3)


@pytest.mark.parametrize("energy", ["logit_proxy", "head_exact"])
@pytest.mark.parametrize("estimator", ["ogb", "eob", "otb", "tir_otb", "otb_isolated", "otb_total"])
def test_what_softens_the_weights_shrinks_with_them_in_a_mean_over_long_sequences(estimator, energy):
    length = 16_000  # 1 / K^2 is 4e-9
    first = torch.zeros(2, length, dtype=torch.float64)
    first[:, 0] = tensor([1 / 16, 1.0])
    rewards = torch.zeros_like(first)
    rewards[0, -1] = 1.0
    inputs = AdvantageInputs(
        rewards=rewards,
        response_mask=torch.ones(2, length, dtype=torch.bool),
        groups=torch.zeros(2, dtype=torch.int64),
        token_energy=first,
        hidden_norm_squared=torch.full_like(first, 0.01),
        trajectory_energy=first[:, 0],
    )
    options = {} if estimator == "eob" else {"energy": energy}
    for aggregation in ("token_mean", "seq_mean_token_mean"):
        found = compute_advantages(estimator, inputs, loss_aggregation=aggregation, **options)
        close(found.baselines[:, 0], [1 / 17] * 2, 1e-7)


def test_reinforce_pp_is_the_whitened_reward_to_go():
    plain = compute_advantages("reinforce_pp", example(), gamma=0.5, normalize=None)
    close(plain.advantages, [[0.25, 0.5, 1, 0, 0], [0, 0, 0, 0, 0], [0.5, 0, 0, 1, 0]])
    assert float(plain.baselines.abs().sum()) == 0.0
    tokens = tensor([0.25, 0.5, 1, 0, 0, 0.5, 1])
    white = compute_advantages("reinforce_pp", example(), gamma=0.5).advantages[torch.tensor(MASK).bool()]
    close(white, (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt())


def test_otb_isolated_by_hand():
    # k=0: w 1 2 1, G 1 0 1 -> 2/4.   k=1: w 1 2 3 -> 4/6.   k=2: alone
    result = compute_advantages("otb_isolated", example())
    close(result.baselines, [[0.5, 2 / 3, 0, 0, 0], [0.5, 2 / 3, 0, 0, 0], [0.5, 0, 0, 2 / 3, 0]], 1e-8)


def test_otb_total_by_hand():
    # W_K 3 4 4 at every k
    result = compute_advantages("otb_total", example(), tail="carry")
    close(
        result.baselines, [[7 / 11, 7 / 11, 7 / 11, 0, 0], [7 / 11, 7 / 11, 0, 0, 0], [7 / 11, 0, 0, 7 / 11, 0]], 1e-8
    )


def test_cross_energy_is_that_of_the_logit_gradients():
    generator = torch.Generator().manual_seed(3)
    log_p = torch.randn(6, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
    targets = torch.tensor([0, 3, 0, 1, 1, 2])
    ratio = torch.rand(6, generator=generator, dtype=torch.float64)
    delta = torch.eye(4, dtype=torch.float64)[targets] - log_p.exp()
    expected = [
        sum(float(ratio[j] * ratio[k]) * max(0.0, float(delta[j] @ delta[k])) for j in range(k + 1)) for k in range(6)
    ]
    close(cross_energy(log_p, targets, ratio), expected)
    # the first is the token's own energy
    close(cross_energy(log_p, targets)[0], float(delta[0] @ delta[0]))


def gae_example(**changes: object) -> AdvantageInputs:
    """One trajectory with an observation in the middle: r = 0 1 2, V = 1 2 4."""
    return AdvantageInputs(
        rewards=tensor([[0.0, torch.nan, 1.0, 2.0]]),
        response_mask=torch.tensor([[1, 0, 1, 1]]),
        groups=torch.tensor([0]),
        values=tensor([[1.0, torch.nan, 2.0, 4.0]]),
        **changes,
    )


def test_gae_by_hand_over_model_tokens():
    # delta = 0 + 2/2 - 1, 1 + 4/2 - 2, 2 + 0 - 4 = 0 1 -2;  gamma lam = 1/8:  A_1 = 1 - 2/8, A_0 = 0 + 0.75/8
    result = compute_advantages("gae", gae_example(), gamma=0.5, lam=0.25, normalize=None)
    close(result.advantages, [[0.09375, 0, 0.75, -2]])
    close(result.returns, [[1.09375, 0, 2.75, 2]])
    close(result.baselines, [[1, 0, 2, 4]])


def test_gae_goes_on_from_the_bootstrap_value_of_a_truncated_trajectory():
    # V after the last is 6: delta_2 = 2 + 3 - 4 = 1;  A_1 = 1 + 1/8, A_0 = 1.125/8
    result = compute_advantages("gae", gae_example(bootstrap_values=tensor([6.0])), gamma=0.5, lam=0.25, normalize=None)
    close(result.advantages, [[0.140625, 0, 1.125, 1]])
    ended = compute_advantages("gae", gae_example(bootstrap_values=tensor([0.0])), normalize=None)
    close(ended.advantages, compute_advantages("gae", gae_example(), normalize=None).advantages)


def test_gae_whitens_the_advantages_and_leaves_the_returns():
    raw = compute_advantages("gae", gae_example(), gamma=0.5, lam=0.25, normalize=None)
    white = compute_advantages("gae", gae_example(), gamma=0.5, lam=0.25)
    tokens = tensor([0.09375, 0.75, -2])
    close(white.advantages[0, [0, 2, 3]], (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt())
    close(white.returns, raw.returns)


GROUPS_ALONE = [n for n in ESTIMATORS.names() if ESTIMATORS[n].group_based and not ESTIMATORS[n].equal_groups]


@pytest.mark.parametrize("estimator", [n for n in GROUPS_ALONE if n != "gpg"])
def test_in_a_group_of_one_the_advantage_is_the_return(estimator):
    inputs = AdvantageInputs(
        rewards=tensor([[0.25, torch.nan, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        response_mask=torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0]]),
        groups=torch.tensor([9, 1, 1]),
        token_energy=torch.ones(3, 3),
        trajectory_energy=torch.ones(3),
    )
    expected = [0.75, 0.0, 0.5] if "otb" in estimator else [0.75, 0.0, 0.75]
    for options in ({}, {"leave_one_out": True}, {"tail": "self"}):
        if set(options) <= set(ESTIMATORS.option_names(estimator)):
            result = compute_advantages(estimator, inputs, normalize=None, **options)
            assert result.advantages[0].tolist() == expected
            assert result.baselines[0].tolist() == [0.0, 0.0, 0.0]


def bandit(repeats: int) -> tuple[AdvantageInputs, Tensor, Tensor, Tensor]:
    """All groups that three draws from three arms can give: inputs, each group's probability, arms, and p."""
    p, outcomes = tensor([0.5, 0.3, 0.2]), tensor([1.0, 0.0, 0.4])
    arms = torch.tensor(list(itertools.product(range(3), repeat=repeats)))  # [G, N]
    rows = arms.flatten()
    energy = ((torch.eye(3, dtype=torch.float64) - p)[rows]).square().sum(-1)
    inputs = one_turn(
        outcomes[rows].tolist(),
        torch.arange(len(arms)).repeat_interleave(repeats).tolist(),
        token_energy=energy.unsqueeze(-1),
        trajectory_energy=energy,
    )
    return inputs, p[arms].prod(-1), arms, p


@pytest.mark.parametrize("estimator", ["ogb", "eob", "otb", "tir_otb", "otb_isolated", "otb_total"])
@pytest.mark.parametrize("repeats", [2, 3])
def test_leaving_one_out_makes_the_gradient_of_a_bandit_unbiased(estimator, repeats):
    inputs, chance, arms, p = bandit(repeats)
    score = torch.eye(3, dtype=torch.float64)[arms] - p  # [G, N, 3]: grad log p of the logits
    true = (p * tensor([1.0, 0.0, 0.4])).unsqueeze(-1) * (torch.eye(3, dtype=torch.float64) - p)

    def expected(**options: object) -> Tensor:
        advantages = compute_advantages(estimator, inputs, **options).advantages.view(arms.shape)
        return (chance.view(-1, 1, 1) * advantages.unsqueeze(-1) * score).sum((0, 1)) / repeats

    # The scale of eob's epsilon is the mean of all energies, the own one included: a bias of the order of epsilon.
    close(expected(leave_one_out=True), true.sum(0), 1e-9 if estimator == "eob" else 1e-12)
    biased = expected(leave_one_out=False)
    shrunk = float(biased @ true.sum(0) / true.sum(0).square().sum())
    assert 0.2 < shrunk < 0.95


def test_two_longest_trajectories_are_no_tail_and_a_third_index_beyond_one_is():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 0]]).bool()  # K = 4 3 1
    rewards = tensor([[0.0, 0, 0, 1], [0.0, 0, 0, 0], [1.0, 0, 0, 0]])
    inputs = AdvantageInputs(rewards=rewards, response_mask=mask, groups=torch.zeros(3, dtype=torch.int64))
    for estimator in ("tir_otb", "otb_total", "otb_isolated"):
        baselines = compute_advantages(estimator, inputs, energy="length", tail="carry").baselines
        assert bool((baselines[0, 1:3] > 0).all())
        assert float(baselines[0, 3]) == float(baselines[0, 2])  # the fourth token is carried


def test_a_reward_on_the_last_model_token_before_a_final_observation_counts():
    result = compute_advantages("tir_otb", example(response_mask=torch.tensor(MASK)))  # an int mask
    assert result.returns[2].tolist() == [1.0, 0.0, 0.0, 1.0, 0.0]
