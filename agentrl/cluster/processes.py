"""What every cluster can do: offer places, and start, watch and end processes in them."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agentrl.cluster.devices import ALL_GPUS
from agentrl.errors import WorldError

STARTED_BY = "AGENTRL_STARTED_BY"
"""Environment variable with the id of the process that started this one, on the same machine."""


STARTED_IN = "AGENTRL_RAY_ADDRESS"
"""Environment variable of a process that the Ray cluster at this address has started."""

# Those that processes on other nodes get too, by the beginnings of their names; and those of them that a process which
# a cluster has started has of its own node.
_CARRIED = (
    *("AGENTRL_", "CUDA_LAUNCH", "DEEPSPEED_", "DS_", "GLOO_", "HF_", "MKL_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_"),
    *("TOKENIZERS_", "TORCH_", "TRANSFORMERS_", "TRITON_", "VLLM_"),
)
_OF_THE_NODE = ("GLOO_SOCKET_IFNAME", ALL_GPUS, STARTED_BY)


def carried(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables of this process that the processes it starts on other nodes get too.

    >>> found = {"NCCL_DEBUG": "INFO", "HOME": "/root", "GLOO_SOCKET_IFNAME": "eth0"}
    >>> carried(found)
    {'NCCL_DEBUG': 'INFO', 'GLOO_SOCKET_IFNAME': 'eth0'}

    The rollout worker, which the cluster has started on a node, does not hand on what holds there alone:

    >>> carried({**found, STARTED_IN: "10.0.0.1:6379", STARTED_BY: "77"})
    {'NCCL_DEBUG': 'INFO', 'AGENTRL_RAY_ADDRESS': '10.0.0.1:6379'}
    """
    own = _OF_THE_NODE if STARTED_IN in environment else ()
    return {name: value for name, value in environment.items() if name.startswith(_CARRIED) and name not in own}


class NodeLostError(WorldError):
    """A node of the cluster is gone, or does not answer any more."""


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process to start.

    ``arguments``: of the Python interpreter of its place. ``environment``: changes of the variables there; None unsets
    one. ``folder``: where it runs, otherwise where its starter runs. ``log``: the file for its output, which otherwise
    goes where that of its starter goes; ``shown``: it goes there too. ``draws``: its standard output goes only there
    if that is a terminal. ``supervised``: whatever it has started ends with it, and it ends with its starter.
    """

    role: str
    number: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str | None] = field(default_factory=dict)
    folder: Path | None = None
    log: Path | None = None
    shown: bool = True
    draws: bool = False
    supervised: bool = False

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True, kw_only=True)
class ClusterNode:
    """A machine, and what the processes of runs may use of it."""

    name: str
    address: str
    cpus: float
    gpus: int


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Resources that must lie on one node; ``holds`` says what for."""

    holds: str
    cpus: float
    gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class Place:
    """A bundle that is reserved on ``node``, which the others reach at ``address``. ``gpus``: their names there."""

    number: int
    node: str
    address: str
    gpus: tuple[str, ...] = ()


class ProcessHandle(Protocol):
    """A process that was started. All methods are callable from any thread."""

    spec: ProcessSpec
    place: Place

    def wait(self, seconds: float) -> int | None:
        """Its exit code once it has ended, negative for a signal; None, after ``seconds`` at most, while it runs.

        Raises NodeLostError if its node does not answer any more.
        """

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process or its node is gone."""


class Cluster(Protocol):
    """Places for processes."""

    def nodes(self) -> list[ClusterNode]:
        """All nodes, and what they have in all."""

    def reserve(self, bundles: Sequence[Bundle], *, patience: float = 0.0) -> list[Place]:
        """Reserve each bundle, all on different nodes. Raises SettingsError or WorldError if they cannot be had.

        ``patience``: seconds to wait for nodes that are not there.
        """

    def host(self, bundle: Bundle, node: ClusterNode | None = None) -> Place:
        """A further place beside those reserved: on ``node``, or on any. Raises WorldError if it cannot be had."""

    def answers(self, place: Place) -> bool:
        """Whether processes can be started there."""

    def start(self, spec: ProcessSpec, place: Place) -> ProcessHandle:
        """Start a process in a place."""

    def free_port(self, place: Place) -> int:
        """A port of the place's node that is currently free."""

    def sees(self, place: Place, path: Path) -> bool:
        """Whether processes there find this file or folder."""

    def give_up(self, place: Place, slot: int) -> None:
        """Reserve no more what the ``slot``-th rank of a place ran on: its GPU, or on Ray its node."""

    def release(self) -> None:
        """End what still runs, and give all places back; they can be reserved again."""

    def close(self) -> None:
        """Release everything, for good."""
