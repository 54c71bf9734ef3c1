"""Ray over two hosts: a rank on each trains what two ranks on one machine train, also after one of them was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from training.conftest import DEADLINE, CommandLine, wait_until, write_random_policy

from agentrl.cluster.local import THIS_MACHINE

from .hosts import Host, obstacle, ray_address, ray_variables, start_ray, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]

TWO = ["training.steps=3", "checkpoint.every=1", "training.deterministic=true", "--num-processes", "2"]
TWO += ["training.zero_stage=3", "training.persistence_threshold=0", "environment.kwargs.seconds=0.02"]
TIMINGS = ("time/", "tokens_per_s", "rollout/seconds")


@dataclass(frozen=True)
class RayHosts:
    """A Ray cluster of two hosts, seen from the first."""

    head: Host
    other: Host
    variables: dict[str, str]

    def start(self, line: CommandLine, *arguments: str) -> subprocess.Popen[str]:
        own = [f"cluster.address={ray_address(self.head)}", "cluster=ray"]
        return subprocess.Popen(
            self.head.command(sys.executable, "-m", "agentrl.cli", *arguments, *own),
            cwd=line.folder,
            env=line.environment() | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def ranks_that_sleep(self, host: Host) -> subprocess.Popen[str]:
        script = str(Path(__file__).with_name("ranks_on_hosts.py"))
        return subprocess.Popen(
            host.command(sys.executable, script, ray_address(self.head)),
            env=os.environ | self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ranks(self, host: Host) -> list[psutil.Process]:
        found = [psutil.Process(pid) for pid in host.processes()]
        return [one for one in found if "agentrl.training.run.rank" in one.cmdline()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the names of sockets must be short
    # A host that is cut off for longer than planned, on a busy machine, is still there when it is back.
    variables = ray_variables() | {"RAY_health_check_failure_threshold": "1000"}
    try:
        with two_hosts() as (head, other):
            for host in (head, other):
                start_ray(head, host, folder, variables)
            yield RayHosts(head, other, variables)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    folder = tmp_path_factory.mktemp("hosts")
    write_random_policy(folder)
    made = CommandLine(folder)
    yield made
    made.close()


def numbers(line: CommandLine, name: str) -> list[dict[str, float]]:
    rows = line.metrics(name)
    return [{key: value for key, value in row.items() if not key.startswith(TIMINGS)} for row in rows]


def test_a_rank_on_each_host_trains_like_two_on_one_even_if_one_is_killed(cluster: RayHosts, line: CommandLine) -> None:
    arguments = line.counting(line.folder / "policy", *TWO)
    process = cluster.start(line, *arguments, "name=far", "cluster.nodes=2", "cluster.restarts=1")
    try:
        saved = line.folder / "runs" / "far" / "checkpoints"
        wait_until(lambda: any(saved.glob("step-*")), process)
        found = [cluster.ranks(host) for host in (cluster.head, cluster.other)]
        assert [len(ranks) for ranks in found] == [1, 1]
        (killed,) = [rank for (rank,) in found if rank.environ()["RANK"] == "1"]
        killed.kill()
        said = process.communicate(timeout=DEADLINE)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    assert re.search(r"training rank 1 on \S+ was killed by SIGKILL; stopping the other ranks", said)
    assert "restart 1 of 1 from the last checkpoint: training rank" in said
    assert len(re.findall(r"resumed after step [12]", said)) == 1
    line.run(*arguments, "name=near")
    assert line.steps("far") == line.steps("near") == [1, 2, 3]
    for far, near in zip(numbers(line, "far"), numbers(line, "near"), strict=True):
        assert far == pytest.approx(near, rel=1e-5, abs=1e-8, nan_ok=True)
    run = line.folder / "runs" / "far"
    logs = sorted(log.name for log in (run / "logs").iterdir())
    assert logs == [f"{THIS_MACHINE.node}-{name}.log" for name in ("rank-0", "rank-1", "worker-0")]
    parts = sorted(part.name for part in (run / "checkpoints" / "step-000003" / "engine").iterdir())
    assert parts == ["part-00000.safetensors", "part-00001.safetensors"]
    assert not any(cluster.ranks(host) for host in (cluster.head, cluster.other))


def test_what_the_hosts_cannot_hold_ends_at_once(cluster: RayHosts, line: CommandLine) -> None:
    arguments = line.counting(line.folder / "policy", "--num-processes", "3", "cluster.nodes=3", "name=none")
    process = cluster.start(line, *arguments)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 2, said
    assert "error: the run requires 1 node with 2 CPUs and 2 nodes with 1 CPU, but the cluster has 2 with 4" in said


def test_ranks_start_again_when_a_head_that_was_cut_off_is_back(cluster: RayHosts) -> None:
    """The command runs on the other host; the rank on the head's host ends by itself."""
    process = cluster.ranks_that_sleep(cluster.other)
    assert process.stdout is not None
    try:
        both = f"ranks on {cluster.head.address} {cluster.other.address}\n"
        assert process.stdout.readline() == both
        cluster.other.link("down")
        assert re.search(r"^training rank \d is lost: Ray's head has not responded for 5 s", process.stdout.readline())
        wait_until(lambda: not sleeping(cluster.head), process)
        cluster.other.link("up")
        assert process.stdout.readline() == both
        assert "was killed by SIGKILL" in process.communicate(timeout=DEADLINE)[0]
    finally:
        process.kill()
        process.communicate()
        cluster.other.link("up")


def sleeping(host: Host) -> list[psutil.Process]:
    """The ranks on a host that only sleep."""
    found = []
    for pid in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "time.sleep(3600)" in " ".join(psutil.Process(pid).cmdline()):
                found.append(psutil.Process(pid))
    return found


def test_a_sandbox_on_each_host_loses_no_program_with_one_of_them(cluster: RayHosts, tmp_path: Path) -> None:
    """The last test here: a host is lost."""
    script = str(Path(__file__).with_name("sandboxes_on_hosts.py"))
    process = subprocess.Popen(
        cluster.head.command(sys.executable, script, ray_address(cluster.head), str(tmp_path)),
        env=os.environ | cluster.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = [process.stdout.readline(), process.stdout.readline()]
        hosts = sorted(re.findall(r"http://([\d.]+):", said[0]))
        assert hosts == [cluster.head.address, cluster.other.address]
        cluster.other.kill()
        said.append(process.communicate(timeout=DEADLINE)[0])
    finally:
        process.kill()
        process.communicate()
    assert re.search(r"sandbox service \d on \S+ was lost: the node", said[-1])
    assert re.search(r"ended \{'right': \d+\}", said[-1])
