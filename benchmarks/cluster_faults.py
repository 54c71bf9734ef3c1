"""Measure how a run reacts to faults: when it reports them, when training resumes, and whether metrics change.

    sudo python benchmarks/cluster_faults.py [--faults rank worker host cut head apart sandbox server]
                                             [--deadline 20]

Two network namespaces are the hosts A and B, each with a training rank; Ray's head and the command are in A. A service
manager restarts Ray on a host where Ray has ended. The first run meets these faults, each after another trained step:

rank     the rank of B is killed
worker   the rollout worker is killed
host     every process of B is killed
cut      B is cut off for a minute
head     every process of Ray on A is killed

A second run, with the command in B, meets

apart    A, with Ray's head, is cut off for a minute

A third run, of one process, plays SimpleTIR with two sandbox services:

sandbox  one of the services is killed

A fourth run, of one process, generates with two vLLM servers:

server   one server is killed, and restarted beside the other

The two times are until the console reports the fault, and until the next step is recorded.
The metrics of each run, without times, are compared with the metrics of an undisturbed run. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from cluster.hosts import Host, obstacle, ray_address, ray_variables, start_ray, two_hosts
from training.conftest import SMALL, CommandLine, write_random_policy
from training.test_vllm_training import servers, write_served_policy

from agentrl.cluster.processes import free_port

RECOVERED = ("rank", "worker", "host", "cut", "head")
FAULTS = (*RECOVERED, "apart", "sandbox", "server")
LONGEST = 600.0
STEPS = 6  # for each fault
CUT = 60.0
SMALL_VALUE = 0.01
ENDS = "; stopping the other ranks"
TIMINGS = ("time/", "tokens_per_s", "rollout/seconds")
SETTINGS = ["checkpoint.every=1", "training.deterministic=true", "training.zero_stage=3", "evaluation.every=1000"]
SETTINGS += ["training.persistence_threshold=0", "environment.kwargs.seconds=0.1", "telemetry.tokens_every=1000"]
SERVED = ["rollout.engine=vllm", "rollout.vllm.replicas=2", "rollout.concurrency=3", "environment.kwargs.seconds=0.2"]
COLD = ["coldstart.steps=120", "coldstart.batch_size=24"]


@dataclass
class Running:
    """A run of the command, with its output so far."""

    line: CommandLine
    name: str
    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(self.process.stdout)

    def steps(self) -> int:
        return max(self.line.steps(self.name), default=0)

    def until(self, condition: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() > began + LONGEST:
                raise SystemExit("the run ended or timed out; its output:\n" + "".join(self.said))
            time.sleep(0.05)

    def another_step(self) -> None:
        before = self.steps()
        self.until(lambda: self.steps() > before)

    def heard(self, text: str, after: int = 0) -> list[str]:
        return [one for one in self.said[after:] if text in one]

    def end(self) -> None:
        if self.process.wait(LONGEST) != 0:
            raise SystemExit("".join(self.said))

    def stop(self) -> None:
        """Send Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(LONGEST)

    def meet(self, strike: Callable[[], None], notices: str, resumes: str | None = None) -> tuple[str, float, float]:
        """Cause a fault after a step. Returns the message, and the seconds until it appears and until the next step."""
        self.another_step()
        so_far, began = len(self.said), time.monotonic()
        strike()
        self.until(lambda: bool(self.heard(notices, so_far)))
        noticed = time.monotonic() - began
        if resumes is not None:
            self.until(lambda: bool(self.heard(resumes, so_far)))
        self.another_step()
        again = time.monotonic() - began
        return self.heard(notices, so_far)[-1].strip().removeprefix("warning: ").removesuffix(ENDS), noticed, again


