"""Earlier turns as a deployed server shows them: a sequence of its own where the template writes one anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rollout.played import GRADER, PROBLEM, START, Played, PrintingSandbox, play_rows
from rollout.templates import QWEN, THINKING

from agentrl.rollout.engines.base import Completion, EngineError
from agentrl.rollout.gateway.environment import RerenderedEnvironment
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.trajectory import Trajectory
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.tools import PYTHON_SCHEMA
from agentrl_envs.types import Ended

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(7)"}}\n</tool_call>'
THOUGHT = f"<think>\nLet me compute.\n</think>\n\n{CALL}"


async def rows(
    played: Played, turns: Sequence[Completion | Exception], *, history: str = "template", **limits: Any
) -> tuple[tuple[Trajectory, ...], Any]:
    assert played.chat is not None
    environment: Any = SimpleTIREnvironment(
        played.settings,
        None,
        GRADER,
        chat=played.chat,
        sandbox=PrintingSandbox(["7"] * 3),  # type: ignore[arg-type]
    )
    if history == "template":
        renderer = ChatRenderer(played.tokenizer, played.codec)
        environment = RerenderedEnvironment(environment, renderer, [PYTHON_SCHEMA.as_openai_function()])
    return await play_rows(environment, played.codec, turns, **limits)


async def test_a_template_that_only_appends_gives_the_trajectory_that_keeping_gives() -> None:
    played = Played(QWEN, protocol="hermes")
    turns = [played.said(CALL, "eos"), played.said("It is \\boxed{5}.", "eos")]
    (kept,), _ = await rows(played, turns, history="keep")
    (shown,), _ = await rows(played, turns)
    assert (shown.prompt_ids, shown.response_ids, shown.response_mask) == (
        kept.prompt_ids,
        kept.response_ids,
        kept.response_mask,
    )
    assert [one.log_probs for one in shown.segments] == [one.log_probs for one in kept.segments]
    assert (shown.ended, shown.verdict, shown.answer, shown.reward) == (Ended.ANSWERED, kept.verdict, "5", 1.0)
    assert [call.outcome for call in shown.tool_calls] == ["ok"]


async def test_a_turn_without_its_thoughts_begins_a_sequence_of_its_own() -> None:
    played = Played(THINKING, protocol="hermes")
    first, last = played.said(THOUGHT, "eos"), played.said("It is \\boxed{5}.", "eos")
    (before, after), engine = await rows(played, [first, last])
    assert played.chat is not None
    prompt = played.codec.encode_prompt(played.chat.prompt(PROBLEM))
    assert (before.prompt_ids, before.response_ids) == (prompt, first.token_ids)
    # What a server that renders the conversation anew would give the model: no thoughts.
    assert after.prompt_ids == prompt + played.template_ids(
        f"{CALL}<|im_end|>\n{START}user\n<tool_response>\n7\n</tool_response><|im_end|>\n{START}assistant\n"
    )
    assert engine.requests[1][1] == after.prompt_ids
    assert after.response_ids == last.token_ids
    assert all(before.response_mask)
    assert all(after.response_mask)
    assert [(row.branch, row.branches) for row in (before, after)] == [(0, 2), (1, 2)]
    assert sum(row.weight for row in (before, after)) == pytest.approx(1.0)
    assert (before.reward, after.reward, after.answer) == (1.0, 1.0, "5")
    assert (sum(before.rewards), sum(after.rewards)) == (0.0, 1.0)
    (kept,), _ = await rows(played, [first, last], history="keep")
    assert kept.response_ids[: len(first.token_ids)] == first.token_ids


async def test_limits_hold_over_all_sequences() -> None:
    played = Played(THINKING, protocol="hermes")
    first, last = played.said(THOUGHT, "eos"), played.said("I do not know", "length")
    room = len(first.token_ids) + 60
    found, engine = await rows(played, [first, last], max_response_tokens=room, max_turn_tokens=room)
    assert found[-1].ended is Ended.TOKEN_LIMIT
    if len(engine.requests) > 1:
        assert engine.requests[1][2].max_tokens <= room - len(first.token_ids)


async def test_a_failed_engine_is_no_data() -> None:
    played = Played(THINKING, protocol="hermes")
    (only,), _ = await rows(played, [played.said(THOUGHT, "eos"), EngineError("gone")], retries=0)
    assert (only.ended, only.segments) == (Ended.INFRASTRUCTURE_FAILURE, ())
