"""Cluster on Ray, which counts resources, places bundles and detects lost nodes. Only this module imports Ray.

Ray starts one actor for each reservation. The actor starts the run's processes as its children, with the same code as
on a single machine. The processes end with the actor. Ray ends the actor when the command that created it exits.
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

from agentrl.cluster.local import LocalProcess, LogPrinter
from agentrl.cluster.plan import UnplaceableError, assign_nodes
from agentrl.cluster.processes import (
    ALL_GPUS,
    RAY_ADDRESS_VARIABLE,
    Bundle,
    ClusterNode,
    NodeLostError,
    PortReachabilityWatch,
    ProcessSpec,
    Reservation,
    accepts_connections,
    free_port,
    inherited_variables,
)
from agentrl.cluster.settings import ClusterSettings
from agentrl.errors import SettingsError, WorldError

if TYPE_CHECKING:
    from ray.actor import ActorHandle

logger = logging.getLogger(__name__)

_Value = TypeVar("_Value")
_POLL_INTERVAL = 0.5  # seconds between two polls of a node
_RETRY_INTERVAL = 1.0  # seconds between two attempts to reserve or connect
_STOP_SECONDS = 5.0  # seconds to wait for nodes to kill their processes
_PROBE_SECONDS = 2.0  # seconds to wait for an unresponsive node to accept a connection


class NodeProcessActor:
    """Actor that starts and watches processes on its node, and kills them after ``deadline`` seconds without a call."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._last_call = time.monotonic()
        self._processes: dict[int, LocalProcess] = {}
        threading.Thread(target=self._kill_processes_without_calls, daemon=True, name="stop-without-calls").start()

    def make_reservation(self, number: int) -> Reservation:
        """Return the actor's reservation, with the address at which other nodes reach this node."""
        self._last_call = time.monotonic()
        gpus = tuple(str(name) for name in ray.get_gpu_ids())
        return Reservation(number=number, node=socket.gethostname(), address=ray.util.get_node_ip_address(), gpus=gpus)

    def free_port(self, address: str) -> int:
        self._last_call = time.monotonic()
        return free_port(address)

    def can_access(self, path: str) -> bool:
        return os.path.exists(path)

    def start(self, spec: ProcessSpec, reservation: Reservation) -> int:
        """Start a process and return its id. Raises SettingsError if ``spec.folder`` does not exist on this node."""
        if spec.folder is not None and not spec.folder.is_dir():
            raise SettingsError(
                f"the node {reservation.node} has no folder {spec.folder}: use a file system that all nodes share"
            )
        self._last_call = time.monotonic()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # Ray blocks SIGINT, and children inherit the mask
        # Gloo must use the network interface through which other nodes reach this node.
        variables = {
            "GLOO_SOCKET_IFNAME": _network_interface(reservation.address),
            ALL_GPUS: ",".join(reservation.gpus) or None,
        }
        variables[RAY_ADDRESS_VARIABLE] = ray.get_runtime_context().gcs_address
        # Ray sets OMP_NUM_THREADS for its actors, and their children would inherit it.
        environment = {**variables, "OMP_NUM_THREADS": None, **spec.environment}
        process = LocalProcess(replace(spec, environment=environment, show_output=False), reservation)
        self._processes[process.pid] = process
        return process.pid

    def exit_codes(self) -> dict[int, int]:
        """Return the exit codes of exited processes by process id."""
        self._last_call = time.monotonic()
        codes = {pid: process.wait(0.0) for pid, process in list(self._processes.items())}
        return {pid: code for pid, code in codes.items() if code is not None}

    def send_signal(self, pid: int, number: int) -> None:
        self._processes[pid].send_signal(signal.Signals(number))

    def kill_processes(self) -> None:
        """Kill all processes that this actor started."""
        for process in list(self._processes.values()):
            process.wait_or_kill(0.0)

    def _kill_processes_without_calls(self) -> None:
        # A command that loses contact with this node restarts its ranks elsewhere, so the ranks here must be killed.
        while True:
            time.sleep(_RETRY_INTERVAL)
            if time.monotonic() - self._last_call > self._deadline:
                self.kill_processes()


def _network_interface(address: str) -> str | None:
    """Return the name of the network interface with this address, or None."""
    known = psutil.net_if_addrs().items()
    return next((name for name, addresses in known if any(one.address == address for one in addresses)), None)


