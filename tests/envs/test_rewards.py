"""Rewards of users' own: called in threads or on the loop, under a deadline, and only finite numbers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl_envs.episode import UnavailableError
from agentrl_envs.registry import PluginError
from agentrl_envs.rewards import Conversation, Message, RewardError, TimedRewardFunction, WeightedRewards
from agentrl_envs.types import Ended, Problem, Verdict
from agentrl_sandbox.client import SandboxSettings

PROBLEM = Problem(id="toy-3", statement="2 + 3?", answer="5", source="toy")
CONVERSATION = Conversation(
    turns=(Message(role="assistant", text="\\boxed{5}"),), ended=Ended.ANSWERED, answer="5", environment_reward=1.0
)
LET_GO = threading.Event()
NUMBER = 5


def length(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> float:
    assert threading.current_thread() is not threading.main_thread()
    return len(conversation.turns[0].text) + (0.5 if verdict is Verdict.CORRECT else 0.0)


async def later(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> float:
    await asyncio.sleep(0)
    return 0.25


class Callable:
    async def __call__(self, problem: Problem, conversation: Conversation, verdict: Verdict | None) -> int:
        return 2


instance = Callable()


def numpy_number(*_: Any) -> Any:
    return np.float32(0.5)


def infinite(*_: Any) -> float:
    return float("inf")


def nan(*_: Any) -> float:
    return float("nan")


def text(*_: Any) -> Any:
    return "1.0"


def truth(*_: Any) -> Any:
    return True


def huge(*_: Any) -> float:
    return 1e308


def large(*_: Any) -> float:
    return 1e6


def nothing(*_: Any) -> Any:
    return None


def bug(*_: Any) -> float:
    raise KeyError("gold")


def beyond_floats(*_: Any) -> Any:
    return 10**400


def gives_up(*_: Any) -> float:
    raise SystemExit(3)


def of_one_argument(problem: Problem) -> float:
    return 1.0


def own_timeout(*_: Any) -> float:
    raise TimeoutError("of a request inside")


def stuck(*_: Any) -> float:
    LET_GO.wait()
    return 1.0


async def stuck_on_the_loop(*_: Any) -> float:
    await asyncio.Event().wait()
    return 1.0


def reward(name: str, deadline: float = 60.0) -> TimedRewardFunction:
    return TimedRewardFunction(f"{__name__}:{name}", deadline=deadline)


@pytest.mark.parametrize(
    ("name", "value"),
    [("length", 9.5), ("later", 0.25), ("instance", 2.0), ("numpy_number", 0.5), ("truth", 1.0), ("large", 1e6)],
)
async def test_plain_and_async_functions(name: str, value: float) -> None:
    assert await reward(name)(PROBLEM, CONVERSATION, Verdict.CORRECT) == (value,)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("infinite", "returned inf; valid: a number from -1,000,000 to 1,000,000"),
        ("nan", "returned nan; valid: a number"),
        ("text", "returned '1.0'; valid: a number"),
        ("nothing", "returned None; valid: a number"),
        ("beyond_floats", r"returned 10+\.*; valid: a number"),
        ("huge", r"returned 1e\+308; valid: a number"),
        ("gives_up", r"raised SystemExit: 3 \(.*test_rewards\.py:\d+\)"),
        ("bug", r"raised KeyError: 'gold' \(.*test_rewards\.py:\d+\)"),
        ("own_timeout", "raised TimeoutError: of a request inside"),
    ],
)
async def test_what_is_no_reward_is_told_with_its_problem(name: str, message: str) -> None:
    with pytest.raises(RewardError, match=rf"the reward {__name__}:{name} {message}.* \(problem toy-3\)"):
        await reward(name)(PROBLEM, CONVERSATION, None)


@pytest.mark.parametrize("name", ["stuck", "stuck_on_the_loop"])
async def test_a_deadline_is_kept(name: str) -> None:
    try:
        with pytest.raises(TimeoutError, match=rf"the reward {__name__}:{name} took longer than 0\.05 s"):
            await reward(name, 0.05)(PROBLEM, CONVERSATION, None)
    finally:
        LET_GO.set()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:reward", "reward 'nowhere:reward': there is no module 'nowhere'"),
        (f"{__name__}:lenth", "has no 'lenth'; did you mean 'length'"),
        (f"{__name__}:NUMBER", "is a int, but must be a function"),
        ("length", "unknown reward 'length' (valid: module:attribute)"),
        (
            f"{__name__}:of_one_argument",
            "cannot be called with (problem, conversation, verdict): its parameters are (problem: ",
        ),
        ("raising_module:reward", "importing module 'raising_module' raised RuntimeError: at import ("),
        ("exiting_module:reward", "importing module 'exiting_module' raised SystemExit: 5 ("),
        ("wrong_module:reward", "importing module 'wrong_module' raised SyntaxError: "),
    ],
)
def test_what_is_no_function_is_said(path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raising_module.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "exiting_module.py").write_text("raise SystemExit(5)\n")
    (tmp_path / "wrong_module.py").write_text("def reward(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError) as caught:
        TimedRewardFunction(path, deadline=1.0)
    assert message in str(caught.value)


TWO_TURNS = Conversation(
    turns=(
        Message(role="assistant", text="a", reward=0.25),
        Message(role="tool", text="b"),
        Message(role="assistant", text="c", reward=1.0),
    ),
    ended=Ended.ANSWERED,
    answer="5",
    environment_reward=1.25,
)


def each_turn(problem: Problem, conversation: Conversation, verdict: Verdict | None) -> list[float]:
    return [len(turn.text) + number for number, turn in enumerate(conversation.turns) if turn.role == "assistant"]


def too_few(*_: Any) -> list[float]:
    return [1.0]


def closed_shop(*_: Any) -> float:
    raise ConnectionRefusedError("refused")


async def with_sandbox(problem: Problem, conversation: Conversation, verdict: Verdict | None, sandbox: Any) -> float:
    return float((await sandbox.execute(f"print({problem.answer} + 1)")).stdout)


def rewards(weights: dict[str, float]) -> WeightedRewards:
    return WeightedRewards(
        {name if name == "environment" else f"{__name__}:{name}": weight for name, weight in weights.items()},
        deadline=60.0,
        sandbox=SandboxSettings(allow_unisolated=True),
    )


async def test_functions_are_weighted_turn_by_turn_and_told_by_name() -> None:
    score = await rewards({"each_turn": 2.0, "later": -1.0, "environment": 4.0})(PROBLEM, TWO_TURNS, None)
    assert score.turns == (2.0 * 1 + 4 * 0.25, 2.0 * 3 - 0.25 + 4 * 1.0)
    assert score.parts == {"each_turn": 4.0, "later": 0.25, "environment": 1.25}


async def test_a_weight_of_zero_is_a_metric_alone() -> None:
    score = await rewards({"later": 1.0, "each_turn": 0.0})(PROBLEM, TWO_TURNS, None)
    assert (score.turns, score.parts) == ((0.0, 0.25), {"later": 0.25, "each_turn": 4.0})


async def test_a_weighted_sum_beyond_the_bound_names_the_weights() -> None:
    with pytest.raises(RewardError, match=r"problem toy-3: the weighted sum .* is 2000000\.0; .*; lower the weights"):
        await rewards({"large": 2.0})(PROBLEM, CONVERSATION, None)


async def test_turns_are_all_rewarded_or_none() -> None:
    with pytest.raises(RewardError, match=r"too_few returned 1 numbers for 2 model turns \(problem toy-3\)"):
        await rewards({"too_few": 1.0})(PROBLEM, TWO_TURNS, None)


async def test_a_service_that_does_not_answer_is_no_bug() -> None:
    with pytest.raises(UnavailableError, match=r"closed_shop raised ConnectionRefusedError: refused"):
        await rewards({"closed_shop": 1.0})(PROBLEM, TWO_TURNS, None)


@pytest.mark.slow
async def test_a_function_gets_the_sandbox_where_it_asks_for_it() -> None:
    own = rewards({"with_sandbox": 1.0})
    await own.open()
    try:
        assert (await own(PROBLEM, TWO_TURNS, None)).turns == (0.0, 6.0)
    finally:
        await own.close()
