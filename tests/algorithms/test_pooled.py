"""Baselines that the step's other groups take part in: limits, what they leave out, and that they stay unbiased."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, Advantages, compute_advantages


def step(returns: list[float], energies: list[list[float]], groups: list[int]) -> AdvantageInputs:
    """Trajectories of two tokens, rewarded at the end."""
    energy = torch.tensor(energies, dtype=torch.float64)
    rewards = torch.zeros_like(energy)
    rewards[:, -1] = torch.tensor(returns, dtype=torch.float64)
    mask = torch.ones_like(energy, dtype=torch.bool)
    return AdvantageInputs(rewards=rewards, response_mask=mask, groups=torch.tensor(groups), token_energy=energy)


INPUTS = step(
    [1.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    [[1.0, 2.0], [5.0, 1.0], [1.0, 1.0], [0.5, 0.5], [8.0, 2.0], [2.0, 1.0]],
    [0, 0, 1, 1, 2, 2],
)


def baselines(inputs: AdvantageInputs = INPUTS, **options: object) -> Tensor:
    return compute_advantages("ogb_pooled", inputs, **options).baselines


def test_by_hand():
    # Group 0: W R = 3, W = 3 + 6. Elsewhere: W R = 2 + 1 + 0 + 3, W = 2 + 1 + 10 + 3, each a mean over 4.
    shared = (3 + 2 * 6 / 4) / (9 + 2 * 16 / 4)
    assert baselines(pool=2.0)[:2].flatten().tolist() == pytest.approx([shared] * 4)
    first = (2 * 6 / 4) / (6 + 2 * 16 / 4)  # without the first trajectory: its group holds W R = 0, W = 6
    second = (3 + 2 * 6 / 4) / (3 + 2 * 16 / 4)
    alone = baselines(pool=2.0, leave_one_out=True)
    assert alone[:2, 0].tolist() == pytest.approx([first, second])


def test_without_weight_for_other_groups_the_groups_own_baseline_is_left():
    own = compute_advantages("ogb", INPUTS).baselines
    torch.testing.assert_close(baselines(pool=1e-12), own)


def test_with_all_weight_on_other_groups_a_trajectory_alone_is_enough():
    far = baselines(pool=1e12)
    energy = INPUTS.token_energy
    assert energy is not None
    weights = energy.sum(-1, keepdim=True).expand(-1, 2)
    returns = INPUTS.rewards.sum(-1, keepdim=True)
    expected = (weights * returns)[2:].sum(0) / weights[2:].sum(0)
    torch.testing.assert_close(far[:2], expected.expand(2, 2))


@pytest.mark.parametrize("row", range(6))
def test_leaving_one_out_no_baseline_knows_its_own_trajectory(row: int):
    before = baselines(leave_one_out=True)[row]
    rewards, energy = INPUTS.rewards.clone(), INPUTS.token_energy
    assert energy is not None
    rewards[row, -1], energy = 7.0, energy.clone()
    energy[row] = torch.tensor([0.1, 90.0])
    torch.testing.assert_close(
        baselines(replace(INPUTS, rewards=rewards, token_energy=energy), leave_one_out=True)[row], before
    )


def test_the_gradient_of_a_bandit_is_unbiased():
    """Two arms, won with p, of different energy; all steps of two groups of two are counted, each with its chance."""
    p, scores, energies = 0.3, (0.7, -0.3), (0.5, 4.0)  # d/dtheta ln p(arm) = 1 - p or -p
    truth = p * scores[0]
    expected = 0.0
    for arms in itertools.product((0, 1), repeat=4):
        chance = float(torch.tensor([p if arm == 0 else 1 - p for arm in arms]).prod())
        inputs = step([1.0 - arm for arm in arms], [[energies[arm], 0.0] for arm in arms], [0, 0, 1, 1])
        found: Advantages = compute_advantages("ogb_pooled", inputs, leave_one_out=True)
        expected += chance * sum(float(found.advantages[i, 0]) * scores[arm] for i, arm in enumerate(arms)) / 4
    assert expected == pytest.approx(truth, rel=1e-6)


def test_equal_rewards_of_a_group_are_data_and_those_of_a_step_are_not():
    assert [name for name in ESTIMATORS.names() if ESTIMATORS[name].equal_groups] == ["none", "ogb_pooled"]
    found = compute_advantages("ogb_pooled", INPUTS).advantages
    assert float(found[2:4].min()) > 0.1  # group 1: right twice, where others failed
    same = replace(INPUTS, rewards=torch.full_like(INPUTS.rewards, 0.7))
    assert compute_advantages("ogb_pooled", same).advantages.abs().max() == 0.0


def test_alone_in_the_step_the_advantage_is_the_return():
    one = step([0.6], [[1.0, 2.0]], [4])
    assert compute_advantages("ogb_pooled", one).advantages.flatten().tolist() == pytest.approx([0.6, 0.6])


def test_a_group_of_one_is_compared_with_the_others():
    singles = replace(INPUTS, groups=torch.arange(6))
    found = compute_advantages("ogb_pooled", singles).advantages[:, 0]
    wins = INPUTS.rewards.sum(-1) > 0
    assert bool((found[wins] > 0).all())
    assert bool((found[~wins] < 0).all())


def test_no_trajectory_is_lost_beside_one_of_far_more_energy():
    energies = [[1e-9, 0.0], [1e9, 0.0], [1e-9, 0.0], [1e-9, 0.0]]
    left = baselines(step([1.0, 0.0, 1.0, 1.0], energies, [0, 0, 1, 1]), leave_one_out=True)
    assert float(left[1, 0]) == pytest.approx(1.0)
