"""A sandbox service on every node: real services, kept alive, as one sandbox."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from shared import command_of

from agentrl.cluster.local import THIS_MACHINE, LocalCluster
from agentrl.cluster.plan import UnplaceableError, nodes_with_capacity, placement_table
from agentrl.cluster.processes import Bundle, ClusterNode, Reservation
from agentrl.cluster.sandboxes import SandboxServices
from agentrl.config import load_settings
from agentrl.errors import SettingsError, WorldError
from agentrl.training.run.launch import sandbox_resource_bundle
from agentrl_sandbox.client import Outcome, SandboxSettings, open_sandbox

SANDBOX = Bundle(purpose="sandbox", cpus=1)


def node(number: int, cpus: float = 4) -> ClusterNode:
    return ClusterNode(name=f"n{number}", address=f"10.0.0.{number}", cpus=cpus, gpus=0)


def test_every_node_with_room_gets_one_and_the_table_shows_it() -> None:
    ranks = [Bundle(purpose="rank 0, worker", cpus=2), Bundle(purpose="rank 1", cpus=1)]
    rows = placement_table(ranks, [node(1, 2), node(2), node(3)], everywhere=SANDBOX)
    assert rows == [
        ["n1", "10.0.0.1", "0 of 0", "2 of 2", "rank 0, worker"],
        ["n2", "10.0.0.2", "0 of 0", "2 of 4", "rank 1, sandbox"],
        ["n3", "10.0.0.3", "0 of 0", "1 of 4", "sandbox"],
    ]
    taken = {"10.0.0.1": [Bundle(purpose="rank 0", cpus=2)]}
    with pytest.raises(
        UnplaceableError, match=r"no node has room for sandbox \(0 GPUs, 1 CPU\); available: 0 GPUs, 0 CPUs on n1"
    ):
        nodes_with_capacity(SANDBOX, [node(1, 2)], taken)


def test_only_ray_starts_services() -> None:
    with pytest.raises(SettingsError, match=r"sandbox\.url=ray:// requires cluster\.kind=ray; got cluster\.kind=auto"):
        load_settings(overrides=["sandbox=ray://"])
    settings = load_settings(overrides=["sandbox=ray://", "cluster=ray", "cluster.sandbox_cpus=3"])
    assert sandbox_resource_bundle(settings) == Bundle(purpose="sandbox", cpus=3)
    assert sandbox_resource_bundle(load_settings(overrides=["cluster=ray"])) is None


class NodesHere(LocalCluster):
    """Nodes that are all this machine; those in ``refused`` start nothing."""

    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.count = count
        self.refused: set[str] = set()

    def nodes(self) -> list[ClusterNode]:
        return [node(number) for number in range(1, self.count + 1)]

    def reserve_on_node(self, bundle: Bundle, node: ClusterNode | None = None) -> Reservation:
        if node is not None and node.name in self.refused:
            raise WorldError("other jobs use it")
        return THIS_MACHINE


@pytest.fixture
def cluster() -> Iterator[NodesHere]:
    made = NodesHere(2)
    yield made
    made.close()


def started(cluster: NodesHere, folder: Path, say: Callable[[str], None]) -> SandboxServices:
    own = ["workers=4", "timeout=60", "allow_unisolated=true"]
    return SandboxServices(cluster, cluster.nodes(), SANDBOX, arguments=own, folder=folder, notify=say)


@pytest.mark.slow
async def test_a_service_that_is_killed_comes_back_at_its_address(cluster: NodesHere, tmp_path: Path) -> None:
    said = list[str]()
    services = started(cluster, tmp_path, said.append)
    token = services.client_variables["SANDBOX_TOKEN"]
    url = ",".join(services.addresses)
    sandbox = await open_sandbox(SandboxSettings(url=url, token=token, allow_unisolated=True, service_deadline=1.0))
    try:
        (killed,) = [
            one for one in psutil.Process(os.getpid()).children(recursive=True) if serves(one, url.split(",")[0])
        ]
        killed.kill()
        done = await asyncio.gather(*(sandbox.execute(f"print({number})") for number in range(20)))
        assert [one.stdout for one in done] == [f"{number}\n" for number in range(20)]
        alone = SandboxSettings(url=url.split(",")[0], token=token, allow_unisolated=True)
        again = await open_sandbox(alone)
        assert (await again.execute("print(1)")).outcome is Outcome.OK
        await again.close()
    finally:
        await sandbox.close()
        services.stop_restarting()
    lost, back = said
    assert lost.startswith(f"sandbox service 0 on {THIS_MACHINE.node} was lost: it exited with code")
    assert back == f"sandbox service 0 on {THIS_MACHINE.node} was restarted"
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == [
        f"{THIS_MACHINE.node}-sandbox-{number}.log" for number in (0, 1)
    ]


def test_a_node_that_gives_no_place_is_told_and_done_without(cluster: NodesHere, tmp_path: Path) -> None:
    said = list[str]()
    cluster.refused = {"n1"}
    services = started(cluster, tmp_path, said.append)
    assert len(services.addresses) == 1
    assert said == ["no sandbox service started on n1 (10.0.0.1): other jobs use it"]
    services.stop_restarting()
    cluster.refused = {"n1", "n2"}
    with pytest.raises(WorldError, match="no node of the cluster could start a sandbox service"):
        started(cluster, tmp_path, said.append)


def serves(process: psutil.Process, address: str) -> bool:
    """Whether this is the gateway at that address."""
    line = command_of(process)
    return "serve" in line and "agentrl.cluster.supervise" not in line and address.rpartition(":")[2] in line
