"""Forked rollouts: estimators over the leaves of trees, sibling baselines, and unbiasedness by enumeration."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from agentrl.algorithms import (
    AdvantageInputs,
    InvalidInputError,
    aggregate,
    compute_advantages,
    loss_normalizer,
    token_factors,
)
from agentrl.algorithms.losses.registry import AGGREGATIONS

History = tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """The tokens between two forks, or up to a leaf, whose path has the reward."""

    tokens: History
    children: tuple[Edge, ...] = ()
    reward: float = 0.0


@dataclass(frozen=True)
class Row:
    group: int
    sample: int
    branch: int
    parent: int
    before: int  # tokens on the path before the edge
    history: History
    weight: float
    edge: Edge


def rows_of(trees: list[list[Edge]]) -> list[Row]:
    """One row for each edge of each tree of each group, parents first."""
    rows = []
    for group, group_trees in enumerate(trees):
        for sample, tree in enumerate(group_trees):
            waiting: list[tuple[Edge, int, History, float]] = [(tree, -1, (), 1.0)]
            for branch in itertools.count():
                if branch == len(waiting):
                    break
                edge, parent, history, weight = waiting[branch]
                rows.append(Row(group, sample, branch, parent, len(history), history, weight, edge))
                below = history + edge.tokens
                waiting += [(child, branch, below, weight / len(edge.children)) for child in edge.children]
    return rows


def inputs_of(rows: list[Row], energy: Callable[[History], float]) -> AdvantageInputs:
    """``energy`` of a token, from the history that ends with it."""
    shape = len(rows), max(len(row.edge.tokens) for row in rows)
    rewards, energies = torch.zeros(2, *shape, dtype=torch.float64)
    mask = torch.zeros(shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        count = len(row.edge.tokens)
        mask[number, :count] = True
        rewards[number, count - 1] = row.edge.reward
        for place in range(count):
            energies[number, place] = energy(row.history + row.edge.tokens[: place + 1])
    forks = {(row.group, row.sample, row.branch): len(row.edge.tokens) for row in rows}

    def whole(values: list[int]) -> torch.Tensor:
        return torch.tensor(values)

    return AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        groups=whole([row.group for row in rows]),
        samples=whole([row.sample for row in rows]),
        branches=whole([row.branch for row in rows]),
        parents=whole([row.parent for row in rows]),
        forks=whole([forks.get((row.group, row.sample, row.parent), 0) for row in rows]),
        path_weights=torch.tensor([row.weight for row in rows], dtype=torch.float64),
        token_energy=energies,
        trajectory_energy=energies.sum(-1),
    )


# -- a policy over two tokens whose rollouts, forks and rewards depend on the whole history ----------------------------


@functools.cache
def probability(history: History) -> float:
    """The probability of token 1 after ``history``."""
    return 0.2 + 0.6 * random.Random(str(history)).random()


@functools.cache
def reward(history: History) -> float:
    return random.Random(f"reward {history}").choice([0.0, 0.0, 1.0, 2.0])


def ends(history: History) -> bool:
    return len(history) == 3 or (len(history) == 2 and history[-1] == 0)


def energy(history: History) -> float:
    chance = probability(history[:-1])
    return 2 * (1 - (chance if history[-1] else 1 - chance)) ** 2


def score(history: History) -> float:
    """The derivative of the last token's log-probability by the logit of token 1 after the history before it."""
    return history[-1] - probability(history[:-1])


Width = Callable[[History], int]


def enumerated(history: History, width: Width, tokens: History = ()) -> Iterator[tuple[float, Edge]]:
    """All edges that continue ``history``, with their probabilities. ``tokens`` already belong to the edge."""
    if tokens and ends(history):
        yield 1.0, Edge(tokens, reward=reward(history))
        return
    children = width(history) if tokens else 1
    if children > 1:
        for chosen in itertools.product(list(enumerated(history, width)), repeat=children):
            yield math.prod(chance for chance, _ in chosen), Edge(tokens, tuple(edge for _, edge in chosen))
        return
    for token in (0, 1):
        chance = probability(history) if token else 1 - probability(history)
        for later, edge in enumerated((*history, token), width, (*tokens, token)):
            yield chance * later, edge


