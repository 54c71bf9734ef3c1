"""The allowances of ranks and the judgement of the worker, in plain seconds."""

from __future__ import annotations

from functools import partial

import torch
from torch._dynamo.callback import callback_handler

from agentrl.training.engine.heartbeat import Heartbeat, HeartbeatMonitor, HeartbeatState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def beat(*place: int, allowed: float = 60.0, marks: int = 0, waits: bool = False) -> HeartbeatState:
    return HeartbeatState(
        node="n1",
        position=(place[0], place[1]),
        activity="work",
        allowed_seconds=allowed,
        progress_count=marks,
        waits_for_worker=waits,
    )


def watched(*beats: HeartbeatState, now: float = 0.0) -> HeartbeatMonitor:
    watch = HeartbeatMonitor(len(beats), deadline=60.0)
    for rank, own in enumerate(beats):
        watch.record_heartbeat(rank, own, now)
    assert watch.stuck_ranks(now) == []
    return watch


def heard(watch: HeartbeatMonitor, ranks: dict[int, HeartbeatState], *, until: int) -> None:
    """Each second the ranks send the same beat again, and the worker looks."""
    for second in range(until + 1):
        for rank, own in ranks.items():
            watch.record_heartbeat(rank, own, float(second))
        assert watch.stuck_ranks(float(second)) == []


def test_the_first_step_compiles_and_is_not_measured() -> None:
    clock = Clock()
    heartbeat = Heartbeat(deadline=60.0, slow=1800.0, clock=clock)
    allowed = []
    heartbeat.mark_step_start(0)  # no group to train
    for step, seconds in ((1, 500.0), (2, 2.0), (3, 9.0), (4, 1.0)):
        heartbeat.mark_wait_start(f"the plan of step {step}")
        allowed.append(heartbeat.beat.allowed_seconds)
        heartbeat.mark_step_start(step)
        for _ in range(2):  # passes
            heartbeat.mark_pass_start()
            allowed.append(heartbeat.beat.allowed_seconds)
            clock.now += seconds
        heartbeat.mark_passes_end()
        allowed.append(heartbeat.beat.allowed_seconds)
        clock.now += 1000.0  # an update, a checkpoint: not a pass
    first, second = [60.0, 1800.0, 1800.0, 1800.0], [60.0, 1800.0, 60.0, 1800.0]
    assert allowed == [*first, *second, 60.0, 60.0, 90.0, 1800.0, 60.0, 90.0, 90.0, 1800.0]


def test_a_pass_in_which_torch_compiles_has_more_time_and_is_not_measured() -> None:
    clock = Clock()
    heartbeat = Heartbeat(deadline=60.0, slow=1800.0, clock=clock)
    for step in (1, 2):
        heartbeat.mark_step_start(step)
        heartbeat.mark_pass_start()
    clock.now += 7.0
    heartbeat.mark_pass_start()
    position = heartbeat.beat.position
    callback_handler.register_start_callback(heartbeat.allow_compilation_time)
    try:
        torch.compile(lambda values: values + 1, backend="eager")(torch.zeros(2))
    finally:
        callback_handler.remove_start_callback(heartbeat.allow_compilation_time)
    assert (heartbeat.beat.allowed_seconds, heartbeat.beat.position) == (1800.0, position)
    clock.now += 500.0
    heartbeat.mark_pass_start()
    assert heartbeat.beat.allowed_seconds == 70.0


def test_every_mark_is_at_a_later_place_and_a_wait_repeats_its_own() -> None:
    heartbeat = Heartbeat(deadline=60.0, slow=10.0)
    beats = [heartbeat.beat]
    waits = partial(heartbeat.mark_wait_start, "the worker")
    for mark in (partial(heartbeat.mark_step_start, 1), heartbeat.mark_pass_start, heartbeat.mark_passes_end, waits):
        mark()
        beats.append(heartbeat.beat)
    assert [one.position for one in beats] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    heartbeat.repeat_mark()
    assert (heartbeat.beat.position, heartbeat.beat.progress_count) == ((1, 0), beats[-1].progress_count + 1)
    assert {one.allowed_seconds for one in beats} == {60.0}  # never less than cluster.deadline


