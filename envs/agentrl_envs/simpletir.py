"""SimpleTIR: the model solves a problem by writing Python, reading the output and trying again.

All protocols (`agentrl_envs.protocols`) use the same episode. Its base class, `ToolEpisode`, is also the base class of
episodes for environments that are defined by a user's class. A correct answer has reward 1, and everything else has
reward 0. The driver handles token limits and the end of sequence. The episode handles text.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment, EpisodeUsageError, UnavailableError
from agentrl_envs.execution import EpisodeSandbox, infrastructure_failure_call, tool_call_of_execution
from agentrl_envs.factory import EnvironmentFactory, TemplateUse
from agentrl_envs.forks import close_on_failure
from agentrl_envs.grading import Grader, GraderError, GraderSettings
from agentrl_envs.protocols.base import MalformedCall, TextProtocol, ToolRequest, make_protocol
from agentrl_envs.protocols.texts import truncate_output
from agentrl_envs.settings import ClassEnvironmentSettings, SimpleTIRSettings
from agentrl_envs.tools import NO_TOOLS, PYTHON, EpisodeTools, ToolSet, load_tools
from agentrl_envs.types import MALFORMED, Ended, Problem, Step, ToolCall
from agentrl_sandbox.client import Execution, Sandbox, SandboxSettings, open_sandbox

__all__ = ["SimpleTIREnvironment", "SimpleTIREpisode", "SimpleTIRSettings"]

_TITLES = {"simpletir": "SimpleTIR", "retool": "ReTool", "torl": "ToRL", "hermes": "Hermes"}
_RESTARTED = "; the interpreter was restarted and its variables are gone"

logger = logging.getLogger(__name__)


class ToolEpisode(ABC):
    """Base class of episodes: one problem, one protocol. Closes the tools and the session, but not the shared sandbox.

    Subclasses define `begin` (create the tools and return the prompt) and `play_turn`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        settings: SimpleTIRSettings | ClassEnvironmentSettings,
        protocol: TextProtocol,
        sandbox: Sandbox | None,
    ) -> None:
        self.problem = problem
        self._settings = settings
        self._protocol = protocol
        self._shared_sandbox = sandbox
        self._sandbox: EpisodeSandbox | None = None
        self._tools: EpisodeTools | None = None
        self._turns = 0
        self._state = "new"  # new -> running -> ended; any state -> closed

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the engine stops generating."""
        return self._protocol.stop_strings

    def turn_complete(self, text: str) -> bool:
        """Return True if a turn that ended at a stop string is complete."""
        return self._protocol.turn_complete(text)

    async def start(self) -> str:
        """Create the tools and return the prompt. Raises ToolError if a tool cannot be created."""
        self._require_state("new")
        self._state = "running"
        if self._shared_sandbox is not None:
            self._sandbox = EpisodeSandbox(self._shared_sandbox, self._settings)
        return await self.begin()

    async def step(self, action: str) -> Step:
        """Play one turn. If a service does not respond, the rollout ends as an infrastructure failure."""
        self._require_state("running")
        self._turns += 1
        try:
            step = await self.play_turn(action)
        except UnavailableError as error:
            logger.warning("problem %s: %s", self.problem.id, error)
            call = infrastructure_failure_call(error.seconds)
            step = Step(observation="", reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE, tool_calls=(call,))
        if step.ended is not None:
            self._state = "ended"
        return step

    async def fork(self) -> Self:
        """Return an episode with the same conversation so far. Copies the interpreter session and the tools."""
        twin = copy.copy(self)
        twin._sandbox = twin._tools = None
        async with close_on_failure(twin):
            if self._sandbox is not None:
                twin._sandbox = await self._sandbox.fork()
            if self._tools is not None:
                twin._tools = await self._tools.fork(twin._sandbox)
        return twin

    async def close(self) -> None:
        """Close the tools and the interpreter session. Further turns raise EpisodeUsageError."""
        self._state = "closed"
        if self._tools is not None:
            await self._tools.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    @abstractmethod
    async def begin(self) -> str:
        """Create the tools and return the prompt."""

    @abstractmethod
    async def play_turn(self, action: str) -> Step:
        """Play one turn. Raises UnavailableError if a service does not respond."""

    async def call_tools(
        self, requests: Sequence[ToolRequest | MalformedCall], action: str
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Execute a turn's calls concurrently. Returns the observation and the telemetry of the calls."""
        results = await asyncio.gather(*(self.call_tool(request) for request in requests), return_exceptions=True)
        # Wait for all calls before raising. A tool's bug ends the run, so it takes precedence over a lost service.
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise next((one for one in failures if not isinstance(one, UnavailableError)), failures[0])
        answered = [result for result in results if not isinstance(result, BaseException)]
        observation = self._protocol.observation(action, [text for text, _ in answered])
        return observation, tuple(call for _, call in answered)

    async def call_tool(self, request: ToolRequest | MalformedCall) -> tuple[str, ToolCall]:
        """Return the result that the model reads and the call's telemetry. An invalid call returns its message."""
        if isinstance(request, MalformedCall):
            return request.message, ToolCall(outcome=MALFORMED, seconds=0.0)
        assert self._tools is not None
        result, call = await self._tools.call(request.name, request.arguments)
        return truncate_output(result, self._settings.observation_limit), call

    def _require_state(self, state: str) -> None:
        if self._state != state:
            raise EpisodeUsageError(f"episode of problem {self.problem.id!r} is {self._state}, expected {state}")


