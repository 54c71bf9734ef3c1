"""Start and supervise the training ranks of a run: stop all ranks if one fails, and restart them if configured."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.cluster.backends import has_many_nodes, open_cluster
from agentrl.cluster.launchers import launcher_variables
from agentrl.cluster.local import log_file
from agentrl.cluster.plan import PLAN_COLUMNS, UnplaceableError, nodes_with_capacity, place_bundles, placement_table
from agentrl.cluster.processes import (
    Bundle,
    Cluster,
    ClusterNode,
    NodeLostError,
    ProcessHandle,
    ProcessSpec,
    Reservation,
    gpus_visible_before_launch,
)
from agentrl.cluster.sandboxes import SandboxServices
from agentrl.errors import (
    EXIT_INTERRUPTED,
    EXIT_PEER_LOST,
    EXIT_REPORTED_ERROR,
    EXIT_STUCK,
    OutOfMemoryError,
    SettingsError,
    WorldError,
)
from agentrl.evaluation.settings import quoted_override
from agentrl.rollout.engines.base import engine_facts, runs_servers_on_nodes, server_bundles
from agentrl.telemetry.console import Console
from agentrl.training.run.signals import handle_stop_signals

if TYPE_CHECKING:
    from agentrl.config import Settings


_EXIT_SECONDS = 30.0  # seconds to wait for ranks to exit after SIGTERM if a rank has failed
_EXIT_SECONDS_AFTER_LOSS = 5.0  # seconds to wait for ranks to exit after SIGTERM if a rank or the worker was lost
_CAUSE_DELAY = 3.0  # seconds to wait for the cause of a failure that may be a consequence of another failure
_POLL_INTERVAL = 0.2  # seconds between two polls of the ranks

RANK_MODULE = "agentrl.training.run.rank"
# Exit codes after which the ranks are not restarted: success, invalid settings, and a stop on request.
_FINAL = (0, SettingsError.exit_code, EXIT_INTERRUPTED)


def runs_in_separate_processes(settings: Settings) -> bool:
    """Return True if ranks run in separate processes, not in this process."""
    cluster = settings.cluster
    return settings.training.num_processes > 1 or has_many_nodes(cluster.kind) or cluster.restarts > 0


def launch_ranks(settings: Settings, run_path: Path, *, resume: bool, poll: Callable[[], object] = lambda: None) -> int:
    """Run ``training.num_processes`` ranks on the run directory until they end, and return the exit code.

    ``poll`` is called several times a second. If it raises, the ranks stop at the next safe point.

    Raises WorldError if a rank failed or a node was lost and no restart of ``cluster.restarts`` is left, and
    OutOfMemoryError if that rank ran out of memory. Raises KeyboardInterrupt if the run was stopped and no rank has
    reported the stop.
    """
    console = Console(settings.telemetry)
    cluster = open_cluster(settings.cluster, _visible_gpus_of_process())
    try:
        nodes = cluster.nodes()
        if has_many_nodes(settings.cluster.kind):
            _resource_plan_rows(settings, nodes)  # raises UnplaceableError if the run cannot be placed
        bundles = rank_resource_bundles(settings, nodes)
        attempt = 0
        while True:
            try:
                return _run_attempt(
                    cluster, bundles, settings, run_path, resume=resume or attempt > 0, again=attempt > 0, poll=poll
                )
            except (NodeLostError, OutOfMemoryError, _RanksLostError) as error:
                if attempt == settings.cluster.restarts:
                    raise
                attempt += 1
                console.warning(f"restart {attempt} of {settings.cluster.restarts} from the last checkpoint: {error}")
            cluster.release()
    finally:
        cluster.close()


class _RanksLostError(WorldError):
    """A rank failed in a way that a restart may fix."""


def _run_attempt(
    cluster: Cluster,
    bundles: Sequence[Bundle],
    settings: Settings,
    run_path: Path,
    *,
    resume: bool,
    again: bool,
    poll: Callable[[], object],
) -> int:
    """Run the ranks until they exit, and return their exit code, one of :data:`_FINAL`.

    Raises NodeLostError, OutOfMemoryError or _RanksLostError if another attempt may succeed, and the errors of
    :func:`launch_ranks`.
    """
    console = Console(settings.telemetry)
    began = time.monotonic()
    try:
        reservations = cluster.reserve(bundles)
    except UnplaceableError as error:
        if not again:
            raise
        seconds = settings.cluster.restart_deadline
        console.note(f"{error}; waiting up to {seconds:g} s")
        reservations = cluster.reserve(bundles, wait_seconds=seconds)
    for reservation in reservations:
        if not cluster.can_access(reservation, run_path.absolute() / "config.yaml"):
            raise SettingsError(
                f"runs_dir: the node {reservation.node} ({reservation.address}) cannot access "
                f"{run_path.absolute()}: set a folder that all nodes share"
            )
    sandboxes = _start_sandboxes(cluster, reservations, settings, run_path, console)
    ranks = start_ranks(cluster, reservations, settings, run_path, resume=resume, sandboxes=sandboxes)
    if again:
        nodes = ", ".join(reservation.node for reservation in reservations)
        console.note(f"{len(ranks)} training ranks restarted on {nodes} after {time.monotonic() - began:.0f} s")
    group = RankProcesses(ranks, lambda end: console.warning(f"{end}; stopping the other ranks"))
    with handle_stop_signals(group.request_stop, group.kill, announce=True):
        try:
            end = group.wait_and_return_root_cause(poll)
            poll()
        except BaseException:
            group.request_stop()
            group.wait_and_return_root_cause()
            raise
    if sandboxes is not None:
        sandboxes.stop_restarting()
    code = 0 if end is None else end.code
    if group.killed or (group.stop_requested and (code < 0 or code == EXIT_PEER_LOST)):
        raise KeyboardInterrupt  # killed, or stopped before the ranks handled signals: no rank has reported it
    if code in _FINAL:
        return code
    if group.stop_requested:
        raise WorldError(str(end))
    raise (OutOfMemoryError if code == OutOfMemoryError.exit_code else _RanksLostError)(str(end))


def start_ranks(
    cluster: Cluster,
    reservations: Sequence[Reservation],
    settings: Settings,
    run_path: Path,
    *,
    resume: bool,
    sandboxes: SandboxServices | None = None,
) -> list[ProcessHandle]:
    """Start the same number of ranks in each reservation, with rank 0 in the first reservation.

    The ranks execute programs in the services ``sandboxes``, if there are any.
    """
    world = settings.training.num_processes
    local_world = world // len(reservations)
    master = (reservations[0].address, cluster.free_port(reservations[0]))
    arguments = ["-m", RANK_MODULE, str(run_path.absolute()), *(["--resume"] if resume else [])]
    arguments += [] if sandboxes is None else [quoted_override("sandbox.url", ",".join(sandboxes.addresses))]
    token = {} if sandboxes is None else sandboxes.client_variables
    started = []
    for number in range(world):
        reservation = reservations[number // local_world]
        position = launcher_variables(
            rank=number, world=world, local_rank=number % local_world, local_world=local_world, master=master
        )
        spec = ProcessSpec(
            role="rank",
            number=number,
            arguments=tuple(arguments),
            environment=position | token | ({} if reservation.gpus else {"DS_ACCELERATOR": "cpu"}),
            folder=Path.cwd(),
            log=log_file(run_path.absolute(), reservation.node, "rank", number),
            keep_terminal_output=number == 0,
        )
        started.append(cluster.start(spec, reservation))
    return started


def rank_resource_bundles(settings: Settings, nodes: Sequence[ClusterNode]) -> list[Bundle]:
    """Return the resources that the ranks need on each node. The first bundle includes rank 0 and the worker.

    A rank needs a GPU if any node has one.
    """
    cluster = settings.cluster
    count = settings.training.num_processes // cluster.nodes
    gpus = 1 if any(node.gpus for node in nodes) else 0
    bundles = []
    for number in range(cluster.nodes):
        ranks = f"rank {number}" if count == 1 else f"ranks {number * count} to {(number + 1) * count - 1}"
        first = number == 0
        bundles.append(
            Bundle(
                purpose=ranks + (", worker" if first else ""),
                cpus=count * cluster.cpus_per_rank + (cluster.worker_cpus if first else 0.0),
                gpus=count * gpus,
            )
        )
    return bundles


def server_resource_bundles(settings: Settings, nodes: Sequence[ClusterNode]) -> list[Bundle]:
    """Return the resources of the servers that the worker starts on the nodes of the cluster, one bundle per server."""
    if not runs_servers_on_nodes(settings.rollout, settings.cluster.kind):
        return []
    return server_bundles(engine_facts(settings.rollout), nodes, settings.cluster.server_cpus)


def sandbox_resource_bundle(settings: Settings) -> Bundle | None:
    """Return the resources of a node's sandbox service, or None unless the run starts one on every node."""
    if settings.sandbox.scheme != "ray":
        return None
    return Bundle(purpose="sandbox", cpus=settings.cluster.sandbox_cpus)


