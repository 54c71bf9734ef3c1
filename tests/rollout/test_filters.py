"""What enters a baseline, what enters the loss, and which groups are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from rollout.fakes import played, problem

from agentrl.errors import SettingsError
from agentrl.rollout.filters import COUNTED_REASONS, FilterRules, filter_groups
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.types import Ended, Verdict

KEEP_ALL: dict[str, Any] = {
    "void_turns": "exclude",
    "truncated": "train",
    "accuracy_range": None,
    "drop_zero_variance": False,
}
NOTHING = dict.fromkeys(COUNTED_REASONS, 0)


def group(*trajectories: Trajectory, index: int = 0) -> Group:
    return Group(problem=problem(index), index=index, trajectories=trajectories)


def rewarded(*rewards: float, index: int = 0) -> Group:
    return group(*(played(r, group=index, sample=n) for n, r in enumerate(rewards)), index=index)


def graded(right: int, of: int, *, reward: float = 1.0, otherwise: float = 0.0) -> Group:
    """``right`` of ``of`` answers are correct."""
    rows = [(reward, Verdict.CORRECT)] * right + [(otherwise, Verdict.INCORRECT)] * (of - right)
    return group(*(played(value, sample=n, verdict=verdict) for n, (value, verdict) in enumerate(rows)))


class Filtered(NamedTuple):
    groups: tuple[Group, ...]
    counts: dict[str, int]

    @property
    def no_loss(self) -> set[tuple[int, int]]:
        """Rollouts (group, sample) that leave the loss."""
        return {(group.index, sample) for group in self.groups for sample, _ in group.masked}


def apply(*groups: Group, **rules: Any) -> Filtered:
    return Filtered(*filter_groups(groups, FilterRules(**{**KEEP_ALL, **rules})))


def samples(filtered: Filtered) -> list[list[int]]:
    return [[item.sample for item in kept.trajectories] for kept in filtered.groups]


def with_void() -> Group:
    return group(played(1.0), played(sample=1, ended=Ended.VOID_TURN), played(sample=2))


def test_nothing_to_filter() -> None:
    filtered = apply(rewarded(0.0, 1.0), rewarded(1.0, 1.0, index=1))
    assert (samples(filtered), filtered.no_loss, filtered.counts) == ([[0, 1], [0, 1]], set(), NOTHING)


def test_void_turns_are_excluded() -> None:
    filtered = apply(with_void())
    assert (samples(filtered), filtered.no_loss, filtered.counts["void"]) == ([[0, 2]], set(), 1)


def test_void_turns_stay_in_the_baseline_as_published_code_has_it() -> None:
    filtered = apply(with_void(), void_turns="mask")
    assert (samples(filtered), filtered.no_loss, filtered.counts["void"]) == ([[0, 1, 2]], {(0, 1)}, 1)


@pytest.mark.parametrize("void_turns", ["exclude", "mask"])
def test_a_group_of_void_turns_alone_is_dropped(void_turns: str) -> None:
    void = group(*(played(sample=sample, ended=Ended.VOID_TURN) for sample in range(2)))
    filtered = apply(void, void_turns=void_turns)
    assert (filtered.groups, filtered.no_loss) == ((), set())
    assert filtered.counts == {**NOTHING, "void": 2, "dropped_empty": 1}


@pytest.mark.parametrize("limit", [Ended.TURN_LIMIT, Ended.TOKEN_LIMIT, Ended.DEADLINE])
@pytest.mark.parametrize(
    ("truncated", "kept", "no_loss", "count"),
    [("train", [0, 1, 2], set(), 0), ("mask", [0, 1, 2], {(0, 1)}, 1), ("exclude", [0, 2], set(), 1)],
)
def test_rollouts_that_a_limit_ended(limit: Ended, truncated: str, kept: list[int], no_loss: set[Any], count: int):
    cut = group(played(1.0), played(sample=1, ended=limit), played(sample=2, ended=Ended.STOPPED))
    filtered = apply(cut, truncated=truncated)
    assert (samples(filtered), filtered.no_loss, filtered.counts) == ([kept], no_loss, {**NOTHING, "truncated": count})


@pytest.mark.parametrize(("truncated", "trained"), [("train", 1), ("mask", 1), ("exclude", 0)])
def test_a_truncated_rollout_gives_variance_unless_it_is_excluded(truncated: str, trained: int):
    cut = group(played(1.0), played(1.0, sample=1), played(0.0, sample=2, ended=Ended.TOKEN_LIMIT))
    filtered = apply(cut, truncated=truncated, drop_zero_variance=True)
    assert (len(filtered.groups), filtered.counts["dropped_zero_variance"]) == (trained, 1 - trained)


@pytest.mark.parametrize("truncated", ["mask", "exclude"])
def test_a_group_without_a_finished_rollout_is_dropped(truncated: str):
    cut = group(played(ended=Ended.TOKEN_LIMIT), played(sample=1, ended=Ended.TURN_LIMIT))
    assert apply(cut, truncated=truncated).counts == {**NOTHING, "truncated": 2, "dropped_empty": 1}


@pytest.mark.parametrize(("truncated", "rows"), [("train", [0, 1, 1]), ("mask", [0, 1, 1]), ("exclude", [0])])
def test_the_branches_of_a_truncated_rollout_are_one_rollout(truncated: str, rows: list[int]):
    branches = [played(sample=1, ended=Ended.TURN_LIMIT, branch=branch, branches=2) for branch in range(2)]
    filtered = apply(group(played(1.0), *branches), truncated=truncated)
    assert samples(filtered) == [rows]
    assert filtered.no_loss == ({(0, 1)} if truncated == "mask" else set())
    assert filtered.counts["truncated"] == (0 if truncated == "train" else 1)


def test_what_is_no_data_is_in_no_baseline() -> None:
    filtered = apply(
        group(
            played(1.0),
            played(sample=1, ended=Ended.INFRASTRUCTURE_FAILURE),
            played(sample=2, ended=Ended.CANCELLED),
            played(sample=3, verdict=Verdict.GRADER_TIMEOUT),
            played(sample=4, verdict=Verdict.INCORRECT),
            played(sample=5, verdict=Verdict.ANSWER_TIMEOUT),
        )
    )
    assert (samples(filtered), filtered.counts) == ([[0, 4, 5]], {**NOTHING, "excluded": 3})


def test_no_data_does_not_turn_a_right_group_into_one_with_variance() -> None:
    # Scored as 0 the failure would make this group look informative.
    failed = group(played(1.0), played(1.0, sample=1), played(sample=2, ended=Ended.INFRASTRUCTURE_FAILURE))
    assert apply(failed, drop_zero_variance=True).counts["dropped_zero_variance"] == 1


@pytest.mark.parametrize(("right", "kept"), [(0, 0), (1, 1), (3, 1), (4, 0)])
def test_the_accuracy_range_includes_its_ends(right: int, kept: int) -> None:
    filtered = apply(graded(right, 4), accuracy_range=(0.25, 0.75))
    assert (len(filtered.groups), filtered.counts["dropped_accuracy"]) == (kept, 1 - kept)


@pytest.mark.parametrize(("reward", "otherwise"), [(1.0, -1.0), (10.0, 0.0), (0.05, 0.0), (-0.2, -1.0)])
def test_accuracy_is_the_share_of_correct_verdicts_whatever_they_are_worth(reward: float, otherwise: float) -> None:
    def kept(right: int) -> int:
        return len(apply(graded(right, 4, reward=reward, otherwise=otherwise), accuracy_range=(0.1, 0.9)).groups)

    assert [kept(right) for right in range(5)] == [0, 1, 1, 1, 0]


def test_a_forked_rollout_counts_once_in_the_accuracy() -> None:
    # A correct rollout, and a tree with four incorrect leaves: 1 of 2 rollouts, not 1 of 5 leaves.
    root = played(sample=1, ended=Ended.FORKED, branches=5, path_weight=1.0)
    leaves = [
        played(sample=1, verdict=Verdict.INCORRECT, branch=n, branches=5, parent=0, fork=2, path_weight=0.25)
        for n in range(1, 5)
    ]
    forked = group(played(1.0, verdict=Verdict.CORRECT), root, *leaves)
    assert len(apply(forked, accuracy_range=(0.5, 0.6)).groups) == 1
    assert apply(forked, accuracy_range=(0.1, 0.4)).counts["dropped_accuracy"] == 1


def test_what_gave_no_answer_is_not_correct() -> None:
    cut = group(
        played(1.0, verdict=Verdict.CORRECT),
        played(sample=1, ended=Ended.TOKEN_LIMIT),
        played(sample=2, ended=Ended.STOPPED),
    )
    assert len(apply(cut, accuracy_range=(0.3, 0.4)).groups) == 1
    unanswered = group(*(played(1.0, sample=n, ended=Ended.TURN_LIMIT) for n in range(2)))
    assert apply(unanswered, accuracy_range=(0.1, 0.9)).counts["dropped_accuracy"] == 1


def test_an_accuracy_range_without_verdicts_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.accuracy_range needs verdicts .* problem toy-7.*=null"):
        apply(rewarded(0.0, 1.0, index=7), accuracy_range=(0.1, 0.9))
    mixed = group(played(verdict=Verdict.INCORRECT), played(1.0, sample=1))
    with pytest.raises(SettingsError, match="verdicts"):
        apply(mixed, accuracy_range=(0.1, 0.9))


def test_removed_void_turns_are_not_in_the_accuracy() -> None:
    # 1 of 2 without the void turn, 1 of 3 with it.
    rows = (
        played(1.0, verdict=Verdict.CORRECT),
        played(sample=1, ended=Ended.VOID_TURN),
        played(sample=2, verdict=Verdict.INCORRECT),
    )
    assert len(apply(group(*rows), accuracy_range=(0.5, 1.0)).groups) == 1
    assert len(apply(group(*rows), accuracy_range=(0.5, 1.0), void_turns="mask").groups) == 0


def test_groups_without_variance_teach_nothing() -> None:
    filtered = apply(rewarded(0.5, 0.5), rewarded(0.0, 1.0, index=1), drop_zero_variance=True)
    assert ([kept.index for kept in filtered.groups], filtered.counts["dropped_zero_variance"]) == ([1], 1)


def test_a_singleton_has_no_variance() -> None:
    assert len(apply(rewarded(1.0)).groups) == 1
    assert apply(rewarded(1.0), drop_zero_variance=True).counts["dropped_zero_variance"] == 1


def test_a_greedy_rollout_gives_variance_and_takes_its_group_along_where_it_is_no_data() -> None:
    def with_greedy(reward: float, ended: Ended = Ended.ANSWERED, *, index: int) -> Group:
        greedy = played(reward, group=index, sample=9, ended=ended)
        return replace(rewarded(1.0, 1.0, index=index), greedy=greedy)

    groups = [
        with_greedy(1.0, index=0),
        with_greedy(0.0, index=1),
        with_greedy(0.0, Ended.INFRASTRUCTURE_FAILURE, index=2),
    ]
    filtered = apply(*groups, drop_zero_variance=True)
    assert [kept.index for kept in filtered.groups] == [1]
    assert filtered.counts == {**NOTHING, "dropped_zero_variance": 1, "dropped_no_greedy": 1}
    assert [item.sample for item in filtered.groups[0].trajectories] == [0, 1]