def exact_gradient() -> dict[History, float]:
    gradient: dict[History, float] = {}
    for chance, edge in enumerated((), lambda _: 1):
        for place in range(len(edge.tokens)):
            known = edge.tokens[: place + 1]
            gradient[known[:-1]] = gradient.get(known[:-1], 0.0) + chance * edge.reward * score(known)
    return gradient


def expected_gradient(groups: list[tuple[float, list[Edge]]], name: str, **options: Any) -> dict[History, float]:
    """The expectation of sum pi_e grad log p_t A_t over groups of trees with their probabilities."""
    rows = rows_of([trees for _, trees in groups])
    inputs = inputs_of(rows, energy)
    advantages = compute_advantages(name, inputs, **options).advantages.tolist()
    gradient: dict[History, float] = {}
    for row, values in zip(rows, advantages, strict=True):
        chance, trees = groups[row.group]
        for place in range(len(row.edge.tokens)):
            known = row.history + row.edge.tokens[: place + 1]
            term = chance / len(trees) * row.weight * values[place] * score(known)
            gradient[known[:-1]] = gradient.get(known[:-1], 0.0) + term
    return gradient


@functools.cache
def groups_of(width: Width, size: int) -> list[tuple[float, list[Edge]]]:
    chosen = itertools.product(list(enumerated((), width)), repeat=size)
    return [(math.prod(chance for chance, _ in trees), [edge for _, edge in trees]) for trees in chosen]


def distance(found: dict[History, float], wanted: dict[History, float]) -> float:
    return max(abs(found.get(key, 0.0) - wanted.get(key, 0.0)) for key in {*found, *wanted})


def once(history: History) -> int:
    return 2 if len(history) == 1 else 1


def by_history(history: History) -> int:
    """Three children after token 1, and a later fork with two after token 0."""
    return {(1,): 3, (0, 1): 2}.get(history, 1)


def nested(history: History) -> int:
    return 2 if len(history) in (1, 2) else 1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tir_otb", {"siblings": "only"}),
        ("tir_otb", {"siblings": "only", "tail": "carry"}),
        ("tir_otb", {"siblings": "pooled", "sibling_pool": 1.5}),
        ("tir_otb", {"siblings": "pooled", "tail": "carry"}),
        ("tir_otb", {"leave_one_out": True}),
        ("otb_isolated", {"siblings": "only"}),
        ("otb_total", {"siblings": "pooled"}),
        ("ogb", {"siblings": "only"}),
        ("ogb", {"siblings": "pooled"}),
        ("ogb", {"leave_one_out": True}),
        ("eob", {"siblings": "only", "epsilon": 1e-300}),
        ("opo", {"leave_one_out": True}),
        ("rloo", {}),
        ("reinforce_pp", {"normalize": None}),
    ],
)
@pytest.mark.parametrize(("width", "size"), [(once, 2), (by_history, 2), (nested, 2)])
def test_the_expected_gradient_over_all_trees_is_exact(name: str, options: Any, width: Width, size: int) -> None:
    found = expected_gradient(groups_of(width, size), name, **options)
    assert distance(found, exact_gradient()) < 1e-10


def test_the_own_subtree_in_the_baseline_biases_the_gradient() -> None:
    found = expected_gradient(groups_of(once, 2), "tir_otb")
    assert distance(found, exact_gradient()) > 1e-3


def test_a_rule_that_looks_ahead_biases_the_gradient() -> None:
    """After two children without a reward, a third is sampled: the number of children depends on their outcomes."""
    groups = []
    for first, fork in groups_of(once, 1):
        (tree,) = fork
        if any(child.reward for child in tree.children):
            groups.append((first, fork))
            continue
        for chance, child in enumerated(tree.tokens, lambda _: 1):
            groups.append((first * chance, [Edge(tree.tokens, (*tree.children, child))]))
    assert math.fsum(chance for chance, _ in groups) == pytest.approx(1.0)
    found = expected_gradient(groups, "tir_otb", siblings="only")
    assert distance(found, exact_gradient()) > 1e-3


# -- values ------------------------------------------------------------------------------------------------------------


def one(_: History) -> float:
    return 1.0