class RayNodeHandle:
    """The command's handle to a node. One request at a time polls all processes of the node."""

    def __init__(
        self,
        host: ActorHandle[NodeProcessActor],
        reservation: Reservation,
        head: PortReachabilityWatch,
        unreachable: set[str],
        deadline: float,
    ) -> None:
        """Create the handle. All handles share ``unreachable``, the addresses of nodes that do not respond."""
        self.host = host
        self.reservation = reservation
        self._head = head
        self._unreachable = unreachable
        self._deadline = deadline
        self._codes: dict[int, int] = {}
        self._next_poll = 0.0
        self._pending: tuple[ray.ObjectRef[dict[int, int]], float] | None = None

    def wait_for_exit_code(self, pid: int, seconds: float) -> int | None:
        """Return the exit code of a process, or None if it is not available within ``seconds``.

        The next call continues to wait for a pending request.
        """
        if self._head.lost is not None:
            raise NodeLostError(f"Ray's head {self._head.lost}")
        if pid not in self._codes:
            self._poll_exit_codes(seconds)
        return self._codes.get(pid)

    def _poll_exit_codes(self, seconds: float) -> None:
        now = time.monotonic()
        if self._pending is None:
            if now < self._next_poll:
                return
            self._pending, self._next_poll = (self.host.exit_codes.remote(), now), now + _POLL_INTERVAL
        answer, since = self._pending
        if ray.wait([answer], timeout=seconds)[0]:
            self._pending = None
            self._codes = _wait_for_result(answer, self.reservation, 0.0)
        elif now > since + self._deadline:
            self._unreachable.add(self.reservation.address)
            raise NodeLostError(f"{_describe_node(self.reservation)} has not responded for {self._deadline:g} s")


class RayProcess:
    """A process that an actor started."""

    def __init__(self, spec: ProcessSpec, node: RayNodeHandle, pid: int) -> None:
        self.spec = spec
        self.reservation = node.reservation
        self._node = node
        self._pid = pid

    def wait(self, seconds: float) -> int | None:
        return self._node.wait_for_exit_code(self._pid, seconds)

    def send_signal(self, number: signal.Signals) -> None:
        self._node.host.send_signal.remote(self._pid, int(number))  # does not wait, because the node may have failed


