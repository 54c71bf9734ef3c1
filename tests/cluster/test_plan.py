"""What fits where is known before anything starts, and what does not is named."""

from __future__ import annotations

import sys

import pytest

from agentrl.cluster.backends import open_cluster
from agentrl.cluster.plan import UnplaceableError, assign_nodes, placement_table
from agentrl.cluster.processes import Bundle, ClusterNode
from agentrl.cluster.settings import ClusterSettings
from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.training.run.launch import rank_resource_bundles, sandbox_resource_bundle, server_resource_bundles


def nodes(*sizes: tuple[float, int]) -> list[ClusterNode]:
    return [
        ClusterNode(name=f"n{number}", address=f"10.0.0.{number}", cpus=cpus, gpus=gpus)
        for number, (cpus, gpus) in enumerate(sizes)
    ]


def bundles(*sizes: tuple[float, int]) -> list[Bundle]:
    return [Bundle(purpose=f"part {number}", cpus=cpus, gpus=gpus) for number, (cpus, gpus) in enumerate(sizes)]


def test_each_bundle_gets_the_tightest_node_of_its_own() -> None:
    found = assign_nodes(bundles((9, 8), (8, 8)), nodes((64, 8), (8, 8), (64, 16), (64, 0)))
    assert [node.name for node in found] == ["n0", "n1"]


@pytest.mark.parametrize(
    ("needed", "there", "message"),
    [
        (
            bundles((9, 8), (8, 8)),
            nodes((64, 8), (64, 4)),
            "requires 2 nodes with 8 GPUs, but the cluster has 1 with 8 and 1 with 4",
        ),
        (
            bundles((9, 10), (8, 8)),
            nodes((64, 8), (64, 8)),
            "1 node with 10 GPUs and 1 node with 8 GPUs, but the cluster has 2 with",
        ),
        (
            bundles((2, 0), (1, 0), (1, 0)),
            nodes((4, 0), (4, 0)),
            "1 node with 2 CPUs and 2 nodes with 1 CPU, but the cluster has 2",
        ),
        (bundles((9, 8)), nodes((8, 8)), "requires 1 node with 9 CPUs, but the cluster has 1 with 8"),
        (bundles((1, 0)), [], "requires 1 node with 1 CPU, but the cluster has none"),
    ],
)
def test_what_cannot_be_placed_is_named(needed: list[Bundle], there: list[ClusterNode], message: str) -> None:
    with pytest.raises(UnplaceableError, match=message):
        assign_nodes(needed, there)


def test_the_table_says_what_goes_where() -> None:
    rows = placement_table(bundles((9, 8), (8, 8)), nodes((64, 8), (64, 8), (64, 8)))
    assert rows == [
        ["n0", "10.0.0.0", "8 of 8", "9 of 64", "part 0"],
        ["n1", "10.0.0.1", "8 of 8", "8 of 64", "part 1"],
        ["n2", "10.0.0.2", "0 of 8", "0 of 64", "-"],
    ]


def test_the_ranks_of_a_run_are_spread_evenly_and_the_first_node_has_the_rest() -> None:
    overrides = ["cluster=ray", "cluster.nodes=2", "training.num_processes=4", "cluster.worker_cpus=3"]
    settings = load_settings(overrides=overrides)
    on_cpus = rank_resource_bundles(settings, nodes((8, 0), (8, 0)))
    assert [(one.purpose, one.cpus, one.gpus) for one in on_cpus] == [
        ("ranks 0 to 1, worker", 5, 0),
        ("ranks 2 to 3", 2, 0),
    ]
    servers = ["rollout.engine=vllm", "rollout.vllm.placement=dedicated", "rollout.vllm.replicas=2"]
    served = load_settings(overrides=[*overrides, *servers])
    on_gpus = rank_resource_bundles(served, nodes((8, 4), (8, 4)))
    assert [(one.purpose, one.gpus) for one in on_gpus] == [("ranks 0 to 1, worker", 2), ("ranks 2 to 3", 2)]


def test_servers_go_where_there_is_room_for_their_gpus() -> None:
    overrides = ["cluster=ray", "cluster.nodes=2", "training.num_processes=4", "rollout.engine=vllm"]
    own = ["rollout.vllm.replicas=3", "rollout.vllm.tensor_parallel_size=2", "sandbox=ray://"]
    settings = load_settings(overrides=[*overrides, *own])
    there = nodes((8, 4), (8, 4), (4, 2))
    ranks, servers = rank_resource_bundles(settings, there), server_resource_bundles(settings, there)
    assert servers == [Bundle(purpose=f"server {number}", cpus=1, gpus=2) for number in range(3)]
    assert placement_table(ranks, there, beside=servers, everywhere=sandbox_resource_bundle(settings)) == [
        ["n0", "10.0.0.0", "4 of 4", "4 of 8", "ranks 2 to 3, server 0, sandbox"],
        ["n1", "10.0.0.1", "4 of 4", "3 of 8", "server 1, server 2, sandbox"],
        ["n2", "10.0.0.2", "2 of 2", "4 of 4", "ranks 0 to 1, worker, sandbox"],
    ]
    with pytest.raises(UnplaceableError, match=r"no node has room for server 2 \(2 GPUs, 1 CPU\)"):
        placement_table(ranks, nodes((8, 4), (8, 4)), beside=servers)
    assert server_resource_bundles(load_settings(overrides=[*own[:1], "rollout.engine=vllm"]), there) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster=ray", "cluster.nodes=2", "training.num_processes=3"],
            "cannot be divided evenly among cluster.nodes=2",
        ),
        (
            ["cluster.nodes=2", "training.num_processes=2"],
            "cluster.nodes=2 requires cluster.kind=ray; got cluster.kind=auto",
        ),
        (
            ["cluster=environment", "cluster.restarts=1"],
            "conflicts with cluster.kind=environment: set it in the launcher",
        ),
        (["cluster=slurm"], "cluster.kind .*unknown cluster 'slurm'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(overrides=overrides)


def test_without_ray_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"pip install 'agentrl-trainer\[ray\]'"):
        open_cluster(ClusterSettings(kind="ray"), None)
