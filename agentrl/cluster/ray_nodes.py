"""Ray as a cluster: it counts resources, places bundles and notices lost nodes. Nothing else here imports it.

Ray starts one actor in each place. The actor starts the processes of a run as its children, by the same code as on a
single machine; they end with it, and Ray ends it with the command that asked for it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from agentrl.cluster.devices import ALL_GPUS, free_port
from agentrl.cluster.local import LocalProcess
from agentrl.cluster.logs import LogRelay
from agentrl.cluster.plan import UnplaceableError, placed
from agentrl.cluster.processes import STARTED_IN, Bundle, ClusterNode, NodeLostError, Place, ProcessSpec, carried
from agentrl.cluster.settings import ClusterSettings
from agentrl.cluster.silence import PortWatch, accepts
from agentrl.errors import SettingsError, WorldError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
# Seconds between two questions to a node; between two looks at a cluster that lacks nodes; for its nodes to kill what
# runs there; and for one that was silent to answer.
_ASK = 0.5
_LOOK = 1.0
_LAST_CALL = 5.0
_PATIENCE = 2.0


class NodeHost:
    """An actor: starts and watches processes on its node, and kills them once it hears nothing for ``deadline`` s."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._heard = time.monotonic()
        self._processes: dict[int, LocalProcess] = {}
        threading.Thread(target=self._end_in_silence, daemon=True, name="end-in-silence").start()

    def place(self, number: int) -> Place:
        """This place, as the other nodes reach it."""
        self._heard = time.monotonic()
        gpus = tuple(str(name) for name in ray.get_gpu_ids())
        return Place(number=number, node=socket.gethostname(), address=ray.util.get_node_ip_address(), gpus=gpus)

    def free_port(self, address: str) -> int:
        self._heard = time.monotonic()
        return free_port(address)

    def sees(self, path: str) -> bool:
        return os.path.exists(path)

    def start(self, spec: ProcessSpec, place: Place) -> int:
        """Start a process and return its id. Raises SettingsError if this node lacks its folder."""
        if spec.folder is not None and not spec.folder.is_dir():
            raise SettingsError(f"the node {place.node} has no folder {spec.folder}: all nodes need the same files")
        self._heard = time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray blocks it, and children inherit that
        own = {"GLOO_SOCKET_IFNAME": _interface(place.address), ALL_GPUS: ",".join(place.gpus) or None}
        own[STARTED_IN] = ray.get_runtime_context().gcs_address
        environment = {**own, "OMP_NUM_THREADS": None, **spec.environment}
        process = LocalProcess(replace(spec, environment=environment, shown=False), place)
        self._processes[process.pid] = process
        return process.pid

    def ended(self) -> dict[int, int]:
        """The exit codes of the processes that have ended."""
        self._heard = time.monotonic()
        codes = {pid: process.wait(0.0) for pid, process in list(self._processes.items())}
        return {pid: code for pid, code in codes.items() if code is not None}

    def send_signal(self, pid: int, number: int) -> None:
        self._processes[pid].send_signal(signal.Signals(number))

    def stop(self) -> None:
        """Kill what was started here."""
        for process in list(self._processes.values()):
            process.end(0.0)

    def _end_in_silence(self) -> None:
        """A command that no longer hears of this node starts its ranks elsewhere: here they must not go on."""
        while True:
            time.sleep(_LOOK)
            if time.monotonic() - self._heard > self._deadline:
                self.stop()


def _interface(address: str) -> str | None:
    """The network interface with this address."""
    known = psutil.net_if_addrs().items()
    return next((name for name, found in known if any(one.address == address for one in found)), None)


class RayNode:
    """The command's view of a node: one question at a time, for all processes that run there."""

    def __init__(
        self, host: ActorHandle[NodeHost], place: Place, head: PortWatch, silent: set[str], deadline: float
    ) -> None:
        """``silent``: addresses of nodes that have not answered, to which it adds its own."""
        self.host = host
        self.place = place
        self._head = head
        self._silent = silent
        self._deadline = deadline
        self._codes: dict[int, int] = {}
        self._next = 0.0
        self._asked: tuple[ray.ObjectRef[dict[int, int]], float] | None = None

    def code(self, pid: int, seconds: float) -> int | None:
        """The exit code of a process if it is known within ``seconds``; the next call waits for the same answer."""
        if self._head.lost is not None:
            raise NodeLostError(f"Ray's head {self._head.lost}")
        if pid not in self._codes:
            self._look(seconds)
        return self._codes.get(pid)

    def _look(self, seconds: float) -> None:
        now = time.monotonic()
        if self._asked is None:
            if now < self._next:
                return
            self._asked, self._next = (self.host.ended.remote(), now), now + _ASK
        answer, since = self._asked
        if ray.wait([answer], timeout=seconds)[0]:
            self._asked = None
            self._codes = _answer(answer, self.place, 0.0)
        elif now > since + self._deadline:
            self._silent.add(self.place.address)
            raise NodeLostError(f"{_node(self.place)} has not answered for {self._deadline:g} s")


