"""Settings of the cluster: the launcher of a run's processes, and their machines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agentrl.cluster.backends import CLUSTERS


class ClusterSettings(BaseModel):
    """Launcher and location of the training ranks; ``cluster=ray`` is short for ``cluster.kind=ray``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: str = "auto"
    """local: this command starts all ranks on this machine; environment: this command is one of the ranks, started by
    torchrun, srun or DeepSpeed's launcher; ray: this command starts the ranks on the nodes of a Ray cluster; auto:
    environment if the variable RANK is set, otherwise local; or the name of a registered backend, or module:Class"""
    address: str = "auto"
    """address of the Ray cluster, HOST:PORT; auto: the cluster of this machine; local: start Ray on this machine"""
    nodes: int = Field(1, ge=1)
    """number of Ray nodes for the ranks; each node has training.num_processes / nodes ranks"""
    cpus_per_rank: float = Field(1.0, gt=0)
    """CPUs that each rank reserves on its Ray node"""
    worker_cpus: float = Field(1.0, ge=0)
    """CPUs that the rollout worker and its child processes reserve on the Ray node of rank 0"""
    sandbox_cpus: float = Field(1.0, ge=0)
    """CPUs that a sandbox service reserves on each Ray node with sandbox.url=ray://. The maximum number of
    concurrent programs of a service is two per CPU, but at least 4, unless sandbox.workers is set"""
    server_cpus: float = Field(1.0, gt=0)
    """CPUs that an engine server reserves on its Ray node, in addition to its GPUs"""
    start_deadline: float = Field(300.0, gt=0)
    """seconds that Ray may take to reserve nodes for a run, including the wait for other jobs, and to start processes
    on them"""
    deadline: float = Field(60.0, gt=0)
    """seconds without a response after which another machine counts as lost. Also the seconds after which a rank counts
    as stuck if it makes no progress in a micro-batch or while it waits for the rollout worker
    (docs/how-to/cluster.md)"""
    restarts: int = Field(0, ge=0)
    """maximum number of automatic restarts from the last checkpoint. A run restarts after a rank, the worker or a node
    is lost. After training runs out of memory, the run restarts with smaller micro-batches. Under torchrun or Slurm,
    restarts are left to the launcher"""
    restart_deadline: float = Field(3600.0, gt=0)
    """seconds that a restart waits for lost Ray nodes to return"""

    @field_validator("kind")
    @classmethod
    def _known_kind(cls, kind: str) -> str:
        CLUSTERS.check(kind)
        return kind
