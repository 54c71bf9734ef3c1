"""Settings of the cluster: who starts the processes of a run, and where."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ClusterSettings(BaseModel):
    """Who starts the training ranks; ``cluster=local`` is short for ``cluster.kind=local``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    kind: Literal["auto", "local", "environment"] = "auto"
    """local: this command starts all ranks on this machine; environment: this command is one of the ranks, which
    torchrun, srun or DeepSpeed's launcher started; auto: environment where RANK is set, otherwise local"""
