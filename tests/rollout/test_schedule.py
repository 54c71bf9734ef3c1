"""The schedule's arithmetic: what it promises holds for every order in which groups may finish."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.schedule import GroupSchedule


def start(schedule: GroupSchedule, first: int, *, extra: int = 0) -> int:
    """Start all that may start; the next number."""
    for _ in range(schedule.groups_to_issue(extra)):
        schedule.record_start(first)
        first += 1
    return first


@settings(max_examples=300)
@given(
    groups=st.integers(1, 4),
    staleness=st.integers(0, 3),
    batches=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    keep=st.sampled_from([1.0, 0.5]),
)
def test_every_group_is_trained_in_time_whatever_finishes_first(
    groups: int, staleness: int, batches: int, seed: int, keep: float
) -> None:
    """A random order of finishing, some batches taking more than their share; nobody ever waits for nothing."""
    chance = random.Random(seed)
    schedule = GroupSchedule(groups=groups, max_staleness=staleness, batches=batches)
    next_index, issued_at, trained_in = 0, {}, {}
    running: list[int] = []
    for batch in range(batches):
        taken, wanted, rounds = 0, groups, 0
        while wanted:
            extra = wanted if rounds else 0
            before = next_index
            next_index = start(schedule, next_index, extra=extra)
            new = range(before, next_index)
            running += new
            issued_at |= dict.fromkeys(new, batch)
            chosen = schedule.take_groups(wanted, refill=rounds > 0)
            if chosen is None:
                assert running, "waits for ever"
                done = running.pop(chance.randrange(len(running)))
                schedule.record_finish(done)
                continue
            assert chosen == sorted(chosen)
            trained_in |= dict.fromkeys(chosen, batch)
            taken += len(chosen)
            rounds += 1
            assert schedule.finished_groups + schedule.running_groups <= staleness * groups
            wanted = chance.randint(1, groups) if rounds < 3 and chance.random() > keep else 0
        schedule.record_trained()
    assert all(trained_in[index] - issued_at[index] <= staleness for index in trained_in)
    assert set(issued_at) == set(trained_in), "issued and never trained"


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_admission_is_the_published_bound(staleness: int) -> None:
    """issued < (trained batches + max_staleness + 1) * groups, at every moment."""
    schedule = GroupSchedule(groups=3, max_staleness=staleness)
    issued = 0
    for trained in range(10):
        issued = start(schedule, issued)
        assert issued == (trained + staleness + 1) * 3
        for index in range(trained * 3, trained * 3 + 3):
            schedule.record_finish(index)
        assert schedule.take_groups(3) == [trained * 3, trained * 3 + 1, trained * 3 + 2]
        assert schedule.groups_to_issue() == 0  # not before the batch is trained
        schedule.record_trained()


def test_without_staleness_the_order_is_that_of_issue() -> None:
    schedule = GroupSchedule(groups=2, max_staleness=0)
    assert start(schedule, 0) == 2
    schedule.record_finish(1)
    assert schedule.take_groups(1) is None  # 0 would be late
    schedule.record_finish(0)
    assert schedule.take_groups(2) == [0, 1]


def test_an_overtaker_waits_if_those_behind_would_not_all_fit() -> None:
    schedule = GroupSchedule(groups=1, max_staleness=2)
    assert start(schedule, 0) == 3
    schedule.record_finish(2)
    assert schedule.take_groups(1) == [2]  # 0 and 1 have two batches left
    schedule.record_trained()
    assert start(schedule, 3) == 4
    schedule.record_finish(3)
    assert (
        schedule.take_groups(1) is None
    )  # 0 and 1 are both due within two batches, and one of them would be this one's
    schedule.record_finish(1)
    assert schedule.take_groups(1) == [1]
    schedule.record_trained()
    schedule.record_finish(0)
    assert schedule.take_groups(1) == [0]


def test_overlapped_starts_a_batch_when_the_one_before_is_taken() -> None:
    schedule = GroupSchedule(groups=2, max_staleness=1, starts_early=False, batches=2)
    assert start(schedule, 0) == 2
    schedule.record_finish(0)
    schedule.record_finish(1)
    assert schedule.groups_to_issue() == 0
    assert schedule.take_groups(2) == [0, 1]
    assert start(schedule, 2) == 4  # while it trains
    schedule.record_trained()
    assert schedule.groups_to_issue() == 0
    schedule.record_finish(2)
    schedule.record_finish(3)
    assert schedule.take_groups(2) == [2, 3]
    assert schedule.groups_to_issue() == 0  # the last batch


def test_the_last_batches_leave_nothing_over() -> None:
    schedule = GroupSchedule(groups=4, max_staleness=3, batches=2)
    assert start(schedule, 0) == 8
    for index in range(8):
        schedule.record_finish(index)
    assert schedule.take_groups(4) == [0, 1, 2, 3]
    schedule.record_trained()
    assert schedule.groups_to_issue() == 0
    assert schedule.take_groups(4) == [4, 5, 6, 7]


class Counted(int):
    """A group's number that counts how often a container looks it up."""

    looked_up = 0

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return int(self)


@pytest.mark.parametrize("staleness", [1, 4])
def test_work_grows_with_the_number_of_groups_and_not_with_its_square(staleness: int) -> None:
    """As ``BackgroundSource`` does it: after each group that finishes the batch is asked for."""
    groups = 1536
    schedule = GroupSchedule(groups=groups, max_staleness=staleness)
    numbers = [Counted(index) for index in range(schedule.groups_to_issue())]
    Counted.looked_up = 0
    for number in numbers:
        schedule.record_start(number)
    for number in reversed(numbers):  # the oldest last: the batch has to be waited for all the time
        schedule.record_finish(number)
        schedule.take_groups(groups)
    assert schedule.finished_groups <= staleness * groups
    assert Counted.looked_up <= 10 * len(numbers)


@settings(max_examples=200)
@given(
    groups=st.integers(1, 3),
    staleness=st.integers(0, 3),
    moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=60),
)
def test_a_batch_is_taken_exactly_if_those_behind_it_can_be_in_time(
    groups: int, staleness: int, moves: list[tuple[int, int]]
) -> None:
    """Against the rule as it is written: the k-th of those behind is due in the batch that k batches' worth fill."""
    schedule = GroupSchedule(groups=groups, max_staleness=staleness)
    issued: dict[int, int] = {}
    done: set[int] = set()
    taken = trained = 0
    for move, number in moves:
        if move == 0 and schedule.groups_to_issue():
            index = 1000 - len(issued) - taken * 100  # numbers need not rise
            while index in issued:
                index -= 1
            schedule.record_start(index)
            issued[index] = trained
        elif move == 1 and len(issued) > len(done):
            index = [index for index in issued if index not in done][number % (len(issued) - len(done))]
            schedule.record_finish(index)
            done.add(index)
        elif move == 2 and taken == trained:
            chosen = [index for index in issued if index in done][:groups]
            behind = [at for index, at in issued.items() if index not in chosen]
            late = any(place >= (at + staleness - taken) * groups for place, at in enumerate(behind))
            expected = None if len(chosen) < groups or late else chosen
            assert schedule.take_groups(groups) == expected
            if expected is not None:
                taken += 1
                issued = {index: at for index, at in issued.items() if index not in expected}
                done -= set(expected)
        elif move == 3 and taken > trained:
            schedule.record_trained()
            trained += 1