def test_sibling_baselines_by_hand() -> None:
    # Two trees: one forks after a token into branches of 1 and 2 tokens with rewards 1 and 0; the other earns 3.
    forked = Edge((0,), (Edge((0,), reward=1.0), Edge((1, 1), reward=0.0)))
    inputs = inputs_of(rows_of([[forked, Edge((0, 0, 0), reward=3.0)]]), one)
    only = compute_advantages("tir_otb", inputs, siblings="only", epsilon=1e-300).advantages.tolist()
    # Root: Q = 1/2 against the other tree's 3. Branches: against each other; the last token is alone.
    # The unforked tree: against Q of the root, the two branches (equal W), and the second branch alone.
    assert only == [[-2.5, 0.0, 0.0], [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [2.5, 2.5, 3.0]]
    carried = compute_advantages("tir_otb", inputs, siblings="only", tail="carry", epsilon=1e-300).advantages.tolist()
    # At the third token, the ended branch counts with its last value: 1 with W = 2, the other 0 with W = 3.
    assert carried[2] == [-1.0, -1.0, 0.0]
    assert carried[3] == pytest.approx([2.5, 2.5, 3 - 2 / 5])
    pooled = compute_advantages("tir_otb", inputs, siblings="pooled", sibling_pool=2.0, epsilon=1e-300).advantages
    assert pooled.tolist()[0] == [-2.5, 0.0, 0.0]
    assert pooled.tolist()[1][0] == pytest.approx(1 - (0 + 2 * 3) / 3)
    assert pooled.tolist()[2][:2] == pytest.approx([0 - (1 + 2 * 3) / 3, 0 - 3])


def test_estimators_weigh_leaves_by_hand() -> None:
    forked = Edge((0,), (Edge((0,), reward=1.0), Edge((1, 1), reward=0.0)))
    inputs = inputs_of(rows_of([[forked, Edge((0, 0, 0), reward=3.0)]]), one)
    mean = (0.5 * 1 + 0.5 * 0 + 3) / 2
    made = compute_advantages("dr_grpo", inputs).advantages.tolist()
    assert made == [[0.5 - mean, 0.0, 0.0], [1 - mean, 0.0, 0.0], [-mean, -mean, 0.0], [3 - mean] * 3]
    squares = 0.5 * (1 - mean) ** 2 + 0.5 * mean**2 + (3 - mean) ** 2
    spread = math.sqrt(squares / (2 - (0.25 + 0.25 + 1) / 2))
    assert compute_advantages("grpo", inputs).advantages[3, 0].item() == pytest.approx((3 - mean) / (spread + 1e-6))
    # The leaves that are not below a token: for a branch, its sibling (1/2) and the other tree (1).
    others = compute_advantages("rloo", inputs).advantages.tolist()
    assert others[0][0] == 0.5 - 3
    assert others[1][0] == pytest.approx(1 - (0.5 * 0 + 3) / 1.5)
    assert others[3] == [3 - 0.5] * 3
    # At the second token, W = 2 everywhere: the branches' 1 and 0 with weight 1/2, and 3.
    shared = compute_advantages("tir_otb", inputs, epsilon=1e-300).baselines.tolist()
    assert shared[3][1] == pytest.approx((0.5 * 1 + 0.5 * 0 + 3) / 2)


def test_published_rules_for_trees_by_hand() -> None:
    # A tree whose first branch forks again, and a tree of two leaves.
    deep = Edge((0,), (Edge((1,), (Edge((2,), reward=1.0), Edge((3,), reward=0.0))), Edge((4, 5), reward=0.0)))
    inputs = inputs_of(rows_of([[deep, Edge((6,), (Edge((7,), reward=1.0), Edge((8,), reward=1.0)))]]), one)
    # Mean rewards: 1/4 of the first tree (leaves of weight 1/4, 1/4, 1/2), 1 of the second, 5/8 of the group.
    made = compute_advantages("treerl", inputs).advantages.tolist()
    assert made[0][0] == pytest.approx(((1 / 4 - 5 / 8) + (1 / 4 - 5 / 8)) / math.sqrt(3))
    assert made[1][0] == pytest.approx(((1 / 2 - 5 / 8) + (1 / 2 - 1 / 4)) / math.sqrt(2))
    assert made[2] == pytest.approx([(0 - 5 / 8) + (0 - 1 / 4)] * 2)
    assert [row[0] for row in made[3:5]] == pytest.approx([(1 - 5 / 8) + (1 - 1 / 2), (0 - 5 / 8) + (0 - 1 / 2)])
    assert made[5][0] == pytest.approx(2 * (1 - 5 / 8) / math.sqrt(2))
    assert [row[0] for row in made[6:]] == pytest.approx([1 - 5 / 8, 1 - 5 / 8])

    def standardized(value: float, mean: float, squares: float, weights: list[float]) -> float:
        total = sum(weights)
        spread = math.sqrt(squares / (total - sum(one**2 for one in weights) / total))
        return (value - mean) / (spread + 1e-6)

    def in_first_tree(value: float) -> float:
        return standardized(value, 1 / 4, (1 / 4) * (3 / 4) ** 2 + (3 / 4) * (1 / 4) ** 2, [1 / 4, 1 / 4, 1 / 2])

    def in_group(value: float) -> float:
        squares = (5 / 4) * (3 / 8) ** 2 + (3 / 4) * (5 / 8) ** 2
        return standardized(value, 5 / 8, squares, [1 / 4, 1 / 4, 1 / 2, 1 / 2, 1 / 2])

    made = compute_advantages("tree_grpo", inputs).advantages.tolist()
    assert made[3][0] == pytest.approx(in_first_tree(1) + in_group(1))
    assert made[2] == pytest.approx([in_first_tree(0) + in_group(0)] * 2)
    assert made[0][0] == pytest.approx(in_group(1 / 4))  # the mean over leaves is 0 within the tree
    assert made[6][0] == pytest.approx(in_group(1))  # no variance within the second tree


@pytest.mark.parametrize(("name", "plain", "factor"), [("tree_grpo", "grpo", 1), ("treerl", "dr_grpo", 2)])
def test_without_forks_the_published_rules_are_plain(name: str, plain: str, factor: int) -> None:
    inputs = inputs_of(rows_of([PLAIN, [FORKED, FORKED]]), token_energy)
    alone = compute_advantages(plain, inputs_of(rows_of([PLAIN]), token_energy)).advantages
    assert torch.equal(compute_advantages(name, inputs).advantages[:3], factor * alone)


def token_energy(history: History) -> float:
    return random.Random(f"energy {history}").random()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["dr_grpo", "tir_otb", "ogb", "opo", "reinforce_pp", "ogb_pooled"])