class Hosts:
    """Two hosts with Ray, which a service manager keeps running."""

    def __init__(self, line: CommandLine, head: Host, other: Host, folder: Path) -> None:
        self.head, self.other = head, other
        self._line = line
        self._folder = folder
        self._variables = ray_variables()
        for host in (head, other):
            start_ray(head, host, folder, self._variables)
            threading.Thread(target=self._keep, args=(host,), daemon=True).start()

    def start(self, name: str, *arguments: str, at: Host | None = None) -> Running:
        where = ["cluster=ray", f"cluster.address={ray_address(self.head)}", "cluster.nodes=2", f"name={name}"]
        process = subprocess.Popen(
            (at or self.head).command(sys.executable, "-m", "agentrl.cli", *arguments, *where),
            cwd=self._line.folder,
            env=self._line.environment() | self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Running(self._line, name, process)

    def rank(self) -> None:
        self._find("agentrl.training.run.rank", self.other).kill()

    def worker(self) -> None:
        self._find("agentrl.training.worker.process", self.head, self.other).kill()

    def host(self) -> None:
        self.other.kill()

    def cut(self) -> None:
        self.other.link("down")
        threading.Timer(CUT, self.other.link, args=("up",)).start()

    def head_of_ray(self) -> None:
        for process in self._ray(self.head):
            process.kill()

    def _find(self, module: str, *hosts: Host) -> psutil.Process:
        found = [one for host in hosts for one in _processes(host) if module in _command(one)]
        return found[0]

    def _ray(self, host: Host) -> list[psutil.Process]:
        return [
            one for one in _processes(host) if any(name in "".join(_command(one)[:1]) for name in ("ray::", "/ray/"))
        ]

    def _keep(self, host: Host) -> None:
        """Restart Ray whenever its processes exit, until the host is removed."""
        with contextlib.suppress(subprocess.CalledProcessError):
            while True:
                time.sleep(1)
                if not any("raylet" in "".join(_command(one)[:1]) for one in _processes(host)):
                    with contextlib.suppress(subprocess.CalledProcessError):
                        start_ray(self.head, host, self._folder, self._variables)


def _processes(host: Host) -> Iterator[psutil.Process]:
    for pid in host.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            yield psutil.Process(pid)


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def difference(line: CommandLine, name: str, undisturbed: str) -> str:
    """Describe the difference between the metrics of two runs."""
    rows, others = (
        [{key: value for key, value in row.items() if not key.startswith(TIMINGS)} for row in line.metrics(one)]
        for one in (name, undisturbed)
    )
    if json.dumps(rows) == json.dumps(others):
        return f"bitwise equal ({len(rows)} rows)"
    worst, where = max(
        (abs(row[key] - other[key]) / max(abs(other[key]), SMALL_VALUE), key)
        for row, other in zip(rows, others, strict=True)
        for key in row.keys() | other.keys()
        if row[key] is not None and row[key] == row[key]
    )
    return (
        f"relative difference at most {worst:.1e} in {len(rows)} rows, largest for {where} "
        f"(values below {SMALL_VALUE}: relative to {SMALL_VALUE})"
    )


def show(fault: str, met: tuple[str, float, float]) -> None:
    said, noticed, again = met
    print(f"| {fault} | {said} | {noticed:.1f} | {again:.1f} |", flush=True)


def on_two_hosts(line: CommandLine, options: argparse.Namespace) -> None:
    faults = [fault for fault in RECOVERED if fault in options.faults]
    steps = [f"training.steps={STEPS * max(len(faults), 1)}", "--num-processes", "2"]
    arguments = [*line.counting(line.folder / "policy", *SETTINGS), *steps, f"cluster.deadline={options.deadline:g}"]
    compared = []
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the paths of sockets must be short
    try:
        with two_hosts() as (head, other):
            hosts = Hosts(line, head, other, folder)
            strikes = {"rank": hosts.rank, "worker": hosts.worker, "host": hosts.host, "cut": hosts.cut}
            strikes["head"] = hosts.head_of_ray
            if faults:
                run = hosts.start("far", *arguments, f"cluster.restarts={len(faults)}")
                for fault in faults:
                    show(fault, run.meet(strikes[fault], ENDS, "resumed after"))
                run.end()
                compared.append("far")
            if "apart" in options.faults:
                run = hosts.start("apart", *arguments, "cluster.restarts=1", at=other)
                show("apart", run.meet(hosts.cut, ENDS, "resumed after"))
                run.end()
                compared.append("apart")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    line.run(*arguments, "name=near")
    for name in compared:
        print(f"\n{name} compared with an undisturbed run of two ranks on one host: {difference(line, name, 'near')}")


@contextlib.contextmanager
def sandbox_service() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "agentrl_sandbox", "serve", "--port", str(port), "--no-token"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def with_sandboxes(line: CommandLine) -> None:
    line.run("coldstart", "--output", "cold", *SMALL, *COLD)
    arguments = line.simpletir(line.folder / "cold", f"training.steps={2 * STEPS}", "training.deterministic=true")
    with sandbox_service() as (_, first), sandbox_service() as (lost, second):
        both = f"sandbox.url={first},{second}"
        run = Running(line, "one", line.start(*arguments, both, "name=one"))
        show("sandbox", run.meet(lost.kill, "receives no new calls"))
        run.end()
    line.run(*arguments, "name=all")
    print(f"\nrun one compared with an undisturbed run with a separate sandbox: {difference(line, 'one', 'all')}")


def with_servers(line: CommandLine) -> None:
    policy = write_served_policy(line.folder / "served")
    run = Running(line, "two", line.start(*line.counting(policy, *SERVED, "training.steps=1000", "name=two")))
    run.another_step()
    began = time.monotonic()
    show("server", run.meet(servers(run.process.pid)[0].kill, "is removed from rotation"))
    run.until(lambda: bool(run.heard("is available again")))
    back = time.monotonic() - began
    run.another_step()
    run.stop()
    rows = [row for row in line.metrics("two") if "policy/updates" in row]
    lost = sum(row["groups/infrastructure_failures"] for row in rows)
    apart = max(row.get("policy/engine_abs_diff", 0.0) for row in rows)
    print(f"\nserver: back after {back:.0f} s; {len(rows)} steps lost {lost} groups", end="")
    print(f"; log-probabilities of engine and trainer differed by at most {apart:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--deadline", type=float, default=20.0, help="cluster.deadline")
    options = parser.parse_args()
    if (why := obstacle()) is not None:
        raise SystemExit(f"cannot run on this machine: {why}")
    folder = Path(tempfile.mkdtemp(prefix="faults"))
    line = CommandLine(folder)
    try:
        print("| fault | console message | seconds until noticed | seconds until the next step |")
        print("|---|---|---|---|", flush=True)
        if "sandbox" in options.faults:
            with_sandboxes(line)
        if "server" in options.faults:
            with_servers(line)
        if not set(options.faults) <= {"sandbox", "server"}:
            write_random_policy(folder)
            on_two_hosts(line, options)
    finally:
        line.close()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
