"""Environments defined by a class with a ``reset`` method. All other public methods are tools.

    class Shop:
        def __init__(self, sandbox=None, grade=None): ...   # passed if they are parameters

        def reset(self, db, **columns) -> str | None: ...   # the row's columns; a returned text is added to the prompt

        def query(self, sql: str) -> str: ...               # a tool, with types and a docstring

        def step(self, text): ...                           # optional: processes a turn without a call

        def get_reward(self) -> float: ...                  # optional: called at the end

Each rollout has a separate instance. The synchronous methods of an instance all run in one thread. Methods may be
``async``. An instance that sets ``done`` ends its rollout. Environments for TRL's ``environment_factory`` have this
form.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from agentrl_envs.chat import ChatFormat, plain_text_format
from agentrl_envs.episode import Environment, EnvironmentContractError, UnavailableError
from agentrl_envs.factory import EnvironmentFactory, TemplateUse
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.hermes import HermesProtocol, PlainTextCallsProtocol
from agentrl_envs.protocols.texts import truncate_output
from agentrl_envs.registry import PluginError, describe_error
from agentrl_envs.settings import ClassEnvironmentSettings, validate_options
from agentrl_envs.simpletir import ToolEpisode
from agentrl_envs.threads import ObjectThread
from agentrl_envs.tools import EpisodeTools, ToolSet
from agentrl_envs.tools.calling import ToolError, indicates_unreachable_service
from agentrl_envs.tools.schema import injected_parameters
from agentrl_envs.tools.toolset import methods_as_tools
from agentrl_envs.types import Ended, Problem, Step, ToolCall, Verdict, as_reward, thaw
from agentrl_sandbox.client import Sandbox, SandboxSettings, open_sandbox

_SPECIAL_METHODS = frozenset({"reset", "step", "get_reward", "close", "fork"})
_SPECIAL_METHODS_OF_TRL = frozenset({"reset", "get_reward", "close"})


@dataclass(frozen=True)
class ClassEnvironmentFactory(EnvironmentFactory[ClassEnvironmentSettings]):
    """Creates environments from a custom class.

    With ``is_trl_class``, every public method except ``reset`` is a tool.
    """

    name: str
    user_class: Any
    is_trl_class: bool = False

    @property
    def tools(self) -> ToolSet:
        """The class's tools. Raises PluginError if a method is not a valid tool."""
        reserved = _SPECIAL_METHODS_OF_TRL if self.is_trl_class else _SPECIAL_METHODS
        return ToolSet(
            tuple(methods_as_tools(self.user_class, f"environment {self.name!r}: {self.user_class.__name__}", reserved))
        )

    @property
    def source_code(self) -> bytes:
        """The content of the file that defines the class; empty if there is no file."""
        try:
            return Path(inspect.getfile(self.user_class)).read_bytes()
        except (OSError, TypeError):
            return b""

    def problem_columns(self, problem: Problem) -> dict[str, object]:
        """Return the arguments of ``reset``: the row's columns, and ``problem``, ``answer``, ``id`` and ``prompt``.

        Raises EnvironmentContractError if ``reset`` requires a column that the row does not have.
        """
        messages = thaw(problem.messages) or [{"role": "user", "content": problem.statement}]
        fields = {"problem": problem.statement, "answer": problem.answer, "id": problem.id}
        columns = fields | {"prompt": messages} | cast("dict[str, object]", thaw(problem.info))
        parameters = list(inspect.signature(inspect.getattr_static(self.user_class, "reset")).parameters.values())[1:]
        wanted = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        missing = [one.name for one in wanted if one.name not in columns and one.default is one.empty]
        if missing:
            raise EnvironmentContractError(
                f"reset() of environment {self.name!r} requires the column{'s' * (len(missing) > 1)} "
                f"{', '.join(map(repr, missing))}; columns of problem {problem.id}: {', '.join(sorted(columns))}"
            )
        if any(one.kind is one.VAR_KEYWORD for one in parameters):
            return columns
        return {one.name: columns[one.name] for one in wanted if one.name in columns}

    @property
    def has_step_method(self) -> bool:
        """True if the class has a ``step`` method for turns without a call."""
        return not self.is_trl_class and hasattr(self.user_class, "step")

    def validate_section(self, section: BaseModel) -> ClassEnvironmentSettings:
        return validate_options(ClassEnvironmentSettings, section.model_extra or {})

    def __call__(
        self,
        settings: ClassEnvironmentSettings,
        sandbox: SandboxSettings,
        grader: GraderSettings,
        chat: ChatFormat | None,
    ) -> ClassEnvironment:
        tools = self.tools
        # Plain text has no end-of-turn marker, so the first call ends a turn.
        written = HermesProtocol if chat else PlainTextCallsProtocol
        if chat is None:
            listed = [schema.as_openai_function() for schema in tools.schemas] if settings.list_tools else []
            chat = plain_text_format(listed, system=settings.system_prompt)
        protocol = written(
            instruction=settings.instruction,
            observation_limit=settings.observation_limit,
            chat=chat,
            tools=tools,
            max_calls=settings.max_calls,
        )
        return ClassEnvironment(self, settings, sandbox, grader, protocol)

    def template_use(self, settings: ClassEnvironmentSettings) -> TemplateUse | None:
        functions = [schema.as_openai_function() for schema in self.tools.schemas]
        if settings.chat == "never" or (settings.chat == "auto" and not functions):
            if settings.history == "template":
                raise PluginError(
                    f"environment.history=template requires a chat template, but {self.name} is played in plain text; "
                    "set environment.history=keep"
                )
            return None
        return TemplateUse(
            settings=settings,
            setting=f"env={self.name}",
            tools=functions,
            lists_tools=settings.list_tools,
            optional=settings.chat == "auto",
            speaker=f"step() of {self.name}" if self.has_step_method else "",
            rerendered=settings.history == "template",
        )