def test_a_forked_rollout_is_the_weighted_mixture_of_its_paths(name: str, seed: int) -> None:
    """Leaves of equal weight, so that each path can stand in a group of plain rollouts."""
    draw = random.Random(seed)

    def edge(depth: int) -> Edge:
        tokens = tuple(draw.randrange(100) for _ in range(draw.randint(1, 3)))
        if depth == 2:
            return Edge(tokens, reward=draw.choice([0.0, 1.0]))
        return Edge(tokens, tuple(edge(depth + 1) for _ in range(2)), draw.choice([0.0, 0.5]))

    trees = [[edge(0) for _ in range(3)] for _ in range(2)]
    rows = rows_of(trees)
    options = {"normalize": None} if name == "reinforce_pp" else {"pool": 4.0} if name == "ogb_pooled" else {}
    found = compute_advantages(name, inputs_of(rows, token_energy), **options)

    # The same paths as separate rollouts. The rewards of shared turns stand at their tokens.
    paths: list[tuple[int, History, list[float], list[tuple[int, int]]]] = []
    number = {(row.group, row.sample, row.branch): place for place, row in enumerate(rows)}
    for row in rows:
        if row.edge.children:
            continue
        chain = [row]
        while chain[0].parent >= 0:
            chain.insert(0, rows[number[row.group, row.sample, chain[0].parent]])
        places = [
            (number[part.group, part.sample, part.branch], at) for part in chain for at in range(len(part.edge.tokens))
        ]
        rewards = [value for part in chain for value in (*(0.0,) * (len(part.edge.tokens) - 1), part.edge.reward)]
        paths.append((row.group, row.history + row.edge.tokens, rewards, places))
    width = max(len(path[1]) for path in paths)
    padded = torch.tensor([[*path[2], *(0.0,) * (width - len(path[1]))] for path in paths], dtype=torch.float64)
    mask = torch.tensor([[True] * len(path[1]) + [False] * (width - len(path[1])) for path in paths])
    energies = torch.tensor(
        [[token_energy(path[1][: at + 1]) if at < len(path[1]) else 0.0 for at in range(width)] for path in paths],
        dtype=torch.float64,
    )
    plain = AdvantageInputs(
        rewards=padded, response_mask=mask, groups=torch.tensor([path[0] for path in paths]), token_energy=energies
    )
    if name == "ogb_pooled":
        options = {"pool": 16.0}  # four leaves of a tree count as one trajectory
    wanted = compute_advantages(name, plain, **options)
    for made, expected in ((found.advantages, wanted.advantages), (found.baselines, wanted.baselines)):
        sums: dict[tuple[int, int], list[float]] = {}
        for path, values in zip(paths, expected.tolist(), strict=True):
            for place, value in zip(path[3], values, strict=False):
                sums.setdefault(place, []).append(value)
        for (row_number, at), values in sums.items():
            assert made[row_number, at].item() == pytest.approx(sum(values) / len(values), abs=1e-12)


