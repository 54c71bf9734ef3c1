"""Which trajectories count in groups and in the loss."""

import pytest
import torch

from agentrl.algorithms import (
    InvalidInputError,
    InvalidOptionError,
    group_sizes,
    groups_within,
    mixed_groups,
    select_trajectories,
)

VOID = torch.tensor([False, True, False, True])
NO_DATA = torch.tensor([False, False, True, True])


@pytest.mark.parametrize(
    ("mode", "in_groups", "in_loss"),
    [
        ("remove", [True, False, False, False], [True, False, False, False]),
        ("loss_only", [True, True, False, False], [True, False, False, False]),
        ("keep", [True, True, False, False], [True, True, False, False]),
    ],
)
def test_void_turns_and_failures(mode, in_groups, in_loss):
    selection = select_trajectories(void_turn=VOID, no_data=NO_DATA, void_turns=mode)
    assert selection.in_groups.tolist() == in_groups
    assert selection.in_loss.tolist() == in_loss


def test_select_refuses_what_it_cannot_read():
    with pytest.raises(InvalidOptionError, match=r"void_turns='removed' is none of .*did you mean 'remove'"):
        select_trajectories(void_turn=VOID, no_data=NO_DATA, void_turns="removed")
    with pytest.raises(InvalidInputError, match="must be boolean"):
        select_trajectories(void_turn=VOID, no_data=NO_DATA.long(), void_turns="keep")


def test_mixed_groups_in_any_order():
    returns = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.5, 0.4])
    groups = torch.tensor([7, -2, 7, -2, 3, 9])
    assert mixed_groups(returns, groups).tolist() == [False, True, False, True, False, False]
    close = torch.tensor([0.1 + 0.2, 0.3]).double()
    assert mixed_groups(close, torch.tensor([0, 0]), tolerance=1e-6).tolist() == [False, False]


def test_groups_within_a_band_of_accuracy_includes_its_ends():
    correct = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    groups = torch.tensor([5, 5, 5, 5, 1, 1, 2, 2])
    assert groups_within(correct, groups, low=0.25, high=0.9).tolist() == [True] * 4 + [False] * 4
    assert groups_within(correct, groups, low=0.0, high=1.0).all()
    with pytest.raises(InvalidOptionError, match=r"low=0.9 is greater than high=0.1"):
        groups_within(correct, groups, low=0.9, high=0.1)


def test_group_sizes():
    assert group_sizes(torch.tensor([4, 9, 4, 4])).tolist() == [3, 1, 3, 3]


def test_values_must_be_finite_and_of_one_row_each():
    with pytest.raises(InvalidInputError, match="row 1 is not finite"):
        mixed_groups(torch.tensor([0.0, torch.nan]), torch.tensor([0, 0]))
    with pytest.raises(InvalidInputError, match=r"must both be \[B\]"):
        groups_within(torch.zeros(2), torch.zeros(3, dtype=torch.int64), low=0.0, high=1.0)
