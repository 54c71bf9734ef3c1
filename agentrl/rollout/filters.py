"""Which trajectories enter a baseline, which enter the loss, and which groups are trained."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.trajectory import Group
from agentrl_envs.types import Ended

# Rewards closer than this count as equal.
_TOLERANCE = 1e-8

COUNTS = ("no_data", "void", "dropped_empty", "dropped_no_greedy", "dropped_accuracy", "dropped_zero_variance")
"""Why trajectories (the first two) and groups are not trained, as they are counted."""


@dataclass(frozen=True, kw_only=True)
class FilterRules:
    """``void_turns``: ``remove`` takes them out as no data, ``loss_only`` keeps them in the baseline (as published
    code does). ``accuracy_range`` and ``drop_zero_variance`` drop whole groups."""

    void_turns: Literal["remove", "loss_only"]
    accuracy_range: tuple[float, float] | None
    drop_zero_variance: bool


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """``groups`` are trained; the rows in ``no_loss`` (group, sample) shape baselines only. ``counts`` says why the
    others are not there."""

    groups: tuple[Group, ...]
    no_loss: frozenset[tuple[int, int]]
    counts: dict[str, int]


def filter_groups(groups: Iterable[Group], rules: FilterRules) -> Filtered:
    """Apply the rules in order: no data, void turns, nothing left to train, greedy rollout, accuracy, variance.

    A greedy rollout that is no data takes its group along; its reward counts in the group's variance alone.
    """
    counts = dict.fromkeys(COUNTS, 0)
    kept: list[Group] = []
    no_loss: set[tuple[int, int]] = set()
    for group in groups:
        data = [item for item in group.trajectories if not item.no_data]
        void = [item for item in data if item.ended is Ended.VOID_TURN]
        counts["no_data"] += len(group.trajectories) - len(data)
        counts["void"] += len(void)
        if rules.void_turns == "remove":
            data = [item for item in data if item.ended is not Ended.VOID_TURN]
        verdict = _verdict(group, [item.reward for item in data], len(data) - len(void), rules)
        if verdict is not None:
            counts[verdict] += 1
            continue
        no_loss.update((item.group, item.sample) for item in data if item.ended is Ended.VOID_TURN)
        kept.append(replace(group, trajectories=tuple(data)))
    return Filtered(groups=tuple(kept), no_loss=frozenset(no_loss), counts=counts)


def _verdict(group: Group, rewards: list[float], trainable: int, rules: FilterRules) -> str | None:
    """Why a group is dropped, or None."""
    if not rewards or (rules.void_turns == "loss_only" and trainable <= 0):
        return "dropped_empty"
    if group.greedy is not None and group.greedy.no_data:
        return "dropped_no_greedy"
    if rules.accuracy_range is not None:
        low, high = rules.accuracy_range
        if not low <= sum(rewards) / len(rewards) <= high:
            return "dropped_accuracy"
    compared = rewards if group.greedy is None else [*rewards, group.greedy.reward]
    if rules.drop_zero_variance and max(compared) - min(compared) <= _TOLERANCE:
        return "dropped_zero_variance"
    return None