@pytest.mark.parametrize("siblings", ["none", "only", "pooled"])
def test_an_only_child_continues_its_parent(siblings: str) -> None:
    apart = Edge((0, 1), (Edge((2,), (Edge((3,), reward=1.0), Edge((4,), reward=0.0))),))
    whole = Edge((0, 1, 2), apart.children[0].children)
    other = Edge((7, 8), (Edge((5,), reward=0.0), Edge((6, 6), reward=1.0)))
    found = compute_advantages("tir_otb", inputs_of(rows_of([[apart, other]]), token_energy), siblings=siblings)
    wanted = compute_advantages("tir_otb", inputs_of(rows_of([[whole, other]]), token_energy), siblings=siblings)
    assert [*found.advantages[0, :2].tolist(), found.advantages[1, 0].item()] == wanted.advantages[0].tolist()
    assert torch.equal(found.advantages[2:, :2], wanted.advantages[1:, :2])


@pytest.mark.parametrize("name", ["tir_otb", "ogb"])
@pytest.mark.parametrize("siblings", ["only", "pooled"])
def test_without_forks_siblings_are_the_other_rollouts(siblings: str, name: str) -> None:
    groups = [[Edge((0,) * count, reward=value) for count, value in ((2, 1.0), (3, 0.0), (3, 1.0))]]
    inputs = inputs_of(rows_of(groups), token_energy)
    found = compute_advantages(name, inputs, siblings=siblings).advantages
    assert torch.allclose(found, compute_advantages(name, inputs, leave_one_out=True).advantages, atol=1e-12)


FORKED = Edge((1,), (Edge((2,), reward=1.0), Edge((3, 4), reward=0.0)))
LENGTHS_AND_REWARDS = [(4, 1.0), (2, 0.0), (3, 1.0)]
PLAIN = [Edge(tuple(range(count)), reward=value) for count, value in LENGTHS_AND_REWARDS]
"""Rollouts without forks, so that the longest is alone in its last column."""
CONTINUED = [Edge(one.tokens[:1], (replace(one, tokens=one.tokens[1:]),)) for one in PLAIN]
"""The same rollouts, each with a fork after the first token of which one branch is left."""


