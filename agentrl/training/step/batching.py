"""The plan of a step: its passes, and its trajectories packed into the same number of micro-batches on all ranks.

One forward pass serves statistics, advantages and the backward pass if each micro-batch contains everything that its
loss needs. A group that does not fit into one micro-batch stays on one rank. If its advantages need only rewards, they
are computed first, and each of its micro-batches takes one forward and one backward pass. Otherwise, all its
micro-batches but the last are scored without gradients. The forward pass of the last micro-batch completes the group,
and the other micro-batches run a second forward pass.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from agentrl.algorithms import LOSSES
from agentrl.batch import MicroBatch, flat_array
from agentrl.kernels.attention import PrefixTree
from agentrl.training.step.objective_settings import (
    ObjectiveSettings,
    advantages_known_before_forward,
    estimator_requirements,
)
from agentrl.trajectory import Group, Trajectory


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's work in one step. The plans of all ranks have the same number of micro-batches.

    An update consists of units: a micro-batch, or the micro-batches of a group that does not fit into one micro-batch.
    Without a statistics pass there is one update. There is no update if no group is left to train on.
    """

    step: int
    version: int  # version of the policy to be trained
    statistics_pass: bool  # True if every micro-batch is scored before the updates
    updates: tuple[tuple[tuple[MicroBatch, ...], ...], ...]
    # Micro-batches scored before the update if there is no statistics pass: all but the last of each split group.
    scored_first: tuple[MicroBatch, ...]
    tokens: float  # number of tokens in the loss over all ranks, weighted by problem
    sequences: float  # number of rollouts with tokens in the loss over all ranks, weighted by problem
    model_tokens: tuple[int, ...]  # number of model tokens of each update over all ranks
    head_exact: bool  # True if the head-exact variance diagnostic is due
    trajectories: int  # number of rollouts over all ranks
    metrics: dict[str, float]  # metrics of the rollouts, on rank 0


@dataclass(frozen=True, kw_only=True)
class RowCosts:
    """Tokens and costs of trajectories that are computed together.

    Attention over a trajectory of ``attention_length`` tokens costs as much as all other operations. Without
    ``share_prefixes``, each trajectory computes its whole prompt: in padded rows, and in the pass of exact energies.
    """

    attention_length: float = math.inf
    share_prefixes: bool = True

    def count_added_tokens(self, rows: Sequence[Trajectory]) -> list[int]:
        """Return the number of tokens that each trajectory adds to a row: its length without its shared prefix."""
        if self.share_prefixes and len({row.prompt_ids for row in rows}) == 1:  # common case; comparing tokens is slow
            return [row.length - (len(row.prompt_ids) if number else 0) for number, row in enumerate(rows)]
        tree = PrefixTree()
        counts = [0] * len(rows)
        for number in sorted(range(len(rows)), key=lambda number: len(rows[number].prompt_ids)):
            counts[number] = self.add_and_count_unshared(tree, rows[number])
        return counts

    def add_and_count_unshared(self, tree: PrefixTree, row: Trajectory) -> int:
        """Add a trajectory to the tree. Returns its length without the prefix shared with earlier trajectories."""
        if not self.share_prefixes:
            return row.length
        tokens = flat_array([row.prompt_ids, *(segment.token_ids for segment in row.segments)], "i")
        return len(tokens) - tree.add_and_count_shared_tokens(tokens.tobytes(), len(row.prompt_ids))

    def count_tokens(self, rows: Sequence[Trajectory]) -> int:
        """Return the number of tokens that one pass over these trajectories computes."""
        return sum(self.count_added_tokens(rows))

    def cost(self, rows: Sequence[Trajectory]) -> float:
        """Return the cost of the computed tokens. A token's attention cost is proportional to its position."""
        added = self.count_added_tokens(rows)
        shared = (row.length - count for row, count in zip(rows, added, strict=True))
        squares = sum(row.length**2 - count**2 for row, count in zip(rows, shared, strict=True))
        return sum(added) + squares / self.attention_length


Unit = tuple[Sequence[Trajectory], ...]
"""The trajectories of one micro-batch, or of all micro-batches of a group that is too large for one micro-batch."""


