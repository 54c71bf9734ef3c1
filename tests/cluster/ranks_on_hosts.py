"""Runs on one of two hosts: ranks that only sleep, on Ray nodes that are lost. Prints what became of them.

python ranks_on_hosts.py ADDRESS-OF-RAY
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
    say(f"{group.wait_and_return_root_cause()}")
    cluster.release()
    _, group = started(cluster, bundles)
    group.kill()
    say(f"{group.wait_and_return_root_cause()}")


def main() -> None:
    cluster = RayCluster(ClusterSettings(kind="ray", address=sys.argv[1], deadline=5.0))
    try:
        lose(cluster)
    finally:
        cluster.close()


if __name__ == "__main__":
    main()