def _start_sandboxes(
    cluster: Cluster, reservations: Sequence[Reservation], settings: Settings, run_path: Path, console: Console
) -> SandboxServices | None:
    """Start sandbox services, one on each node that has room beside the ranks in ``reservations``."""
    bundle = sandbox_resource_bundle(settings)
    if bundle is None:
        return None
    nodes = cluster.nodes()
    taken = {
        reservation.address: [own]
        for reservation, own in zip(reservations, rank_resource_bundles(settings, nodes), strict=True)
    }
    place_bundles(server_resource_bundles(settings, nodes), nodes, taken)  # the worker will start them
    fields = settings.sandbox.model_dump(exclude_none=True, exclude={"url", "retry_deadline", "service_deadline"})
    fields.setdefault("workers", max(4, math.ceil(2 * bundle.cpus)))
    return SandboxServices(
        cluster,
        nodes_with_capacity(bundle, nodes, taken),
        bundle,
        arguments=[f"{name}={value}" for name, value in fields.items()],
        folder=run_path.absolute(),
        notify=console.note,
    )


def print_resource_plan(settings: Settings, console: Console) -> None:
    """Print the resource plan. Raises SettingsError if the run cannot be placed."""
    cluster = open_cluster(settings.cluster, _visible_gpus_of_process())
    try:
        nodes = cluster.nodes()
        console.table("Resource plan", list(PLAN_COLUMNS), _resource_plan_rows(settings, nodes))
    finally:
        cluster.close()


