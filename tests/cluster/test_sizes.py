"""With cluster.elastic, a run takes what there is; a resource on which a rank fails twice is excluded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cluster.local import THIS_MACHINE, LocalCluster
from agentrl.cluster.plan import UnplaceableError, assign_nodes
from agentrl.cluster.processes import Bundle, ClusterNode, ProcessHandle, ProcessSpec, Reservation
from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.training.run.launch import EXIT_CRASHED, RankExit, RankReserver, rank_resource_bundles
from agentrl.training.worker.service import EXIT_PEER_LOST

RAY = ["cluster=ray", "cluster.nodes=3", "cluster.restarts=9", "training.num_processes=6", "cluster.elastic=true"]


class Nodes:
    """A cluster of which only the nodes matter."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.waited = list[float]()
        self.given_up = list[str]()

    def nodes(self) -> list[ClusterNode]:
        return [ClusterNode(name=f"n{one}", address=f"10.0.0.{one}", cpus=8, gpus=0) for one in range(self.count)]

    def reserve(self, bundles: Sequence[Bundle], *, wait_seconds: float = 0.0) -> list[Reservation]:
        self.waited.append(wait_seconds)
        return [
            Reservation(number=number, node=node.name, address=node.address)
            for number, node in enumerate(assign_nodes(bundles, self.nodes()))
        ]

    def start(self, spec: ProcessSpec, reservation: Reservation) -> ProcessHandle:
        raise AssertionError("sizes start nothing")

    def free_port(self, reservation: Reservation) -> int:
        raise AssertionError("sizes start nothing")

    def can_access(self, reservation: Reservation, path: Path) -> bool:
        raise AssertionError("sizes start nothing")

    def exclude_resource(self, reservation: Reservation, slot: int) -> None:
        self.given_up.append(reservation.address)

    def release(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing runs."""


class Ended:
    """A rank that has ended."""

    def __init__(self, number: int, reservation: Reservation) -> None:
        self.spec = ProcessSpec(role="rank", number=number, arguments=())
        self.reservation = reservation

    def wait(self, seconds: float) -> int | None:
        raise AssertionError("sizes start nothing")

    def send_signal(self, number: int) -> None:
        raise AssertionError("sizes start nothing")


def sizes(tmp_path: Path, *overrides: str, gpus: int = 0) -> RankReserver:
    settings = load_settings(overrides=["data.train.0.path=builtin:arithmetic", *overrides])
    node = ClusterNode(name="n0", address="10.0.0.0", cpus=8, gpus=gpus)
    return RankReserver(settings, lambda size: rank_resource_bundles(size, [node]), tmp_path)


def reserve(run: RankReserver, cluster: Nodes, patience: float) -> tuple[int, int, list[str], list[float]]:
    """Ranks, nodes, what was said, and how long was waited for each size."""
    said = list[str]()
    cluster.waited.clear()
    size, reservations = run.reserve(cluster, wait_seconds=patience, notify=said.append)
    assert len(reservations) == size.cluster.nodes
    return size.training.num_processes, size.cluster.nodes, said, [*cluster.waited]


def test_a_run_waits_for_its_size_and_then_takes_what_there_is(tmp_path: Path) -> None:
    run, cluster = sizes(tmp_path, *RAY), Nodes(3)
    assert reserve(run, cluster, 0.0) == (6, 3, [], [0.0])
    cluster.count = 1
    waits = [
        "the run requires 1 node with 3 CPUs and 2 nodes with 2 CPUs, but the cluster has 1 with 8; waiting up to 5 s"
    ]
    assert reserve(run, cluster, 5.0) == (2, 1, waits, [0.0, 5.0, 0.0, 0.0])
    cluster.count = 2  # another loss later: a node has come back, and it is not waited for the third
    assert reserve(run, cluster, 5.0) == (4, 2, [], [0.0, 0.0])
    cluster.count = 0
    with pytest.raises(UnplaceableError, match="requires 1 node with 3 CPUs, but the cluster has none"):
        run.reserve(cluster, wait_seconds=5.0, notify=waits.append)


def test_without_elastic_it_waits_for_its_size_alone(tmp_path: Path) -> None:
    run, cluster = sizes(tmp_path, *RAY[:-1]), Nodes(2)
    with pytest.raises(UnplaceableError, match="the cluster has 2 with 8"):
        run.reserve(cluster, wait_seconds=5.0, notify=lambda text: None)
    assert cluster.waited == [0.0, 5.0]


def test_where_a_rank_fails_twice_between_checkpoints_is_given_up(tmp_path: Path) -> None:
    run, cluster = sizes(tmp_path, *RAY), Nodes(3)
    _, reservations = run.reserve(cluster, notify=str)
    failed, other = (RankExit(rank=Ended(number, reservations[number // 2]), code=EXIT_CRASHED) for number in (5, 3))
    run.record_failure(cluster, failed)
    (tmp_path / "step-000001").mkdir()
    run.record_failure(cluster, failed)  # it was of use in between
    run.record_failure(cluster, other)
    run.record_failure(cluster, replace(other, lost="the node is gone"))  # nothing to give up
    follower = replace(other, code=EXIT_PEER_LOST)
    run.record_failure(cluster, follower)
    run.record_failure(cluster, follower)  # nothing of its own
    assert cluster.given_up == []
    run.record_failure(cluster, failed)
    run.record_failure(cluster, failed)
    assert cluster.given_up == ["10.0.0.2"]


def test_on_one_machine_the_gpu_is_given_up_or_else_a_rank(tmp_path: Path) -> None:
    local = ["cluster.restarts=1", "cluster.elastic=true", "training.num_processes=4", "training.sequence_parallel=2"]
    run, cluster = sizes(tmp_path, *local, gpus=5), LocalCluster(["a", "b", "c", "d", "e"])
    for left in (["a", "c", "d", "e"], ["a", "d"]):
        _, (reservation,) = run.reserve(cluster, notify=str)
        end = RankExit(rank=Ended(1, reservation), code=-9)
        run.record_failure(cluster, end)
        run.record_failure(cluster, end)
        assert list(run.reserve(cluster, notify=str)[1][0].gpus) == left
    run = sizes(tmp_path, *local)
    run.reserve(LocalCluster(None), notify=str)
    end = RankExit(rank=Ended(1, THIS_MACHINE), code=-9)
    run.record_failure(LocalCluster(None), end)
    run.record_failure(LocalCluster(None), end)
    assert run.reserve(LocalCluster(None), notify=str)[0].training.num_processes == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.elastic=true"], "cluster.elastic=true has no effect with cluster.restarts=0"),
        (
            [*RAY, "training.sequence_parallel=3"],
            "training.sequence_parallel=3 and 2 ranks per node: after the loss of a node, the remaining ranks may not "
            "form complete sequence-parallel groups; valid: a divisor of 2",
        ),
    ],
)
def test_what_cannot_be_elastic_is_one_message(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings(overrides=overrides)
    assert str(refused.value).count("cluster.elastic") == 1
    assert message in str(refused.value)
