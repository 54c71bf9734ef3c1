"""The plan of a step: which passes it takes, and its trajectories packed into micro-batches, equally many on all ranks.

One forward serves statistics, advantages and backward if each micro-batch holds everything that its loss needs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algorithms import LOSSES
from agentrl.rollout.worker import RolloutBatch
from agentrl.training.step.objective_settings import ObjectiveSettings, needs
from agentrl.trajectory import Group, Row, Trajectory


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """The rows of one forward. ``dummy`` rows take part in collectives and have no weight."""

    rows: tuple[Row, ...]
    dummy: bool = False

    @property
    def lengths(self) -> list[int]:
        """Prompt and response tokens of each row."""
        return [row.length for row in self.rows]


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """One rank's part of an optimizer update. The counts are over all ranks."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int  # that the filters leave to the loss
    sequences: float  # of these tokens, a rollout's branches as one
    model_tokens: int  # all that the model sampled


@dataclass(frozen=True, kw_only=True)
class PassPlan:
    """The passes of a step: one forward, or a statistics pass first for these ``reasons``."""

    reasons: tuple[str, ...]

    @property
    def one_forward(self) -> bool:
        return not self.reasons

    def describe(self) -> str:
        """One line for the console and ``--dry-run``."""
        if self.one_forward:
            return "one forward for statistics, advantages and backward (micro-batches of whole groups)"
        return "a statistics pass, then the training pass: " + "; ".join(self.reasons)


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank's work in one step. The plans of all ranks have the same number of micro-batches."""

    step: int
    version: int  # of the policy that is trained
    passes: PassPlan
    updates: tuple[UpdatePlan, ...]
    head_exact: bool
    no_loss: frozenset[tuple[int, int]]  # (group, sample) of trajectories without a loss
    trajectories: int  # over all ranks
    greedy_returns: dict[int, float]  # reward of a group's greedy rollout
    homes: dict[int, int]  # the rank that receives all rows of a group in a statistics pass
    metrics: dict[str, float]


def pack(
    units: Sequence[Sequence[Trajectory]], budget: int, *, ranks: int, attention_length: float = math.inf
) -> list[list[MicroBatch]]:
    """Micro-batches for each rank: units stay whole, tokens are at most ``budget``, numbers are equal.

    Units (a group, or some of its trajectories) go from the costliest to the cheapest, each to the micro-batch with the
    least cost that has room for it; there are as few micro-batches as that allows. So all cost nearly the same, and
    ranks seldom wait for each other. A unit larger than the budget gets a micro-batch of its own. Attention over a
    trajectory of ``attention_length`` tokens costs as much as everything else.
    """
    costs = {id(unit): _cost(unit, attention_length) for unit in units}
    ordered = sorted(units, key=lambda unit: costs[id(unit)], reverse=True)
    bins = _fill(ordered, [costs[id(unit)] for unit in ordered], budget, ranks=ranks)
    plans: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for number, rows in enumerate(bins):
        turn, place = divmod(number, ranks)
        rank = place if turn % 2 == 0 else ranks - 1 - place  # who got the costliest of one turn gets the cheapest
        plans[rank].append(MicroBatch(rows=tuple(map(Row.of, rows))))
    most = max(len(plan) for plan in plans)
    shortest = min((row for unit in units for row in unit), key=lambda item: item.length)
    filler = MicroBatch(rows=(Row.of(shortest),), dummy=True)
    return [plan + [filler] * (most - len(plan)) for plan in plans]


def packed_tokens(rows: Sequence[Trajectory]) -> int:
    """Tokens of these trajectories in one row, where each distinct prompt stands once."""
    prompts = {row.prompt_ids for row in rows}
    return sum(map(len, prompts)) + sum(row.length - len(row.prompt_ids) for row in rows)


def pieces(group: Sequence[Trajectory], most: int) -> list[Sequence[Trajectory]]:
    """A group in parts of at most ``most`` tokens, or of one trajectory each: as many as possible share its prompt."""
    parts: list[list[Trajectory]] = []
    for row in sorted(group, key=lambda item: item.length, reverse=True):
        if parts and packed_tokens([*parts[-1], row]) <= most:
            parts[-1].append(row)
        else:
            parts.append([row])
    return [*parts]


def _cost(rows: Sequence[Trajectory], attention_length: float) -> float:
    return packed_tokens(rows) + sum(row.length**2 for row in rows) / attention_length


def _fill(
    units: Sequence[Sequence[Trajectory]], costs: Sequence[float], budget: int, *, ranks: int
) -> list[list[Trajectory]]:
    """The rows of every micro-batch, the costliest first."""
    sizes = [packed_tokens(unit) for unit in units]
    count = max(1, math.ceil(sum(sizes) / budget / ranks)) * ranks
    while True:
        bins: list[list[Trajectory]] = [[] for _ in range(count)]
        spent, tokens = np.zeros(count), np.zeros(count, dtype=np.int64)
        for unit, cost, size in zip(units, costs, sizes, strict=True):
            has_room = (tokens == 0) | (tokens + size <= budget)
            place = int(np.where(has_room, spent, np.inf).argmin())
            if not has_room[place]:
                break
            bins[place] += unit
            spent[place] += cost
            tokens[place] += size
        else:
            order = sorted(range(count), key=lambda place: -spent[place])
            return [bins[place] for place in order if bins[place]]
        count += ranks


