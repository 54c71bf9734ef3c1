"""Commands that play tasks in Harbor's format inside the tasks' containers: ``--env harbor:DIRECTORY:COMMAND``.

A container has no network except the gateway, which this process serves on the container's loopback interface.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from agentrl.rollout.gateway.programs import (
    AgentFailureError,
    AgentProgram,
    ContainerOrVerifierError,
    agent_environment_variables,
)
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl_envs.adapters.harbor_containers import TaskContainers
from agentrl_envs.adapters.harbor_tasks import check_agent_files, task_of_problem
from agentrl_envs.episode import UnavailableError
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import HarborAgentSettings

PORT = 42731
"""Port of the gateway on the loopback interface of every container."""

_LOG = "/tmp/agentrl-agent.log"  # a file in the container, because the agent's output may be long
_LOG_SECONDS = 30.0


class ContainerCommand(AgentProgram):
    """A command that runs once per rollout, in the container of a task. The task's verifier computes the reward."""

    def __init__(self, command: str, options: HarborAgentSettings, settings: AgentGatewaySettings) -> None:
        self._command = command
        self._options = options
        self._settings = settings
        self._containers = TaskContainers(options)
        self._gateway: AgentGateway | None = None

    async def open(self, server: AgentGateway) -> None:
        """Connect to Docker. Raises UnavailableError if Docker does not respond."""
        self._gateway = server
        await self._containers.open()

    async def run(self, rollout: AgentRollout, started: Callable[[], None]) -> float:
        """Wait for a free container and start it. Then run the command and the verifier, and return the reward.

        The verifier also runs after a failed command in two cases: the policy had reached a limit, or the task's time
        limit stopped the command although the engine never failed. Raises AgentFailureError if either fails.
        """
        assert self._gateway is not None, "the environment is not open"
        problem, access = rollout.policy.problem, rollout.access
        try:
            async with contextlib.AsyncExitStack() as stack:
                container = await self._containers.start(task_of_problem(problem))
                stack.push_async_callback(container.close)
                listener = await container.open_listener(PORT, self._options.helper_image)
                stack.callback((await self._gateway.serve_also_on(listener)).close)
                started()
                base_url_in_container = access.base_url.replace(self._gateway.url, f"http://127.0.0.1:{PORT}", 1)
                agent = container.task.config.agent
                result = await container.execute(
                    f"exec >{_LOG} 2>&1\n{self._command}",
                    timeout=agent.timeout_sec or self._settings.deadline,
                    user=agent.user,
                    environment=agent_environment_variables(
                        problem, replace(access, base_url=base_url_in_container), self._settings
                    ),
                )
                # As in Harbor, reaching the task's time limit is attributed to the policy, like reaching the turn or
                # token limit, unless the engine failed: the agent may then have spent the time on failed requests.
                out_of_time = result.stopped and rollout.failure is None
                if result.exit_code and not out_of_time and rollout.stopped is None:
                    log = await container.execute(f"tail -c 2000 {_LOG}", timeout=_LOG_SECONDS, user="root")
                    reason = result.stopped or f"exit code {result.exit_code}"
                    raise AgentFailureError(f"{self._command}: {reason}\n{log.output.strip()}")
                await rollout.reject_further_requests()  # processes of the agent may still run
                return await container.run_verifier()
        except UnavailableError as error:
            raise ContainerOrVerifierError(str(error)) from error

    def describe(self) -> str:
        return f"agent: {self._command}, in a separate container for each rollout; {self._containers.describe()}"

    async def close(self) -> None:
        """Disconnect from Docker."""
        await self._containers.disconnect()


def load_container_command(
    target: str, options: HarborAgentSettings, settings: AgentGatewaySettings
) -> ContainerCommand:
    """Return the program for ``DIRECTORY:COMMAND``. Raises PluginError if ``target`` is invalid."""
    directory, _, command = target.partition(":")
    if not command.strip():
        raise PluginError(f"env=harbor:{target} names no command: write harbor:DIRECTORY:COMMAND or harbor:DIRECTORY")
    check_agent_files(options.agent_files, directory)
    return ContainerCommand(command, options, settings)
