"""Agent programs: a function, a command for each rollout, or a worker process that plays any number of rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import shlex
import shutil
import signal
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import cast

from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AGENT, FUNCTION, KEY_VARIABLE, VERIFIERS, AgentGatewaySettings
from agentrl.rollout.gateway.wire import GatewayAccess
from agentrl_envs.adapters import verifiers_worker
from agentrl_envs.registry import PluginError, import_attribute
from agentrl_envs.settings import VerifiersSettings
from agentrl_envs.threads import BlockingCallPool, LoopThread
from agentrl_envs.types import Problem, as_reward

logger = logging.getLogger(__name__)

# Environment variables that agents' processes inherit. Proxy variables are excluded, as they may contain passwords.
_INHERITED_VARIABLES = (
    "CURL_CA_BUNDLE",
    "HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "REQUESTS_CA_BUNDLE",
    "SHELL",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "TMPDIR",
    "TZ",
    "USER",
    "VIRTUAL_ENV",
)
_QUOTED_CHARACTERS = 2000  # characters of a command's output that are quoted in a message

BLOCKED_LOOP_SECONDS = 1.0
"""Seconds after which an async agent function that blocks the agents' event loop is reported."""


class AgentFailureError(Exception):
    """Raised if an agent's process fails or the agent returns an invalid reward.

    The rollout is excluded, unless the policy reached a limit.
    """


class ContainerOrVerifierError(AgentFailureError):
    """Raised if the container or the verifier fails. The rollout is excluded, even if the policy reached a limit."""


class AgentProgram(ABC):
    """Base class of programs that play problems through the gateway."""

    trusted = False
    """Whether the program may report rewards and receives the whole problem regardless of the gateway's settings."""

    async def open(self, server: AgentGateway) -> None:
        """Prepare the program for rollouts through ``server``."""

    @abstractmethod
    async def run(self, rollout: AgentRollout, started: Callable[[], None]) -> float | None:
        """Play the problem of ``rollout``. Returns the reward, or None if the program computes none.

        Calls ``started`` when the agent can begin. The rollout's deadline is measured from that call. Raises
        AgentFailureError if the agent fails. Exceptions of a user's function propagate.
        """

    @abstractmethod
    def describe(self) -> str:
        """Describe the program in one line for the console."""

    async def close(self) -> None:
        """Stop processes and threads that outlive a rollout."""


def load_agent_program(target: str, settings: AgentGatewaySettings) -> AgentProgram:
    """Return the agent program for ``module:function`` or a command. Raises PluginError if ``target`` is invalid."""
    if FUNCTION.fullmatch(target):
        found = import_attribute(target, "agent")
        if not callable(found):
            raise PluginError(f"agent {target!r} is a {type(found).__name__}, expected a function")
        _check_signature(target, found)
        return _FunctionProgram(target, found, settings.threads)
    command = split_command(target)
    if not command:
        raise PluginError(f"env={AGENT} requires an agent: write agent:module:function or 'agent:COMMAND'")
    return _CommandProgram(command, settings)


def split_command(target: str) -> list[str]:
    """Split a command into words. Raises PluginError for an unclosed quotation."""
    try:
        return shlex.split(target)
    except ValueError as error:
        raise PluginError(f"agent {target!r} is not a valid command: {error}") from error


async def start_process(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    directory: str,
    inherited: Sequence[str] = (),
    stdout: int,
    stderr: int | None = None,
) -> asyncio.subprocess.Process:
    """Start an agent's process in a new session and an empty directory. Raises AgentFailureError if it cannot start.

    The process inherits only common environment variables and ``inherited``, because other variables may contain the
    trainer's credentials. Because the process starts in a different directory, words of ``command`` that name files are
    made absolute, and the trainer's working directory is added to ``PYTHONPATH``.
    """
    names = {*_INHERITED_VARIABLES, *inherited, *(name for name in os.environ if name.startswith("LC_"))}
    paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    absolute = [os.path.abspath(word) if number or "/" in word else word for number, word in enumerate(command)]
    try:
        return await asyncio.create_subprocess_exec(
            *(path if os.path.isfile(path) else word for word, path in zip(command, absolute, strict=True)),
            env={
                **{name: os.environ[name] for name in names if name in os.environ},
                "PYTHONPATH": os.pathsep.join([*paths, os.getcwd()]),
                **variables,
            },
            cwd=directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentFailureError(f"{command[0]}: {error.strerror}") from error


@contextlib.asynccontextmanager
async def temporary_agent_directory() -> AsyncIterator[str]:
    """Create an empty working directory for an agent's process, and remove it on exit."""
    directory = await asyncio.to_thread(tempfile.mkdtemp, prefix="agentrl-agent-")
    try:
        yield directory
    finally:
        # Shield the removal, so that a cancelled rollout still removes its files.
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True))


def kill_process_tree(process: asyncio.subprocess.Process) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _check_signature(name: str, function: Callable[..., object]) -> None:
    try:
        inspect.signature(function).bind("problem", base_url="", api_key="", model="")
    except TypeError as error:
        raise PluginError(
            f"agent {name!r} must be callable as run(problem, *, base_url, api_key, model): {error}"
        ) from None