def plan_step(
    rollouts: RolloutBatch,
    settings: ObjectiveSettings,
    *,
    budget: int,
    ranks: int,
    attention_length: float = math.inf,
) -> list[RankPlan]:
    """The plan of every rank for one rollout batch; no updates if no group is left to train.

    ``attention_length`` as in :func:`pack`.
    """
    groups, algorithm = rollouts.groups, settings.algorithm
    largest = max((packed_tokens(group.trajectories) for group in groups), default=0)
    passes = plan_passes(settings, group_tokens=largest, budget=budget)
    # The head-exact diagnostic also needs whole groups; if they do not fit, the step goes without it.
    head_exact = due(rollouts.step, algorithm.head_exact_every) and largest <= budget
    updates: list[list[UpdatePlan]] = [[] for _ in range(ranks)]
    for part in split_updates(groups, algorithm.updates_per_step):
        rows = [item for group in part for item in group.trajectories]
        units: list[Sequence[Trajectory]] = [group.trajectories for group in part]
        if not (passes.one_forward or head_exact):
            units = [piece for unit in units for piece in pieces(unit, budget // 4)]
        trained = [row for row in rows if (row.group, row.sample) not in rollouts.no_loss]
        packed = pack(units, budget, ranks=ranks, attention_length=attention_length)
        tokens = sum(row.model_tokens for row in trained)
        sequences = math.fsum(row.weight for row in trained)
        model_tokens = sum(row.model_tokens for row in rows)
        for rank, micro_batches in enumerate(packed):
            updates[rank].append(
                UpdatePlan(
                    micro_batches=tuple(micro_batches), tokens=tokens, sequences=sequences, model_tokens=model_tokens
                )
            )
    homes = find_homes(updates)
    trajectories = sum(len(group.rollouts) for group in groups)
    greedy = {group.index: group.greedy.reward for group in groups if group.greedy is not None}
    return [
        RankPlan(
            step=rollouts.step,
            version=rollouts.version,
            passes=passes,
            updates=tuple(updates[rank]),
            head_exact=head_exact,
            no_loss=rollouts.no_loss,
            trajectories=trajectories,
            greedy_returns=greedy,
            homes=homes,
            metrics=rollouts.metrics if rank == 0 else {},
        )
        for rank in range(ranks)
    ]


def find_homes(updates: Sequence[Sequence[UpdatePlan]]) -> dict[int, int]:
    """For each group, the rank that receives all its rows, from the updates of every rank."""
    tokens: dict[int, list[int]] = {}
    for rank, parts in enumerate(updates):
        for micro in (micro for part in parts for micro in part.micro_batches if not micro.dummy):
            for row in micro.rows:
                tokens.setdefault(row.group, [0] * len(updates))[rank] += row.length
    return share_out(tokens)


def share_out(tokens: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """A rank for each group, given its tokens on each: the one with most of them; in a tie, the least loaded so far.

    >>> share_out({0: [5, 5], 1: [5, 5], 2: [9, 1]})
    {0: 0, 1: 1, 2: 0}
    """
    homes: dict[int, int] = {}
    given: Counter[int] = Counter()
    for group, counts in sorted(tokens.items()):
        homes[group] = max(range(len(counts)), key=lambda rank: (counts[rank], -given[rank]))
        given[homes[group]] += sum(counts)
    return homes


def due(step: int, every: int) -> bool:
    """Whether an action of every ``every`` steps (0: never) is due at ``step``."""
    return bool(every) and step % every == 0


def split_updates(groups: Sequence[Group], updates: int) -> list[Sequence[Group]]:
    """Groups in up to ``updates`` parts of nearly equal size, none empty."""
    parts = min(updates, len(groups))
    if parts == 0:
        return []
    bounds = [round(index * len(groups) / parts) for index in range(parts + 1)]
    return [groups[low:high] for low, high in itertools.pairwise(bounds)]


def plan_passes(settings: ObjectiveSettings, *, group_tokens: int, budget: int) -> PassPlan:
    """Decide from the settings; ``group_tokens`` are those of the largest group, ``budget`` a micro-batch's."""
    return PassPlan(reasons=tuple(_reasons(settings, group_tokens, budget)))


def _reasons(settings: ObjectiveSettings, group_tokens: int, budget: int) -> Iterator[str]:
    algorithm, correction = settings.algorithm, settings.correction
    needed = needs(settings)
    if algorithm.updates_per_step > 1:
        yield f"{algorithm.updates_per_step} updates on the same trajectories need the log-probabilities before"
    if needed.step_wide:
        yield needed.reason
    if "values" in needed.inputs:
        yield "the critic's values are those before its update"
    if "trajectory_energy" in needed.inputs:
        yield "exact energies take a forward and a backward of their own"
    if LOSSES.traits(algorithm.loss).step_wide:
        yield f"the loss {algorithm.loss} selects tokens over the whole step"
    if correction.self_normalize:
        yield "self-normalised weights take the mean over the whole step (correction.self_normalize)"
    if correction.masks:
        yield "the loss mask depends on the log-probabilities (correction.ratio_mask, correction.divergence_mask)"
    if group_tokens > budget:
        yield f"a group of {group_tokens} tokens does not fit one micro-batch (training.micro_batch_tokens={budget})"