class SimpleTIREpisode(ToolEpisode):
    """One problem under one protocol. Does not close the shared sandbox and grader."""

    def __init__(
        self,
        problem: Problem,
        *,
        settings: SimpleTIRSettings,
        sandbox: Sandbox | None,
        grader: Grader,
        protocol: TextProtocol | None = None,
        tools: ToolSet = NO_TOOLS,
    ) -> None:
        """Create an episode. ``sandbox`` may be None only if the protocol executes nothing.

        The default ``protocol`` is ``settings.protocol``.
        """
        super().__init__(problem, settings=settings, protocol=protocol or make_protocol(settings), sandbox=sandbox)
        self._grader = grader
        self._tool_set = tools
        self._setup_lock = asyncio.Lock()

    async def begin(self) -> str:
        """Create the tools and return the prompt: instruction and statement."""
        self._tools = EpisodeTools(
            self._tool_set, self.problem, sandbox=self._sandbox, timeout=self._settings.execution_timeout
        )
        await self._tools.open()
        return self._protocol.prompt(self.problem)

    async def play_turn(self, action: str) -> Step:
        """Execute the turn's program or calls, and grade its answer if it has one.

        The protocol defines how an episode ends after a turn without a program, a call or an answer. The driver
        replaces this end if a token limit cut the turn or the model ended the turn without an answer.
        """
        turn = self._protocol.parse(action)
        if turn.program is not None:
            return await self._run_program(turn.program, action, turn.answer)
        if turn.calls:
            return self._step_after_calls(*await self.call_tools(turn.calls, action))
        if turn.answer is not None:
            return await self._grade(turn.answer, observation="", calls=())
        return Step(observation="", reward=0.0, ended=self._protocol.end_after_empty_turn)

    async def call_tool(self, request: ToolRequest | MalformedCall) -> tuple[str, ToolCall]:
        """Execute a call. The tool ``python`` runs in the sandbox."""
        if isinstance(request, ToolRequest) and request.name == PYTHON:
            execution = await self._execute(str(request.arguments["code"]))
            return self._result_text(execution), tool_call_of_execution(execution)
        return await super().call_tool(request)

    async def _run_program(self, program: str, action: str, text_answer: str | None) -> Step:
        """Execute the turn's program. A printed answer takes precedence over an answer in the model's text."""
        execution = await self._execute(program)
        call = tool_call_of_execution(execution)
        observation = self._protocol.observation(action, [self._result_text(execution)])
        answer = self._protocol.printed_answer(execution.stdout) or text_answer
        if answer is not None:
            return await self._grade(answer, observation=observation, calls=(call,))
        return self._step_after_calls(observation, (call,))

    async def _execute(self, program: str) -> Execution:
        """Run a program after the problem's setup. Raises UnavailableError if the sandbox fails."""
        if self._sandbox is None:
            raise EpisodeUsageError("the episode has no sandbox, so its protocol must not run programs")
        problem = self.problem
        if self._settings.interpreter == "session" and problem.setup:
            # Run the setup as a separate program, so that it runs even if the first program has a syntax error.
            async with self._setup_lock:
                if self._sandbox.is_stateless:
                    await self._sandbox.execute(problem.setup)
            problem = replace(problem, setup="")
        return await self._sandbox.execute(self._protocol.source_to_run(problem, program))

    def _result_text(self, execution: Execution) -> str:
        """Return the result that the model reads, with a note if the interpreter session ended."""
        return self._protocol.result_for_model(execution) + (_RESTARTED if execution.session_ended else "")

    def _step_after_calls(self, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        ended = Ended.TURN_LIMIT if self._turns >= self._settings.max_turns else None
        return Step(observation=observation, reward=0.0, ended=ended, tool_calls=calls)

    async def _grade(self, answer: str, *, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        """Grade the answer and return the last step.

        Without a reference answer, the reward is 0. A reward function may replace it.
        """
        last = Step(observation=observation, reward=0.0, ended=Ended.ANSWERED, answer=answer, tool_calls=calls)
        if self.problem.answer is None and not self._grader.needs_no_reference:
            return last
        try:
            verdict, score = await self._grader.score(answer, self.problem)
        except GraderError as error:
            logger.warning("problem %s was not graded: %s", self.problem.id, error)
            return replace(last, ended=Ended.INFRASTRUCTURE_FAILURE)
        return replace(last, reward=score, verdict=verdict)


class SimpleTIREnvironment(Environment):
    """Resources shared by the episodes of a run: sandbox, grader, protocol and tools.

    If an open ``sandbox`` is passed, it is used and never closed. Otherwise `open` creates a sandbox from
    ``sandbox_settings``.
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
        """Load the tools. Raises PluginError for an invalid tool and EpisodeUsageError if ``chat`` is missing."""
        self.settings = settings or SimpleTIRSettings()
        self._tools = _load_tools_of_protocol(self.settings)
        self._protocol = make_protocol(self.settings, chat=chat, tools=self._tools)
        self._sandbox_settings = sandbox_settings or SandboxSettings()
        self._grader = Grader(grader_settings or GraderSettings())
        self._external_sandbox = sandbox
        self._sandbox = sandbox

    async def open(self) -> None:
        """Open the sandbox. Raises `agentrl_sandbox.client.SandboxError` if the sandbox is not usable."""
        if self._sandbox is None and self._runs_programs:
            self._sandbox = await open_sandbox(self._sandbox_settings)

    def episode(self, problem: Problem) -> SimpleTIREpisode:
        """Create an episode of this problem."""
        return SimpleTIREpisode(
            problem,
            settings=self.settings,
            sandbox=self._require_sandbox() if self._runs_programs else None,
            grader=self._grader,
            protocol=self._protocol,
            tools=self._tools,
        )

    async def close(self) -> None:
        """Close the grader and the shared tools, and the sandbox unless it was passed to the constructor."""
        await self._grader.close()
        await self._tools.close()
        if self._sandbox is not None and self._external_sandbox is None:
            sandbox, self._sandbox = self._sandbox, None
            await sandbox.close()

    def with_turns(self, max_turns: int) -> SimpleTIREnvironment:
        """Return a copy with up to ``max_turns`` turns per episode.

        The copy shares the sandbox and the grader of this environment and does not close them.
        """
        twin = copy.copy(self)
        twin.settings = self.settings.model_copy(update={"max_turns": max_turns})
        return twin

    def describe(self) -> list[str]:
        """Return console lines about the protocol's limits, the sandbox's isolation and the grader."""
        settings = self.settings
        title = _TITLES.get(settings.protocol, settings.protocol)
        lines = [f"{title}: up to {settings.max_turns} turns, {settings.execution_timeout:g} s a program"]
        if self._tools.schemas:
            lines.append(f"tools: {', '.join(schema.name for schema in self._tools.schemas)}")
        if self._runs_programs:
            lines.append(f"sandbox: {self._require_sandbox().isolation.describe()}")
        return [*lines, f"grading: {self._grader.describe()}"]

    @property
    def _runs_programs(self) -> bool:
        return self.settings.protocol != "hermes" or self._tools.needs_sandbox

    def _require_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise EpisodeUsageError("the environment is not open: await environment.open() first")
        return self._sandbox


class SimpleTIRFactory(EnvironmentFactory[SimpleTIRSettings]):
    """Factory of the environment ``simpletir``."""

    def __call__(
        self, settings: SimpleTIRSettings, sandbox: SandboxSettings, grader: GraderSettings, chat: ChatFormat | None
    ) -> SimpleTIREnvironment:
        return SimpleTIREnvironment(settings, sandbox, grader, chat=chat)

    def template_use(self, settings: SimpleTIRSettings) -> TemplateUse | None:
        if settings.protocol == "hermes":
            if settings.chat == "never":
                return None
            return TemplateUse(
                settings=settings,
                setting="environment.protocol=hermes",
                tools=[schema.as_openai_function() for schema in _load_tools_of_protocol(settings).schemas],
                rerendered=settings.history == "template",
            )
        if settings.chat != "always":
            return None
        # The other protocols have no tool calls. Programs are plain text, and their outputs are user messages.
        return TemplateUse(
            settings=settings,
            setting="environment.chat=always",
            speaker=f"environment.protocol={settings.protocol}",
        )


def _load_tools_of_protocol(settings: SimpleTIRSettings) -> ToolSet:
    """Load the tools of protocol hermes. Raises `PluginError` for an invalid tool."""
    if settings.protocol != "hermes":
        return NO_TOOLS
    return load_tools(settings.tools, interpreter=settings.interpreter, mcp_sessions=settings.mcp_sessions)
