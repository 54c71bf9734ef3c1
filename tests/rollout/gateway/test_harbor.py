"""Commands that play Harbor tasks in containers, against the local Docker engine."""

from __future__ import annotations

import asyncio
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from envs.docker_engine import BASE_IMAGE, need_docker
from rollout.gateway.chat import chat_codec, rollout
from rollout.gateway.test_environment import saying

from agentrl.rollout.driver import Driver
from agentrl.rollout.gateway.environment import AgentEnvironment, program_for_environment
from agentrl.rollout.gateway.harbor import ContainerCommand
from agentrl.rollout.gateway.programs import AgentFailureError
from agentrl.rollout.gateway.render import ChatRenderer
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Group
from agentrl_envs.adapters.harbor_containers import CommandResult
from agentrl_envs.adapters.harbor_tasks import HarborTask
from agentrl_envs.settings import HarborAgentSettings
from agentrl_envs.types import Ended, Problem

EXAMPLE = Path(__file__).parents[3] / "examples" / "harbor"
TASK = EXAMPLE / "tasks" / "write-word"
PLAYED = Problem(id="write-word", statement="Write hello.", answer=None, source="harbor", info={"task": str(TASK)})
SETTINGS = RolloutSettings(max_turn_tokens=4000, max_response_tokens=8000, retries=0)

# Writes what an agent can reach to the file that the task requires.
PROBE = """python3 - <<'END'
import json, os, socket, urllib.error, urllib.request

url, found = os.environ["OPENAI_BASE_URL"], []
found.append(" ".join(sorted(name for _, name in socket.if_nameindex())))
for address in ("172.17.0.1", "1.1.1.1"):
    try:
        socket.create_connection((address, 80), timeout=2)
    except OSError as error:
        found.append(error.strerror)
mine = os.environ["OPENAI_API_KEY"]
for path, key in (("/reward", mine), ("/finish", mine), ("/reward", "x")):
    request = urllib.request.Request(url.removesuffix("/v1") + path, b'{"reward": 1}', {"x-api-key": key})
    try:
        urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        found.append(str(error.code))
print(", ".join(found))
open("/app/out.txt", "w").write("hello")
END"""


async def play(command: str, engine: Any, *, samples: int, task: Path = TASK, **limits: Any) -> Group:
    tokenizer, codec = chat_codec()
    settings = AgentGatewaySettings(**limits)
    options = {"build_args": {"BASE_IMAGE": BASE_IMAGE}, "helper_image": BASE_IMAGE, "agent_files": f"{EXAMPLE}/agent"}
    program = program_for_environment(f"harbor:{EXAMPLE}/tasks:{command}", options, settings)
    environment = AgentEnvironment(program, settings, ChatRenderer(tokenizer, codec))
    await environment.open()
    problem = replace(PLAYED, info={"task": str(task)})
    driver = Driver(environment=environment, engine=engine, codec=codec, settings=SETTINGS, seed=7)
    try:
        requests = [Group(index=0, problem=problem)]
        (group,) = [group async for group in driver.play_groups(requests, step=1, group_size=samples, greedy=False)]
    finally:
        await environment.close()
    return group


@pytest.mark.slow
async def test_a_command_in_a_container_reaches_the_gateway_and_nothing_else() -> None:
    need_docker()
    group = await play("python3 /agent/agent.py", saying(PROBE, "done"), samples=1)
    (row,) = group.trajectories
    assert (row.reward, row.ended) == (1.0, Ended.ANSWERED)
    unreachable = "Network is unreachable"
    (seen,) = [part.text for part in row.segments if part.origin == "observation"]
    assert f"lo, {unreachable}, {unreachable}, 403, 403, 401" in seen


@pytest.mark.slow
async def test_the_verifier_rewards_a_command_and_a_failed_command_is_excluded() -> None:
    need_docker()
    group = await play("python3 /agent/agent.py", saying("true", "done"), samples=2)
    assert [(row.reward, row.ended) for row in group.trajectories] == [(0.0, Ended.ANSWERED)] * 2
    group = await play("echo no such thing; exit 3", saying("true"), samples=1)
    assert [row.ended for row in group.trajectories] == [Ended.INFRASTRUCTURE_FAILURE]


@pytest.mark.slow
async def test_an_agent_that_reaches_a_limit_is_verified(tmp_path: Path) -> None:
    need_docker()
    write = "echo hello > /app/out.txt"
    group = await play("python3 /agent/agent.py", saying(write, "true"), samples=1, max_generations=1)
    assert [(row.reward, row.ended) for row in group.trajectories] == [(1.0, Ended.TURN_LIMIT)]
    task = shutil.copytree(TASK, tmp_path / "task")
    (task / "task.toml").write_text("[agent]\ntimeout_sec = 8\n", encoding="utf-8")
    group = await play("python3 /agent/agent.py; sleep 60", saying(write, "done"), samples=1, task=task)
    assert [(row.reward, row.ended) for row in group.trajectories] == [(1.0, Ended.ANSWERED)]


class FakeContainer:
    """A container that is reached over the host's loopback interface, and that has no processes."""

    async def open_listener(self, port: int, image: str) -> socket.socket:
        return socket.create_server(("127.0.0.1", 0))

    async def close(self) -> None:
        """Do nothing, because there is no container."""


async def run_agent(one: AgentRollout, container: FakeContainer) -> float:
    """The reward of a command in ``container``."""

    async def start(task: HarborTask) -> FakeContainer:
        await asyncio.sleep(0)  # the gateway starts while a container starts
        return container

    settings = AgentGatewaySettings()
    gateway, program = AgentGateway(settings), ContainerCommand("agent", HarborAgentSettings(), settings)
    program._containers, program._gateway = SimpleNamespace(start=start), gateway  # type: ignore[assignment]
    await gateway.open()
    try:
        gateway.register_rollout(one)
        return await program.run(one, lambda: None)
    finally:
        await gateway.close()


class FinishedContainer(FakeContainer):
    """A container whose agent has ended, and whose verifier returns 1 if the rollout accepts no further requests."""

    task = SimpleNamespace(config=SimpleNamespace(agent=SimpleNamespace(timeout_sec=None, user=None)))

    def __init__(self, played: AgentRollout) -> None:
        self._played = played

    async def execute(self, command: str, **options: Any) -> CommandResult:
        return CommandResult(output="", exit_code=0, stopped="")

    async def run_verifier(self) -> float:
        return float(self._played.finished)


async def test_processes_that_an_agent_left_cannot_sample_while_the_verifier_runs() -> None:
    one = rollout(saying("done"), problem=PLAYED)
    assert await run_agent(one, FinishedContainer(one)) == 1.0


class StoppedContainer(FakeContainer):
    """A container whose agent is stopped by the time limit of the task, and whose verifier returns 0."""

    task = SimpleNamespace(config=SimpleNamespace(agent=SimpleNamespace(timeout_sec=8, user=None)))

    async def execute(self, command: str, **options: Any) -> CommandResult:
        return CommandResult(output="", exit_code=124, stopped="it took 8 s")

    async def run_verifier(self) -> float:
        return 0.0


@pytest.mark.parametrize("failure", [None, "the engine failed: no server"])
async def test_an_agent_that_waited_for_a_failed_engine_until_its_time_limit_is_not_scored(failure: str | None) -> None:
    one = rollout(saying("done"), problem=PLAYED)
    one.failure = failure
    if failure is None:
        assert await run_agent(one, StoppedContainer()) == 0.0
        return
    with pytest.raises(AgentFailureError):
        await run_agent(one, StoppedContainer())
