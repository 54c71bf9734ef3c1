"""The plug-in for ``rollout.engine=vllm``: its settings, the resulting properties, and checks for contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from agentrl.cluster.backends import has_many_nodes
from agentrl.rollout.engines.base import EngineFacts, EnginePlugin, ServerSettings

if TYPE_CHECKING:
    from agentrl.rollout.engines.base import EngineSpecification, ManagedEngine
    from agentrl.rollout.settings import EngineRelatedSettings, RolloutSettings


class VLLMSettings(ServerSettings):
    """The vLLM servers of ``rollout.engine=vllm``."""

    prefix: ClassVar[str] = "rollout.vllm"

    placement: Literal["colocated", "dedicated", "external"] = Field(
        "dedicated",
        description="colocated: servers are started on the training GPUs and sleep during training; dedicated: "
        "servers are started on other GPUs of this machine, or on its CPU, and with cluster=ray on any node; "
        "external: the servers at addresses are already running",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs per server")
    devices: list[int] | None = Field(
        None,
        description="GPU indices of the servers; null: the GPUs of the training ranks (colocated), else the next free "
        "GPUs",
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="fraction of a GPU's memory for a server; null: 0.85, but for colocated servers at most the "
        "fraction that is free when they start",
    )
    extra_args: list[str] = Field([], description="additional command-line arguments of vLLM's server")
    transfer: Literal["auto", "nccl", "ipc", "file"] = Field(
        "auto",
        description="transport of weights to servers; auto: ipc if colocated, nccl to other GPUs, file without GPUs",
    )
    lora: Literal["adapter", "merged"] = Field(
        "adapter",
        description="form in which servers receive a policy with adapters (model.lora.rank). adapter: the adapters, as "
        "files with a new name for each version; merged: the model with merged adapters, rounded to its dtype",
    )
    quantization: (
        Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", "int8_per_channel_weight_only"] | None
    ) = Field(
        None,
        description="format to which servers on GPUs round the weights when they arrive (vLLM's online quantization); "
        "int8 applies to experts only; null: the dtype of the weights. Needs a correction (correction.*)",
    )
    seeded: bool = Field(
        True, description="use a separate seed for each request, which makes sampling in vLLM slightly slower"
    )

    @model_validator(mode="after")
    def _consistent(self) -> VLLMSettings:
        if (self.placement == "external") != bool(self.addresses):
            raise ValueError("addresses must be set for placement=external, and only for placement=external")
        if self.devices is not None and len(self.devices) != self.replicas * self.tensor_parallel_size:
            raise ValueError(f"devices must list replicas x tensor_parallel_size GPUs; got {len(self.devices)}")
        if self.placement == "colocated" and self.transfer == "nccl":
            raise ValueError(
                "transfer=nccl cannot be used with placement=colocated, which shares the trainer's GPUs: "
                "set transfer=ipc"
            )
        return self


class VLLMPlugin(EnginePlugin):
    """The plug-in for vLLM servers, with the settings ``rollout.vllm``."""

    def facts(self, rollout: RolloutSettings) -> EngineFacts:
        vllm = rollout.vllm
        external = vllm.placement == "external"
        started = f"vLLM, {vllm.placement}: {vllm.replicas} servers of {vllm.tensor_parallel_size} GPUs"
        return EngineFacts(
            about=f"vLLM servers at {', '.join(vllm.addresses)}" if external else started,
            largest_support=64,  # each token adds 60 bytes to a response
            returns_routes=True,
            approximation=f"rollout.vllm.quantization={vllm.quantization}" if vllm.quantization else "",
            prompt_limit=rollout.max_prompt_tokens,
            servers=0 if external else vllm.replicas,
            gpus_per_server=vllm.tensor_parallel_size,
            gpu_share=vllm.gpu_memory_utilization,
            shares_gpus="rollout.vllm.placement=colocated" if vllm.placement == "colocated" else "",
            remote=external,
            start_seconds=vllm.start_deadline,
        )

    def managed(self, request: EngineSpecification) -> ManagedEngine:
        from agentrl.rollout.engines.vllm.engine import ManagedVLLM

        return ManagedVLLM(request)

    def problems(self, settings: EngineRelatedSettings, *, cluster: str) -> Iterator[str]:
        vllm, rank = settings.rollout.vllm, settings.model.lora.rank
        if rank == 0 and vllm.lora != type(vllm).model_fields["lora"].default:
            yield f"rollout.vllm.lora={vllm.lora} with model.lora.rank=0, which trains without an adapter"
        if rank and vllm.lora == "adapter" and vllm.transfer in ("nccl", "ipc"):
            yield (
                f"rollout.vllm.transfer={vllm.transfer} with rollout.vllm.lora=adapter: servers load adapters from "
                "files; valid: auto, file, or rollout.vllm.lora=merged"
            )
        if has_many_nodes(cluster) and vllm.placement == "dedicated" and vllm.devices is not None:
            yield f"rollout.vllm.devices={vllm.devices}: cluster.kind={cluster} chooses the GPUs; valid: null"
        for address in vllm.addresses:
            if not address.startswith(("http://", "https://")):
                yield f"rollout.vllm.addresses: {address!r} is not an address; valid: http://HOST:PORT"

    def check_machine(self, settings: EngineRelatedSettings, *, longest: int, training_gpus: int) -> None:
        from agentrl.rollout.engines.vllm.plan import plan_policy_servers

        if settings.rollout.vllm.placement == "external":
            return
        path = str(settings.model.path)
        plan_policy_servers(
            settings.rollout,
            settings.model,
            path,
            served=path,
            longest=longest,
            training_gpus=training_gpus,
            backend="file",
        )
