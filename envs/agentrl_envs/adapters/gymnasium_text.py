"""Training on gymnasium text environments. Each episode has a separate environment, whose methods run in threads.

``reset(seed=, options={"problem": Problem})`` returns the prompt. ``step(action)`` returns the observation that is
appended to the conversation. The seed is derived from the problem's id, so all episodes of a group have the same task.
A stop string in ``metadata["stop"]`` ends the turn. ``terminated`` ends the episode as `Ended.ANSWERED`, ``truncated``
as `Ended.TURN_LIMIT`, unless ``info["ended"]`` contains an `Ended` value. ``info["verdict"]`` and ``info["answer"]``
are returned in the `Step`.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import gymnasium

from agentrl_envs.episode import Environment, EnvironmentContractError, EpisodeUsageError
from agentrl_envs.forks import replay_actions
from agentrl_envs.settings import GymnasiumSettings
from agentrl_envs.threads import BlockingCallPool
from agentrl_envs.types import Ended, Problem, Step, Verdict, as_reward

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
TextEnv: TypeAlias = "gymnasium.Env[Any, Any]"
EnvFactory = Callable[[], TextEnv]


class GymnasiumEpisode:
    """One episode of a gymnasium text environment. Creates and closes the environment."""

    def __init__(self, problem: Problem, *, make: EnvFactory, threads: BlockingCallPool, call_deadline: float) -> None:
        self.problem = problem
        self._make = make
        self._threads = threads
        self._call_deadline = call_deadline
        self._env: TextEnv | None = None
        self._actions: list[str] = []
        self._ended = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings in ``metadata["stop"]``; empty before the start."""
        return () if self._env is None else tuple(self._env.metadata.get("stop", ()))

    def turn_complete(self, text: str) -> bool:
        """Return True, because a stop string always ends the turn."""
        return True

    async def start(self) -> str:
        """Create and reset the environment.

        Raises EnvironmentContractError if the prompt is not text, and TimeoutError if a call exceeds its deadline.
        """
        if self._env is not None:
            raise EpisodeUsageError("the episode has already started: call start() once")
        self._env = await self._call_in_thread(self._make)
        seed = zlib.crc32(self.problem.id.encode())
        observation, _ = await self._call_in_thread(
            lambda: self._started_env().reset(seed=seed, options={"problem": self.problem})
        )
        return _require_text(observation, "reset")

    async def step(self, action: str) -> Step:
        """Run ``step`` in a thread. Exceptions of the environment propagate. A timeout excludes the rollout."""
        env = self._started_env()
        if self._ended:
            raise EpisodeUsageError("the episode has ended: do not call step() again")
        try:
            observation, reward, terminated, truncated, info = await self._call_in_thread(lambda: env.step(action))
        except TimeoutError:
            logger.warning("problem %s: step() took longer than %g s", self.problem.id, self._call_deadline)
            self._ended = True
            return Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE)
        try:
            reward = as_reward(reward)
        except ValueError as error:
            raise EnvironmentContractError(
                f"problem {self.problem.id}: step() returned the invalid reward {error}"
            ) from None
        self._actions.append(action)
        ended = _end_of_episode(bool(terminated), bool(truncated), info)
        self._ended = ended is not None
        return Step(
            observation=_require_text(observation, "step"),
            reward=reward,
            ended=ended,
            verdict=Verdict(info["verdict"]) if info.get("verdict") else None,
            answer=info.get("answer"),
        )

    async def fork(self) -> GymnasiumEpisode:
        """Repeat all actions in a new environment. The copy is exact only if the environment is deterministic."""
        twin = GymnasiumEpisode(self.problem, make=self._make, threads=self._threads, call_deadline=self._call_deadline)
        if self._env is not None:
            await replay_actions(twin, self._actions)
        return twin

    async def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            env, self._env = self._env, None
            await self._call_in_thread(env.close)

    def _started_env(self) -> TextEnv:
        if self._env is None:
            raise EpisodeUsageError(
                "the episode is not running: call start() first, and do not call step() after close()"
            )
        return self._env

    async def _call_in_thread(self, blocking: Callable[[], Result]) -> Result:
        return await self._threads.run(blocking, timeout=self._call_deadline)


class GymnasiumEnvironment(Environment):
    """Creates the episodes of a gymnasium environment. The episodes share a thread pool."""

    def __init__(self, make: Callable[..., TextEnv], settings: GymnasiumSettings | None = None) -> None:
        self.settings = settings or GymnasiumSettings()
        self._make = make
        self._threads = BlockingCallPool(self.settings.threads, name="gymnasium-env")

    def episode(self, problem: Problem) -> GymnasiumEpisode:
        """Create an episode. The gymnasium environment is created when the episode starts."""
        return GymnasiumEpisode(
            problem,
            make=lambda: self._make(**self.settings.kwargs),
            threads=self._threads,
            call_deadline=self.settings.call_deadline,
        )

    def describe(self) -> list[str]:
        """Return the environment's name and the number of threads."""
        name = getattr(self._make, "__qualname__", repr(self._make))
        return [f"gymnasium environment {name}, blocking calls in up to {self.settings.threads} threads"]


def _require_text(observation: object, method: str) -> str:
    if not isinstance(observation, str):
        raise EnvironmentContractError(
            f"{method}() of a text environment must return a str as its observation, not {type(observation).__name__}"
        )
    return observation


def _end_of_episode(terminated: bool, truncated: bool, info: dict[str, object]) -> Ended | None:
    if not (terminated or truncated):
        return None
    if info.get("ended"):
        return Ended(str(info["ended"]))
    return Ended.ANSWERED if terminated else Ended.TURN_LIMIT