class RayCluster:
    """The nodes of a Ray cluster."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Connect to the cluster. Raises SettingsError if there is no cluster at ``cluster.address``."""
        self._settings = settings
        self._group: PlacementGroup | None = None
        self._hosts: dict[int, RayNodeHandle] = {}
        self._numbers = itertools.count()
        self._unreachable: set[str] = set()  # addresses
        self._relay = LogPrinter()
        self._head = _connect_and_watch_head(settings)

    def nodes(self) -> list[ClusterNode]:
        nodes = [
            ClusterNode(
                name=node["NodeManagerHostname"],
                address=node["NodeManagerAddress"],
                cpus=node["Resources"].get("CPU", 0.0),
                gpus=int(node["Resources"].get("GPU", 0)),
            )
            for node in ray.nodes()
            if node["Alive"] and self._responds(node["NodeManagerAddress"], node["NodeManagerPort"])
        ]
        return sorted(nodes, key=lambda node: node.address)

    def _responds(self, address: str, port: int) -> bool:
        """Return False if the node is unresponsive. Ray lists a lost node as alive for another minute."""
        if address in self._unreachable and accepts_connections((address, port), _PROBE_SECONDS):
            self._unreachable.discard(address)
        return address not in self._unreachable

    def reserve(self, bundles: Sequence[Bundle], *, wait_seconds: float = 0.0) -> list[Reservation]:
        """Reserve the bundles on different nodes and start an actor in each.

        Retries actors that Ray does not start, for ``wait_seconds`` or ``start_deadline`` seconds, whichever is longer.
        """
        began = time.monotonic()
        nodes_by, started_by = began + wait_seconds, began + max(wait_seconds, self._settings.start_deadline)
        while True:
            if self._head.lost is not None:
                self._reconnect(nodes_by)
            self._wait_for_nodes(bundles, nodes_by)
            try:
                return self._try_to_reserve(bundles)
            except UnplaceableError:  # a node failed after the check
                self.release()
            except WorldError as error:  # for example because a node that has just returned is slow
                if time.monotonic() >= started_by:
                    raise
                logger.warning("%s; retrying for %.0f s", error, started_by - time.monotonic())
                self.release()
                time.sleep(_RETRY_INTERVAL)

    def reserve_on_node(self, bundle: Bundle, node: ClusterNode | None = None) -> Reservation:
        """Start an actor with these resources. Raises WorldError if Ray does not place it within ``start_deadline``."""
        number = next(self._numbers)
        strategy: NodeAffinitySchedulingStrategy | str = "DEFAULT"
        if node is not None:
            strategy = NodeAffinitySchedulingStrategy(_ray_node_id(node), soft=False)
        host = self._start_host(bundle, strategy)
        seconds = self._settings.start_deadline
        try:
            reservations: list[Reservation] = ray.get([host.make_reservation.remote(number)], timeout=seconds)
        except RayError as error:
            ray.kill(host)
            why = str(error).splitlines()[0]
            raise WorldError(f"Ray did not place {bundle.purpose} within {seconds:g} s: {why}") from error
        self._add_node(host, reservations[0])
        return reservations[0]

    def is_reachable(self, reservation: Reservation) -> bool:
        try:
            self.free_port(reservation)
        except NodeLostError:
            return False
        return True

    def start(self, spec: ProcessSpec, reservation: Reservation) -> RayProcess:
        node = self._hosts[reservation.number]
        full = replace(spec, environment={**inherited_variables(), **spec.environment})
        if spec.log is not None and spec.show_output:
            self._relay.follow(spec.log)
        pid: int = self._wait_for(reservation, node.host.start.remote(full, reservation))
        return RayProcess(spec, node, pid)

    def free_port(self, reservation: Reservation) -> int:
        port: int = self._wait_for(
            reservation, self._hosts[reservation.number].host.free_port.remote(reservation.address)
        )
        return port

    def can_access(self, reservation: Reservation, path: Path) -> bool:
        exists: bool = self._wait_for(reservation, self._hosts[reservation.number].host.can_access.remote(str(path)))
        return exists

    def _add_node(self, host: ActorHandle[NodeProcessActor], reservation: Reservation) -> None:
        self._hosts[reservation.number] = RayNodeHandle(
            host, reservation, self._head, self._unreachable, self._settings.deadline
        )

    def _wait_for(self, reservation: Reservation, answer: ray.ObjectRef[_Value]) -> _Value:
        return _wait_for_result(answer, reservation, self._settings.deadline)

    def release(self) -> None:
        hosts = [node.host for node in self._hosts.values()]
        self._hosts = {}
        if hosts:
            ray.wait([host.kill_processes.remote() for host in hosts], num_returns=len(hosts), timeout=_STOP_SECONDS)
        if self._head.lost is None:  # killing actors and removing groups require the head
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

    def _reconnect(self, deadline: float) -> None:
        """Reconnect after the head was lost. Raises UnplaceableError if the head has not returned by ``deadline``."""
        ray.shutdown()
        while True:
            try:
                self._head = _connect_and_watch_head(self._settings)
                return
            except (SettingsError, WorldError) as error:
                if time.monotonic() >= deadline:
                    raise UnplaceableError(f"Ray's head {self._head.lost}: {error}") from error
                time.sleep(_RETRY_INTERVAL)

    def _try_to_reserve(self, bundles: Sequence[Bundle]) -> list[Reservation]:
        """Try once to reserve the bundles. Raises UnplaceableError if a required node failed in the meantime."""
        seconds = self._settings.start_deadline
        resources = [{"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {}) for bundle in bundles]
        self._group = group = placement_group(resources, strategy="STRICT_SPREAD")
        deadline = time.monotonic() + seconds
        while not group.wait(_RETRY_INTERVAL):
            assign_nodes(bundles, self.nodes())
            if time.monotonic() >= deadline:
                raise WorldError(
                    f"Ray did not place {bundles[0].purpose} within cluster.start_deadline={seconds:g} s, because "
                    f"other jobs use the nodes (free in total: {_free_resources()}): wait for these jobs, or raise the "
                    "deadline"
                )
        hosts = [
            self._start_host(bundle, PlacementGroupSchedulingStrategy(group, index))
            for index, bundle in enumerate(bundles)
        ]
        try:
            reservations: list[Reservation] = ray.get(
                [host.make_reservation.remote(n) for n, host in enumerate(hosts)], timeout=seconds
            )
        except RayError as error:
            assign_nodes(bundles, self.nodes())
            raise WorldError(f"a node failed to start processes: {str(error).splitlines()[0]}") from error
        for host, reservation in zip(hosts, reservations, strict=True):
            self._add_node(host, reservation)
        self._numbers = itertools.count(len(hosts))
        # The largest bundle stays first. All other bundles are sorted by address, so that ranks find their local files
        # again.
        return [reservations[0], *sorted(reservations[1:], key=lambda reservation: reservation.address)]

    def _wait_for_nodes(self, bundles: Sequence[Bundle], deadline: float) -> None:
        while True:
            try:
                assign_nodes(bundles, self.nodes())
                return
            except UnplaceableError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_INTERVAL)

    def _start_host(
        self, bundle: Bundle, strategy: PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy | str
    ) -> ActorHandle[NodeProcessActor]:
        actor = ray.remote(NodeProcessActor).options(
            num_cpus=bundle.cpus, num_gpus=bundle.gpus, max_concurrency=4, scheduling_strategy=strategy
        )
        return cast("ActorHandle[NodeProcessActor]", actor.remote(self._settings.deadline))


def _ray_node_id(node: ClusterNode) -> str:
    """Return Ray's id of a node. Raises NodeLostError if the node is not alive."""
    for entry in ray.nodes():
        if entry["Alive"] and entry["NodeManagerAddress"] == node.address:
            return str(entry["NodeID"])
    raise NodeLostError(f"the node {node.name} ({node.address}) has left the cluster")


def _connect_and_watch_head(settings: ClusterSettings) -> PortReachabilityWatch:
    """Connect to the cluster and start watching its head.

    Raises SettingsError if no cluster responds, and WorldError if Ray does not start within ``start_deadline``.
    """
    until = time.monotonic() + settings.start_deadline
    while True:
        try:
            _connect_once(settings)
            break
        except WorldError as error:
            if time.monotonic() >= until:
                raise
            logger.warning("%s; retrying for %.0f s", error, until - time.monotonic())
            time.sleep(_RETRY_INTERVAL)
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return PortReachabilityWatch((host, int(port)), settings.deadline)


def _connect_once(settings: ClusterSettings) -> None:
    """Try once to connect. Raises SettingsError if no cluster responds and WorldError if Ray does not start in time."""
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=os.environ.get(RAY_ADDRESS_VARIABLE, settings.address),
            namespace="agentrl",
            include_dashboard=False if settings.address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, ValueError) as error:
        raise SettingsError(
            f"cluster.address={settings.address}: no Ray cluster responds ({str(error).splitlines()[0]}); "
            "start one with 'ray start --head' (docs/how-to/cluster.md), or set cluster.address=HOST:PORT"
        ) from error
    except SystemExit:  # raised by Ray's handler on a SIGTERM while connecting
        raise KeyboardInterrupt from None
    except Exception as error:
        # If a node starts too slowly, Ray raises RuntimeError or a plain Exception. Any other exception is a bug.
        if not isinstance(error, RuntimeError) and type(error) is not Exception:
            raise
        ray.shutdown()
        raise WorldError(f"Ray did not start: {str(error).splitlines()[0]}") from error
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)  # Ray installs a handler that ends this process without a message


def _wait_for_result(answer: ray.ObjectRef[_Value], reservation: Reservation, seconds: float) -> _Value:
    """Return the result of an actor's method, or raise its exception. Raises NodeLostError if there is no response."""
    try:
        return ray.get(answer, timeout=seconds)
    except GetTimeoutError:
        raise NodeLostError(f"{_describe_node(reservation)} has not responded for {seconds:g} s") from None
    except RayActorError:
        raise NodeLostError(f"{_describe_node(reservation)} was lost") from None
    except RayTaskError as error:
        raise error.cause from None


def _describe_node(reservation: Reservation) -> str:
    return f"the node {reservation.node} ({reservation.address})"


def _free_resources() -> str:
    free = ray.available_resources()
    return f"{free.get('CPU', 0):g} CPUs, {free.get('GPU', 0):g} GPUs"
