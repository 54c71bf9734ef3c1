"""Measure how much time the command spends on starting and watching the ranks of a node with Ray.

    python benchmarks/cluster_watch.py [--ranks 8] [--seconds 20]

A Ray cluster on this machine runs `--ranks` idle processes. `start` is the wall-clock time of starting one process.
`watching` is the command's CPU time for a node, and `idle` the CPU time of a connection to Ray without processes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Sequence

from agentrl.cluster.backends import open_cluster
from agentrl.cluster.processes import Bundle, ProcessHandle, ProcessSpec
from agentrl.cluster.settings import ClusterSettings

LOOK = 0.2  # seconds, as in agentrl.training.run.launch
SLEEP = "import time; time.sleep(3600)"


def cpu_ms(handles: Sequence[ProcessHandle], seconds: float) -> float:
    """Return the CPU milliseconds of this process per second."""
    began, cpu = time.monotonic(), time.process_time()
    while time.monotonic() < began + seconds:
        if any(handle.wait(0.0) is not None for handle in handles):
            raise SystemExit("a process has ended")
        time.sleep(LOOK)
    return 1000 * (time.process_time() - cpu) / (time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    cluster = open_cluster(ClusterSettings(kind="ray", address="local"), None)
    try:
        (reservation,) = cluster.reserve([Bundle(purpose="idle processes", cpus=1)])
        idle = cpu_ms([], options.seconds)
        began = time.monotonic()
        specs = [ProcessSpec(role="rank", number=number, arguments=("-c", SLEEP)) for number in range(options.ranks)]
        handles = [cluster.start(spec, reservation) for spec in specs]
        start = 1000 * (time.monotonic() - began) / options.ranks
        watching = cpu_ms(handles, options.seconds) - idle
    finally:
        cluster.close()
    print("| start, ms per rank | watching, CPU ms per second and node | idle, CPU ms per second |\n|---|---|---|")
    print(f"| {start:.0f} | {watching:.1f} | {idle:.1f} |")


if __name__ == "__main__":
    main()