def _to_reward_or_none(value: object, source: str) -> float | None:
    """Convert ``value`` to a reward. Accepts None. Raises AgentFailureError for an invalid reward."""
    try:
        return None if value is None else as_reward(value)
    except ValueError as error:
        raise AgentFailureError(f"{source} returned the reward {error}") from None


@cache
def _shared_agent_loop() -> LoopThread:
    """Return the event loop of this process's asynchronous agents.

    The loop is never closed, because a run opens the agents several times. If the agent's module creates an HTTP client
    once, the client's connections belong to the loop.
    """
    return LoopThread()


class _FunctionProgram(AgentProgram):
    """A user's function. Asynchronous functions run in a separate event loop, and other functions in threads."""

    def __init__(self, name: str, function: Callable[..., object], threads: int) -> None:
        self._name = name
        self._function = function
        self._async = inspect.iscoroutinefunction(function)
        self._threads = BlockingCallPool(threads, name="agent")
        self._block_reporter: asyncio.Task[None] | None = None

    async def run(self, rollout: AgentRollout, started: Callable[[], None]) -> float | None:
        started()
        access = rollout.access
        arguments = {"base_url": access.base_url, "api_key": access.api_key, "model": access.model}
        call = partial(self._function, rollout.policy.problem, **arguments)
        if not self._async:
            return _to_reward_or_none(await self._threads.run(call), self._name)
        loop = _shared_agent_loop()
        if self._block_reporter is None:
            self._block_reporter = asyncio.create_task(self._warn_of_blocking_lines(loop))
        made = loop.start(cast("Coroutine[object, object, object]", call()))
        return _to_reward_or_none(await asyncio.wrap_future(made), self._name)

    def describe(self) -> str:
        return f"agent: {self._name}, in {'an event loop' if self._async else 'threads'}"

    async def close(self) -> None:
        if self._block_reporter is not None:
            self._block_reporter.cancel()
            await asyncio.gather(self._block_reporter, return_exceptions=True)
            self._block_reporter = None

    async def _warn_of_blocking_lines(self, loop: LoopThread) -> None:
        """Warn once about each line that blocks the loop, because it also blocks all other rollouts."""
        reported: set[tuple[str, int | None]] = set()
        while True:
            answer = asyncio.wrap_future(loop.start(asyncio.sleep(0)))
            while not (await asyncio.wait([answer], timeout=BLOCKED_LOOP_SECONDS))[0]:
                at = loop.current_line()
                if at is not None and (at.filename, at.lineno) not in reported:
                    reported.add((at.filename, at.lineno))
                    logger.warning(
                        "agent %s: %s:%s blocked the event loop and all other rollouts for more than %g s: %s\n"
                        "Use an asynchronous version of this call or asyncio.to_thread(...), or make the agent a plain "
                        "function, which runs in a thread. If the call is already asynchronous, the machine is busy, "
                        "and the warning is harmless",
                        self._name,
                        at.filename,
                        at.lineno,
                        BLOCKED_LOOP_SECONDS,
                        at.line,
                    )
            await asyncio.sleep(BLOCKED_LOOP_SECONDS)


def agent_environment_variables(
    problem: Problem, access: GatewayAccess, settings: AgentGatewaySettings
) -> dict[str, str]:
    """Return the environment variables of a command: the policy's address and the visible part of the problem."""
    return {
        "OPENAI_BASE_URL": access.base_url,
        "OPENAI_API_KEY": access.api_key,
        "OPENAI_MODEL": access.model,
        "ANTHROPIC_BASE_URL": access.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": access.api_key,
        "ANTHROPIC_MODEL": access.model,
        "AGENTRL_STATEMENT": problem.statement.replace("\0", ""),  # environment variables cannot contain NUL
        "AGENTRL_PROBLEM": json.dumps(settings.visible_columns(problem)),
    }


class _CommandProgram(AgentProgram):
    """A command that runs once per rollout.

    The policy's address and the visible part of the problem are passed in environment variables. With
    ``gateway.agent_rewards``, a number in the last line of the output is the reward.
    """

    def __init__(self, command: list[str], settings: AgentGatewaySettings) -> None:
        self._command = command
        self._settings = settings

    async def run(self, rollout: AgentRollout, started: Callable[[], None]) -> float | None:
        started()
        access = rollout.access
        variables = agent_environment_variables(rollout.policy.problem, access, self._settings)
        if self._settings.agent_rewards:
            variables["AGENTRL_REWARD_URL"] = access.base_url.removesuffix("/v1") + "/reward"
        pipe = asyncio.subprocess.PIPE
        async with temporary_agent_directory() as directory:
            process = await start_process(
                self._command,
                variables,
                directory=directory,
                inherited=self._settings.agent_environment,
                stdout=pipe,
                stderr=pipe,
            )
            try:
                out, err = await process.communicate()
            finally:
                kill_process_tree(process)
        if process.returncode:
            output = err.decode(errors="replace")[-_QUOTED_CHARACTERS:].strip()
            raise AgentFailureError(f"{self._command[0]} ended with exit code {process.returncode}: {output}")
        if not self._settings.agent_rewards:
            return None
        return _to_reward_or_none(_parse_last_number(out.decode(errors="replace")), self._command[0])

    def describe(self) -> str:
        return f"agent: {shlex.join(self._command)}, a process for each rollout"


