"""How rows are grouped, cut into blocks and summed: what compute_advantages stands on."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, InvalidInputError, compute_advantages
from agentrl.algorithms.advantages import Moments
from agentrl.algorithms.estimators import inputs as estimator_inputs
from agentrl.algorithms.estimators.branches import reward_to_go
from agentrl.algorithms.estimators.inputs import blocks_of_equally_sized_groups
from agentrl.algorithms.records import Groups


def test_rows_in_order_are_stacked_as_a_view():
    groups = Groups.from_ids(torch.tensor([1, 1, 5, 5]))
    values = torch.arange(8.0).view(4, 2)
    assert groups.stack(values).data_ptr() == values.data_ptr()
    assert groups.stack(values).tolist() == [[[0.0, 1.0], [2.0, 3.0]], [[4.0, 5.0], [6.0, 7.0]]]


@pytest.mark.parametrize("ids", [[1, 1, 5, 5], [5, 1, 5, 1], [2, 9, 2, 2, -1, 9]])
def test_unstacking_gives_the_rows_back(ids):
    groups = Groups.from_ids(torch.tensor(ids))
    values = torch.rand(len(ids), 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(groups.unstack(groups.stack(values)), values)
    assert groups.group_size_by_row.tolist() == [ids.count(i) for i in ids]
    sums = groups.broadcast_group_sum(values[:, 0])
    for row, i in enumerate(ids):
        own = [float(values[j, 0]) for j, other in enumerate(ids) if other == i]
        assert float(sums[row]) == pytest.approx(sum(own))
        assert float(groups.broadcast_group_min(values[:, 0])[row]) == min(own)


def test_the_mean_of_equal_values_is_exactly_that_value():
    values = torch.full((7,), 0.1, dtype=torch.float64)
    assert torch.equal(Groups.from_ids(torch.zeros(7, dtype=torch.int64)).broadcast_group_mean(values), values)


def test_blocks_hold_whole_groups_of_one_size_and_every_row_once(monkeypatch):
    monkeypatch.setitem(estimator_inputs._BLOCK_ELEMENTS, "cpu", 24)
    ids = torch.tensor([3, 1, 3, 2, 1, 2, 2, 7, 8, 8, 4, 4])
    blocks = list(blocks_of_equally_sized_groups(ids, 3))
    assert sorted(torch.cat(blocks).tolist()) == list(range(12))
    members = [[ids[block].tolist().count(i) for i in ids[block].tolist()] for block in blocks]
    assert all(len(set(sizes)) == 1 for sizes in members)
    # eight rows fit: 1 of a group of one; 8 of groups of two; 3 of the group of three
    assert [len(block) for block in blocks] == [1, 8, 3]
    assert all(Groups.from_ids(ids[block]).in_order for block in blocks)


def ragged() -> AdvantageInputs:
    """Twenty-three groups of one to five rows, mixed."""
    generator = torch.Generator().manual_seed(5)
    groups = torch.cat([torch.full((1 + i % 5,), i) for i in range(23)])
    rows, width = groups.numel(), 9
    groups = groups[torch.randperm(rows, generator=generator)]
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 4] = True

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    return AdvantageInputs(
        rewards=torch.where(mask, noise(rows, width).round(), torch.nan),
        response_mask=mask,
        groups=groups,
        token_energy=noise(rows, width),
        trajectory_energy=noise(rows),
        values=noise(rows, width),
        greedy_returns=noise(rows),
    )


@pytest.mark.parametrize("estimator", ESTIMATORS.names())
@pytest.mark.parametrize("normalize", [None, "group_std", "whiten"])
def test_results_do_not_depend_on_the_size_of_the_blocks(estimator, normalize, monkeypatch):
    inputs = ragged()
    whole = compute_advantages(estimator, inputs, normalize=normalize)
    for size in (1, 40, 200):
        monkeypatch.setitem(estimator_inputs._BLOCK_ELEMENTS, "cpu", size)
        parts = compute_advantages(estimator, inputs, normalize=normalize)
        torch.testing.assert_close(parts.advantages, whole.advantages, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.returns, whole.returns, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("estimator", ["tir_otb", "gpg"])
def test_messages_name_the_row_of_the_batch_not_of_a_block(estimator, monkeypatch):
    monkeypatch.setitem(estimator_inputs._BLOCK_ELEMENTS, "cpu", 1)
    inputs = ragged()
    row, position = 37, 4
    rewards = inputs.rewards.clone()
    rewards[row, position] = torch.inf
    with pytest.raises(InvalidInputError, match="rewards is inf at a model token: row 37, position 4"):
        compute_advantages(estimator, replace(inputs, rewards=rewards))
    rewards = inputs.rewards.clone()
    rewards[row, int((~inputs.response_mask[row]).nonzero()[0])] = 0.5
    with pytest.raises(InvalidInputError, match=r"rewards is 0\.5 in row 37 at position"):
        compute_advantages(estimator, replace(inputs, rewards=rewards))
    mask = inputs.response_mask.clone()
    mask[row] = False
    with pytest.raises(InvalidInputError, match="row 37 has no model token"):
        compute_advantages(estimator, replace(inputs, response_mask=mask, rewards=torch.zeros_like(inputs.rewards)))


def test_a_float32_batch_is_whitened_in_float64():
    """Advantages of 1000 +- 0.001 would lose their digits if they were rounded first."""
    rewards = (1000 + torch.rand(64, 1, generator=torch.Generator().manual_seed(0)) / 1000).float()
    inputs = AdvantageInputs(rewards=rewards, response_mask=torch.ones(64, 1).bool(), groups=torch.arange(64))
    result = compute_advantages("reinforce_pp", inputs).advantages
    exact = rewards.double()
    expected = (exact - exact.mean()) / (exact.var() + 1e-8).sqrt()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected.float(), rtol=1e-6, atol=1e-6)


def test_moments_of_parts_are_those_of_the_whole():
    values = 1e6 + torch.rand(1, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(1, 30).bool()
    cut = [Moments.from_advantages(part, mask[:, : part.shape[1]]) for part in values.split([1, 20, 9], dim=-1)]
    merged = cut[0].merge(cut[1]).merge(cut[2])
    assert float(merged.count) == 30
    assert float(merged.mean) == pytest.approx(float(values.mean()), abs=1e-9)
    assert float(merged.squares / 29) == pytest.approx(float(values.var()), rel=1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 64, 65, 1100])
def test_reward_to_go_is_the_recursion_from_behind(gamma, width):
    rewards = torch.rand(2, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64)
    expected, running = [], torch.zeros(2, dtype=torch.float64)
    for k in reversed(range(width)):
        running = rewards[:, k] + gamma * running
        expected.append(running)
    torch.testing.assert_close(reward_to_go(rewards, gamma), torch.stack(expected[::-1], -1), rtol=1e-13, atol=1e-13)


def test_an_empty_batch_has_empty_results_for_every_estimator():
    for estimator in ESTIMATORS.names():
        grid, row = torch.zeros(0, 4), torch.zeros(0)
        inputs = AdvantageInputs(
            rewards=grid,
            response_mask=grid.bool(),
            groups=row.long(),
            values=grid,
            trajectory_energy=row,
            greedy_returns=row,
        )
        result = compute_advantages(estimator, inputs)
        assert result.advantages.shape == (0, 4)
        assert result.advantages.dtype == torch.float32
