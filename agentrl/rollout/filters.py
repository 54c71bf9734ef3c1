"""Filters that select the trajectories used for baselines and the loss, and the groups to train on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.errors import SettingsError
from agentrl.trajectory import Group, Trajectory, assign_path_weights
from agentrl_envs.types import Ended, Verdict

# Rewards that differ by at most this much count as equal.
_REWARD_TOLERANCE = 1e-8

COUNTED_REASONS = (
    "excluded", "void", "truncated", "dropped_empty", "dropped_no_greedy", "dropped_accuracy", "dropped_zero_variance",
)  # fmt: skip
"""Reasons for not training on rollouts (the first three) and groups. Metrics count each reason."""

Treatment = Literal["train", "mask", "exclude"]
"""Use of a rollout, depending on how it ended. train: without restriction. mask: in the baseline but not in the loss.
exclude: removed from the group, and therefore from the loss, the baseline and the filters."""


@dataclass(frozen=True, kw_only=True)
class FilterRules:
    """Rules for :func:`filter_groups`.

    ``void_turns`` and ``truncated``: the use of rollouts with a void turn, and of rollouts that ended at a limit.
    ``accuracy_range``: drop groups whose fraction of correct verdicts is outside this range. ``drop_zero_variance``:
    drop groups with equal rewards.
    """

    void_turns: Treatment
    truncated: Treatment
    accuracy_range: tuple[float, float] | None
    drop_zero_variance: bool

    def treatment(self, ended: Ended) -> Treatment:
        """Return the treatment of a rollout that ended as ``ended``."""
        if ended is Ended.VOID_TURN:
            return self.void_turns
        return self.truncated if ended.is_truncation else "train"


def filter_groups(groups: Iterable[Group], rules: FilterRules) -> tuple[tuple[Group, ...], dict[str, int]]:
    """Return the groups to train on, and the numbers of rollouts and groups not trained on, by reason.

    The rules apply in this order: excluded rollouts, void turns and truncation, empty groups, a failed greedy rollout,
    accuracy, equal rewards. Rollouts in the baseline but not in the loss are listed in :attr:`.Group.masked`. A failed
    greedy rollout removes its group. The reward of any other greedy rollout counts only in the group's variance. Raises
    SettingsError if ``accuracy_range`` is set but answers are not graded.
    """
    counts = dict.fromkeys(COUNTED_REASONS, 0)
    kept: list[Group] = []
    for group in groups:
        included = [item for item in group.trajectories if not item.is_excluded]
        rollouts = [item for item in included if item.receives_reward]
        counts["excluded"] += len(group.rollouts) - len(rollouts)
        for item in rollouts:
            if rules.treatment(item.ended) != "train":
                counts["void" if item.ended is Ended.VOID_TURN else "truncated"] += 1
        included = _reweight_branches([item for item in included if rules.treatment(item.ended) != "exclude"])
        masked = frozenset((item.sample, item.branch) for item in included if rules.treatment(item.ended) == "mask")
        reason = _reason_to_drop(group, included, masked, rules)
        if reason is not None:
            counts[reason] += 1
            continue
        kept.append(replace(group, trajectories=tuple(included), masked=masked))
    return tuple(kept), counts


def _reweight_branches(included: list[Trajectory]) -> list[Trajectory]:
    """Recompute the weights of forked rollouts for their remaining branches, and drop branches of weight 0."""
    kept: list[Trajectory] = []
    for _, items in itertools.groupby(included, key=lambda item: item.sample):
        branches = list(items)
        kept += (
            branches
            if branches[0].path_weight is None
            else [one for one in assign_path_weights(branches) if one.path_weight]
        )
    return kept


def _reason_to_drop(
    group: Group, included: list[Trajectory], masked: frozenset[tuple[int, int]], rules: FilterRules
) -> str | None:
    """Return the reason for dropping a group, or None. Only trajectories that receive a reward count."""
    included = [item for item in included if item.receives_reward]
    if all((item.sample, item.branch) in masked for item in included):
        return "dropped_empty"
    if group.greedy is not None and group.greedy.is_excluded:
        return "dropped_no_greedy"
    if rules.accuracy_range is not None:
        low, high = rules.accuracy_range
        if not low <= _accuracy(included) <= high:
            return "dropped_accuracy"
    rewards = [item.reward for item in (*included, *([] if group.greedy is None else [group.greedy]))]
    if rules.drop_zero_variance and max(rewards) - min(rewards) <= _REWARD_TOLERANCE:
        return "dropped_zero_variance"
    return None


def _accuracy(included: list[Trajectory]) -> float:
    """Return the fraction of correct verdicts. A trajectory without an answer counts as incorrect.

    A forked rollout counts once, with the weights of its paths.
    """
    if any(item.ended is Ended.ANSWERED and item.verdict is None for item in included):
        raise SettingsError(
            "algorithm.accuracy_range needs verdicts on answers, but the environment returned none for problem "
            f"{included[0].problem.id}: set algorithm.accuracy_range=null, or return "
            'info["verdict"] from the environment'
        )
    correct = math.fsum(item.rollout_fraction for item in included if item.verdict is Verdict.CORRECT)
    return correct / math.fsum(item.rollout_fraction for item in included)