def test_a_shorter_allowance_is_reported_at_once() -> None:
    heartbeat, reported = Heartbeat(deadline=60.0, slow=1800.0), list[float]()
    heartbeat.shortened = lambda: reported.append(heartbeat.beat.allowed_seconds)
    heartbeat.mark_wait_start("the plan")
    for mark in (
        heartbeat.repeat_mark,
        partial(heartbeat.mark_wait_start, "more"),
        partial(heartbeat.mark_step_start, 1),
        heartbeat.mark_pass_start,
    ):
        mark()
        assert reported == [60.0]
    heartbeat.mark_wait_start("the worker")
    assert reported == [60.0, 60.0]


def test_of_ranks_that_wait_for_each_other_the_last_one_is_stuck() -> None:
    ahead, behind = beat(5, 8), beat(5, 7)
    watch = watched(ahead, behind)
    heard(watch, {0: ahead, 1: behind}, until=60)
    assert watch.stuck_ranks(61.0) == [1]
    assert watch.describe_stuck_rank(1, 61.0) == (
        "training rank 1 on n1 is stuck: no progress for 61 s in work, longer than the 60 s allowed (cluster.deadline)"
    )


def test_a_rank_may_wait_for_as_long_as_others_go_on() -> None:
    waiting = beat(5, 8)
    watch = watched(waiting, beat(5, 0, allowed=600.0))
    heard(watch, {0: waiting}, until=599)  # the other computes one long pass
    watch.record_heartbeat(1, beat(5, 8, marks=1), 600.0)  # it arrives: the first one has waited long at the same place
    watch.record_heartbeat(0, waiting, 600.0)
    assert watch.stuck_ranks(600.0) == []


def test_a_stopped_process_is_told_from_one_that_waits_for_it() -> None:
    same = beat(5, 7)
    watch = watched(same, same)
    heard(watch, {0: same}, until=60)
    assert watch.stuck_ranks(61.0) == [1]
    assert watch.describe_stuck_rank(1, 61.0).endswith(
        "; its process does not respond, as when it was stopped with SIGSTOP"
    )


def test_a_silent_process_is_stuck_wherever_it_is() -> None:
    ahead, behind = beat(5, 8, allowed=1800.0), beat(5, 8, allowed=1800.0)
    watch = watched(ahead, behind)
    heard(watch, {0: ahead}, until=600)  # ten times the deadline
    assert watch.stuck_ranks(601.0) == [1]
    assert watch.describe_stuck_rank(1, 601.0) == (
        "training rank 1 on n1 is stuck: no progress for 601 s in work; its process does not respond, as when it was "
        "stopped with SIGSTOP"
    )


def test_a_rank_that_waits_for_the_worker_is_not_excused_by_others() -> None:
    watch = watched(beat(6, 0, waits=True), beat(6, 0, waits=True))
    for second in range(61):
        watch.record_heartbeat(0, beat(6, 0, waits=True, marks=second), float(second))
        assert watch.stuck_ranks(float(second)) == []
    assert watch.stuck_ranks(61.0) == [1]


def test_nobody_is_stuck_after_all_processes_were_suspended() -> None:
    watch = watched(beat(5, 7), beat(5, 7))
    assert watch.stuck_ranks(1000.0) == []
    assert watch.stuck_ranks(1004.0) == []
    heard_last = [watch.stuck_ranks(1004.0 + seconds) for seconds in range(60)]
    assert heard_last[-1] == [0, 1]


def test_a_rank_that_has_not_started_is_not_watched() -> None:
    watch = HeartbeatMonitor(2, deadline=60.0)
    watch.record_heartbeat(0, beat(0, 0), 0.0)
    assert [watch.stuck_ranks(float(second)) for second in range(100)] == [[]] * 100


def test_a_single_process_may_be_suspended() -> None:
    work = beat(5, 7)
    watch = watched(work)
    assert [watch.stuck_ranks(float(second)) for second in range(700)] == [[]] * 700
    for second in range(700, 760):  # it goes on
        watch.record_heartbeat(0, work, float(second))
        assert watch.stuck_ranks(float(second)) == []
    watch.record_heartbeat(0, work, 761.0)
    assert watch.stuck_ranks(761.0) == [0]
