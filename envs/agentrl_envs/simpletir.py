"""SimpleTIR: solve a problem by writing Python, seeing what it prints and trying again.

Every program starts in a fresh interpreter. A correct answer is worth 1, everything else 0. Token limits and the end
of sequence are the driver's; what the episode sees is text.
"""

from __future__ import annotations

import copy
import logging

from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.execution import run_program
from agentrl_envs.grading import Grader, GraderError, GraderSettings
from agentrl_envs.protocols.base import Protocol
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.types import Ended, Problem, Step, ToolCall, Verdict
from agentrl_sandbox.client import Sandbox, SandboxSettings, open_sandbox

__all__ = ["SimpleTIREnvironment", "SimpleTIREpisode", "SimpleTIRSettings"]

logger = logging.getLogger(__name__)


class SimpleTIREpisode:
    """One problem under the SimpleTIR protocol. Shares the sandbox and the grader and closes neither."""

    def __init__(self, problem: Problem, *, settings: SimpleTIRSettings, sandbox: Sandbox, grader: Grader) -> None:
        self.problem = problem
        self._settings = settings
        self._sandbox = sandbox
        self._grader = grader
        self._protocol: Protocol = SimpleTIRProtocol(
            instruction=settings.instruction, observation_limit=settings.observation_limit
        )
        self._turns = 0
        self._state = "new"  # new -> running -> ended; closed from any

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings at which an engine stops generating."""
        return self._protocol.stop

    def turn_complete(self, text: str) -> bool:
        """Whether a turn that was stopped by a stop string is over: its program is closed."""
        return self._protocol.turn_complete(text)

    async def start(self) -> str:
        """The prompt: instruction and statement."""
        self._expect("new")
        self._state = "running"
        return self._protocol.prompt(self.problem)

    async def step(self, action: str) -> Step:
        """Run the turn's program, grade its answer if it has one, and say how the episode goes on.

        Without program and answer the episode ends as `Ended.VOID_TURN`; a driver that knows better (the token limit
        cut the turn, or it is a plain end of sequence) refines that.
        """
        self._expect("running")
        step = await self._play(action)
        if step.ended is not None:
            self._state = "ended"
        return step

    async def fork(self) -> SimpleTIREpisode:
        """The same conversation so far. Programs are stateless, so nothing else has to be copied."""
        twin = SimpleTIREpisode(self.problem, settings=self._settings, sandbox=self._sandbox, grader=self._grader)
        twin._turns, twin._state = self._turns, self._state
        return twin

    async def close(self) -> None:
        """Forbid further turns."""
        self._state = "closed"

    async def _play(self, action: str) -> Step:
        self._turns += 1
        turn = self._protocol.parse(action)
        if turn.program is None:
            if turn.answer is None:
                return Step(observation="", reward=0.0, ended=Ended.VOID_TURN)
            return await self._grade(turn.answer, observation="", calls=())
        source = self._protocol.runnable(self.problem, turn.program)
        execution, call = await run_program(self._sandbox, source, self._settings)
        if execution is None:
            return Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE, tool_calls=(call,))
        observation = self._protocol.observation(execution)
        answer = self._protocol.printed_answer(execution.stdout) or turn.answer
        if answer is not None:
            return await self._grade(answer, observation=observation, calls=(call,))
        ended = Ended.TURN_LIMIT if self._turns >= self._settings.max_turns else None
        return Step(observation=observation, reward=0.0, ended=ended, tool_calls=(call,))

    async def _grade(self, answer: str, *, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        try:
            verdict = await self._grader.grade(answer, self.problem.answer)
        except GraderError as error:
            logger.warning("problem %s was not graded: %s", self.problem.id, error)
            return Step(
                observation=observation,
                reward=0.0,
                ended=Ended.INFRASTRUCTURE_FAILURE,
                answer=answer,
                tool_calls=calls,
            )
        return Step(
            observation=observation,
            reward=1.0 if verdict is Verdict.CORRECT else 0.0,
            ended=Ended.ANSWERED,
            verdict=verdict,
            answer=answer,
            tool_calls=calls,
        )

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise EpisodeUsageError(f"episode of problem {self.problem.id!r} is {self._state}, expected {state}")


class SimpleTIREnvironment:
    """What the episodes of a run share: the sandbox, the grader and the settings.

    A ``sandbox`` given open is used as it is and left open; otherwise `open` opens one by ``sandbox_settings``.
    """

    def __init__(
        self,
        settings: SimpleTIRSettings | None = None,
        sandbox_settings: SandboxSettings | None = None,
        grader_settings: GraderSettings | None = None,
        *,
        sandbox: Sandbox | None = None,
    ) -> None:
        self.settings = settings or SimpleTIRSettings()
        self._sandbox_settings = sandbox_settings or SandboxSettings()
        self._grader = Grader(grader_settings or GraderSettings())
        self._given = sandbox
        self._sandbox = sandbox

    async def open(self) -> None:
        """Open the sandbox. Raises `agentrl_sandbox.client.SandboxError` where it cannot work."""
        if self._sandbox is None:
            self._sandbox = await open_sandbox(self._sandbox_settings)

    def episode(self, problem: Problem) -> SimpleTIREpisode:
        """A fresh episode of this problem."""
        return SimpleTIREpisode(problem, settings=self.settings, sandbox=self._opened(), grader=self._grader)

    async def close(self) -> None:
        """Close the grader, and the sandbox if it was opened here."""
        await self._grader.close()
        if self._sandbox is not None and self._given is None:
            sandbox, self._sandbox = self._sandbox, None
            await sandbox.close()

    def with_turns(self, max_turns: int) -> SimpleTIREnvironment:
        """Episodes of up to ``max_turns`` on this environment's sandbox and grader, which stay its own to close."""
        twin = copy.copy(self)
        twin.settings = self.settings.model_copy(update={"max_turns": max_turns})
        return twin

    def describe(self) -> list[str]:
        """The protocol's limits, the sandbox's isolation and how answers are graded."""
        settings = self.settings
        return [
            f"SimpleTIR: up to {settings.max_turns} turns, {settings.execution_timeout:g} s a program",
            f"sandbox: {self._opened().isolation.describe()}",
            f"grading: {self._grader.describe()}",
        ]

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise EpisodeUsageError("the environment is not open: await its open() first")
        return self._sandbox
