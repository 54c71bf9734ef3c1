"""SimpleTIR: solve a problem by writing Python, seeing what it prints and trying again.

Under the published protocol of that name, or under another one (`agentrl_envs.protocols`): the episode is the same.
Every program starts in a fresh interpreter. A correct answer is worth 1, everything else 0. Token limits and the end
of sequence are the driver's; what the episode sees is text.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from pydantic import BaseModel

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment, EpisodeUsageError, UnavailableError
from agentrl_envs.execution import EpisodeSandbox, call_of, failed_call
from agentrl_envs.factory import EnvironmentFactory, TemplateUse
from agentrl_envs.grading import Grader, GraderError, GraderSettings
from agentrl_envs.protocols.base import MalformedCall, Protocol, ToolRequest, clip
from agentrl_envs.protocols.factory import TITLES, make_protocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.threads import BlockingCalls
from agentrl_envs.tools import NO_TOOLS, PYTHON, EpisodeTools, ToolSet, load_tools
from agentrl_envs.types import MALFORMED, Ended, Problem, Step, ToolCall
from agentrl_sandbox.client import Execution, Sandbox, SandboxSettings, open_sandbox

__all__ = ["SimpleTIREnvironment", "SimpleTIREpisode", "SimpleTIRSettings"]

_THREADS = 64  # plain functions that run at once
_RESTARTED = "; the interpreter was restarted and its variables are gone"

logger = logging.getLogger(__name__)


class SimpleTIREpisode:
    """One problem under one protocol. Shares the sandbox and the grader and closes neither; its tools are its own."""

    def __init__(
        self,
        problem: Problem,
        *,
        settings: SimpleTIRSettings,
        sandbox: Sandbox | None,
        grader: Grader,
        protocol: Protocol | None = None,
        tools: ToolSet = NO_TOOLS,
        threads: BlockingCalls | None = None,
    ) -> None:
        """``protocol``: none for the one that ``settings`` name. Only one that runs nothing needs no ``sandbox``.

        ``threads`` are for plain functions among the tools.
        """
        self.problem = problem
        self._settings = settings
        self._given_sandbox = sandbox
        self._sandbox: EpisodeSandbox | None = None
        self._grader = grader
        self._protocol = make_protocol(settings) if protocol is None else protocol
        self._tools = tools
        self._threads = threads or BlockingCalls(_THREADS, name="tool")
        self._own: EpisodeTools | None = None
        self._setup = asyncio.Lock()
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
        """The prompt: instruction and statement. Raises `agentrl_envs.tools.ToolError`."""
        self._expect("new")
        self._state = "running"
        if self._given_sandbox is not None:
            self._sandbox = EpisodeSandbox(self._given_sandbox, self._settings)
        self._own = EpisodeTools(
            self._tools,
            self.problem,
            sandbox=self._sandbox,
            threads=self._threads,
            timeout=self._settings.execution_timeout,
        )
        await self._own.open()
        return self._protocol.prompt(self.problem)

    async def step(self, action: str) -> Step:
        """Run the turn's program, grade its answer if it has one, and say how the episode goes on.

        Without program and answer the episode ends as `Ended.VOID_TURN`; a driver that knows better (the token limit
        cut the turn, or it is a plain end of sequence) refines that.
        """
        self._expect("running")
        try:
            step = await self._play(action)
        except UnavailableError as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            call = failed_call(error.seconds)
            step = Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE, tool_calls=(call,))
        if step.ended is not None:
            self._state = "ended"
        return step

    async def fork(self) -> SimpleTIREpisode:
        """The same conversation so far, with an interpreter and tools of its own that begin as these are now."""
        twin = SimpleTIREpisode(
            self.problem,
            settings=self._settings,
            sandbox=self._given_sandbox,
            grader=self._grader,
            protocol=self._protocol,
            tools=self._tools,
            threads=self._threads,
        )
        twin._turns, twin._state = self._turns, self._state
        if self._sandbox is not None:
            twin._sandbox = await self._sandbox.fork()
        if self._own is not None:
            twin._own = await self._own.fork(twin._sandbox)
        return twin

    async def close(self) -> None:
        """Forbid further turns, and close the tools and the interpreter."""
        self._state = "closed"
        if self._own is not None:
            await self._own.close()
        if self._sandbox is not None:
            await self._sandbox.close()

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
        execution = await self._execute(program)
        call = call_of(execution)
        observation = self._protocol.observation(action, [self._shown(execution)])
        answer = self._protocol.printed_answer(execution.stdout) or said
        if answer is not None:
            return await self._grade(answer, observation=observation, calls=(call,))
        return self._goes_on(observation, (call,))

    async def _call(self, requests: Sequence[ToolRequest | MalformedCall], action: str) -> Step:
        """The turn's calls, all at once; one that cannot be made gets an error in its place."""
        made = await asyncio.gather(*(self._answer(request) for request in requests), return_exceptions=True)
        failures = [result for result in made if isinstance(result, BaseException)]
        if failures:
            raise next((one for one in failures if not isinstance(one, UnavailableError)), failures[0])
        answered = [result for result in made if not isinstance(result, BaseException)]
        observation = self._protocol.observation(action, [text for text, _ in answered])
        return self._goes_on(observation, tuple(call for _, call in answered))

    async def _answer(self, request: ToolRequest | MalformedCall) -> tuple[str, ToolCall]:
        """What the model reads in the place of a call's result."""
        if isinstance(request, MalformedCall):
            return request.message, ToolCall(outcome=MALFORMED, seconds=0.0)
        if request.name == PYTHON:
            execution = await self._execute(str(request.arguments["code"]))
            return self._shown(execution), call_of(execution)
        assert self._own is not None
        result, call = await self._own.call(request.name, request.arguments)
        return clip(result, self._settings.observation_limit), call

    async def _execute(self, program: str) -> Execution:
        """Run a program, after the problem's setup. Raises `UnavailableError`."""
        if self._sandbox is None:
            raise EpisodeUsageError("the episode has no sandbox: its protocol must run nothing")
        problem = self.problem
        if self._settings.interpreter == "session" and problem.setup:
            async with self._setup:  # of its own: a program with a syntax error would take it along
                if self._sandbox.fresh:
                    await self._sandbox.execute(problem.setup)
            problem = replace(problem, setup="")
        return await self._sandbox.execute(self._protocol.runnable(problem, program))

    def _shown(self, execution: Execution) -> str:
        """What the model reads of a program, that its session has ended included."""
        return self._protocol.result(execution) + (_RESTARTED if execution.session_ended else "")

    def _goes_on(self, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        ended = Ended.TURN_LIMIT if self._turns >= self._settings.max_turns else None
        return Step(observation=observation, reward=0.0, ended=ended, tool_calls=calls)

    async def _grade(self, answer: str, *, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        """The step that ends the episode. Without a gold answer it is worth nothing: a reward function says more."""
        if self.problem.answer is None and not self._grader.needs_no_reference:
            return Step(observation=observation, reward=0.0, ended=Ended.ANSWERED, answer=answer, tool_calls=calls)
        try:
            verdict, score = await self._grader.score(answer, self.problem)
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
            reward=score,
            ended=Ended.ANSWERED,
            verdict=verdict,
            answer=answer,
            tool_calls=calls,
        )

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise EpisodeUsageError(f"episode of problem {self.problem.id!r} is {self._state}, expected {state}")


class SimpleTIREnvironment(Environment):
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
        self._tools = _tools(self.settings)
        self._threads = BlockingCalls(_THREADS, name="tool")
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
            threads=self._threads,
        )

    async def close(self) -> None:
        """Close the grader and shared tools, and the sandbox if it was opened here."""
        await self._grader.close()
        await self._tools.close()
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
        return self.settings.protocol != "hermes" or self._tools.runs_programs

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise EpisodeUsageError("the environment is not open: await its open() first")
        return self._sandbox


