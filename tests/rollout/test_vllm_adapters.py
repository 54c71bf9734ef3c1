"""Versions as adapters on servers, against fakes: names, who keeps which, what is unloaded, and servers that refuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rollout.fake_vllm import FakeVLLM, fakes, sampled
from rollout.vllm_support import CODEC, NEEDS, ask, eventually, rollout

from agentrl.errors import SettingsError
from agentrl.rollout.engines.replica import ServerClient
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.rollout.engines.vllm.engine import build_vllm_engine
from agentrl.rollout.engines.vllm.plan import VLLMPlan
from agentrl.rollout.settings import RolloutSettings


async def passes(replica: ServerClient) -> str | None:
    await replica.score((1, 2), salt="probe")
    return None


@asynccontextmanager
async def adapting(server: FakeVLLM, *, rank: int = 4) -> AsyncIterator[ServerEngine]:
    settings = rollout([server])
    engine = build_vllm_engine([server.address], NEEDS, settings, adapter_rank=rank)
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


async def install(engine: ServerEngine, version: int) -> None:
    await engine.pause()
    await engine.install(Path(f"/adapters/{version}"), version)
    assert await engine.find_problems(passes) == []
    engine.resume(passes)


def versions(server: FakeVLLM) -> list[str]:
    """The last parts of the directories of the loaded adapters."""
    return [Path(path).name for path in (server.adapters or {}).values()]


async def test_a_version_is_an_adapter_of_its_own_and_the_model_never_changes() -> None:
    async with fakes(CODEC) as (server,):
        server.adapters = {"somebody's": "/elsewhere"}
        async with adapting(server) as engine:
            assert "model" not in (await _body(server, engine))  # the start policy is the model itself
            await install(engine, 1)
            first = (await _body(server, engine))["model"]
            assert server.adapters[first] == "/adapters/1"
            await install(engine, 2)
            answer = await ask(engine)
            assert server.adapters[server.bodies[-1]["model"]] == "/adapters/2"
            assert answer.version_spans == ((2, 4),)  # whatever the server calls its model's weights
            assert versions(server) == ["elsewhere", "2"]
            # What was sent once more has another name, or the server would keep what it has.
            await install(engine, 2)
            assert versions(server) == ["elsewhere", "2"]
    changed = {call.split("?")[0] for call in server.controls_called()}
    assert changed == {*("/update_weight_version", "/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")}
    assert not server.loaded


async def _body(server: FakeVLLM, engine: ServerEngine) -> dict[str, Any]:
    await ask(engine)
    return server.bodies[-1]


async def test_no_adapter_is_unloaded_under_a_running_request() -> None:
    async with fakes(CODEC) as (server,):
        server.adapters = {}
        async with adapting(server) as engine:
            await install(engine, 1)
            held = asyncio.Event()

            async def wait(body: dict[str, Any]) -> Any:
                await held.wait()
                return 200, {"choices": [sampled([5] * 4)]}

            server.on_generate = wait
            running = asyncio.create_task(ask(engine))
            await eventually(lambda: len(server.bodies) == 1)
            await install(engine, 2)
            await install(engine, 3)
            assert versions(server) == ["1", "3"]
            held.set()
            assert (await running).version_spans == ((1, 4),)
            await install(engine, 4)
            assert versions(server) == ["4"]


async def test_a_server_that_was_started_again_is_given_the_adapter_again() -> None:
    async with fakes(CODEC) as (server,):
        server.adapters = {}
        async with adapting(server) as engine:
            await install(engine, 1)
            await server.die()
            server.adapters, server.version = {}, "default"
            task = asyncio.create_task(ask(engine))
            await eventually(lambda: not engine._servers[0].load.is_up)
            await server.start()
            assert (await task).version_spans == ((1, 4),)
            assert versions(server) == ["1"]


@pytest.mark.parametrize(("there", "said"), [(None, "no adapters"), ({}, "adapters up to rank 8")])
async def test_a_server_without_room_for_the_adapters_is_refused(there: dict[str, str] | None, said: str) -> None:
    async with fakes(CODEC) as (server,):
        server.adapters = there
        with pytest.raises(SettingsError, match=f"it accepts {said}, but model.lora.rank=9.*--max-lora-rank 16"):
            async with adapting(server, rank=9):
                pass


def test_a_started_server_has_room_for_the_adapters() -> None:
    shape: dict[str, Any] = {"model": "m", "tokenizer": "m", "host": "h", "port": 1, "dtype": "float32"}
    shape["rollout"] = RolloutSettings(schedule="overlapped")  # one step stale: three adapters at a time
    plain = VLLMPlan(**shape, max_tokens=9)
    assert "--enable-lora" not in plain.arguments()
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in plain.environment_variable_changes()
    plan = VLLMPlan(**shape, max_tokens=9, adapter_rank=9)
    command = plan.arguments()
    assert [command[command.index(name) + 1] for name in ("--max-lora-rank", "--max-loras")] == ["16", "3"]
    assert plan.environment_variable_changes()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
