"""Runs on one of two hosts: ranks that only sleep, on Ray nodes that are lost or given up. Prints what became of them.

python ranks_on_hosts.py ADDRESS-OF-RAY lost|given-up
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from agentrl.cluster.plan import UnplaceableError
from agentrl.cluster.processes import Bundle, ProcessSpec, Reservation
from agentrl.cluster.ray_nodes import RayCluster
from agentrl.cluster.settings import ClusterSettings
from agentrl.training.run.launch import RankProcesses

SLEEP = ("-c", "import time; time.sleep(3600)")
PATIENCE = 600.0


def say(text: str) -> None:
    print(text, flush=True)


def started(cluster: RayCluster, bundles: Sequence[Bundle]) -> tuple[list[Reservation], RankProcesses]:
    reservations = cluster.reserve(bundles, wait_seconds=PATIENCE)
    ranks = [
        cluster.start(ProcessSpec(role="rank", number=number, arguments=SLEEP), reservation)
        for number, reservation in enumerate(reservations)
    ]
    say(f"ranks on {' '.join(sorted(one.address for one in reservations))}")
    return reservations, RankProcesses(ranks)


def lose(cluster: RayCluster) -> None:
    """A rank on each host, again once the lost host is back."""
    bundles = [Bundle(purpose=f"rank {number}", cpus=1) for number in range(2)]
    _, group = started(cluster, bundles)
    say(f"{group.wait()}")
    cluster.release()
    _, group = started(cluster, bundles)
    group.kill()
    say(f"{group.wait()}")


def exclude_resource(cluster: RayCluster) -> None:
    """A rank that may run anywhere, on nodes that answer and are given up one after the other."""
    bundles = [Bundle(purpose="rank 0", cpus=1)]
    for _ in cluster.nodes():
        (reservation,), _ = started(cluster, bundles)
        cluster.exclude_resource(reservation, 0)
        cluster.release()
    try:
        cluster.reserve(bundles)
    except UnplaceableError as error:
        say(f"{error}")


def main() -> None:
    cluster = RayCluster(ClusterSettings(kind="ray", address=sys.argv[1], deadline=5.0))
    try:
        (lose if sys.argv[2] == "lost" else exclude_resource)(cluster)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
