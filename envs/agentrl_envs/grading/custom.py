"""A user's grader in place of the comparison with the gold answer: ``grader.function=module:function``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import SupportsFloat, cast

from agentrl_envs.adapters.blocking import BlockingCalls
from agentrl_envs.episode import EnvironmentContractError
from agentrl_envs.registry import PluginError, describe_error, import_attribute
from agentrl_envs.types import Problem, Verdict

_THREADS = 8


class CustomGrader:
    """Calls ``function(answer, problem)``, in a thread, for a score from 0 to 1."""

    def __init__(self, path: str) -> None:
        """Raises PluginError if ``path`` (``module:function``) names no function."""
        found = import_attribute(path, "grader.function")
        if not callable(found):
            raise PluginError(f"grader.function {path!r} is a {type(found).__name__}, expected a function")
        self._path = path
        self._function: Callable[[str, Problem], SupportsFloat] = found
        self._threads = BlockingCalls(_THREADS, name="grader")

    async def grade(self, answer: str, problem: Problem) -> tuple[Verdict, float]:
        """The verdict, correct at a score of 1, and the score.

        Raises EnvironmentContractError if the function raises, or returns something else than a number from 0 to 1.
        """
        try:
            value = await self._threads.run(lambda: self._function(answer, problem))
        except Exception as error:
            raise EnvironmentContractError(self._say(problem, f"raised {describe_error(error)}")) from error
        score = float(value) if hasattr(cast(object, value), "__float__") else math.nan
        if not 0.0 <= score <= 1.0:
            raise EnvironmentContractError(self._say(problem, f"returned {value!r:.100}; valid: a number from 0 to 1"))
        return Verdict.CORRECT if score == 1.0 else Verdict.INCORRECT, score

    def describe(self) -> str:
        """One line for the console."""
        return f"by {self._path}"

    def _say(self, problem: Problem, what: str) -> str:
        return f"the grader {self._path} {what} (problem {problem.id})"
