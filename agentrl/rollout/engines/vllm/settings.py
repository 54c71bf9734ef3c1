"""Settings of ``rollout.vllm``. Only this package reads them."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.rollout.engines.settings import ServerSettings


class VLLMSettings(ServerSettings):
    """The vLLM servers of ``rollout.engine=vllm``."""

    prefix: ClassVar[str] = "rollout.vllm"

    placement: Literal["colocated", "dedicated", "external"] = Field(
        "dedicated",
        description="colocated: servers are started on the training GPUs and sleep during training; dedicated: "
        "servers are started on other GPUs of this machine, or on its CPU, and with cluster=ray on any node; "
        "external: servers already run at addresses",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs per server")
    devices: list[int] | None = Field(
        None,
        description="GPU numbers for the servers; null: those of the training ranks (colocated), else the next free "
        "ones",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a GPU's memory for a server; null: 0.85, and colocated at most what training leaves "
        "free when the servers start",
    )
    extra_args: list[str] = Field([], description="further command-line arguments of vLLM's server")
    transfer: Literal["auto", "nccl", "ipc", "file"] = Field(
        "auto",
        description="how weights are sent to servers; auto: ipc if colocated, nccl to other GPUs, file without GPUs",
    )
    lora: Literal["adapter", "merged"] = Field(
        "adapter",
        description="what servers are sent of a policy with adapters (model.lora.rank): adapter: the adapters, as "
        "files under a new name for each version; merged: the model with the adapters merged into it, rounded to its "
        "dtype",
    )
    seeded: bool = Field(True, description="give each request its own seed; makes sampling by vLLM slightly slower")

    @model_validator(mode="after")
    def _consistent(self) -> VLLMSettings:
        if (self.placement == "external") != bool(self.addresses):
            raise ValueError("addresses are given for placement=external, and only for it")
        if self.devices is not None and len(self.devices) != self.replicas * self.tensor_parallel_size:
            raise ValueError(f"devices must name replicas x tensor_parallel_size GPUs, it names {len(self.devices)}")
        if self.placement == "colocated" and self.transfer == "nccl":
            raise ValueError("transfer=nccl needs other GPUs than the trainer's: choose ipc for placement=colocated")
        return self
