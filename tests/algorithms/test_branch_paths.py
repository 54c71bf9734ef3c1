"""Baselines of tokens over branched rollouts: by the index on the way from the root, a rollout counting as one."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages

BY_PATH = ("tir_otb", "otb_isolated", "otb_total")
EPSILON = 1e-8


@dataclass
class Branch:
    """A row: its rollout, the energies of its tokens, and where it forks: a branch and its tokens before the fork."""

    group: int
    sample: int
    branch: int
    energies: list[float]
    parent: int = -1
    fork: int = 0
    reward: float = 0.0


def inputs_of(rows: list[Branch], *, gap: int = 0) -> AdvantageInputs:
    """``gap`` observation tokens stand behind every model token."""
    width = max(len(row.energies) for row in rows) * (gap + 1)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    energies, rewards = torch.zeros(2, len(rows), width, dtype=torch.float64)
    for place, row in enumerate(rows):
        at = torch.arange(len(row.energies)) * (gap + 1)
        mask[place, at] = True
        energies[place, at] = torch.tensor(row.energies, dtype=torch.float64)
        rewards[place, at[-1]] = row.reward
    numbers = {
        name: torch.tensor([getattr(row, one) for row in rows])
        for name, one in {"groups": "group", "samples": "sample", "branches": "branch"}.items()
    }
    return AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        token_energy=energies,
        hidden_norm_squared=energies + 1,
        log_probs=-energies,
        sum_pi_squared=energies * 0.1,
        importance_weights=energies * 0.2,
        values=energies * 0.3,
        greedy_returns=torch.full((len(rows),), 0.25, dtype=torch.float64),
        trajectory_energy=energies.sum(-1),
        parents=torch.tensor([row.parent for row in rows]),
        forks=torch.tensor([row.fork for row in rows]),
        **numbers,
    )


# Rollout 0 is a0 a1 a2, with b0 behind a0; it got 1. Rollout 1 is c0 c1; it got 0.
SMALL = [
    Branch(0, 0, 0, [1.0, 2.0, 3.0]),
    Branch(0, 0, 1, [4.0], parent=0, fork=1, reward=1.0),
    Branch(0, 1, 0, [1.0, 1.0]),
]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # W: a 1, 3, 6; b0 1 + 4; c 1, 2. At index 1 rollout 0 weighs (3 + 5) / 2.
        ("tir_otb", {}, [[1 / 2, 1 - 4 / 6, 1], [1 - 4 / 6], [-1 / 2, -4 / 6]]),
        ("tir_otb", {"leave_one_out": True}, [[1, 1, 1], [1], [-1, -1]]),
        ("tir_otb", {"tail": "carry"}, [[1 / 2, 1 / 3, 1 / 3], [1 / 3], [-1 / 2, -2 / 3]]),
        ("tir_otb", {"tail": "self"}, [[1 / 2, 1 / 3, 0], [1 / 3], [-1 / 2, -2 / 3]]),
        # The rollouts have 4 and 2 tokens.
        ("tir_otb", {"loss_aggregation": "seq_mean_token_mean"}, [[0.8, 2 / 3, 1], [2 / 3], [-0.2, -1 / 3]]),
        ("otb_isolated", {}, [[1 / 2, 1 - 3 / 4, 1], [1 - 3 / 4], [-1 / 2, -3 / 4]]),
        ("otb_total", {}, [[1 - 10 / 12, 1 - 10 / 12, 1], [1 - 10 / 12], [-10 / 12, -10 / 12]]),
        # Columns of rows mean nothing here: the baseline of whole rollouts.
        ("otb", {}, [[1 - 10 / 12] * 3, [1 - 10 / 12], [-10 / 12] * 2]),
        ("ogb", {}, [[1 - 10 / 12] * 3, [1 - 10 / 12], [-10 / 12] * 2]),
    ],
)
@pytest.mark.parametrize("gap", [0, 2])
def test_a_small_tree_by_hand(name: str, options: dict[str, Any], expected: list[list[float]], gap: int) -> None:
    inputs = replace(inputs_of(SMALL, gap=gap), importance_weights=None)
    made = compute_advantages(name, inputs, **options)
    for row, values in enumerate(expected):
        assert made.advantages[row][inputs.response_mask[row]].tolist() == pytest.approx(values, abs=1e-7)
    assert not made.advantages[~inputs.response_mask].any()


def test_the_order_of_rows_does_not_matter() -> None:
    inputs = replace(inputs_of(SMALL), importance_weights=None)
    turned = replace(
        inputs,
        **{one.name: value.flip(0) for one in fields(inputs) if (value := getattr(inputs, one.name)) is not None},
    )
    for name in BY_PATH:
        found, expected = compute_advantages(name, turned), compute_advantages(name, inputs)
        assert torch.equal(found.advantages.flip(0), expected.advantages)


@pytest.mark.parametrize(
    ("name", "expected"), [("tir_otb", [1 / 2, 3 / 5, 6 / 13]), ("otb_isolated", [1 / 2, 2 / 3, 3 / 8])]
)
@pytest.mark.parametrize("copies", [1, 2, 5])
def test_a_baseline_does_not_depend_on_the_number_of_branches(name: str, expected: list[float], copies: int) -> None:
    """Branches that say the same are one to the baseline."""
    begin = Branch(0, 0, 0, [1.0, 2.0, 3.0], reward=float(copies == 1))
    again = [
        Branch(0, 0, place, [2.0, 3.0], parent=0, fork=1, reward=float(place == copies - 1))
        for place in range(1, copies)
    ]
    other = Branch(0, 1, 0, [1.0, 1.0, 5.0])
    inputs = replace(inputs_of([begin, *again, other]), importance_weights=None)
    made = compute_advantages(name, inputs).baselines
    assert made[0].tolist() == made[-1].tolist() == pytest.approx(expected, abs=1e-7)
    for row in made[1:-1]:
        assert row[:2].tolist() == made[0, 1:].tolist()


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS.names()) - {"gpg", "ogb_pooled"}))
def test_groups_without_branches_are_bitwise_what_they_are_alone(name: str) -> None:
    """Also beside a group with branches, and with observations between their tokens."""
    plain = [Branch(3, 0, 0, [0.3, 0.7, 1.1, 0.2], reward=1.0), Branch(3, 1, 0, [0.9, 0.1]), Branch(3, 2, 0, [0.4])]
    both = inputs_of([*SMALL, *plain], gap=1)
    alone = replace(
        both, **{one.name: value[3:] for one in fields(both) if (value := getattr(both, one.name)) is not None}
    )
    options = {"normalize": None} if "normalize" in ESTIMATORS.option_names(name) else {}
    found, expected = compute_advantages(name, both, **options), compute_advantages(name, alone, **options)
    unnumbered = replace(alone, samples=None, branches=None, parents=None, forks=None)
    for made in (expected, compute_advantages(name, unnumbered, **options)):
        assert torch.equal(found.advantages[3:], made.advantages)
        assert torch.equal(found.baselines[3:], made.baselines)
        assert torch.equal(found.returns[3:], made.returns)


@st.composite
def forests(draw: Any) -> list[Branch]:
    """Groups of rollouts whose branches fork anywhere; branches are numbered in any order."""
    rows: list[Branch] = []
    for sample in range(draw(st.integers(2, 4))):
        made: list[Branch] = []
        for _ in range(draw(st.integers(1, 4))):
            energies = draw(st.lists(st.floats(0.01, 2.0), min_size=1, max_size=4))
            parent = draw(st.integers(-1, len(made) - 1))
            fork = draw(st.integers(1, len(made[parent].energies))) if parent >= 0 else 0
            made.append(Branch(sample % 2, sample, len(made), energies, parent, fork))
        numbers = draw(st.permutations(range(len(made))))
        reward = draw(st.sampled_from([0.0, 0.5, 1.0]))
        for one in made:
            one.branch, one.parent = numbers[one.branch], -1 if one.parent < 0 else numbers[one.parent]
            one.reward = reward if one.branch == len(made) - 1 else 0.0
        rows += made
    return rows


def slowly(name: str, rows: list[Branch]) -> list[list[float]]:
    """The baselines, token by token. Tail: zero."""
    # rollout -> branch, number, index, weight, return
    places: dict[tuple[int, int], list[tuple[Branch, int, int, float, float]]] = {}
    for row in rows:
        energies = list(row.energies)
        returns = sum(two.reward for two in rows if two.sample == row.sample)
        one = row
        while one.parent >= 0:
            fork = one.fork
            one = next(two for two in rows if (two.sample, two.branch) == (row.sample, one.parent))
            energies = [*one.energies[:fork], *energies]
            returns -= one.reward * (fork == len(one.energies))  # it was earned before
        total = sum(sum(two.energies) for two in rows if two.sample == row.sample)
        for number in range(len(row.energies)):
            index = len(energies) - len(row.energies) + number
            weight = {"tir_otb": sum(energies[: index + 1]), "otb_isolated": energies[index], "otb_total": total}[name]
            places.setdefault((row.group, row.sample), []).append((row, number, index, weight + EPSILON, returns))
    baselines = {id(row): [0.0] * len(row.energies) for row in rows}
    for (group, _), tokens in places.items():
        for row, number, index, *_ in tokens:
            weights, moments = [], []
            for (other, _), told in places.items():
                here = [(weight, got) for _, _, place, weight, got in told if other == group and place == index]
                if here:
                    weights.append(sum(weight for weight, _ in here) / len(here))
                    moments.append(sum(weight * got for weight, got in here) / len(here))
            if len(weights) > 1:
                baselines[id(row)][number] = sum(moments) / sum(weights)
    return [baselines[id(row)] for row in rows]


@pytest.mark.parametrize("name", BY_PATH)
@settings(max_examples=60, deadline=None)
@given(rows=forests())
def test_any_forest_equals_a_slow_reference(name: str, rows: list[Branch]) -> None:
    inputs = replace(inputs_of(rows, gap=1), importance_weights=None)
    made = compute_advantages(name, inputs).baselines
    branched = {row.group for row in rows if row.branch > 0}
    for place, (row, expected) in enumerate(zip(rows, slowly(name, rows), strict=True)):
        if row.group in branched:
            assert made[place][inputs.response_mask[place]].tolist() == pytest.approx(expected, abs=1e-12)


def ways_of(rows: list[Branch], values: torch.Tensor) -> list[list[tuple[int, int, float]]]:
    """The tokens from each root to each leaf: row, number and value."""
    ends = {(row.sample, row.parent, row.fork) for row in rows}
    found = []
    for place, row in enumerate(rows):
        if (row.sample, row.branch, len(row.energies)) in ends:
            continue  # another one begins behind its last token
        way: list[tuple[int, int, float]] = []
        count = len(row.energies)
        while True:
            way = [*((place, number, float(values[place, number])) for number in range(count)), *way]
            if rows[place].parent < 0:
                break
            count = rows[place].fork
            key = (rows[place].sample, rows[place].parent)
            place = next(number for number, one in enumerate(rows) if (one.sample, one.branch) == key)
        found.append(way)
    return found


@pytest.mark.parametrize("name", ["gae", "reinforce_pp"])
@settings(max_examples=60, deadline=None)
@given(rows=forests(), rewards=st.integers(0, 2**16), bootstrap=st.floats(0.0, 2.0))
def test_discounts_are_those_of_every_way_as_a_row_of_its_own(
    name: str, rows: list[Branch], rewards: int, bootstrap: float
) -> None:
    """What a rollout earned elsewhere stands at the end of each; a shared token has the mean."""
    options = {"gamma": 0.7, "normalize": None} | ({"lam": 0.6} if name == "gae" else {})
    inputs = inputs_of(rows)
    drawn = torch.rand(inputs.rewards.shape, generator=torch.Generator().manual_seed(rewards), dtype=torch.float64)
    after = torch.full((len(rows),), bootstrap, dtype=torch.float64)
    inputs = replace(inputs, rewards=drawn * inputs.response_mask, bootstrap_values=after)
    expected: dict[tuple[int, int], list[float]] = {}
    branched = {row.group for row in rows if row.branch > 0}
    for way in ways_of(rows, inputs.rewards):
        sample = rows[way[-1][0]].sample
        earned = torch.tensor([[reward for *_, reward in way]], dtype=torch.float64)
        mine = torch.tensor([row.sample == sample for row in rows])
        earned[0, -1] += inputs.rewards[mine].sum() - earned.sum()
        alone = AdvantageInputs(
            rewards=earned,
            response_mask=torch.ones_like(earned, dtype=torch.bool),
            groups=torch.zeros(1, dtype=torch.long),
            values=torch.stack([inputs.values[place, number] for place, number, _ in way]).unsqueeze(0),
            bootstrap_values=after[:1],
        )
        made = compute_advantages(name, alone, **options).advantages
        for (place, number, _), value in zip(way, made[0].tolist(), strict=True):
            expected.setdefault((place, number), []).append(value)
    found = compute_advantages(name, inputs, **options).advantages
    for (place, number), values in expected.items():
        if rows[place].group in branched:
            assert float(found[place, number]) == pytest.approx(sum(values) / len(values), abs=1e-12)


def test_a_discounted_tree_by_hand() -> None:
    """a0 is one token away from one end and two from the other; both ends got the rollout's 1."""
    inputs = inputs_of(SMALL[:2], gap=1)
    made = compute_advantages("reinforce_pp", inputs, gamma=0.5, normalize=None).advantages
    assert made[inputs.response_mask].tolist() == [(1 / 4 + 1 / 2) / 2, 1 / 2, 1, 1]
    # V is 0.3 times the energy: a 0.3, 0.6, 0.9; b0 1.2. delta of a0 on either way: 0.6 - 0.3 and 1.2 - 0.3.
    found = compute_advantages("gae", inputs, gamma=1.0, lam=0.0, normalize=None)
    assert found.advantages[inputs.response_mask].tolist() == pytest.approx([(0.3 + 0.9) / 2, 0.3, 0.1, -0.2])
    assert found.returns[inputs.response_mask].tolist() == pytest.approx([0.9, 0.9, 1.0, 1.0])


def test_a_constant_reward_leaves_no_advantage() -> None:
    main, branch, other = SMALL
    rows = [main, replace(branch, reward=0.7), replace(other, reward=0.7)]
    inputs = replace(inputs_of(rows), importance_weights=None)
    assert not compute_advantages("tir_otb", inputs, tail="carry").advantages.any()
