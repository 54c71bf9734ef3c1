"""Cluster interface: nodes, reservations and processes. Also utilities for ports, GPUs and lost machines."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from agentrl.errors import WorldError

ALL_GPUS = "AGENTRL_GPUS"
"""Environment variable with the GPUs that were visible before each rank was assigned a GPU."""
PARENT_VARIABLE = "AGENTRL_STARTED_BY"
"""Environment variable with the id of the parent process on the same machine."""
RAY_ADDRESS_VARIABLE = "AGENTRL_RAY_ADDRESS"
"""Environment variable with the address of the Ray cluster that started the process."""

_POLL_INTERVAL = 1.0  # seconds between two attempts to connect to another machine
_CONNECT_SECONDS = 5.0  # timeout of one attempt

# Prefixes of the environment variables that processes on other nodes inherit.
_INHERITED_PREFIXES = (
    *("AGENTRL_", "CUDA_LAUNCH", "DEEPSPEED_", "DS_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_"),
    *("TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "TRITON_", "VLLM_"),
)
# Variables with these prefixes that are valid only on one node. Processes on nodes of a cluster do not pass them on.
_NODE_VARIABLES = ("GLOO_SOCKET_IFNAME", ALL_GPUS, PARENT_VARIABLE)


def inherited_variables(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that processes on other nodes inherit from this one.

    >>> found = {"NCCL_DEBUG": "INFO", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0"}
    >>> inherited_variables(found)
    {'NCCL_DEBUG': 'INFO', 'GLOO_SOCKET_IFNAME': 'eth0'}

    The rollout worker runs on a node of the cluster and does not pass on variables that are valid only there:

    >>> inherited_variables({**found, RAY_ADDRESS_VARIABLE: "10.0.0.1:6379", PARENT_VARIABLE: "77"})
    {'NCCL_DEBUG': 'INFO', 'AGENTRL_RAY_ADDRESS': '10.0.0.1:6379'}
    """
    dropped = _NODE_VARIABLES if RAY_ADDRESS_VARIABLE in environment else ()
    inherited = [name for name in environment if name.startswith(_INHERITED_PREFIXES) and name not in dropped]
    return {name: environment[name] for name in inherited}


class NodeLostError(WorldError):
    """A node of the cluster has failed or no longer responds."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to start.

    - ``arguments``: arguments of the Python interpreter on its node
    - ``environment``: changed environment variables; None unsets a variable
    - ``folder``: working directory; default: the directory of the starting process
    - ``log``: file for its output; default: the output of the starting process
    - ``show_output``: output is written to the log and to the output of the starting process
    - ``keep_terminal_output``: standard output is not logged if it is a terminal
    - ``supervised``: the process ends with the starting process, and its descendants end with the process
    """

    role: str
    number: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    folder: Path | None = None
    log: Path | None = None
    show_output: bool = True
    keep_terminal_output: bool = False
    supervised: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A machine with the resources that runs may use."""

    name: str
    address: str
    cpus: float
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Resources required on one node, and their purpose in words."""

    purpose: str
    cpus: float
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A reserved bundle on ``node``, reachable at ``address`` from other nodes. ``gpus`` names its GPUs."""

    number: int
    node: str
    address: str
    gpus: tuple[str, ...] = ()


class ProcessHandle(Protocol):
    """A started process. All methods may be called from any thread."""

    spec: ProcessSpec
    reservation: Reservation

    def wait(self, seconds: float) -> int | None:
        """Wait up to ``seconds``. Returns the exit code (negative for a signal), or None if the process still runs.

        Raises NodeLostError if its node no longer responds.
        """

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal. Ignored if the process or its node no longer exists."""


class Cluster(Protocol):
    """Nodes on which processes can be started."""

    def nodes(self) -> list[ClusterNode]:
        """Return all nodes with their total resources."""

    def reserve(self, bundles: Sequence[Bundle], *, wait_seconds: float = 0.0) -> list[Reservation]:
        """Reserve each bundle on a different node, waiting up to ``wait_seconds`` seconds for missing nodes.

        Raises SettingsError or WorldError if the bundles cannot be reserved.
        """

    def reserve_on_node(self, bundle: Bundle, node: ClusterNode | None = None) -> Reservation:
        """Reserve another bundle on ``node``, or by default on any node. Raises WorldError if no node has room."""

    def is_reachable(self, reservation: Reservation) -> bool:
        """Return True if processes can be started on the reservation's node."""

    def start(self, spec: ProcessSpec, reservation: Reservation) -> ProcessHandle:
        """Start a process on reserved resources."""

    def free_port(self, reservation: Reservation) -> int:
        """Return a port of the reservation's node that is currently free."""

    def can_access(self, reservation: Reservation, path: Path) -> bool:
        """Return True if processes on the reservation's node can access this file or folder."""

    def release(self) -> None:
        """End all processes and free all reservations."""

    def close(self) -> None:
        """Release everything and close the cluster."""


def gpus_visible_before_launch(gpu_count: int) -> list[str]:
    """Return the GPUs that were visible before a launcher assigned them to ranks. Default: 0 to ``gpu_count`` - 1."""
    named = os.environ.get(ALL_GPUS) or os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(gpu_count)]


def free_port(host: str) -> int:
    """Return a port that is currently free. Another process may take it before it is used."""
    # Return the port, not the bound socket: the process that uses the port starts later, often on another machine,
    # and accepts only a port number.
    with socket.socket() as free:
        try:
            free.bind((host, 0))
        except OSError as error:
            raise WorldError(f"no server can listen on {host}: {error.strerror}") from error
        port: int = free.getsockname()[1]
        return port


def set_tcp_timeout(connection: Connection, seconds: float) -> None:
    """Make a TCP connection fail if the other machine has not responded for about ``seconds``."""
    # Keepalive detects a silent peer only while nothing is in flight; TCP_USER_TIMEOUT covers unacknowledged data.
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))


def accepts_connections(address: tuple[str, int], seconds: float) -> bool:
    """Return True if a port of another machine accepts a connection within ``seconds``."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except OSError:
        return False
    return True


class PortReachabilityWatch:
    """Checks repeatedly, in a thread, whether a port of another machine accepts connections."""

    def __init__(self, address: tuple[str, int], deadline: float, *, poll_interval: float = _POLL_INTERVAL) -> None:
        """Start watching. Two refusals in a row, or ``deadline`` seconds without a response, mark the port as lost."""
        self.lost: str | None = None
        self._address = address
        self._deadline = deadline
        self._poll_interval = poll_interval
        self._ended = threading.Event()
        threading.Thread(target=self._check_until_closed, daemon=True, name="watch-port").start()

    def close(self) -> None:
        self._ended.set()

    def _check_until_closed(self) -> None:
        last_answer, refused = time.monotonic(), 0
        while self.lost is None and not self._ended.wait(self._poll_interval):
            try:
                socket.create_connection(self._address, timeout=min(_CONNECT_SECONDS, self._deadline)).close()
                last_answer, refused = time.monotonic(), 0
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                refused = 0
            if refused > 1:
                self.lost = "refuses connections"
            elif time.monotonic() > last_answer + self._deadline:
                self.lost = f"has not responded for {self._deadline:g} s"
