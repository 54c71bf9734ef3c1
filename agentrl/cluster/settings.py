"""Settings of the cluster: which program starts the processes of a run, and on which machines."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ClusterSettings(BaseModel):
    """How training ranks are started, and on which machines. ``cluster=ray`` is short for ``cluster.kind=ray``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["auto", "local", "environment", "ray"] = "auto"
    """local: this command starts all ranks on this machine; environment: this command is one of the ranks, which
    torchrun, srun or DeepSpeed's launcher started; ray: this command starts them on the nodes of a Ray cluster; auto:
    environment where RANK is set, otherwise local"""
    address: str = "auto"
    """of the Ray cluster: HOST:PORT; auto: the one that this machine belongs to; local: start Ray on this machine"""
    nodes: int = Field(1, ge=1)
    """number of Ray nodes that share the ranks, training.num_processes / nodes on each"""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs that each rank reserves of a Ray node"""
    worker_cpus: float = Field(1.0, ge=0)
    """CPUs that the rollout worker and its child processes reserve on the Ray node of rank 0"""
    sandbox_cpus: float = Field(1.0, ge=0)
    """CPUs that a sandbox service reserves on each Ray node with sandbox.url=ray://. It runs twice as many programs at
    once, and at least 4, unless sandbox.workers is set"""
    server_cpus: float = Field(1.0, gt=0)
    """CPUs that a server of the engine reserves on the Ray node that runs it, beside its GPUs"""
    start_deadline: float = Field(300.0, gt=0)
    """seconds to wait for Ray to assign nodes to a run, which other jobs may occupy, and to start processes there"""
    deadline: float = Field(60.0, gt=0)
    """seconds without a response after which another machine counts as lost, and without progress in a micro-batch or a
    wait for the rollout worker after which a rank counts as stuck (docs/cluster.md)"""
    restarts: int = Field(0, ge=0)
    """how often a run restarts by itself from its last checkpoint after it lost a rank, its worker or a node, or, with
    smaller micro-batches, after it ran out of memory in training. A launcher restarts its ranks itself"""
    restart_deadline: float = Field(3600.0, gt=0)
    """seconds that a restart waits for Ray nodes to come back"""
    elastic: bool = False
    """restart with fewer ranks if lost nodes have not come back by cluster.restart_deadline, or if a rank fails on the
    same GPU or node again before another checkpoint is saved. With several cluster.nodes, all ranks of a node are left
    out; otherwise one rank, or one sequence-parallel group (training.sequence_parallel)"""
