"""Gymnasium environments with and without tools, and a text space for all of Unicode.

`agentrl_envs.registration` registers the environments as ``agentrl/SimpleTIR-v0`` and ``agentrl/Reasoning-v0``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Text

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.grading import GraderSettings
from agentrl_envs.reasoning import ReasoningEnvironment
from agentrl_envs.settings import ReasoningSettings, SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment, SimpleTIREpisode
from agentrl_envs.threads import LoopThread
from agentrl_envs.types import Problem, Step, ToolCall
from agentrl_sandbox.client import Sandbox, SandboxSettings

_SURROGATE = re.compile("[\ud800-\udfff]")
_SAMPLE_CHARSET = string.ascii_letters + string.digits + string.punctuation + " \näπ∑中🙂"
_LONGEST_SAMPLE = 64


class UnicodeText(Text):
    """A text space for all of Unicode, up to ``max_length`` characters, including the empty text.

    By default, gymnasium's `Text` accepts only letters and digits. With all of Unicode as charset, creating a `Text`
    takes seconds and hundreds of megabytes. This space samples up to 64 characters from a small charset, and accepts
    every text that UTF-8 can encode. It cannot be flattened, because it has no fixed table of characters.
    """

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(max_length, min_length=0, charset=_SAMPLE_CHARSET, seed=seed)

    def contains(self, x: object) -> bool:
        """Return True if x is a str of valid length without lone surrogates, which have no encoding."""
        return isinstance(x, str) and len(x) <= self.max_length and _SURROGATE.search(x) is None

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random text. ``mask`` and ``probability`` are as in `gymnasium.spaces.Text.sample`."""
        if mask is None and probability is None:
            length = int(self.np_random.integers(0, min(_LONGEST_SAMPLE, self.max_length) + 1))
            return super().sample(mask=(length, None))
        return super().sample(mask=mask, probability=probability)

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length})"

    def __eq__(self, other: object, /) -> bool:
        return isinstance(other, UnicodeText) and self.max_length == other.max_length

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_np_flattenable(self) -> bool:
        """False, because the space has no fixed size."""
        return False


_MAX_TEXT_CHARACTERS = 1 << 20  # characters in one action or observation

SAMPLE_PROBLEMS = (
    Problem(id="sample-0", statement="What is 17 * 23?", answer="391", source="sample"),
    Problem(id="sample-1", statement="How many primes are there below 100?", answer="25", source="sample"),
    Problem(id="sample-2", statement="What is the sum of the digits of 2**100?", answer="115", source="sample"),
)


class ProblemEnv(gymnasium.Env[str, str]):
    """Problems as a gymnasium environment. An action is a model turn, and an observation is the text after the turn.

    ``reset`` samples a problem with the seed, or uses ``options={"problem": Problem}``, and returns the prompt.
    ``info`` is deterministic. ``env.unwrapped.telemetry`` contains a `ToolCall`, with its duration, for each program
    since the last reset. An excluded episode is ``truncated``.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  (gymnasium's name and type)

    def __init__(self, problems: Sequence[Problem], environment: SimpleTIREnvironment | ReasoningEnvironment) -> None:
        if not problems:
            raise ValueError("problems must contain at least one Problem")
        self.action_space = UnicodeText(_MAX_TEXT_CHARACTERS)
        self.observation_space = UnicodeText(_MAX_TEXT_CHARACTERS)
        self.telemetry: list[ToolCall] = []
        self._problems = tuple(problems)
        self._environment = environment
        self._loop: LoopThread | None = None
        self._episode: SimpleTIREpisode | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, object]]:
        """Start an episode. Returns the prompt and the problem's id. The first call opens the sandbox."""
        super().reset(seed=seed)
        problem = (options or {}).get("problem")
        if problem is None:
            problem = self._problems[int(self.np_random.integers(len(self._problems)))]
        loop = self._start_loop()
        self.telemetry.clear()
        self._episode = self._environment.episode(problem)
        return loop.run(self._episode.start()), {"problem_id": problem.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        """Play one turn. ``terminated`` is true if the policy ended the episode, ``truncated`` if anything else did."""
        if self._episode is None or self._loop is None:
            raise EpisodeUsageError("the episode is not running: call reset() before step()")
        step = self._loop.run(self._episode.step(action))
        self.telemetry.extend(step.tool_calls)
        truncated = step.ended is not None and (step.ended.is_truncation or step.ended.is_excluded)
        return step.observation, step.reward, step.ended is not None and not truncated, truncated, self._info(step)

    def close(self) -> None:
        """Close the sandbox, the grader and the event loop. May be called more than once."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            loop.run(self._environment.close())
            loop.close()

    def _start_loop(self) -> LoopThread:
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
    """Gymnasium environment for problems with the SimpleTIR protocol, or another tool protocol set in ``settings``.

    Protocol hermes and ``settings.chat=always`` require ``chat``.

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
    """Gymnasium environment for problems that are solved in a single turn without tools.

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
