"""Gymnasium environments around episodes, with tools and without.

`agentrl_envs.registration` registers them as ``agentrl/SimpleTIR-v0`` and ``agentrl/Reasoning-v0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium

from agentrl_envs.chat.chat_format import ChatFormat
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.gym.loop_thread import LoopThread
from agentrl_envs.gym.spaces import UnicodeText
from agentrl_envs.reasoning import ReasoningEnvironment
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment, SimpleTIREpisode
from agentrl_envs.types import Problem, Step, ToolCall
from agentrl_sandbox.client import Sandbox, SandboxSettings

_MAX_TEXT = 1 << 20  # characters in one action or observation

SAMPLE_PROBLEMS = (
    Problem(id="sample-0", statement="What is 17 * 23?", answer="391", source="sample"),
    Problem(id="sample-1", statement="How many primes are there below 100?", answer="25", source="sample"),
    Problem(id="sample-2", statement="What is the sum of the digits of 2**100?", answer="115", source="sample"),
)


class ProblemEnv(gymnasium.Env[str, str]):
    """Problems as a gymnasium environment. An action is a turn of the model, an observation the text it reads next.

    ``reset`` samples a problem with the seed, or takes ``options={"problem": Problem}``; its observation is the prompt.
    ``info`` is deterministic. Durations of programs are in ``env.unwrapped.telemetry``: one `ToolCall` for each program
    since the last reset. An episode that failed for reasons outside the policy is ``truncated``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium's name and type)

    def __init__(self, problems: Sequence[Problem], environment: SimpleTIREnvironment | ReasoningEnvironment) -> None:
        if not problems:
            raise ValueError("problems is empty: give at least one Problem")
        self.action_space = UnicodeText(_MAX_TEXT)
        self.observation_space = UnicodeText(_MAX_TEXT)
        self.telemetry: list[ToolCall] = []
        self._problems = tuple(problems)
        self._environment = environment
        self._loop: LoopThread | None = None
        self._episode: SimpleTIREpisode | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, object]]:
        """Start an episode; the first call opens the sandbox. Returns the prompt and the problem's id."""
        super().reset(seed=seed)
        problem = (options or {}).get("problem")
        if problem is None:
            problem = self._problems[int(self.np_random.integers(len(self._problems)))]
        loop = self._running_loop()
        self.telemetry.clear()
        self._episode = self._environment.episode(problem)
        return loop.run(self._episode.start()), {"problem_id": problem.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Play one turn. Terminated if the policy ended the episode, truncated if anything else did."""
        if self._episode is None or self._loop is None:
            raise EpisodeUsageError("step() before reset()")
        step = self._loop.run(self._episode.step(action))
        self.telemetry.extend(step.tool_calls)
        truncated = step.ended is not None and (step.ended.is_truncation or step.ended.is_no_data)
        return step.observation, step.reward, step.ended is not None and not truncated, truncated, self._info(step)

    def close(self) -> None:
        """Close the sandbox, the grader and the event loop. May be called more than once."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.run(self._environment.close())
            loop.close()

    def _running_loop(self) -> LoopThread:
        if self._loop is None:
            loop = LoopThread()
            try:
                loop.run(self._environment.open())
            except BaseException:
                loop.close()
                raise
            self._loop = loop
        return self._loop

    def _info(self, step: Step) -> dict[str, object]:
        assert self._episode is not None
        return {
            "problem_id": self._episode.problem.id,
            "ended": None if step.ended is None else step.ended.value,
            "verdict": None if step.verdict is None else step.verdict.value,
            "answer": step.answer,
            "tool_outcomes": tuple(call.outcome for call in step.tool_calls),
        }


class SimpleTIREnv(ProblemEnv):
    """SimpleTIR, or another protocol with tools if ``settings`` selects one.

    Protocol hermes and ``settings.chat=always`` need ``chat``.

    Example::

        env = gymnasium.make("agentrl_envs.registration:agentrl/SimpleTIR-v0")
        prompt, info = env.reset(seed=1)
        observation, reward, terminated, truncated, info = env.step("```py\\nfinal_answer(17 * 23)\\n```")
    """

    def __init__(
        self,
        problems: Sequence[Problem] = SAMPLE_PROBLEMS,
        *,
        settings: SimpleTIRSettings | None = None,
        sandbox: Sandbox | SandboxSettings | None = None,
        grader: GraderSettings | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        by_settings = sandbox is None or isinstance(sandbox, SandboxSettings)
        environment = SimpleTIREnvironment(
            settings,
            sandbox if isinstance(sandbox, SandboxSettings) else None,
            grader,
            chat=chat,
            sandbox=None if by_settings else sandbox,  # type: ignore[arg-type]
        )
        super().__init__(problems, environment)


class ReasoningEnv(ProblemEnv):
    """The same problems in a single turn without tools.

    Example::

        env = gymnasium.make("agentrl_envs.registration:agentrl/Reasoning-v0")
        prompt, info = env.reset(seed=1)
        observation, reward, terminated, truncated, info = env.step("17 times 23 is \\\\boxed{391}.")
    """

    def __init__(
        self,
        problems: Sequence[Problem] = SAMPLE_PROBLEMS,
        *,
        settings: ReasoningSettings | None = None,
        grader: GraderSettings | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        super().__init__(problems, ReasoningEnvironment(settings, None, grader, chat=chat))
