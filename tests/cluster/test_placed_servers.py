"""vLLM servers on nodes of a cluster: started by the real command line, watched, and started elsewhere with their node.

The program that the command line starts is a stand-in for vLLM, which answers as vLLM does.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from rollout.fake_vllm import fakes
from rollout.vllm_support import CODEC, VOCABULARY, ask, eventually, is_up

from agentrl.cluster.local import LocalCluster, LocalProcess
from agentrl.cluster.processes import Bundle, ClusterNode, NodeLostError, ProcessSpec, Reservation, free_port
from agentrl.errors import WorldError
from agentrl.rollout.engines.base import engine_facts, server_bundles
from agentrl.rollout.engines.processes import NodeServer
from agentrl.rollout.engines.replica import ServerRequirements
from agentrl.rollout.engines.server_pool import ServerEngine
from agentrl.rollout.engines.vllm.engine import build_vllm_engine
from agentrl.rollout.engines.vllm.plan import VLLMPlan, plan_servers_on_gpus
from agentrl.rollout.settings import RolloutSettings

STAND_IN = """
import asyncio, os, sys

async def copy(source, target):
    try:
        while data := await source.read(65536):
            target.write(data)
    finally:
        target.close()

async def relay(reader, writer):
    there, out = await asyncio.open_connection("127.0.0.1", int(os.environ["AGENTRL_STAND_IN"]))
    await asyncio.gather(copy(reader, out), copy(there, writer))

async def serve():
    host, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--host", "--port"))
    await asyncio.start_server(relay, host, int(port))
    print("serves with", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""
"""Hands everything to the server in the test's process."""


class Node(LocalProcess):
    """A process of a node that may be lost."""

    def __init__(self, spec: ProcessSpec, reservation: Reservation, lost: set[str]) -> None:
        super().__init__(spec, reservation)
        self._lost = lost

    def wait(self, seconds: float) -> int | None:
        if self.reservation.node in self._lost:
            raise NodeLostError(f"{self.reservation.node} is gone")
        return super().wait(seconds)

    def vanish(self) -> None:
        """End with everything that it has started."""
        if super().wait(0.0) is None:
            for child in psutil.Process(self.pid).children(recursive=True):
                child.kill()
        assert super().wait(30.0) is not None


class Nodes(LocalCluster):
    """Nodes ``a`` and ``b`` with two GPUs each, both this machine."""

    def __init__(self) -> None:
        super().__init__(None)
        self.lost: set[str] = set()
        self.running: list[Node] = []
        self.taken: set[str] = set()
        self._numbers = itertools.count()

    def nodes(self) -> list[ClusterNode]:
        found = [ClusterNode(name=name, address=f"10.0.0.{name}", cpus=4, gpus=2) for name in "ab"]
        return [node for node in found if node.name not in self.lost]

    def reserve_on_node(self, bundle: Bundle, node: ClusterNode | None = None) -> Reservation:
        free = [node.name for node in self.nodes() if node.name not in self.taken]
        if not free:
            raise WorldError("no node has room")
        self.taken.add(free[0])
        return Reservation(number=next(self._numbers), node=free[0], address="127.0.0.1", gpus=("6", "7"))

    def is_reachable(self, reservation: Reservation) -> bool:
        return reservation.node not in self.lost

    def free_port(self, reservation: Reservation) -> int:
        return free_port(reservation.address)

    def start(self, spec: ProcessSpec, reservation: Reservation) -> Node:
        process = Node(spec, reservation, self.lost)
        self.running.append(process)
        return process

    def lose(self, name: str) -> None:
        self.lost.add(name)
        self.taken.discard(name)
        for one in self.running:
            if one.reservation.node == name:
                one.vanish()

    def close(self) -> None:
        for one in self.running:
            one.vanish()


@pytest_asyncio.fixture
async def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Nodes]:
    program = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN)
    for folder in (program.parent, *program.parents[1:3]):
        (folder / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = Nodes()
    async with fakes(CODEC) as (server,):
        monkeypatch.setenv("AGENTRL_STAND_IN", str(server.port))
        yield made
        made.close()


@asynccontextmanager
async def opened(nodes: Nodes, folder: Path, replicas: int) -> AsyncIterator[ServerEngine]:
    own = {"replicas": replicas, "tensor_parallel_size": 2, "start_deadline": 60.0, "outage_deadline": 60.0}
    settings = RolloutSettings(
        engine="vllm", max_prompt_tokens=100, max_turn_tokens=50, max_response_tokens=100, vllm=own
    )
    bundles = server_bundles(engine_facts(settings), nodes.nodes(), 1.0)
    gpus = [str(number) for number in range(2 * replicas)]
    served = {"model": "m", "tokenizer": "m", "dtype": "float32", "max_tokens": 200}
    plan = VLLMPlan(rollout=settings, host="127.0.0.1", port=0, **served)  # type: ignore[arg-type]
    plans = plan_servers_on_gpus(plan, gpus=gpus, training_gpus=0)
    servers = [
        NodeServer(plan, folder, number, cluster=nodes, bundle=bundle)
        for number, (plan, bundle) in enumerate(zip(plans, bundles, strict=True))
    ]
    engine = build_vllm_engine(
        servers, ServerRequirements(codec=CODEC, vocabulary=VOCABULARY, max_tokens=200), settings
    )
    try:
        await engine.open()
        yield engine
    finally:
        await engine.close()


@pytest.mark.slow
async def test_a_server_starts_elsewhere_when_its_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    async with opened(nodes, tmp_path, 1) as engine:
        first = engine.responding_servers[0].address
        assert (await ask(engine)).token_ids == (8, 9, 10, 11)
        nodes.lose("a")
        assert (await ask(engine)).token_ids == (8, 9, 10, 11)
        (second,) = engine.responding_servers
        assert first != second.address
    assert [one.reservation.node for one in nodes.running] == ["a", "b"]
    logs = {log.name: log.read_text() for log in (tmp_path / "logs").iterdir()}
    assert logs == {f"{node}-server-0.log": "serves with 6,7\n" for node in "ab"}
    assert all(one.wait(10.0) is not None for one in nodes.running if one.reservation.node == "b")


@pytest.mark.slow
async def test_while_no_node_has_room_the_others_serve(nodes: Nodes, tmp_path: Path) -> None:
    async with opened(nodes, tmp_path, 2) as engine:
        nodes.lose("b")
        done = await asyncio.gather(*(ask(engine, name=str(number)) for number in range(8)))
        assert {one.token_ids for one in done} == {(8, 9, 10, 11)}
        assert sum(is_up(engine, number) for number in range(2)) == 1
        await eventually(lambda: "no node has room" in engine._failure_messages)
        nodes.lost.clear()
        await eventually(lambda: is_up(engine, 0) and is_up(engine, 1))
    assert sorted(one.reservation.node for one in nodes.running) == ["a", "b", "b"]
