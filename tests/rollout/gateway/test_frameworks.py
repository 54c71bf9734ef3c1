"""Agents of real frameworks: what was sampled for them carries loss exactly once, whatever they make of the history."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from rollout.fakes import tiny_model
from rollout.gateway.chat import chat_codec
from rollout.gateway.test_environment import play, saying
from shared import needed

from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Trajectory
from agentrl_envs.types import Ended

PACKAGES = {"openai_agents": "agents", "smolagents_tools": "smolagents", "smolagents_code": "smolagents"}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"b": 3, "a":2}}\n</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
CODE = ("Thought: I add.\n<code>\nprint(2 + 3)\n</code>", "Done.\n<code>\nfinal_answer(5)\n</code>")


class Recorded:
    """An engine that keeps what it was given and what it sampled."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    async def generate(self, token_ids: Any, *given: Any, **named: Any) -> Any:
        made = await self._engine.generate(token_ids, *given, **named)
        self.calls.append((tuple(token_ids), made.token_ids))
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def trained(rows: tuple[Trajectory, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What carries loss, each time with all tokens before it."""
    found = []
    for row in rows:
        context = row.prompt_ids
        for segment in row.segments:
            if segment.origin == "model":
                found.append((context, segment.token_ids))
            context += segment.token_ids
    return found


async def rollout_of(name: str, engine: Any, *, turn_tokens: int = 200) -> tuple[tuple[Trajectory, ...], Any, Any]:
    needed(PACKAGES[name], "dev")
    recorded = Recorded(engine)
    limits = RolloutSettings(
        max_turn_tokens=turn_tokens, max_prompt_tokens=100_000, max_response_tokens=100_000, retries=0
    )
    (group,), metrics, driver = await play(f"agent:rollout.gateway.frameworks:{name}", recorded, rollout=limits)
    assert driver.last_failure is None
    assert Counter(trained(group.trajectories)) == Counter(recorded.calls)
    return group.trajectories, metrics, recorded.calls


async def test_a_history_that_is_sent_back_is_one_sequence() -> None:
    (row,), metrics, calls = await rollout_of("openai_agents", saying(CALL, "It is 5."))
    assert (row.ended, row.reward, row.turns, len(calls)) == (Ended.ANSWERED, 1.0, 2, 2)
    assert "<tool_response>\n5\n</tool_response>" in row.segments[1].text
    assert metrics["gateway/miss_edited"] == 0


@pytest.mark.parametrize(("name", "said"), [("smolagents_tools", (CALL, FINAL)), ("smolagents_code", CODE)])
async def test_a_glued_history_is_a_branch_for_each_step(name: str, said: tuple[str, str]) -> None:
    rows, metrics, _ = await rollout_of(name, saying(*said))
    assert [(row.branch, row.turns, row.reward) for row in rows] == [(0, 1, 1.0), (1, 1, 1.0)]
    assert sum(row.weight for row in rows) == pytest.approx(1.0)
    assert metrics["gateway/miss_edited"] == 1


@pytest.mark.parametrize("name", ["openai_agents", "smolagents_tools"])
async def test_whatever_a_tiny_model_says_is_trained_once(name: str) -> None:
    engine = TransformersEngine(tiny_model(), chat_codec()[1], RolloutSettings(concurrency=1))
    try:
        rows, _, calls = await rollout_of(name, engine, turn_tokens=12)
    finally:
        await engine.close()
    assert len(calls) >= 1
    assert {row.ended for row in rows} == {Ended.ANSWERED}