@pytest.mark.parametrize("tail", ["zero", "carry", "self"])
@pytest.mark.parametrize("siblings", ["none", "only", "pooled"])
@pytest.mark.parametrize("name", ["tir_otb", "otb_isolated", "otb_total"])
def test_groups_without_forks_have_the_plain_token_baselines(name: str, siblings: str, tail: str) -> None:
    def made(options: Any, *groups: list[Edge]) -> list[list[float]]:
        return compute_advantages(name, inputs_of(rows_of(list(groups)), token_energy), **options).advantages.tolist()

    options = {"siblings": siblings, "tail": tail, "leave_one_out": True}
    plain = made({"tail": tail, "leave_one_out": True}, PLAIN)
    assert made(options, PLAIN) == plain
    assert made(options, PLAIN, [FORKED, FORKED])[:3] == plain
    for groups in ([CONTINUED], [CONTINUED, [FORKED, FORKED]]):
        continued = made(options, *groups)
        for number, values in enumerate(plain):
            joined = [continued[2 * number][0], *continued[2 * number + 1]]
            assert joined[: len(values)] == pytest.approx(values, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ogb", {"siblings": "pooled"}),
        ("ogb", {"leave_one_out": True}),
        ("eob", {"leave_one_out": True}),
        ("opo", {"leave_one_out": True}),
        ("rloo", {}),
        ("grpo", {}),
        ("dr_grpo", {"normalize": "group_std"}),
    ],
)
def test_a_forked_group_changes_no_other_group(name: str, options: Any) -> None:
    alone = compute_advantages(name, inputs_of(rows_of([PLAIN]), token_energy), **options).advantages
    beside = compute_advantages(name, inputs_of(rows_of([PLAIN, [FORKED, *PLAIN]]), token_energy), **options)
    assert torch.equal(beside.advantages[:3], alone)


@pytest.mark.parametrize("siblings", ["none", "only", "pooled"])
@pytest.mark.parametrize("name", ["tir_otb", "ogb"])
def test_leaves_with_equal_rewards_have_no_advantage(name: str, siblings: str) -> None:
    tree = Edge((0,), (Edge((1,), reward=0.7), Edge((2, 3), (Edge((4,), reward=0.7), Edge((5,), reward=0.7)))))
    inputs = inputs_of(rows_of([[tree, tree]]), token_energy)
    made = compute_advantages(name, inputs, siblings=siblings, **({"tail": "carry"} if name == "tir_otb" else {}))
    assert made.advantages.abs().max() < 1e-15


@pytest.mark.parametrize("normalize", ["group_std", "whiten"])
def test_normalization_counts_leaves_with_their_weights(normalize: str) -> None:
    tree = Edge((0,), (Edge((1,), reward=1.0), Edge((2,), reward=0.0)))
    inputs = inputs_of(rows_of([[tree, Edge((3, 4), reward=1.0)]]), token_energy)
    raw = compute_advantages("dr_grpo", inputs).advantages
    made = compute_advantages("dr_grpo", inputs, normalize=normalize).advantages
    # Two trees of two tokens each: A = 1/4 and -3/4 with weight 1/2, and 1/4. Four weighted tokens with mean 0.
    spread = math.sqrt((2 * 0.5 * 0.25**2 + 2 * 0.5 * 0.75**2 + 2 * 0.25**2) / 3)
    assert made[inputs.response_mask] == pytest.approx((raw / spread)[inputs.response_mask], rel=1e-5)


def test_an_estimator_by_columns_refuses_forked_rollouts() -> None:
    tree = Edge((0,), (Edge((1,), reward=1.0), Edge((2,), reward=0.0)))
    with pytest.raises(InvalidInputError, match="use tir_otb"):
        compute_advantages("otb", inputs_of(rows_of([[tree]]), token_energy))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_tree_weighs_as_much_as_one_rollout(mode: str) -> None:
    """A root of two tokens and branches of two tokens each: the same as one rollout with the branches' mean loss."""
    length = 7.0 if mode == "seq_mean_token_sum_norm" else None
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    losses = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 1.0], [4.0, 0.0]], dtype=torch.float64)
    path_weights = torch.tensor([1.0, 0.5, 0.5, 1.0], dtype=torch.float64)
    weights = torch.tensor([2 / 4, 1 / 4, 1 / 4, 1.0], dtype=torch.float64)  # of the tokens, counted with path_weights
    found = aggregate(losses, mask, mode, length=length, weights=weights, path_weights=path_weights)
    plain = torch.tensor([[1.0, 2.0, 5.0, 3.0], [4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    plain_mask = torch.tensor([[True] * 4, [True, False, False, False]])
    assert float(found) == pytest.approx(float(aggregate(plain, plain_mask, mode, length=length)))
    count = loss_normalizer(mask, mode, weights, path_weights=path_weights)
    assert float(count) == float(loss_normalizer(plain_mask, mode))
    factors = token_factors(mask, mode, length=length, weights=weights, path_weights=path_weights)
    assert float((factors * (losses * mask).sum(-1)).sum()) == pytest.approx(float(found))
