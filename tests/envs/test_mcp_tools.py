"""Tools of MCP servers that were written with the package: over pipes and HTTP, alone and shared, lost and absent."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from envs_chat import CHAT
from ranks import free_port
from shared import needed

from agentrl_envs.grading import GraderSettings
from agentrl_envs.registry import PluginError
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.tools import load_tools
from agentrl_envs.tools.mcp_tools import list_server_tools
from agentrl_envs.types import Ended, Problem

needed("mcp", "mcp")

SERVER = '''
import os, sys, time
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")
sold = []

@server.tool()
def sell(item: str, count: int = 1) -> str:
    """Sells an item."""
    if item == "moon":
        raise ToolError("not in stock")
    sold.extend([item] * count)
    return f"{len(sold)} sold by {os.getpid()}"

@server.tool()
def wait(seconds: float) -> str:
    """Waits."""
    time.sleep(seconds)
    return "waited"

@server.tool()
def table() -> list[int]:
    """A table."""
    return [1, 2]

@server.tool()
def leave() -> str:
    """Ends the server."""
    os._exit(1)

if len(sys.argv) > 1:
    server.run(transport="streamable-http", port=int(sys.argv[1]))
else:
    server.run()
'''
PROBLEM = Problem(id="p", statement="Sell.", answer="5", source="toy")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    script = Path(tmp_path_factory.mktemp("mcp")) / "shop.py"
    script.write_text(SERVER, encoding="utf-8")
    return f"{sys.executable} {script}"


@asynccontextmanager
async def environment(*tools: str, **options: Any) -> AsyncIterator[SimpleTIREnvironment]:
    settings = SimpleTIRSettings(protocol="hermes", tools=tools, **options)
    made = SimpleTIREnvironment(settings, None, GraderSettings(workers=1), chat=CHAT)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def said(episode: Any, *calls: tuple[str, dict[str, Any]]) -> Any:
    turn = "".join(f"<tool_call>{json.dumps({'name': one, 'arguments': given})}</tool_call>" for one, given in calls)
    step = await episode.step(turn)
    return step, step.observation.removeprefix("</a>\n<t>").removesuffix("</t><a>").split("|")


def test_the_tools_are_those_that_the_server_lists(command: str) -> None:
    tools = load_tools([f"mcp:{command}"])
    assert [schema.name for schema in tools.schemas] == ["sell", "wait", "table", "leave"]
    sell = tools.schemas[0]
    assert (sell.description, sell.parameters["required"]) == ("Sells an item.", ["item"])
    assert not tools.needs_sandbox
    assert sell.find_argument_error({"item": 3}) is not None


async def test_each_trajectory_has_a_server_of_its_own(command: str) -> None:
    async with environment(f"mcp:{command}") as made:
        first, second = made.episode(PROBLEM), made.episode(PROBLEM)
        for episode in (first, second):
            await episode.start()
        step, (text,) = await said(first, ("sell", {"item": "pen", "count": 2}))
        count, _, process = text.partition(" sold by ")
        assert (count, [call.outcome for call in step.tool_calls], step.ended) == ("2", ["ok"], None)
        _, (other,) = await said(second, ("sell", {"item": "pen"}))
        assert other.startswith("1 sold by ")
        assert not other.endswith(process)
        _, texts = await said(first, ("sell", {"item": "ink"}), ("sell", {"item": "ink"}))
        assert sorted(texts) == [f"3 sold by {process}", f"4 sold by {process}"]
        for episode in (first, second):
            await episode.close()
    assert not Path(f"/proc/{process}").exists() or sys.platform != "linux"


async def test_a_shared_server_keeps_its_state_over_trajectories(command: str) -> None:
    async with environment(f"mcp:{command}", mcp_sessions="shared") as made:
        texts = []
        for _ in range(2):
            episode = made.episode(PROBLEM)
            await episode.start()
            texts.append((await said(episode, ("sell", {"item": "pen"})))[1][0])
            twin = await episode.fork()
            await twin.close()
            await episode.close()
        assert [text.split()[0] for text in texts] == ["1", "2"]
        assert len({text.split()[-1] for text in texts}) == 1


async def test_errors_results_and_refused_arguments_are_observations(command: str) -> None:
    async with environment(f"mcp:{command}", execution_timeout=60.0) as made:
        episode = made.episode(PROBLEM)
        await episode.start()
        step, (error, table, refused) = await said(
            episode, ("sell", {"item": "moon"}), ("table", {}), ("sell", {"item": "pen", "count": "two"})
        )
        assert "not in stock" in error
        assert table == "1\n2"
        assert refused.startswith("ToolCallError: argument count of sell: 'two' is not of type 'integer'")
        assert [call.outcome for call in step.tool_calls] == ["error", "ok", "malformed"]
        await episode.close()


async def test_a_call_that_takes_too_long_is_the_calls_fault(command: str) -> None:
    async with environment(f"mcp:{command}", execution_timeout=0.5) as made:
        episode = made.episode(PROBLEM)
        await episode.start()
        step, (text,) = await said(episode, ("wait", {"seconds": 60}))
        assert (text, step.tool_calls[0].outcome) == ("TimeoutError: wait did not answer in time", "timeout")
        await episode.close()


async def test_a_server_that_is_lost_is_no_data(command: str) -> None:
    async with environment(f"mcp:{command}") as made:
        episode = made.episode(PROBLEM)
        await episode.start()
        step, _ = await said(episode, ("leave", {}))
        assert (step.ended, step.tool_calls[0].outcome) == (Ended.INFRASTRUCTURE_FAILURE, "infrastructure_failure")
        await episode.close()


async def test_a_trajectory_with_a_server_of_its_own_cannot_branch(command: str) -> None:
    async with environment(f"mcp:{command}") as made:
        episode = made.episode(PROBLEM)
        await episode.start()
        await (await episode.fork()).close()  # before its first call there is nothing to copy
        await said(episode, ("table", {}))
        with pytest.raises(Exception, match="cannot branch, because the server's state cannot be copied"):
            await episode.fork()
        await episode.close()


async def test_a_server_over_http(command: str) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(*command.split(), str(port), stderr=asyncio.subprocess.DEVNULL)
    url = f"mcp:http://127.0.0.1:{port}/mcp"
    try:
        async with asyncio.timeout(120):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.05)
                else:
                    writer.close()
                    break
        async with environment(url) as made:
            episode = made.episode(PROBLEM)
            await episode.start()
            step, (text,) = await said(episode, ("sell", {"item": "pen"}))
            assert text == f"1 sold by {process.pid}"
            process.kill()
            await process.wait()
            step, _ = await said(episode, ("sell", {"item": "pen"}))
            assert step.ended is Ended.INFRASTRUCTURE_FAILURE
            await episode.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        list_server_tools.cache_clear()


@pytest.mark.parametrize("target", ["no-such-command", f"{sys.executable} -c pass", "http://127.0.0.1:9/mcp", ""])
def test_a_server_that_is_not_there_is_one_message(target: str) -> None:
    with pytest.raises(PluginError, match=r"the MCP server .* cannot be reached: "):
        load_tools([f"mcp:{target}"])


def test_a_tool_of_the_same_name_twice_is_refused(command: str) -> None:
    with pytest.raises(PluginError, match="two tools have the name 'sell'"):
        load_tools([f"mcp:{command}", f"mcp:{command}"])


async def test_a_shared_server_that_is_lost_is_started_again(command: str) -> None:
    async with environment(f"mcp:{command}", mcp_sessions="shared") as made:
        for call, ended in ((("leave", {}), Ended.INFRASTRUCTURE_FAILURE), (("sell", {"item": "pen"}), None)):
            episode = made.episode(PROBLEM)
            await episode.start()
            step, (text,) = await said(episode, call)
            assert step.ended is ended
            await episode.close()
        assert text.startswith("1 sold by ")
