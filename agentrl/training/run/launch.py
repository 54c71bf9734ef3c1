"""Start the training ranks of a run, watch them, end all when one has failed, and start them again if asked to."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.cluster.devices import visible_gpus
from agentrl.cluster.launchers import RankPlace
from agentrl.cluster.logs import log_file
from agentrl.cluster.opening import open_cluster
from agentrl.cluster.plan import PLAN_COLUMNS, allot, plan_table, roomy
from agentrl.cluster.processes import Bundle, Cluster, ClusterNode, NodeLostError, Place, ProcessHandle, ProcessSpec
from agentrl.cluster.sandboxes import SandboxServices
from agentrl.errors import OutOfMemoryError, SettingsError, WorldError
from agentrl.evaluation.options import quoted
from agentrl.rollout.engines.registry import engine_facts, server_bundles, servers_on_nodes
from agentrl.telemetry.console import Console
from agentrl.training.run.rank_group import RankEnd, RankGroup
from agentrl.training.run.signals import INTERRUPTED, stop_requests
from agentrl.training.run.sizes import RunSizes
from agentrl.training.worker.wire import FOLLOWED

if TYPE_CHECKING:
    from agentrl.config import Settings

RANK_MODULE = "agentrl.training.run.rank"
# Exit codes after which the same would happen again: the user's settings, and a stop on request.
_FINAL = (0, SettingsError.exit_code, INTERRUPTED)


def launched(settings: Settings) -> bool:
    """Whether ranks are processes of their own, and not this one."""
    cluster = settings.cluster
    return settings.training.num_processes > 1 or cluster.kind == "ray" or cluster.restarts > 0


def launch(settings: Settings, run_path: Path, *, resume: bool) -> int:
    """Run ``training.num_processes`` ranks on the run directory until they end, and return the exit code.

    Raises WorldError if a rank failed or a node was lost and no attempt of ``cluster.restarts`` is left, and
    OutOfMemoryError if the rank ran out of memory. Raises KeyboardInterrupt if the run was stopped and no rank has
    reported it.
    """
    console = Console(settings.telemetry)
    cluster = open_cluster(settings.cluster, _own_gpus())
    try:
        nodes = cluster.nodes()
        if settings.cluster.kind == "ray":
            _table(settings, nodes)  # what cannot be placed ends the run here
        sizes = RunSizes(settings, lambda size: bundles_of(size, nodes), run_path / "checkpoints")
        attempt = 0
        while True:
            try:
                return _attempt(cluster, sizes, settings, run_path, resume=resume or attempt > 0, again=attempt > 0)
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


def _attempt(
    cluster: Cluster, sizes: RunSizes, settings: Settings, run_path: Path, *, resume: bool, again: bool
) -> int:
    """Run the ranks to their end and return their exit code, one of :data:`_FINAL`.

    Raises NodeLostError, OutOfMemoryError or _RanksLostError if another attempt may succeed, and what :func:`launch`
    raises.
    """
    console = Console(settings.telemetry)
    began = time.monotonic()
    patience = settings.cluster.restart_deadline if again else 0.0
    size, places = sizes.reserve(cluster, patience=patience, say=console.note)
    _check_folder(cluster, places, run_path)
    sandboxes = _sandboxes(cluster, places, size, run_path, console)
    ranks = start_ranks(cluster, places, size, run_path, resume=resume, sandboxes=sandboxes)
    if again:
        full, nodes = settings.training.num_processes, ", ".join(place.node for place in places)
        console.note(f"{len(ranks)} of {full} training ranks start on {nodes} after {time.monotonic() - began:.0f} s")
    group = RankGroup(ranks, lambda end: console.warning(f"{end}; the other ranks end"))
    with stop_requests(group.ask, group.insist, announce=True):
        end = group.end()
    if sandboxes is not None:
        sandboxes.close()
    if end is not None:
        sizes.learn(cluster, end)
    return _outcome(group, end)


def _outcome(group: RankGroup, end: RankEnd | None) -> int:
    code = 0 if end is None else end.code
    if group.insisted or (group.asked and (code < 0 or code == FOLLOWED)):
        raise KeyboardInterrupt  # forced, or before the ranks handled signals, so no rank has reported it
    if code in _FINAL:
        return code
    if group.asked:
        raise WorldError(str(end))
    raise (OutOfMemoryError if code == OutOfMemoryError.exit_code else _RanksLostError)(str(end))


def start_ranks(
    cluster: Cluster,
    places: Sequence[Place],
    settings: Settings,
    run_path: Path,
    *,
    resume: bool,
    sandboxes: SandboxServices | None = None,
) -> list[ProcessHandle]:
    """Start the ranks, equally many in each place; the first place has rank 0. ``sandboxes``: those that they use."""
    count = settings.training.num_processes
    here = count // len(places)
    master = (places[0].address, cluster.free_port(places[0]))
    arguments = ["-m", RANK_MODULE, str(run_path.absolute()), *(["--resume"] if resume else [])]
    arguments += [] if sandboxes is None else [quoted("sandbox.url", ",".join(sandboxes.addresses))]
    token = {} if sandboxes is None else sandboxes.variables
    started = []
    for number in range(count):
        place = places[number // here]
        own = RankPlace(rank=number, world=count, local_rank=number % here, local_world=here, master=master)
        spec = ProcessSpec(
            role="rank",
            number=number,
            arguments=tuple(arguments),
            environment=own.variables() | token | ({} if place.gpus else {"DS_ACCELERATOR": "cpu"}),
            folder=Path.cwd(),
            log=log_file(run_path.absolute(), place.node, "rank", number),
            draws=number == 0,
        )
        started.append(cluster.start(spec, place))
    return started


def bundles_of(settings: Settings, nodes: Sequence[ClusterNode]) -> list[Bundle]:
    """What the ranks of a run need of each node; the first one has rank 0, with the worker.

    A rank needs a GPU if the nodes have any.
    """
    cluster, count = settings.cluster, settings.training.num_processes
    here = count // cluster.nodes
    gpus = 1 if any(node.gpus for node in nodes) else 0
    bundles = []
    for place in range(cluster.nodes):
        ranks = f"rank {place}" if here == 1 else f"ranks {place * here} to {(place + 1) * here - 1}"
        first = place == 0
        bundles.append(
            Bundle(
                holds=ranks + (", worker" if first else ""),
                cpus=here * cluster.cpus_per_rank + (cluster.worker_cpus if first else 0.0),
                gpus=here * gpus,
            )
        )
    return bundles


def servers_of(settings: Settings, nodes: Sequence[ClusterNode]) -> list[Bundle]:
    """What the servers need that the worker places on the nodes of the cluster, each on one node."""
    if not servers_on_nodes(settings.rollout, settings.cluster.kind):
        return []
    return server_bundles(engine_facts(settings.rollout), nodes, settings.cluster.server_cpus)


def sandbox_bundle(settings: Settings) -> Bundle | None:
    """What the sandbox service of a node needs; None unless the run starts one on every node."""
    if settings.sandbox.scheme != "ray":
        return None
    return Bundle(holds="sandbox", cpus=settings.cluster.sandbox_cpus)


def _sandboxes(
    cluster: Cluster, places: Sequence[Place], settings: Settings, run_path: Path, console: Console
) -> SandboxServices | None:
    """The running sandbox services, one on each node that has room beside the ranks in ``places``."""
    bundle = sandbox_bundle(settings)
    if bundle is None:
        return None
    nodes = cluster.nodes()
    taken = {place.address: [own] for place, own in zip(places, bundles_of(settings, nodes), strict=True)}
    allot(servers_of(settings, nodes), nodes, taken)  # the worker will start them
    fields = settings.sandbox.model_dump(exclude_none=True, exclude={"url", "retry_deadline", "service_deadline"})
    fields.setdefault("workers", max(4, math.ceil(2 * bundle.cpus)))
    return SandboxServices(
        cluster,
        roomy(bundle, nodes, taken),
        bundle,
        arguments=[f"{name}={value}" for name, value in fields.items()],
        folder=run_path.absolute(),
        say=console.note,
    )


def show_plan(settings: Settings, console: Console) -> None:
    """Print what would be placed where. Raises SettingsError if it cannot be placed."""
    cluster = open_cluster(settings.cluster, _own_gpus())
    try:
        nodes = cluster.nodes()
        console.table("Resource plan", list(PLAN_COLUMNS), _table(settings, nodes))
    finally:
        cluster.close()


def _table(settings: Settings, nodes: Sequence[ClusterNode]) -> list[list[str]]:
    """The rows of the resource plan. Raises UnplaceableError."""
    servers, sandbox = servers_of(settings, nodes), sandbox_bundle(settings)
    return plan_table(bundles_of(settings, nodes), nodes, beside=servers, everywhere=sandbox)


def _check_folder(cluster: Cluster, places: Sequence[Place], run_path: Path) -> None:
    for place in places:
        if not cluster.sees(place, run_path.absolute() / "config.yaml"):
            raise SettingsError(
                f"runs_dir: the node {place.node} ({place.address}) cannot see the files of {run_path.absolute()}; "
                "give a folder that all nodes share"
            )


def _own_gpus() -> list[str] | None:
    return visible_gpus(torch.cuda.device_count()) if torch.cuda.is_available() else None