def _resource_plan_rows(settings: Settings, nodes: Sequence[ClusterNode]) -> list[list[str]]:
    """Return the rows of the resource plan. Raises UnplaceableError if the run cannot be placed."""
    servers, sandbox = server_resource_bundles(settings, nodes), sandbox_resource_bundle(settings)
    return placement_table(rank_resource_bundles(settings, nodes), nodes, beside=servers, everywhere=sandbox)


def _visible_gpus_of_process() -> list[str] | None:
    return gpus_visible_before_launch(torch.cuda.device_count()) if torch.cuda.is_available() else None


@dataclass(frozen=True, kw_only=True)
class RankExit:
    """The end of a rank: its exit ``code``, negative for a signal, and the reason if its node was lost (``lost``)."""

    rank: ProcessHandle
    code: int
    lost: str | None = None

    @property
    def killed(self) -> bool:
        return self.code < 0

    @property
    def severity(self) -> int:
        """Priority of this end as the root cause. It is lowest for ranks that failed because a peer disconnected."""
        if self.lost is not None:
            return 3
        if self.killed:
            return 2 if self.code != -signal.SIGTERM else 0
        if self.code in (EXIT_STUCK, OutOfMemoryError.exit_code, SettingsError.exit_code):
            return 2  # the other ranks crash when this rank closes its connections
        return 0 if self.code == EXIT_PEER_LOST else 1

    def __str__(self) -> str:
        if self.lost is not None:
            return f"training {self.rank.spec.name} is lost: {self.lost}"
        reasons = {
            EXIT_PEER_LOST: "lost the rollout worker",
            EXIT_STUCK: "was stuck",
            OutOfMemoryError.exit_code: "ran out of memory",
            EXIT_REPORTED_ERROR: "ended with an error",
        }
        how = reasons.get(self.code, f"exited with code {self.code}")
        if self.killed:
            how = f"was killed by {signal.Signals(-self.code).name}"
        return f"training {self.rank.spec.name} on {self.rank.reservation.node} {how}"


