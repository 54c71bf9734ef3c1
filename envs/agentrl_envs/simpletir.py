"""SimpleTIR: the model solves a problem by writing Python, reading the output and trying again.

All protocols (`agentrl_envs.protocols`) use the same episode. A correct answer has reward 1, everything else has reward
0. The driver handles token limits and the end of sequence. The episode handles text.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import replace

from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment, EpisodeUsageError
from agentrl_envs.execution import tool_call_of_execution
from agentrl_envs.factory import EnvironmentFactory, TemplateUse
from agentrl_envs.grading import Grader, GraderError, GraderSettings
from agentrl_envs.protocols.base import MalformedCall, TextProtocol, ToolRequest, make_protocol
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.tool_episode import ToolEpisode
from agentrl_envs.tools import NO_TOOLS, PYTHON, EpisodeTools, ToolSet, load_tools
from agentrl_envs.types import Ended, Problem, Step, ToolCall
from agentrl_sandbox.client import Execution, Sandbox, SandboxSettings, open_sandbox

__all__ = ["SimpleTIREnvironment", "SimpleTIREpisode", "SimpleTIRSettings"]

_TITLES = {"simpletir": "SimpleTIR", "retool": "ReTool", "torl": "ToRL", "hermes": "Hermes"}
_RESTARTED = "; the interpreter was restarted and its variables are gone"

logger = logging.getLogger(__name__)


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

        The protocol defines the end after a turn without a program, a call or an answer. The driver replaces this value
        if a token limit cut the turn or the model ended the turn without an answer.
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
        """Run a program after the problem's setup. Raises UnavailableError."""
        if self._sandbox is None:
            raise EpisodeUsageError("the episode has no sandbox, so its protocol must not run programs")
        problem = self.problem
        if self._settings.interpreter == "session" and problem.setup:
            # Run the setup as a separate program, so that a syntax error in the first program does not discard it.
            async with self._setup_lock:
                if self._sandbox.is_stateless:
                    await self._sandbox.execute(problem.setup)
            problem = replace(problem, setup="")
        return await self._sandbox.execute(self._protocol.source_to_run(problem, program))

    def _result_text(self, execution: Execution) -> str:
        """Return the result that the model reads, with a note if the interpreter session ended."""
        return self._protocol.result(execution) + (_RESTARTED if execution.session_ended else "")

    def _step_after_calls(self, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        ended = Ended.TURN_LIMIT if self._turns >= self._settings.max_turns else None
        return Step(observation=observation, reward=0.0, ended=ended, tool_calls=calls)

    async def _grade(self, answer: str, *, observation: str, calls: tuple[ToolCall, ...]) -> Step:
        """Return the last step. Without a reference answer, the reward is 0, and a reward function may replace it."""
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
        self,
        settings: SimpleTIRSettings,
        sandbox: SandboxSettings | None = None,
        grader: GraderSettings | None = None,
        *,
        chat: ChatFormat | None = None,
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