class RayProcess:
    """A process that an actor has started."""

    def __init__(self, spec: ProcessSpec, node: RayNode, pid: int) -> None:
        self.spec = spec
        self.place = node.place
        self._node = node
        self._pid = pid

    def wait(self, seconds: float) -> int | None:
        return self._node.code(self._pid, seconds)

    def send_signal(self, number: signal.Signals) -> None:
        self._node.host.send_signal.remote(self._pid, int(number))  # nothing waits for a node that may be gone


class RayCluster:
    """The nodes of a Ray cluster."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Connect. Raises SettingsError if there is no cluster at ``cluster.address``."""
        self._settings = settings
        self._group: PlacementGroup | None = None
        self._places: dict[int, RayNode] = {}
        self._numbers = itertools.count()
        self._given_up: set[str] = set()  # addresses, as those of the next
        self._silent: set[str] = set()
        self._relay = LogRelay()
        self._head = _connect(settings)

    def nodes(self) -> list[ClusterNode]:
        found = [
            ClusterNode(
                name=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in ray.nodes()
            if node["Alive"] and self._usable(node["NodeManagerAddress"], node["NodeManagerPort"])
        ]
        return sorted(found, key=lambda node: node.address)

    def _usable(self, address: str, port: int) -> bool:
        """Ray counts a node that has fallen silent as alive for another minute."""
        if address in self._silent and accepts((address, port), _PATIENCE):
            self._silent.discard(address)
        return address not in self._silent and address not in self._given_up

    def reserve(self, bundles: Sequence[Bundle], *, patience: float = 0.0) -> list[Place]:
        """Reserve the bundles, all on different nodes, and start an actor in each.

        If Ray does not start an actor, tries again for ``patience`` or ``start_deadline`` seconds, the longer of both.
        """
        began = time.monotonic()
        until, started_by = began + patience, began + max(patience, self._settings.start_deadline)
        while True:
            if self._head.lost is not None:
                self._connect_again(until)
            self._await_nodes(bundles, until)
            try:
                return self._reserved(bundles)
            except UnplaceableError:  # a node has gone meanwhile
                self.release()
            except WorldError as error:  # a node that has just come back may be slow, for example
                if time.monotonic() >= started_by:
                    raise
                logger.warning("%s; trying again for %.0f s", error, started_by - time.monotonic())
                self.release()
                time.sleep(_LOOK)

    def host(self, bundle: Bundle, node: ClusterNode | None = None) -> Place:
        """Start an actor with these resources. Raises WorldError if Ray has not placed it within the deadline."""
        number = next(self._numbers)
        where: NodeAffinitySchedulingStrategy | str = "DEFAULT"
        if node is not None:
            where = NodeAffinitySchedulingStrategy(_id_of(node), soft=False)
        host = self._actor(bundle, where)
        seconds = self._settings.start_deadline
        try:
            places: list[Place] = ray.get([host.place.remote(number)], timeout=seconds)
        except RayError as error:
            ray.kill(host)
            why = str(error).splitlines()[0]
            raise WorldError(f"Ray has not placed {bundle.holds} within {seconds:g} s: {why}") from error
        self._keep(host, places[0])
        return places[0]

    def answers(self, place: Place) -> bool:
        try:
            self.free_port(place)
        except NodeLostError:
            return False
        return True

    def start(self, spec: ProcessSpec, place: Place) -> RayProcess:
        node = self._places[place.number]
        full = replace(spec, environment={**carried(), **spec.environment})
        if spec.log is not None and spec.shown:
            self._relay.follow(spec.log)
        pid: int = self._ask(place, node.host.start.remote(full, place))
        return RayProcess(spec, node, pid)

    def free_port(self, place: Place) -> int:
        port: int = self._ask(place, self._places[place.number].host.free_port.remote(place.address))
        return port

    def sees(self, place: Place, path: Path) -> bool:
        found: bool = self._ask(place, self._places[place.number].host.sees.remote(str(path)))
        return found

    def _keep(self, host: ActorHandle[NodeHost], place: Place) -> None:
        self._places[place.number] = RayNode(host, place, self._head, self._silent, self._settings.deadline)

    def _ask(self, place: Place, answer: ray.ObjectRef[_Value]) -> _Value:
        return _answer(answer, place, self._settings.deadline)

    def give_up(self, place: Place, slot: int) -> None:
        self._given_up.add(place.address)

    def release(self) -> None:
        hosts = [node.host for node in self._places.values()]
        self._places = {}
        if hosts:
            ray.wait([host.stop.remote() for host in hosts], num_returns=len(hosts), timeout=_LAST_CALL)
        if self._head.lost is None:  # the head carries these out
            for host in hosts:
                with contextlib.suppress(RayError):
                    ray.kill(host)
            if self._group is not None:
                remove_placement_group(self._group)
        self._group = None

    def close(self) -> None:
        self.release()
        self._relay.close()
        self._head.close()
        ray.shutdown()

    def _connect_again(self, until: float) -> None:
        """Connect to a cluster whose head was lost. Raises UnplaceableError if it has not come back."""
        ray.shutdown()
        while True:
            try:
                self._head = _connect(self._settings)
                return
            except (SettingsError, WorldError) as error:
                if time.monotonic() >= until:
                    raise UnplaceableError(f"Ray's head {self._head.lost}: {error}") from error
                time.sleep(_LOOK)

    def _reserved(self, bundles: Sequence[Bundle]) -> list[Place]:
        """Raises UnplaceableError if a node that it counted on is gone."""
        seconds = self._settings.start_deadline
        resources = [{"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {}) for bundle in bundles]
        self._group = group = placement_group(
            resources, strategy="STRICT_SPREAD", bundle_label_selector=self._selectors(len(bundles))
        )
        deadline = time.monotonic() + seconds
        while not group.wait(_LOOK):
            placed(bundles, self.nodes())
            if time.monotonic() >= deadline:
                raise WorldError(
                    f"Ray has not placed {bundles[0].holds} within cluster.start_deadline={seconds:g} s: other jobs "
                    f"use the nodes (free of all: {_free()})"
                )
        hosts = [
            self._actor(bundle, PlacementGroupSchedulingStrategy(group, place)) for place, bundle in enumerate(bundles)
        ]
        try:
            found: list[Place] = ray.get([host.place.remote(n) for n, host in enumerate(hosts)], timeout=seconds)
        except RayError as error:
            placed(bundles, self.nodes())
            raise WorldError(f"a node does not start processes: {str(error).splitlines()[0]}") from error
        for host, place in zip(hosts, found, strict=True):
            self._keep(host, place)
        self._numbers = itertools.count(len(hosts))
        # The largest bundle stays first; the others in the order of addresses, so that ranks find their files again.
        return [found[0], *sorted(found[1:], key=lambda place: place.address)]

    def _selectors(self, count: int) -> list[dict[str, str]] | None:
        """For each bundle, a label that keeps it off the nodes that were given up."""
        names = [node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] in self._given_up]
        return [{"ray.io/node-id": f"!in({','.join(names)})"}] * count if names else None

    def _await_nodes(self, bundles: Sequence[Bundle], deadline: float) -> None:
        while True:
            try:
                placed(bundles, self.nodes())
                return
            except UnplaceableError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK)

    def _actor(
        self, bundle: Bundle, where: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy | str
    ) -> ActorHandle[NodeHost]:
        actor = ray.remote(NodeHost).options(
            num_cpus=bundle.cpus, num_gpus=bundle.gpus, max_concurrency=4, scheduling_strategy=where
        )
        return cast("ActorHandle[NodeHost]", actor.remote(self._settings.deadline))


def _id_of(node: ClusterNode) -> str:
    """Ray's name of a node. Raises NodeLostError if it is gone."""
    for found in ray.nodes():
        if found["Alive"] and found["NodeManagerAddress"] == node.address:
            return str(found["NodeID"])
    raise NodeLostError(f"the node {node.name} ({node.address}) is gone")


def _connect(settings: ClusterSettings) -> PortWatch:
    """Connect, and watch the head.

    Raises SettingsError if no cluster answers, and WorldError if Ray does not start within ``start_deadline``.
    """
    until = time.monotonic() + settings.start_deadline
    while True:
        try:
            _init(settings)
            break
        except WorldError as error:
            if time.monotonic() >= until:
                raise
            logger.warning("%s; trying again for %.0f s", error, until - time.monotonic())
            time.sleep(_LOOK)
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return PortWatch((host, int(port)), settings.deadline)


def _init(settings: ClusterSettings) -> None:
    """Connect once. Raises SettingsError if no cluster answers, WorldError if Ray is too slow."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=os.environ.get(STARTED_IN, settings.address),
            namespace="agentrl",
            include_dashboard=False if settings.address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError) as error:
        raise SettingsError(
            f"cluster.address={settings.address}: no Ray cluster answers there ({str(error).splitlines()[0]}); "
            "start one with 'ray start --head' (docs/cluster.md), or set cluster.address=HOST:PORT"
        ) from error
    except SystemExit:  # SIGTERM meanwhile: Ray's handler raises it
        raise KeyboardInterrupt from None
    except Exception as error:
        # If its node starts too slowly, Ray raises RuntimeError or a bare Exception; anything else is a bug.
        if not isinstance(error, RuntimeError) and type(error) is not Exception:
            raise
        ray.shutdown()
        raise WorldError(f"Ray has not started: {str(error).splitlines()[0]}") from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)  # Ray installs a handler that ends this process without a message


def _answer(answer: ray.ObjectRef[_Value], place: Place, seconds: float) -> _Value:
    """The answer of a place's actor. Raises NodeLostError if none comes, and what the actor raised."""
    try:
        return ray.get(answer, timeout=seconds)
    except GetTimeoutError:
        raise NodeLostError(f"{_node(place)} has not answered for {seconds:g} s") from None
    except RayActorError:
        raise NodeLostError(f"{_node(place)} is gone") from None
    except RayTaskError as error:
        raise error.cause from None


def _node(place: Place) -> str:
    return f"the node {place.node} ({place.address})"


def _free() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs"