class RankProcesses:
    """The running ranks of one attempt."""

    def __init__(self, handles: Sequence[ProcessHandle], report: Callable[[RankExit], None] = lambda end: None) -> None:
        """``report`` is called with the first failure immediately, because the other ranks take a while to exit."""
        self.stop_requested = False
        self.killed = False
        self._handles = handles
        self._report = report
        self._killed_by_timer = False
        self._terminating = False
        self._cause: RankExit | None = None
        self._cause_found_at = 0.0
        self._reported: RankExit | None = None

    def request_stop(self) -> None:
        """Stop the ranks at the next safe point."""
        self.stop_requested = True
        _send_signal(self._handles, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the ranks."""
        self.killed = True
        _send_signal(self._handles, signal.SIGKILL)

    def wait_and_return_root_cause(self, poll: Callable[[], object] = lambda: None) -> RankExit | None:
        """Wait until all ranks have exited, calling ``poll`` often. Returns the root cause of a failure, or None."""
        running = list(self._handles)
        while running:
            ends = {index: end for index, one in enumerate(running) if (end := _exit_of(one)) is not None}
            running = [one for index, one in enumerate(running) if index not in ends]
            for end in ends.values():
                ended_by_timer = self._killed_by_timer and end.lost is None
                if end.code and not ended_by_timer and (self._cause is None or end.severity > self._cause.severity):
                    self._cause, self._cause_found_at = end, time.monotonic()
            cause = self._cause
            if cause is not None and cause.code != EXIT_INTERRUPTED:
                # A possible consequence of another failure is reported after a delay.
                sure = not running or cause.severity > 0 or time.monotonic() > self._cause_found_at + _CAUSE_DELAY
                if sure and cause is not self._reported and not self.stop_requested:
                    self._reported = cause
                    self._report(cause)
                if not self._terminating:
                    self._terminating = True
                    self._start_termination(running, _EXIT_SECONDS if cause.severity == 1 else _EXIT_SECONDS_AFTER_LOSS)
            if running:
                poll()
                time.sleep(_POLL_INTERVAL)
        return self._cause

    def _start_termination(self, running: Sequence[ProcessHandle], seconds: float) -> None:
        """Send SIGTERM to the ranks, and kill the remaining ranks after ``seconds`` in a daemon thread."""

        def kill() -> None:
            self._killed_by_timer = True
            _send_signal(running, signal.SIGKILL)

        _send_signal(running, signal.SIGTERM)
        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()


def _exit_of(rank: ProcessHandle) -> RankExit | None:
    try:
        code = rank.wait(0.0)
    except NodeLostError as error:
        return RankExit(rank=rank, code=-signal.SIGKILL, lost=str(error))
    return None if code is None else RankExit(rank=rank, code=code)


def _send_signal(ranks: Sequence[ProcessHandle], number: signal.Signals) -> None:
    for rank in ranks:
        rank.send_signal(number)
