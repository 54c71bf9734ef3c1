"""SimpleTIR: solve a problem by writing Python, seeing what it prints and trying again.

Under the published protocol of that name, or under another one (`agentrl_envs.protocols`): the episode is the same.
Every program starts in a fresh interpreter. A correct answer is worth 1, everything else 0. Token limits and the end
of sequence are the driver's; what the episode sees is text.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Mapping, Sequence

from agentrl_envs.episode import EpisodeUsageError
from agentrl_envs.execution import run_program
from agentrl_envs.grading import Grader, GraderError, GraderSettings
from agentrl_envs.protocols.base import MalformedCall, Protocol, ToolRequest
from agentrl_envs.protocols.chat import ChatFormat
from agentrl_envs.protocols.factory import TITLES, make_protocol
from agentrl_envs.protocols.results import clip
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.tools import NO_TOOLS, PYTHON, Tool, ToolSet, call_tool, load_tools
from agentrl_envs.types import MALFORMED, Ended, Problem, Step, ToolCall, Verdict
from agentrl_sandbox.client import Execution, Sandbox, SandboxSettings, open_sandbox

__all__ = ["SimpleTIREnvironment", "SimpleTIREpisode", "SimpleTIRSettings"]

logger = logging.getLogger(__name__)


class SimpleTIREpisode:
    """One problem under one protocol. Shares the sandbox, the grader and the tools and closes none of them."""

    def __init__(
        self,
        problem: Problem,
        *,
        settings: SimpleTIRSettings,
        sandbox: Sandbox | None,
        grader: Grader,
        protocol: Protocol | None = None,
        tools: ToolSet = NO_TOOLS,
    ) -> None:
        """``protocol``: none for the one that ``settings`` name. Only one that runs nothing needs no ``sandbox``."""
        self.problem = problem
        self._settings = settings
        self._sandbox = sandbox
        self._grader = grader
        self._protocol = make_protocol(settings) if protocol is None else protocol
        self._tools = tools
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
        twin = SimpleTIREpisode(
            self.problem,
            settings=self._settings,
            sandbox=self._sandbox,
            grader=self._grader,
            protocol=self._protocol,
            tools=self._tools,
        )
        twin._turns, twin._state = self._turns, self._state
        return twin

    async def close(self) -> None:
        """Forbid further turns."""
        self._state = "closed"

    async def _play(self, action: str) -> Step:
        self._turns += 1
        turn = self._protocol.parse(action)
        if turn.program is not None:
            return await self._run(turn.program, action, turn.answer)
        if turn.calls:
            return await self._call(turn.calls, action)
        if turn.answer is not None:
            return await self._grade(turn.answer, observation="", calls=())
        return Step(observation="", reward=0.0, ended=self._protocol.empty_turn)

    async def _run(self, program: str, action: str, said: str | None) -> Step:
        """The turn's program, and the answer that it printed or else the one in the turn's words."""
        execution, call = await self._execute(program)
        if execution is None:
            return Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE, tool_calls=(call,))
        observation = self._protocol.observation(action, [self._protocol.result(execution)])
        answer = self._protocol.printed_answer(execution.stdout) or said
        if answer is not None:
            return await self._grade(answer, observation=observation, calls=(call,))
        return self._goes_on(observation, (call,))

    async def _call(self, requests: Sequence[ToolRequest | MalformedCall], action: str) -> Step:
        """The turn's calls, one after the other; one that cannot be made gets an error in its place."""
        results: list[str] = []
        made: list[ToolCall] = []
        for request in requests:
            if isinstance(request, MalformedCall):
                results.append(request.message)
                made.append(ToolCall(outcome=MALFORMED, seconds=0.0))
            elif request.name in self._tools.own:
                result, call = await self._use(self._tools.own[request.name], request.arguments)
                results.append(clip(result, self._settings.observation_limit))
                made.append(call)
            else:
                execution, call = await self._execute(str(request.arguments["code"]))
                made.append(call)
                if execution is None:
                    return Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE, tool_calls=tuple(made))
                results.append(self._protocol.result(execution))
        return self._goes_on(self._protocol.observation(action, results), tuple(made))

    async def _execute(self, program: str) -> tuple[Execution | None, ToolCall]:
        if self._sandbox is None:
            raise EpisodeUsageError("the episode has no sandbox: its protocol must run nothing")
        return await run_program(self._sandbox, self._protocol.runnable(self.problem, program), self._settings)

    async def _use(self, tool: Tool, arguments: Mapping[str, object]) -> tuple[str, ToolCall]:
        """A user's tool under ``execution_timeout``; that it takes too long is the call's fault, as of a program."""
        began = time.monotonic()
        outcome = "ok"
        try:
            async with asyncio.timeout(self._settings.execution_timeout) as limit:
                result = await call_tool(tool, arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            result, outcome = f"TimeoutError: {tool.name} did not answer in time", "timeout"
        return result, ToolCall(outcome=outcome, seconds=time.monotonic() - began)

    def _goes_on(self, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        ended = Ended.TURN_LIMIT if self._turns >= self._settings.max_turns else None
        return Step(observation=observation, reward=0.0, ended=ended, tool_calls=calls)

    async def _grade(self, answer: str, *, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        """The step that ends the episode. Without a gold answer it is worth nothing: a reward function says more."""
        if self.problem.answer is None:
            return Step(observation=observation, reward=0.0, ended=Ended.ANSWERED, answer=answer, tool_calls=calls)
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
        chat: ChatFormat | None = None,
        sandbox: Sandbox | None = None,
    ) -> None:
        """Raises `PluginError` for tools that are none, and `EpisodeUsageError` where ``chat`` lacks."""
        self.settings = settings or SimpleTIRSettings()
        self._tools = load_tools(self.settings.tools) if self.settings.protocol == "hermes" else NO_TOOLS
        self._protocol = make_protocol(self.settings, chat=chat, tools=self._tools)
        self._sandbox_settings = sandbox_settings or SandboxSettings()
        self._grader = Grader(grader_settings or GraderSettings())
        self._given = sandbox
        self._sandbox = sandbox

    async def open(self) -> None:
        """Open the sandbox. Raises `agentrl_sandbox.client.SandboxError` where it cannot work."""
        if self._sandbox is None and self._runs_programs:
            self._sandbox = await open_sandbox(self._sandbox_settings)

    def episode(self, problem: Problem) -> SimpleTIREpisode:
        """A fresh episode of this problem."""
        return SimpleTIREpisode(
            problem,
            settings=self.settings,
            sandbox=self._opened() if self._runs_programs else None,
            grader=self._grader,
            protocol=self._protocol,
            tools=self._tools,
        )

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
        title = TITLES.get(settings.protocol, settings.protocol)
        lines = [f"{title}: up to {settings.max_turns} turns, {settings.execution_timeout:g} s a program"]
        if self._tools.schemas:
            lines.append(f"tools: {', '.join(schema.name for schema in self._tools.schemas)}")
        if self._runs_programs:
            lines.append(f"sandbox: {self._opened().isolation.describe()}")
        return [*lines, f"grading: {self._grader.describe()}"]

    @property
    def _runs_programs(self) -> bool:
        return self.settings.protocol != "hermes" or self._tools.schema(PYTHON) is not None

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise EpisodeUsageError("the environment is not open: await its open() first")
        return self._sandbox
