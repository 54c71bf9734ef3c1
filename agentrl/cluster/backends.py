"""Cluster backends, which start the processes of a run. Selected by ``cluster.kind``.

A backend opens a :class:`.Cluster`, which reserves resources on nodes and starts processes there. To add a backend,
write a `Cluster` and a `ClusterBackend` in a separate module, and register the backend: with :func:`register_cluster`,
as an entry point of the group ``agentrl.clusters``, as ``cluster.kind=module:Class``, or below in `CLUSTERS`.

This module imports no heavy libraries, because settings are checked without them.
"""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from agentrl.errors import SettingsError
from agentrl_envs.registry import Registry, install_command

if TYPE_CHECKING:
    from agentrl.cluster.processes import Cluster
    from agentrl.cluster.settings import ClusterSettings

_Backend = TypeVar("_Backend", bound="type[ClusterBackend]")


class ClusterBackend(ABC):
    """A kind of cluster that ``cluster.kind`` can select."""

    many_nodes: ClassVar[bool] = False
    """True if the cluster places ranks, servers and sandbox services on several machines. If so, ranks are always
    processes of the cluster, and the machine that runs the command need not meet their requirements."""

    @abstractmethod
    def open(self, settings: ClusterSettings, gpus: Sequence[str] | None) -> Cluster:
        """Open the cluster. ``gpus`` contains the names of this machine's GPUs, or is None for CPU training.

        Raises SettingsError if the cluster cannot be reached.
        """


class LocalBackend(ClusterBackend):
    """Runs all processes on this machine."""

    def open(self, settings: ClusterSettings, gpus: Sequence[str] | None) -> Cluster:
        from agentrl.cluster.local import LocalCluster

        return LocalCluster(gpus)


class RayBackend(ClusterBackend):
    """Runs processes on the nodes of a Ray cluster."""

    many_nodes = True

    def open(self, settings: ClusterSettings, gpus: Sequence[str] | None) -> Cluster:
        if importlib.util.find_spec("ray") is None:
            raise SettingsError(
                f"cluster=ray requires Ray, which is missing: run {install_command('ray')} on every node"
            )
        # By default, Ray ends this process within a minute after the head node is lost. Ray reads the variable when it
        # is imported.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(round(settings.deadline + 60)))
        # Otherwise, Ray prints the end of a dead raylet's log after our message: dozens of lines with "[state-dump]".
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated")
        from agentrl.cluster.ray_nodes import RayCluster

        return RayCluster(settings)


_MODULE = __name__
CLUSTERS: Registry[type[ClusterBackend]] = Registry(
    "cluster",
    builtin={
        "auto": f"{_MODULE}:LocalBackend",
        "local": f"{_MODULE}:LocalBackend",
        "environment": f"{_MODULE}:LocalBackend",  # a launcher starts the ranks, and the worker starts the servers
        "ray": f"{_MODULE}:RayBackend",
    },
    group="agentrl.clusters",
    paths=True,
)
"""Backends by the value of ``cluster.kind``."""


def register_cluster(name: str) -> Callable[[_Backend], _Backend]:
    """Register the decorated class for ``cluster.kind=NAME``."""
    return CLUSTERS.decorator(name)


def has_many_nodes(kind: str) -> bool:
    """Return True if the backend ``kind`` (``cluster.kind``) places processes on several machines."""
    return CLUSTERS[kind].many_nodes


def open_cluster(settings: ClusterSettings, gpus: Sequence[str] | None) -> Cluster:
    """Open the cluster selected by ``settings``. See `ClusterBackend.open`."""
    return CLUSTERS[settings.kind]().open(settings, gpus)