class SimpleTIRFactory(EnvironmentFactory[SimpleTIRSettings]):
    """Makes the environment ``simpletir``."""

    def settings(self, section: BaseModel) -> SimpleTIRSettings:
        return cast(SimpleTIRSettings, section)

    def __call__(
        self,
        settings: SimpleTIRSettings,
        sandbox: SandboxSettings | None = None,
        grader: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
    ) -> SimpleTIREnvironment:
        return SimpleTIREnvironment(settings, sandbox, grader, chat=chat)

    def template(self, settings: SimpleTIRSettings) -> TemplateUse | None:
        if settings.protocol == "hermes":
            if settings.chat == "never":
                return None
            return TemplateUse(
                settings=settings,
                setting="environment.protocol=hermes",
                tools=[schema.as_function() for schema in _tools(settings).schemas],
                rerendered=settings.history == "template",
            )
        if settings.chat != "always":
            return None
        # Only programs and their outputs follow in the other protocols, the latter as a user's messages.
        return TemplateUse(
            settings=settings,
            setting="environment.chat=always",
            speaker=f"environment.protocol={settings.protocol}",
        )


def _tools(settings: SimpleTIRSettings) -> ToolSet:
    """Load the tools of protocol hermes. Raises `PluginError` for an invalid tool."""
    if settings.protocol != "hermes":
        return NO_TOOLS
    return load_tools(settings.tools, interpreter=settings.interpreter, mcp_sessions=settings.mcp_sessions)
