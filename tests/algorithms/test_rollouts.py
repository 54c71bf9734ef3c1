"""A rollout's branches weigh as one rollout: in every estimator, in the loss and in the group's mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, aggregate, compute_advantages, loss_normalizer
from agentrl.algorithms.losses.registry import AGGREGATIONS

NAMES = ESTIMATORS.names()


def rows_of(
    rollouts: list[tuple[int, int, float, list[int]]], *, split: bool, seed: int = 0
) -> tuple[Any, torch.Tensor]:
    """Inputs with a row for each branch (or one for each rollout), and every row's weight.

    ``rollouts``: group, sample, reward and the branches' numbers of model tokens; each branch follows on the whole of
    the one before. Every token has values of its own, the same however the rollout is split.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[tuple[int, int, int, float, torch.Tensor, float, int]] = []
    for group, sample, reward, branches in rollouts:
        tokens = torch.rand(sum(branches), 4, generator=generator, dtype=torch.float64)
        parts = tokens.split(branches) if split else [tokens]
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            fork = len(parts[place - 1]) if place else 0
            rows.append((group, sample, place, reward if last else 0.0, part, len(part) / len(tokens), fork))
    width = max(len(row[4]) for row in rows)
    padded = torch.stack([torch.nn.functional.pad(row[4], (0, 0, 0, width - len(row[4]))) for row in rows])
    lengths = torch.tensor([len(row[4]) for row in rows])
    mask = torch.arange(width) < lengths[:, None]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(rows)), lengths - 1] = torch.tensor([row[3] for row in rows], dtype=torch.float64)
    groups, samples, branches = (torch.tensor([row[column] for row in rows]) for column in range(3))
    energies = padded[..., 3]
    inputs = AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        groups=groups,
        samples=samples,
        branches=branches,
        parents=branches - 1,
        forks=torch.tensor([row[6] for row in rows]),
        log_probs=-padded[..., 0],
        sum_pi_squared=padded[..., 1] * 0.5,
        token_energy=energies,
        hidden_norm_squared=padded[..., 1] + 1,
        importance_weights=padded[..., 2],
        values=padded[..., 0],
        greedy_returns=torch.full((len(rows),), 0.25, dtype=torch.float64),
        trajectory_energy=(energies * mask).sum(-1) + 1e-3 * lengths.double(),
    )
    return inputs, torch.tensor([row[5] for row in rows], dtype=torch.float64)


ROLLOUTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ),
    min_size=2,
    max_size=6,
).map(lambda items: [(group, sample, reward, branches) for sample, (group, reward, branches) in enumerate(items)])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(rollouts=ROLLOUTS)
def test_every_estimator_gives_a_branched_rollout_what_it_gives_the_rollout_as_one_row(
    name: str, rollouts: Any
) -> None:
    apart, _ = rows_of(rollouts, split=True)
    whole, _ = rows_of(rollouts, split=False)
    if name == "otb" and apart.branches.any():
        return  # its columns are those of rows
    found, expected = compute_advantages(name, apart), compute_advantages(name, whole)
    for made, wanted in ((found.advantages, expected.advantages), (found.baselines, expected.baselines)):
        assert made[apart.response_mask] == pytest.approx(wanted[whole.response_mask], abs=1e-12)
        assert not made[~apart.response_mask].any()


def test_the_mean_of_a_group_does_not_depend_on_the_number_of_branches() -> None:
    for branches in ([4], [1, 3], [1, 1, 1, 1]):
        inputs, _ = rows_of([(0, 0, 1.0, branches), (0, 1, 0.0, [2])], split=True)
        made = compute_advantages("dr_grpo", inputs)
        assert made.baselines[inputs.response_mask].tolist() == [0.5] * 6


@pytest.mark.parametrize("mode", AGGREGATIONS)
@settings(max_examples=25, deadline=None)
@given(rollouts=ROLLOUTS)
def test_a_loss_weighs_the_branches_of_a_rollout_as_one_sequence(mode: str, rollouts: Any) -> None:
    length = 7.0 if mode == "seq_mean_token_sum_norm" else None
    (apart, weights), (whole, ones) = rows_of(rollouts, split=True), rows_of(rollouts, split=False)
    found = aggregate(apart.values, apart.response_mask, mode, length=length, weights=weights)
    expected = aggregate(whole.values, whole.response_mask, mode, length=length)
    assert float(found) == pytest.approx(float(expected), abs=1e-12)
    assert float(aggregate(whole.values, whole.response_mask, mode, length=length, weights=ones)) == float(expected)
    count = loss_normalizer(apart.response_mask, mode, weights)
    assert float(count) == pytest.approx(float(loss_normalizer(whole.response_mask, mode)))


def test_a_branch_after_observations_keeps_its_places() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]),
        response_mask=torch.tensor([[True, False, True], [False, False, True], [True, False, False]]),
        groups=torch.tensor([5, 5, 5]),
        samples=torch.tensor([0, 0, 1]),
        branches=torch.tensor([0, 1, 0]),
    )
    made = compute_advantages("rloo", inputs).advantages
    assert made.tolist() == [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]]
