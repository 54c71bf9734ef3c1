"""Sandbox services of a run on several nodes: one per node, restarted while the ranks run."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.local import log_file
from agentrl.cluster.processes import (
    Bundle,
    Cluster,
    ClusterNode,
    NodeLostError,
    ProcessHandle,
    ProcessSpec,
    Reservation,
)
from agentrl.errors import AgentRLError, WorldError

_POLL_INTERVAL = 1.0  # seconds between two checks of all services
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; doubled from the first to the longest
_JOIN_SECONDS = 10.0  # seconds to wait for the end of the thread that restarts services


@dataclass(kw_only=True, eq=False)
class _Service:
    """A sandbox service on one node. ``process`` is None while the service waits for its restart."""

    node: ClusterNode
    reservation: Reservation
    port: int
    number: int
    process: ProcessHandle | None = None
    started: float = 0.0
    pause: float = _FIRST_PAUSE
    restart_at: float = 0.0


class SandboxServices:
    """Running services. A service that exits is restarted at the same address as soon as its node is available."""

    def __init__(
        self,
        cluster: Cluster,
        nodes: Sequence[ClusterNode],
        bundle: Bundle,
        *,
        arguments: Sequence[str],
        folder: Path,
        notify: Callable[[str], None],
    ) -> None:
        """Start a service on each of ``nodes``. A node that fails to start a service is reported and skipped.

        ``bundle`` is reserved for each service. ``arguments`` are passed to ``agentrl-sandbox serve``. ``folder`` is
        the run directory. Raises WorldError if no node starts a service.
        """
        self._cluster = cluster
        self._bundle = bundle
        self._arguments = tuple(arguments)
        self._folder = folder
        self._notify = notify
        self._token = secrets.token_urlsafe(32)
        with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
            opened = list(pool.map(self._start_on_node, range(len(nodes)), nodes))
        self._services = [service for service in opened if service is not None]
        if not self._services:
            raise WorldError("no node of the cluster could start a sandbox service (see the reasons above)")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._restart_exited_until_closed, daemon=True, name="keep-sandboxes")
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        return [f"http://{service.reservation.address}:{service.port}" for service in self._services]

    @property
    def client_variables(self) -> dict[str, str]:
        """Environment variables that authorize clients."""
        return {"SANDBOX_TOKEN": self._token}

    def stop_restarting(self) -> None:
        """Stop restarting services. They end when their reservations are released."""
        self._ended.set()
        self._thread.join(_JOIN_SECONDS)

    def _start_on_node(self, number: int, node: ClusterNode) -> _Service | None:
        try:
            reservation = self._cluster.reserve_on_node(self._bundle, node)
            service = _Service(
                node=node, reservation=reservation, port=self._cluster.free_port(reservation), number=number
            )
            self._start_process(service)
        except WorldError as error:
            self._notify(f"no sandbox service started on {node.name} ({node.address}): {error}")
            return None
        return service

    def _start_process(self, service: _Service) -> None:
        reservation = service.reservation
        address = ("--host", reservation.address, "--port", str(service.port))
        spec = ProcessSpec(
            role="sandbox",
            number=service.number,
            arguments=("-m", "agentrl_sandbox", "serve", *address, *self._arguments),
            environment=self.client_variables,
            log=log_file(self._folder, reservation.node, "sandbox", service.number),
            show_output=False,
            supervised=True,
        )
        service.process = self._cluster.start(spec, reservation)
        service.started = time.monotonic()

    def _restart_exited_until_closed(self) -> None:
        while not self._ended.wait(_POLL_INTERVAL):
            for service in self._services:
                if service.process is not None:
                    self._check_process(service, service.process)
                elif time.monotonic() >= service.restart_at:
                    self._restart(service)

    def _check_process(self, service: _Service, process: ProcessHandle) -> None:
        try:
            code = process.wait(0.0)
        except NodeLostError as error:
            why = str(error)
        else:
            if code is None:
                return
            why = f"it exited with code {code}"
        self._mark_as_lost(service, why)

    def _restart(self, service: _Service) -> None:
        try:
            if service.node.address not in {node.address for node in self._cluster.nodes()}:
                self._schedule_restart(service)
                return
            if not self._cluster.is_reachable(service.reservation):
                service.reservation = self._cluster.reserve_on_node(self._bundle, service.node)
            self._start_process(service)
        except AgentRLError as error:
            self._mark_as_lost(service, str(error))
        else:
            self._notify(f"sandbox service {service.number} on {service.reservation.node} was restarted")

    def _mark_as_lost(self, service: _Service, why: str) -> None:
        # A service that ran longer than the longest pause did not fail at its start, so it may restart soon.
        if time.monotonic() - service.started > _LONGEST_PAUSE:
            service.pause = _FIRST_PAUSE
        service.process = None
        self._schedule_restart(service)
        if not self._ended.is_set():
            self._notify(
                f"sandbox service {service.number} on {service.reservation.node} was lost: {why}; calls are "
                "sent to the other services"
            )

    def _schedule_restart(self, service: _Service) -> None:
        service.restart_at = time.monotonic() + service.pause
        service.pause = min(2 * service.pause, _LONGEST_PAUSE)