def pack_into_micro_batches(
    units: Sequence[Sequence[Trajectory]], budget: int, *, ranks: int, costs: RowCosts = RowCosts()
) -> list[Unit]:
    """Pack whole units into micro-batches of at most ``budget`` tokens, and return them in descending order of cost.

    A unit is a group or some of its trajectories. In descending order of cost, each unit is added to the cheapest
    micro-batch with room for it. The number of micro-batches is the smallest possible multiple of ``ranks``, or less
    if there are too few units. Therefore all micro-batches cost nearly the same, and ranks seldom wait for each other.
    A unit larger than the budget gets a separate micro-batch.
    """
    if not units:
        return []
    by_unit = {id(unit): costs.cost(unit) for unit in units}
    ordered = sorted(units, key=lambda unit: by_unit[id(unit)], reverse=True)
    sizes = [costs.count_tokens(unit) for unit in ordered]
    count = max(1, math.ceil(sum(sizes) / budget / ranks)) * ranks
    while True:
        bins: list[list[Trajectory]] = [[] for _ in range(count)]
        spent, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
        for unit, size in zip(ordered, sizes, strict=True):
            has_room = (tokens == 0) | (tokens + size <= budget)
            cheapest = int(np.where(has_room, spent, np.inf).argmin())
            if not has_room[cheapest]:
                break
            bins[cheapest] += unit
            spent[cheapest] += by_unit[id(unit)]
            tokens[cheapest] += size
        else:
            order = sorted(range(count), key=lambda index: -spent[index])
            return [(bins[index],) for index in order if bins[index]]
        count += ranks


def distribute_alternately(units: Sequence[Unit], *, ranks: int) -> list[list[Unit]]:
    """Distribute single-micro-batch units, in descending order of cost, over the ranks in alternating order.

    The rank with the costliest unit of a round receives the cheapest unit of the next round, so that the micro-batches
    of a round cost nearly the same.
    """
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    for number, unit in enumerate(units):
        round_number, position = divmod(number, ranks)
        dealt[position if round_number % 2 == 0 else ranks - 1 - position].append(unit)
    return dealt


