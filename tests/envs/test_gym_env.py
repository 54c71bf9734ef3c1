"""SimpleTIR's gymnasium face, checked by gymnasium itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import agentrl_envs.registration
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.gym import SAMPLE_PROBLEMS, SimpleTIREnv, UnicodeText
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import Problem
from agentrl_sandbox.client import Execution, Outcome

PROGRAM = "```py\nprint(2)\n```"
Sandboxes = Callable[..., Any]
Ran = Callable[..., Execution]


def test_check_env(scripted_sandbox: Sandboxes) -> None:
    env = gymnasium.make("agentrl_envs.registration:agentrl/SimpleTIR-v0", sandbox=scripted_sandbox())
    check_env(env.unwrapped)
    env.close()


def test_registering_twice_is_harmless() -> None:
    agentrl_envs.registration.register_gymnasium_ids()


def test_episode_through_make(scripted_sandbox: Sandboxes, execution: Ran, problem: Problem) -> None:
    sandbox = scripted_sandbox(execution("1\n"), execution("\\boxed{5}\n", seconds=2.0))
    env = gymnasium.make("agentrl/SimpleTIR-v0", settings=SimpleTIRSettings(instruction=""), sandbox=sandbox)
    assert env.reset(seed=0, options={"problem": problem}) == ("What is 2 + 3?\n", {"problem_id": "toy-0"})
    observation, reward, terminated, truncated, info = env.step(PROGRAM)
    assert (observation, reward, terminated, truncated) == ("\nCode execution result: 1\n", 0.0, False, False)
    assert info == {"problem_id": "toy-0", "ended": None, "verdict": None, "answer": None, "tool_outcomes": ("ok",)}
    observation, reward, terminated, truncated, info = env.step(PROGRAM)
    assert (observation, reward, terminated, truncated) == ("\nCode execution result: \\boxed{5}\n", 1.0, True, False)
    assert (info["ended"], info["verdict"], info["answer"]) == ("answered", "correct", "5")
    assert [call.seconds for call in env.get_wrapper_attr("telemetry")] == [0.25, 2.0]  # timings are here, not in info
    env.close()


def test_limits_and_failures_truncate(scripted_sandbox: Sandboxes, execution: Ran) -> None:
    broken = execution(outcome=Outcome.INFRASTRUCTURE_FAILURE)
    env = SimpleTIREnv(
        settings=SimpleTIRSettings(max_turns=1, sandbox_attempts=1), sandbox=scripted_sandbox(execution("1\n"), broken)
    )
    env.reset(seed=0)
    assert env.step(PROGRAM)[2:4] == (False, True)
    env.reset(seed=0)
    _, _, terminated, truncated, info = env.step(PROGRAM)
    assert (terminated, truncated, info["ended"]) == (False, True, "infrastructure_failure")
    env.close()


def test_seed_draws_the_problem(scripted_sandbox: Sandboxes) -> None:
    env = SimpleTIREnv(sandbox=scripted_sandbox())
    drawn = {env.reset(seed=seed)[1]["problem_id"] for seed in range(30)}
    assert drawn == {problem.id for problem in SAMPLE_PROBLEMS}
    assert env.reset(seed=3) == env.reset(seed=3)
    env.close()


async def test_works_inside_a_running_event_loop(scripted_sandbox: Sandboxes, execution: Ran) -> None:
    env = SimpleTIREnv(sandbox=scripted_sandbox(execution("1\n")))
    env.reset(seed=0)
    assert env.step(PROGRAM)[0] == "\nCode execution result: 1\n"
    await asyncio.to_thread(env.close)


def test_reasoning_has_a_face_of_its_own() -> None:
    env = gymnasium.make("agentrl_envs.registration:agentrl/Reasoning-v0")
    check_env(env.unwrapped, skip_render_check=True)
    problem = Problem(id="toy", statement="2 + 3?", answer="5", source="toy")
    prompt, _ = env.reset(options={"problem": problem})
    assert prompt.endswith("2 + 3?\n")
    assert env.step("```py\nprint(5)\n```\nSo \\boxed{5}.") == (
        "",
        1.0,
        True,
        False,
        {"problem_id": "toy", "ended": "answered", "verdict": "correct", "answer": "5", "tool_outcomes": ()},
    )
    env.close()


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SimpleTIREnv([])
    with pytest.raises(EpisodeUsageError, match="reset\\(\\) before step"):
        SimpleTIREnv().step("x")


def test_unicode_text_admits_what_utf8_can_carry() -> None:
    space = UnicodeText(4)
    assert all(text in space for text in ("", "a b\n", "π🙂中\0", "<|e"))
    assert not any(text in space for text in ("12345", "\ud800", 5, None, b"a"))


def test_unicode_text_samples_itself() -> None:
    space = UnicodeText(1 << 20, seed=7)
    samples = [space.sample() for _ in range(50)]
    assert all(sample in space and len(sample) <= 64 for sample in samples)
    assert len(set(samples)) > 40
    assert samples == [UnicodeText(1 << 20, seed=7).sample(), *samples[1:]]
    assert len(space.sample(mask=(5, None))) == 5
    assert (space == UnicodeText(1 << 20), space == UnicodeText(3)) == (True, False)