def _parse_last_number(text: str) -> float | None:
    lines = text.strip().splitlines()
    try:
        return float(lines[-1]) if lines else None
    except ValueError:
        return None


EXTERNAL_WORKER = "external"
_STDERR = 2


class WorkerProgram(AgentProgram):
    """A worker process that plays all rollouts, or workers started by the user. Workers report rewards over HTTP."""

    def __init__(
        self,
        command: list[str],
        settings: AgentGatewaySettings,
        *,
        name: str = "",
        variables: dict[str, str] | None = None,
        trusted: bool = False,
    ) -> None:
        self._command = command
        self._settings = settings
        self.trusted = trusted
        self._name = name or shlex.join(command)
        self._variables = variables or {}
        self._gateway: AgentGateway | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._start_lock = asyncio.Lock()
        self._directory = contextlib.AsyncExitStack()

    async def open(self, server: AgentGateway) -> None:
        self._gateway = server

    async def run(self, rollout: AgentRollout, started: Callable[[], None]) -> float | None:
        process = await self._ensure_worker_process() if self._command else None
        await self._wait_or_raise_on_exit(process, self._open_gateway().offer_to_workers(rollout))
        started()
        await self._wait_or_raise_on_exit(process, rollout.finished_event.wait())
        return None

    def describe(self) -> str:
        if self._command:
            return f"agent: {self._name}, one process for all rollouts"
        return f"agents: workers that poll {'' if self._gateway is None else self._gateway.url + '/rollouts'}"

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_process_tree(process)
            await process.wait()
        await self._directory.aclose()

    def _open_gateway(self) -> AgentGateway:
        assert self._gateway is not None, "the environment is not open"
        return self._gateway

    async def _wait_or_raise_on_exit(
        self, process: asyncio.subprocess.Process | None, waiting: Coroutine[object, object, object]
    ) -> None:
        """Await ``waiting``. Raises AgentFailureError if the worker's process exits first."""
        done = asyncio.ensure_future(waiting)
        ended = None if process is None else asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait([one for one in (done, ended) if one is not None], return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                status = "" if ended is None else f" with exit code {ended.result()}"
                raise AgentFailureError(f"the worker {self._name} ended{status}")
        finally:
            for one in (done, ended):
                if one is not None:
                    one.cancel()

    async def _ensure_worker_process(self) -> asyncio.subprocess.Process:
        """Return the worker's process, restarted if it has exited. Its output is written to stderr."""
        async with self._start_lock:
            if self._process is None or self._process.returncode is not None:
                server = self._open_gateway()
                variables = {"AGENTRL_GATEWAY_URL": server.url, KEY_VARIABLE: server.key, **self._variables}
                await self._directory.aclose()
                self._process = await start_process(
                    self._command,
                    variables,
                    directory=await self._directory.enter_async_context(temporary_agent_directory()),
                    inherited=self._settings.agent_environment,
                    stdout=_STDERR,
                )
            return self._process


def load_worker_program(target: str, settings: AgentGatewaySettings) -> WorkerProgram:
    """Return the worker for ``worker:COMMAND`` or ``worker:external``. Raises PluginError if ``target`` is invalid."""
    command = split_command(target)
    if not command:
        raise PluginError(
            "env=worker: the command is missing: write 'worker:COMMAND', or worker:external for workers that you start "
            "yourself"
        )
    if target != EXTERNAL_WORKER:
        return WorkerProgram(command, settings)
    if not os.environ.get(KEY_VARIABLE):
        raise PluginError(f"env=worker:external needs {KEY_VARIABLE}, the key that workers use to fetch rollouts")
    return WorkerProgram([], settings)


def load_verifiers_worker(name: str, options: VerifiersSettings, settings: AgentGatewaySettings) -> WorkerProgram:
    """Return the worker for a task set of the verifiers library, run by ``options.python``.

    Raises PluginError if the task set is missing or ``options.python`` is not a file.
    """
    if not name:
        raise PluginError(f"env={VERIFIERS} names no task set: write {VERIFIERS}TASKSET")
    if options.python is None:
        raise PluginError(
            f"env={VERIFIERS}{name} needs environment.python, the Python of a virtual environment with verifiers 0.4 "
            "(its dependencies conflict with agentrl's): python -m venv venv; venv/bin/pip install 'verifiers==0.4.*'"
        )
    if not Path(options.python).expanduser().is_file():
        raise PluginError(f"environment.python={options.python} is not a file")
    command = [str(Path(options.python).expanduser()), str(Path(verifiers_worker.__file__)), name]
    return WorkerProgram(
        command,
        settings,
        name=f"verifiers {name}",
        variables={"AGENTRL_VERIFIERS": options.model_dump_json(include={"config", "concurrency"})},
        trusted=True,  # the worker runs only the code of the task set, which contains the answers anyway
    )
