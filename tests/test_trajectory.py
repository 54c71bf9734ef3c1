"""Segments and trajectories: what they refuse, and what they hold, by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from agentrl.trajectory import Group, Segment, Trajectory, TrajectoryError
from agentrl_envs.types import Ended, Problem, ToolCall, Verdict

PROBLEM = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy", family="sums", setup="x = 1")


def model(*ids: int, reward: float = 0.0, version: int = 0) -> Segment:
    log_probs = tuple(-0.1 * token for token in ids)
    spans = ((version, len(ids)),)
    return Segment(origin="model", token_ids=ids, text="A", log_probs=log_probs, version_spans=spans, reward=reward)


def observed(*ids: int) -> Segment:
    return Segment(origin="observation", token_ids=ids, text="E")


def trajectory(*segments: Segment, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "problem": PROBLEM,
        "step": 3,
        "group": 7,
        "sample": 0,
        "prompt_ids": (11, 12),
        "segments": segments,
        "ended": Ended.ANSWERED,
    }
    return Trajectory(**{**values, **changes})


GOOD: dict[str, Any] = {
    "origin": "model",
    "token_ids": (1, 2),
    "text": "A",
    "log_probs": (-0.1, -0.2),
    "version_spans": ((0, 2),),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": (), "log_probs": (), "version_spans": ()},
        {"origin": "system"},
        {"log_probs": (-0.1,)},
        {"log_probs": ()},
        {"log_probs": (-0.1, math.nan)},
        {"log_probs": (-0.1, -math.inf)},
        {"log_probs": (-0.1, 0.5)},
        {"version_spans": ()},
        {"version_spans": ((0, 1),)},
        {"version_spans": ((0, 2), (1, 0))},
        {"version_spans": ((0, 3), (1, -1))},
        {"reward": math.nan},
        {"reward": math.inf},
    ],
)
def test_a_model_segment_that_lies_is_refused(changes: dict[str, Any]) -> None:
    Segment(**GOOD)
    with pytest.raises(TrajectoryError):
        Segment(**{**GOOD, **changes})


@pytest.mark.parametrize(
    "changes", [{"log_probs": (-0.1,)}, {"version_spans": ((0, 1),)}, {"reward": 1.0}, {"token_ids": ()}]
)
def test_an_observation_carries_tokens_and_nothing_else(changes: dict[str, Any]) -> None:
    with pytest.raises(TrajectoryError):
        Segment(**{"origin": "observation", "token_ids": (1,), "text": "E", **changes})


def test_a_trajectory_has_a_prompt_and_a_turn_of_the_model() -> None:
    with pytest.raises(TrajectoryError, match="prompt"):
        trajectory(model(1), prompt_ids=())
    with pytest.raises(TrajectoryError, match="model token"):
        trajectory(observed(1))
    # What failed before its first turn is still recorded.
    assert trajectory(prompt_ids=(), ended=Ended.INFRASTRUCTURE_FAILURE).is_excluded


def test_the_worked_example() -> None:
    one = trajectory(model(1, 2, reward=0.25), observed(7, 8, 9), model(3, reward=1.0, version=4))
    assert one.response_ids == (1, 2, 7, 8, 9, 3)
    assert one.response_mask == (True, True, False, False, False, True)
    assert one.log_probs == (-0.1, -0.2, 0.0, 0.0, 0.0, pytest.approx(-0.3))
    assert one.rewards == (0.0, 0.25, 0.0, 0.0, 0.0, 1.0)
    assert one.versions == (0, 0, -1, -1, -1, 4)
    assert (one.reward, one.turns, one.model_tokens, one.length) == (1.25, 2, 3, 8)


@pytest.mark.parametrize(
    ("changes", "is_excluded"),
    [
        ({"ended": Ended.CANCELLED}, True),
        ({"ended": Ended.INFRASTRUCTURE_FAILURE}, True),
        ({"verdict": Verdict.GRADER_TIMEOUT}, True),
        ({"verdict": Verdict.UNPARSABLE_GOLD}, True),
        ({"verdict": Verdict.UNPARSABLE_ANSWER}, False),
        ({"verdict": Verdict.ANSWER_TIMEOUT}, False),
        ({"ended": Ended.DEADLINE}, False),
        ({"ended": Ended.VOID_TURN}, False),
    ],
)
def test_only_what_failed_outside_the_policy_is_no_data(changes: dict[str, Any], is_excluded: bool) -> None:
    assert trajectory(model(1), **changes).is_excluded is is_excluded


def test_a_record_survives_json() -> None:
    one = trajectory(
        model(1, 2),
        observed(7),
        model(3, reward=1.0),
        verdict=Verdict.CORRECT,
        answer="5",
        tool_calls=(ToolCall(outcome="ok", seconds=0.5), ToolCall(outcome="error", seconds=0.1, truncated=True)),
        seconds=1.5,
    )
    record = json.loads(json.dumps(one.to_record()))
    assert Trajectory.from_record(record) == one
    assert (record["ended"], record["segments"][1]["origin"]) == ("answered", "observation")


def test_a_group_without_some_keeps_the_others() -> None:
    first, twin, last = (trajectory(model(1), sample=sample) for sample in (0, 0, 2))
    group = Group(problem=PROBLEM, index=7, trajectories=(first, twin, last))
    # Identity counts, not equality: the twin stays.
    assert [id(item) for item in group.without_trajectories([first]).trajectories] == [id(twin), id(last)]