class ClassEnvironment(Environment):
    """Resources shared by the episodes of a run: the grader, the settings, and the sandbox if the class needs it."""

    def __init__(
        self,
        factory: ClassEnvironmentFactory,
        settings: ClassEnvironmentSettings,
        sandbox: SandboxSettings,
        grader: GraderSettings,
        protocol: HermesProtocol,
    ) -> None:
        self.settings = settings
        self._factory = factory
        self._protocol = protocol
        self._sandbox_settings = sandbox
        self._sandbox: Sandbox | None = None
        self._grader = Grader(grader)

    async def open(self) -> None:
        """Open the sandbox if the class or a tool needs it."""
        wanted = self._protocol.tools.needs_sandbox or "sandbox" in injected_parameters(self._factory.user_class)
        if self._sandbox is None and wanted:
            self._sandbox = await open_sandbox(self._sandbox_settings)

    def episode(self, problem: Problem) -> ClassEpisode:
        """Create an episode. The instance of the class is created when the episode starts."""
        return ClassEpisode(problem, self._factory, self.settings, self._protocol, self._sandbox, self._grader)

    async def close(self) -> None:
        """Close the sandbox and the grader. May be called more than once."""
        await self._grader.close()
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()

    def describe(self) -> list[str]:
        """Return console lines about the class, its tools and the sandbox's isolation."""
        names = ", ".join(schema.name for schema in self._protocol.tools.schemas) or "none"
        lines = [f"environment {self._factory.name}: up to {self.settings.max_turns} turns, tools: {names}"]
        return lines if self._sandbox is None else [*lines, f"sandbox: {self._sandbox.isolation.describe()}"]