def balance_over_ranks(units: Sequence[Unit], *, ranks: int, costs: RowCosts) -> list[list[Unit]]:
    """Assign each unit, in descending order of cost, to the rank with the lowest total cost so far."""
    by_unit = [sum(map(costs.cost, unit)) for unit in units]
    shares: list[list[Unit]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    for number in sorted(range(len(units)), key=lambda number: -by_unit[number]):
        rank = spent.index(min(spent))
        shares[rank].append(units[number])
        spent[rank] += by_unit[number]
    return shares


def split_group(
    group: Sequence[Trajectory], max_tokens: int, *, costs: RowCosts = RowCosts()
) -> list[Sequence[Trajectory]]:
    """Split a group into parts of at most ``max_tokens`` tokens, as large as possible.

    A longer trajectory is a separate part. The branches of a rollout stay together where possible, because they share
    prefixes.
    """
    longest: Counter[int] = Counter()
    for row in group:
        longest[row.sample] = max(longest[row.sample], row.length)
    parts: list[list[Trajectory]] = []
    tree, tokens = PrefixTree(), math.inf
    for row in sorted(group, key=lambda item: (-longest[item.sample], item.sample, item.branch)):
        tokens += costs.add_and_count_unshared(tree, row)
        if tokens > max_tokens:
            tree, parts = PrefixTree(), [*parts, []]
            tokens = costs.add_and_count_unshared(tree, row)
        parts[-1].append(row)
    return [*parts]


def plan_step(
    groups: Sequence[Group],
    settings: ObjectiveSettings,
    *,
    step: int,
    version: int,
    budget: int,
    ranks: int,
    attention_length: float = math.inf,
    padded_rows: bool = False,
    other_padded_rows: bool = False,
    teacher_prompt: Callable[[Trajectory], tuple[int, ...]] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> list[RankPlan]:
    """Return the plan of every rank for the ``groups`` of one step. Without groups, the plans have no updates.

    ``version`` is the version of the policy to be trained. ``attention_length``: see :class:`RowCosts`.
    ``padded_rows``: the policy reads padded trajectories (``model.rows``); ``other_padded_rows``: another model on the
    ranks does. ``metrics`` are the metrics of the rollouts. ``teacher_prompt``: see
    :meth:`.MicroBatch.from_trajectories`.
    """
    algorithm = settings.algorithm
    exact_energies = "trajectory_energy" in estimator_requirements(settings).inputs
    share_prefixes = not (padded_rows or other_padded_rows or exact_energies)
    costs = RowCosts(attention_length=attention_length, share_prefixes=share_prefixes)
    largest = max((costs.count_tokens(group.trajectories) for group in groups), default=0)
    statistics_pass = bool(statistics_pass_reasons(settings))
    # The head-exact diagnostic needs whole groups, so it is omitted if a group does not fit into a micro-batch.
    head_exact = is_due(step, algorithm.head_exact_every) and largest <= budget
    updates: list[list[tuple[tuple[MicroBatch, ...], ...]]] = [[] for _ in range(ranks)]
    scored_first: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    trained: list[Trajectory] = []
    model_tokens: list[int] = []
    greedy = {group.index: group.greedy.reward for group in groups if group.greedy is not None}
    for part in split_into_updates(groups, algorithm.updates_per_step):
        pack = partial(pack_into_micro_batches, budget=budget, ranks=ranks, costs=costs)
        every = [group.trajectories for group in part]
        whole = [rows for rows in every if costs.count_tokens(rows) <= budget]
        split = [tuple(split_group(rows, budget, costs=costs)) for rows in every if costs.count_tokens(rows) > budget]
        shares = distribute_alternately(pack(whole), ranks=ranks)
        scored = 0
        if split and not statistics_pass:
            shares = balance_over_ranks([*split, *pack(whole)], ranks=ranks, costs=costs)
            scored = 0 if advantages_known_before_forward(settings) else 1
            statistics_pass = _statistics_pass_is_faster(shares, scored, costs)
        if statistics_pass and not head_exact:
            parts = [piece for rows in every for piece in split_group(rows, budget // 4, costs=costs)]
            shares = distribute_alternately(pack(parts), ranks=ranks)
        rows = [item for group in every for item in group]
        masked = {(group.index, sample, branch) for group in part for sample, branch in group.masked}
        trained += [row for row in rows if (row.group, row.sample, row.branch) not in masked]
        model_tokens.append(sum(row.model_tokens for row in rows))
        homes = choose_home_ranks(shares)
        packed = partial(
            MicroBatch.from_trajectories,
            no_loss=masked,
            home_ranks=homes,
            greedy_returns=greedy,
            teacher_prompt=teacher_prompt,
            share_prefixes=share_prefixes,
        )
        # Ranks run the same number of passes. Ranks with fewer micro-batches repeat a micro-batch with weight 0.
        filler = packed([min(rows, key=lambda row: row.length)], counted=False)
        most = max(sum(map(len, share)) for share in shares)
        first = max(sum(len(unit) - 1 for unit in share) for share in shares) * scored
        for rank, share in enumerate(shares):
            units = [tuple(packed(items) for items in unit) for unit in share]
            scored_first[rank] += [micro for unit in units for micro in unit[:-1]] if scored else []
            scored_first[rank] += [filler] * (first - len(scored_first[rank]))
            updates[rank].append((*units, *[(filler,)] * (most - sum(map(len, units)))))
    trajectories = sum(len(group.rollouts) for group in groups)
    planned = (micro for rank_updates in updates for update in rank_updates for unit in update for micro in unit)
    computed = sum(micro.tokens for micro in planned if micro.counted)
    measured = dict(metrics or {})
    if computed and not padded_rows:
        lengths = sum(row.length for group in groups for row in group.trajectories)
        measured["policy/prefix_sharing"] = lengths / computed
    return [
        RankPlan(
            step=step,
            version=version,
            statistics_pass=statistics_pass,
            updates=tuple(updates[rank]),
            scored_first=tuple(scored_first[rank]),
            tokens=math.fsum(row.model_tokens * row.token_weight for row in trained),
            sequences=math.fsum(row.weight * row.problem_weight for row in trained),
            model_tokens=tuple(model_tokens),
            head_exact=head_exact,
            trajectories=trajectories,
            metrics=measured if rank == 0 else {},
        )
        for rank in range(ranks)
    ]


def _statistics_pass_is_faster(shares: Sequence[Sequence[Unit]], scored: int, costs: RowCosts) -> bool:
    """Return True if keeping each group on one rank makes other ranks wait longer than a statistics pass takes.

    A backward pass costs as much as two forward passes. After a statistics pass, any rank can train on any trajectory
    of a group.
    """

    def cost(items: Sequence[Sequence[Trajectory]]) -> float:
        return sum(map(costs.cost, items))

    once = max(sum(3 * cost(unit) + scored * cost(unit[:-1]) for unit in share) for share in shares)
    return once > 4 * sum(cost(unit) for share in shares for unit in share) / len(shares)


def choose_home_ranks(shares: Sequence[Sequence[Unit]]) -> dict[int, int]:
    """Return the rank that receives all trajectories of each group, from the units of every rank.

    This is the rank with the most tokens of the group or, in a tie, the rank that has received the fewest tokens so
    far.
    """
    tokens: dict[int, list[int]] = {}
    for rank, share in enumerate(shares):
        for row in (row for unit in share for rows in unit for row in rows):
            tokens.setdefault(row.group, [0] * len(shares))[rank] += row.length
    homes: dict[int, int] = {}
    received: Counter[int] = Counter()
    for group, counts in sorted(tokens.items()):
        homes[group] = max(range(len(counts)), key=lambda rank: (counts[rank], -received[rank]))
        received[homes[group]] += sum(counts)
    return homes


def is_due(step: int, every: int) -> bool:
    """Return True if an action that is repeated every ``every`` steps (0: never) is due at ``step``."""
    return bool(every) and step % every == 0


def split_into_updates(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """Split groups into up to ``updates`` non-empty parts of nearly equal size."""
    parts = min(updates, len(groups))
    if parts == 0:
        return []
    bounds = [round(index * len(groups) / parts) for index in range(parts + 1)]
    return [groups[low:high] for low, high in itertools.pairwise(bounds)]


def describe_passes(settings: ObjectiveSettings, *, group_tokens: int, budget: int) -> str:
    """Describe the passes for groups of ``group_tokens`` in one line, for the console and ``--dry-run``."""
    reasons = statistics_pass_reasons(settings)
    if reasons:
        return "a statistics pass, then the training pass: " + "; ".join(reasons)
    text = "one forward for statistics, advantages and backward"
    if group_tokens <= budget:
        return f"{text} (micro-batches of whole groups)"
    size = f"{group_tokens} tokens, training.micro_batch_tokens={budget}"
    if advantages_known_before_forward(settings):
        return (
            f"{text}, also for groups that do not fit into one micro-batch ({size}), because their advantages need "
            "only rewards"
        )
    return (
        f"{text}; groups that do not fit into one micro-batch ({size}) need a second forward for all micro-batches but "
        "the last"
    )


def statistics_pass_reasons(settings: ObjectiveSettings) -> tuple[str, ...]:
    """Return the reasons for a statistics pass before training; empty if none is needed."""
    algorithm, correction = settings.algorithm, settings.correction
    needed = estimator_requirements(settings)
    reasons = []
    if algorithm.updates_per_step > 1:
        reasons.append(
            f"{algorithm.updates_per_step} updates on the same trajectories need log-probabilities from before the "
            "updates"
        )
    if needed.step_wide and not advantages_known_before_forward(settings):
        reasons.append(needed.reason)
    if "values" in needed.inputs:
        reasons.append("the critic's values must be computed before its update")
    if "trajectory_energy" in needed.inputs:
        reasons.append("exact energies need a separate forward and backward pass")
    if LOSSES.traits(algorithm.loss).step_wide:
        reasons.append(f"the loss {algorithm.loss} selects tokens over the whole step")
    if correction.self_normalize:
        reasons.append("self-normalized weights need the mean over the whole step (correction.self_normalize)")
    if correction.masks_tokens and settings.aggregation != "token_sum":
        reasons.append(
            "the divisor of the loss counts the tokens that correction.ratio_mask and correction.divergence_mask keep "
            "in the whole step"
        )
    return tuple(reasons)
