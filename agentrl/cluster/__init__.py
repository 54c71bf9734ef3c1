"""Start, place and supervise the processes of a run, on this machine or on the nodes of a Ray cluster."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.cluster.processes import Cluster
    from agentrl.cluster.settings import ClusterSettings


def open_cluster(settings: ClusterSettings, gpus: Sequence[str] | None) -> Cluster:
    """Open the cluster that ``settings`` select. ``gpus``: names of this machine's GPUs, or None for CPU training.

    Raises SettingsError if the cluster cannot be reached.
    """
    # Imported late, because programs that open no cluster also import this package.
    from agentrl.cluster.local import LocalCluster
    from agentrl.errors import SettingsError
    from agentrl_envs.registry import install_extra

    if settings.kind != "ray":
        return LocalCluster(gpus)
    if importlib.util.find_spec("ray") is None:
        raise SettingsError(f"cluster=ray requires Ray, which is missing: run {install_extra('ray')} on every node")
    # Without this limit, Ray ends this process within a minute after its head node is lost. Ray reads the variable when
    # it is imported.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(round(settings.deadline + 60)))
    # Otherwise Ray prints the last lines of a dead raylet's log, dozens with "[state-dump]", after our error message.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "^Raylet is terminated")
    from agentrl.cluster.ray_nodes import RayCluster

    return RayCluster(settings)
