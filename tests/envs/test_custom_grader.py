"""A user's grading function in place of the comparison with the gold answer."""

from __future__ import annotations

import pytest

from agentrl_envs.episode import EnvironmentContractError
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.registry import PluginError
from agentrl_envs.types import Problem, Verdict

PROBLEM = Problem(id="p", statement="?", answer=None, source="t", info={"wanted": "blue"})


def colour(answer: str, problem: Problem) -> float:
    return 1.0 if answer == problem.info["wanted"] else 0.25


def wrong(answer: str, problem: Problem) -> float:
    return {"two": 2.0, "nan": float("nan")}[answer]


def graded_by(name: str) -> Grader:
    return Grader(GraderSettings(function=f"{__name__}:{name}"))


async def test_it_sees_the_problem_and_gives_partial_credit() -> None:
    grader = graded_by("colour")
    assert await grader.score("blue", PROBLEM) == (Verdict.CORRECT, 1.0)
    assert await grader.score("red", PROBLEM) == (Verdict.INCORRECT, 0.25)
    assert grader.needs_no_reference
    assert grader.describe() == f"by {__name__}:colour"


@pytest.mark.parametrize(
    ("answer", "message"),
    [("two", "returned 2.0; valid: a number from 0 to 1"), ("nan", "returned nan"), ("x", "raised KeyError")],
)
async def test_what_it_must_not_do_names_function_and_problem(answer: str, message: str) -> None:
    with pytest.raises(EnvironmentContractError, match=rf"the grader {__name__}:wrong {message}.*\(problem p\)"):
        await graded_by("wrong").score(answer, PROBLEM)


def test_a_function_that_is_not_there_is_one_message() -> None:
    with pytest.raises(PluginError, match=r"has no 'color'; did you mean 'colour'\?"):
        graded_by("color")
    with pytest.raises(PluginError, match="but must be a function"):
        graded_by("PROBLEM")


async def test_without_one_a_correct_answer_is_worth_one() -> None:
    grader = Grader(GraderSettings())
    problem = Problem(id="p", statement="?", answer="7", source="t")
    assert await grader.score("7", problem) == (Verdict.CORRECT, 1.0)
    assert await grader.score("8", problem) == (Verdict.INCORRECT, 0.0)
    await grader.close()
