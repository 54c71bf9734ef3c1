"""An episode, turn by turn, over a sandbox that answers from a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_envs.episode import Environment, Episode, EpisodeUsageError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.types import Ended, Problem, Step, ToolCall, Verdict
from agentrl_sandbox.client import Execution, Outcome, SandboxError

PROGRAM = "```py\nprint(2)\n```"
Play = Callable[..., Any]
Ran = Callable[..., Execution]


async def test_two_turns_to_a_correct_answer(play: Play, execution: Ran) -> None:
    episode, sandbox = play(execution("5\n"), execution("\\boxed{5}\n", seconds=0.5))
    assert await episode.start() == "What is 2 + 3?\n"
    assert await episode.step(PROGRAM) == Step(
        observation="\nCode execution result: 5\n",
        reward=0.0,
        ended=None,
        tool_calls=(ToolCall(outcome="ok", seconds=0.25, printed="5\n", exit_code=0),),
    )
    assert await episode.step("```py\nfinal_answer(5)\n```") == Step(
        observation="\nCode execution result: \\boxed{5}\n",
        reward=1.0,
        ended=Ended.ANSWERED,
        verdict=Verdict.CORRECT,
        answer="5",
        tool_calls=(ToolCall(outcome="ok", seconds=0.5, printed="\\boxed{5}\n", exit_code=0),),
    )
    assert "print(2)" in sandbox.programs[0]
    assert "print(2)" not in sandbox.programs[1]  # programs are stateless


async def test_answer_in_the_models_own_words(play: Play) -> None:
    episode, _ = play()
    await episode.start()
    step = await episode.step(r"Clearly \boxed{6}.")
    assert (step.reward, step.ended, step.verdict, step.answer) == (0.0, Ended.ANSWERED, Verdict.INCORRECT, "6")
    assert step.observation == ""


async def test_a_program_runs_even_when_the_text_has_an_answer(play: Play, execution: Ran) -> None:
    episode, _ = play(execution("noise\n"))
    await episode.start()
    step = await episode.step("It is \\boxed{5}.\n" + PROGRAM)
    assert (step.reward, step.ended, step.observation) == (1.0, Ended.ANSWERED, "\nCode execution result: noise\n")


async def test_the_computed_answer_wins_over_the_written_one(play: Play, execution: Ran) -> None:
    episode, _ = play(execution("\\boxed{4}\n"))
    await episode.start()
    step = await episode.step("It is \\boxed{5}.\n" + PROGRAM)
    assert (step.reward, step.answer) == (0.0, "4")


async def test_an_answer_printed_before_an_error_counts(play: Play, execution: Ran) -> None:
    episode, _ = play(execution("\\boxed{5}\n", stderr="ValueError: x", outcome=Outcome.ERROR))
    await episode.start()
    step = await episode.step(PROGRAM)
    assert (step.reward, step.observation) == (1.0, "\nCode execution result: ValueError: x\n")


async def test_an_answer_cut_from_the_observation_counts(play: Play, execution: Ran) -> None:
    episode, _ = play(execution("x" * 600 + "\\boxed{5}" + "x" * 600))
    await episode.start()
    assert (await episode.step(PROGRAM)).reward == 1.0


@pytest.mark.parametrize("action", ["", "I do not know.", "```py\nprint(1)", "```py\n\n```", r"\boxed{}", r"\boxed{5"])
async def test_void_turn(play: Play, action: str) -> None:
    episode, _ = play()
    await episode.start()
    assert await episode.step(action) == Step(observation="", reward=0.0, ended=Ended.VOID_TURN)


async def test_turn_limit_keeps_the_last_observation(play: Play, execution: Ran) -> None:
    episode, _ = play(execution("1\n"), execution("2\n"), execution("3\n"))
    await episode.start()
    assert [(await episode.step(PROGRAM)).ended for _ in range(2)] == [None, None]
    last = await episode.step(PROGRAM)
    assert (last.ended, last.observation, last.verdict) == (Ended.TURN_LIMIT, "\nCode execution result: 3\n", None)


async def test_an_answer_in_the_last_turn_is_not_lost(play: Play, execution: Ran) -> None:
    episode, _ = play(execution("\\boxed{5}\n"), max_turns=1)
    await episode.start()
    step = await episode.step(PROGRAM)
    assert (step.ended, step.reward) == (Ended.ANSWERED, 1.0)


async def test_infrastructure_failures_are_retried_under_one_request_id(play: Play, execution: Ran) -> None:
    episode, sandbox = play(execution(outcome=Outcome.INFRASTRUCTURE_FAILURE), execution("5\n"))
    await episode.start()
    step = await episode.step(PROGRAM)
    assert (step.ended, step.observation) == (None, "\nCode execution result: 5\n")
    assert len(sandbox.request_ids) == 2
    assert len(set(sandbox.request_ids)) == 1


@pytest.mark.parametrize("raised", [True, False])
async def test_a_sandbox_that_stays_broken_is_no_wrong_answer(play: Play, execution: Ran, raised: bool) -> None:
    failure = SandboxError("gone") if raised else execution(outcome=Outcome.INFRASTRUCTURE_FAILURE)
    episode, _ = play(failure, failure)
    await episode.start()
    step = await episode.step("\\boxed{6}\n" + PROGRAM)
    assert (step.ended, step.verdict, step.answer) == (Ended.INFRASTRUCTURE_FAILURE, None, None)
    assert step.ended is not None
    assert step.ended.is_excluded
    assert [call.outcome for call in step.tool_calls] == ["infrastructure_failure"]


async def test_a_bug_in_the_sandbox_client_is_not_swallowed(play: Play) -> None:
    episode, _ = play(ZeroDivisionError("bug"))
    await episode.start()
    with pytest.raises(ZeroDivisionError):
        await episode.step(PROGRAM)


async def test_grader_that_cannot_start_is_an_infrastructure_failure(play: Play, grader: Any) -> None:
    episode, _ = play()
    await episode.start()
    await grader.close()
    assert (await episode.step(r"\boxed{5}")).ended is Ended.INFRASTRUCTURE_FAILURE


async def test_fork_goes_on_from_the_same_turn(play: Play, execution: Ran) -> None:
    episode, _ = play(*(execution("1\n") for _ in range(5)))
    await episode.start()
    await episode.step(PROGRAM)
    twin = await episode.fork()
    for each in (episode, twin):  # both have two of three turns left
        assert (await each.step(PROGRAM)).ended is None
        assert (await each.step(PROGRAM)).ended is Ended.TURN_LIMIT


async def test_calls_out_of_order_raise(play: Play) -> None:
    episode, _ = play()
    with pytest.raises(EpisodeUsageError, match=r"toy-0.* is new, expected running"):
        await episode.step("x")
    await episode.start()
    with pytest.raises(EpisodeUsageError, match="is running, expected new"):
        await episode.start()
    await episode.step("void")
    with pytest.raises(EpisodeUsageError, match="is ended"):
        await episode.step("x")
    await episode.close()
    with pytest.raises(EpisodeUsageError, match="is closed"):
        await episode.step("x")


async def test_environment_shares_a_given_sandbox_and_leaves_it_open(
    scripted_sandbox: Callable[..., Any], problem: Problem
) -> None:
    sandbox = scripted_sandbox()
    environment = SimpleTIREnvironment(
        SimpleTIRSettings(instruction="Go."), grader_settings=GraderSettings(workers=1), sandbox=sandbox
    )
    assert isinstance(environment, Environment)
    await environment.open()
    episode = environment.episode(problem)
    assert isinstance(episode, Episode)
    assert await episode.start() == "Go.\n\nWhat is 2 + 3?\n"
    assert environment.describe() == [
        "SimpleTIR: up to 10 turns, 10 s a program",
        "sandbox: bounded_time (no namespaces)",
        "grading: by value in up to 1 processes, 5 s of CPU time per comparison",
    ]
    await environment.close()
    await environment.close()
    assert not sandbox.closed


async def test_environment_must_be_open(problem: Problem) -> None:
    with pytest.raises(EpisodeUsageError, match="open"):
        SimpleTIREnvironment().episode(problem)