class ClassEpisode(ToolEpisode):
    """One problem, played with an instance of the custom class."""

    _settings: ClassEnvironmentSettings
    _protocol: HermesProtocol

    def __init__(
        self,
        problem: Problem,
        factory: ClassEnvironmentFactory,
        settings: ClassEnvironmentSettings,
        protocol: HermesProtocol,
        sandbox: Sandbox | None,
        grader: Grader,
    ) -> None:
        super().__init__(problem, settings=settings, protocol=protocol, sandbox=sandbox)
        self._factory = factory
        self._grader = grader
        self.running_call = ""

    async def begin(self) -> str:
        """Create the instance and call ``reset`` with the row's columns.

        Returns the prompt, followed by the text that ``reset`` returns.
        """
        self._tools = EpisodeTools(
            self._protocol.tools,
            self.problem,
            sandbox=self._sandbox,
            timeout=self._settings.execution_timeout,
            extra_arguments={
                "grade": _GradeFunction(self._grader, asyncio.get_running_loop()),
                **self._settings.kwargs,
            },
            lenient=self._factory.is_trl_class,
        )
        self.running_call = self._method_name("__init__")
        try:
            await self._tools.create_instance(self._factory.user_class)
        except ToolError as error:
            if isinstance(error.__cause__, TypeError):
                raise ToolError(f"{error}; set the arguments of __init__ in environment.kwargs") from error.__cause__
            raise
        returned = await self._call_method("reset", **self._factory.problem_columns(self.problem))
        if returned is not None and not isinstance(returned, str):
            raise EnvironmentContractError(
                f"{self._method_name('reset')} must return text or None, not {type(returned).__name__}"
            )
        return self._protocol.chat.prompt(
            self.problem,
            lambda statement: "\n\n".join(filter(None, (self._protocol.user_message(statement), returned))),
        )

    async def play_turn(self, action: str) -> Step:
        """Execute the turn's calls or, without calls, pass its text to ``step``. Without either, the episode ends."""
        turn = self._protocol.parse(action)
        if turn.calls:
            observation, calls = await self.call_tools(turn.calls, action)
            return await self._step_after_turn(observation, 0.0, done=False, calls=calls)
        if self._factory.has_step_method:
            returned, reward, done = _parse_step_result(
                await self._call_method("step", action), self._method_name("step")
            )
            observation = (
                self._protocol.format_user_reply(truncate_output(returned, self._settings.observation_limit))
                if returned
                else ""
            )
            return await self._step_after_turn(observation, reward, done=done, calls=())
        return await self._last_step(Ended.ANSWERED, "", 0.0, ())

    async def _step_after_turn(
        self, observation: str, reward: float, *, done: bool, calls: tuple[ToolCall, ...]
    ) -> Step:
        instance, _ = self._instance_and_thread()
        if done or bool(getattr(instance, "done", False)):
            return await self._last_step(Ended.ANSWERED, observation, reward, calls)
        if self._turns >= self._settings.max_turns:
            return await self._last_step(Ended.TURN_LIMIT, observation, reward, calls)
        return Step(observation=observation, reward=reward, ended=None, tool_calls=calls)

    async def _last_step(self, ended: Ended, observation: str, reward: float, calls: tuple[ToolCall, ...]) -> Step:
        instance, _ = self._instance_and_thread()
        if hasattr(instance, "get_reward"):
            reward += _checked_reward(await self._call_method("get_reward"), self._method_name("get_reward"))
        return Step(observation=observation, reward=reward, ended=ended, tool_calls=calls)

    async def _call_method(self, method: str, *args: object, **kwargs: object) -> object:
        """Call a method of the instance. Convert exceptions to UnavailableError or EnvironmentContractError."""
        name = self.running_call = self._method_name(method)
        instance, thread = self._instance_and_thread()
        function = getattr(instance, method)
        try:
            if inspect.iscoroutinefunction(function):
                result = await cast("Callable[..., asyncio.Future[object]]", function)(*args, **kwargs)
            else:
                await thread.wait_for_overdue_call()
                result = await thread.run(partial(function, *args, **kwargs), call_name=name)
        except UnavailableError:
            raise
        except (Exception, SystemExit) as error:
            if indicates_unreachable_service(error):
                raise UnavailableError(f"{name} raised {describe_error(error)}") from error
            raise EnvironmentContractError(f"{name} raised {describe_error(error)}") from error
        self.running_call = ""
        return result

    def _instance_and_thread(self) -> tuple[object, ObjectThread]:
        assert self._tools is not None
        return self._tools.instance(self._factory.user_class)

    def _method_name(self, method: str) -> str:
        return f"{method}() of environment {self._factory.name!r}"


class _GradeFunction:
    """``grade(answer, reference)`` for synchronous methods. Returns True if the answer is correct.

    Asynchronous methods call ``await grade.of(answer, reference)`` instead.
    """

    def __init__(self, grader: Grader, loop: asyncio.AbstractEventLoop) -> None:
        self._grader = grader
        self._loop = loop

    def __call__(self, answer: str | None, reference: str) -> bool:
        return asyncio.run_coroutine_threadsafe(self.of(answer, reference), self._loop).result()

    async def of(self, answer: str | None, reference: str) -> bool:
        verdict = await self._grader.grade(answer, reference)
        if verdict.is_excluded:
            raise UnavailableError(f"the answer {answer!r:.60} was not graded ({verdict.value})")
        return verdict is Verdict.CORRECT

    def __deepcopy__(self, memo: object) -> _GradeFunction:
        return self


def _parse_step_result(value: object, what: str) -> tuple[str, float, bool]:
    """Return (observation, reward, done) for a result of ``step``: text, None, or (text, reward, done)."""
    if value is None or isinstance(value, str):
        return value or "", 0.0, value is None
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str):
        return value[0], _checked_reward(value[1], what), bool(value[2])
    raise EnvironmentContractError(f"{what} must return text, None, or (text, reward, done), not {value!r:.80}")


def _checked_reward(value: object, what: str) -> float:
    try:
        return as_reward(value)
    except ValueError as error:
        raise EnvironmentContractError(f"{what} returned the invalid reward {error}") from None
