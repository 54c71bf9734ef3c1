"""Tasks in Harbor's format: ``--env harbor:DIRECTORY``. Each rollout has a container in the local Docker engine.

The built-in agent has one tool, ``bash``, which runs commands in the container. The reward is the result of the task's
verifier. If the agent is a command, it runs in the same containers (`agentrl.rollout.gateway.harbor`).
"""

from __future__ import annotations

import asyncio
import math
import time

from pydantic import BaseModel

from agentrl_envs.adapters.class_environment import ClassEnvironmentFactory
from agentrl_envs.adapters.harbor_containers import TaskContainer, TaskContainers
from agentrl_envs.adapters.harbor_tasks import check_agent_files, task_of_problem
from agentrl_envs.chat import ChatFormat
from agentrl_envs.episode import Environment, Episode
from agentrl_envs.factory import EnvironmentFactory, TemplateUse
from agentrl_envs.grading import GraderSettings
from agentrl_envs.settings import ClassEnvironmentSettings, HarborSettings, ToolTurnSettings, validate_options
from agentrl_envs.tools import ToolSet
from agentrl_envs.types import Problem
from agentrl_sandbox.client import SandboxSettings

_UNLIMITED = 1e9  # seconds. The container enforces the limit of a command; waiting for a container has no limit


class TaskShell:
    """State of the built-in agent in one task: the tool and its container. The first command starts the container."""

    def __init__(self, containers: TaskContainers, problem: Problem, seconds: float) -> None:
        self.done = False
        self._containers = containers
        self._problem = problem
        self._seconds = seconds
        self._used = 0.0  # seconds that commands took
        self._lock = asyncio.Lock()  # a turn may contain several commands, which run in order
        self._container: TaskContainer | None = None

    def reset(self) -> None:
        """Do nothing, because the first command starts the container and the prompt does not need it."""

    async def bash(self, command: str) -> str:
        """Run a command in a new bash shell and return its output. Files are kept between commands.

        Args:
            command: The command line or script to run.
        """
        async with self._lock:
            container = await self._started()
            agent = container.task.config.agent
            began, most = time.monotonic(), agent.timeout_sec or math.inf
            limit = min(self._seconds, max(1.0, most - self._used))
            done = await container.execute(command, timeout=limit, user=agent.user)
            self._used += time.monotonic() - began
            self.done = self._used >= most
        end = f"stopped because {done.stopped}" if done.stopped else f"exit code {done.exit_code}"
        return done.output if not done.exit_code else f"{done.output.rstrip()}\n[{end}]".lstrip()

    async def get_reward(self) -> float:
        return await (await self._started()).run_verifier()

    async def close(self) -> None:
        if self._container is not None:
            await self._container.close()

    async def _started(self) -> TaskContainer:
        if self._container is None:
            self._container = await self._containers.start(task_of_problem(self._problem))
        return self._container


class HarborEnvironment(Environment):
    """Environment of the built-in terminal agent."""

    def __init__(self, terminals: Environment, containers: TaskContainers) -> None:
        self._terminals = terminals
        self._containers = containers

    async def open(self) -> None:
        """Connect to Docker. Raises UnavailableError if it does not respond."""
        await self._containers.open()

    def episode(self, problem: Problem) -> Episode:
        """Create an episode. Its container starts with the first command."""
        return self._terminals.episode(problem)

    async def close(self) -> None:
        """Disconnect from Docker. May be called more than once."""
        await self._terminals.close()
        await self._containers.disconnect()

    def describe(self) -> list[str]:
        """Return lines for the console about the tool and the containers."""
        return [*self._terminals.describe(), self._containers.describe()]


class HarborFactory(EnvironmentFactory[HarborSettings]):
    """Creates environments of the built-in terminal agent."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._classes = ClassEnvironmentFactory(f"harbor:{directory}", TaskShell)

    @property
    def tools(self) -> ToolSet:
        """The tool ``bash``."""
        return self._classes.tools

    def validate_section(self, section: BaseModel) -> HarborSettings:
        return validate_options(HarborSettings, section.model_extra or {})

    def __call__(
        self, settings: HarborSettings, sandbox: SandboxSettings, grader: GraderSettings, chat: ChatFormat | None
    ) -> HarborEnvironment:
        check_agent_files(settings.agent_files, self._directory)
        containers = TaskContainers(settings)
        terminals = self._classes(_class_settings(settings, containers), sandbox, grader, chat)
        return HarborEnvironment(terminals, containers)

    def template_use(self, settings: HarborSettings) -> TemplateUse | None:
        return self._classes.template_use(_class_settings(settings, None))

    def problem_columns(self, problem: Problem) -> dict[str, object]:
        return {"task": task_of_problem(problem).name}


def _class_settings(settings: HarborSettings, containers: TaskContainers | None) -> ClassEnvironmentSettings:
    shared = {name: getattr(settings, name) for name in ToolTurnSettings.model_fields}
    return ClassEnvironmentSettings(
        **shared,
        execution_timeout=_UNLIMITED,
        kwargs={"containers": containers, "seconds": settings.execution_timeout},
    )
