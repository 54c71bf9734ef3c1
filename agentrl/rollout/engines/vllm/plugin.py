"""vLLM as ``rollout.engine=vllm``: the facts that its settings imply, and the contradictions between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from agentrl.rollout.engines.registry import EngineFacts, EnginePlugin

if TYPE_CHECKING:
    from agentrl.rollout.engines.base import EngineRequest, ManagedEngine
    from agentrl.rollout.settings import EngineSections, RolloutSettings


class VLLMPlugin(EnginePlugin):
    """vLLM servers. Their settings are ``rollout.vllm``."""

    def facts(self, rollout: RolloutSettings) -> EngineFacts:
        vllm = rollout.vllm
        external = vllm.placement == "external"
        started = f"vLLM, {vllm.placement}: {vllm.replicas} servers of {vllm.tensor_parallel_size} GPUs"
        return EngineFacts(
            about=f"vLLM servers at {', '.join(vllm.addresses)}" if external else started,
            prompt_limit=rollout.max_prompt_tokens,
            servers=0 if external else vllm.replicas,
            gpus_per_server=vllm.tensor_parallel_size,
            gpu_share=vllm.gpu_memory_utilization,
            shares_gpus="rollout.vllm.placement=colocated" if vllm.placement == "colocated" else "",
            remote=external,
            start_seconds=vllm.start_deadline,
        )

    def managed(self, request: EngineRequest) -> ManagedEngine:
        from agentrl.rollout.engines.vllm.engine import ManagedVLLM

        return ManagedVLLM(request)

    def problems(self, settings: EngineSections, *, cluster: str) -> Iterator[str]:
        vllm, rank = settings.rollout.vllm, settings.model.lora.rank
        if rank == 0 and vllm.lora != type(vllm).model_fields["lora"].default:
            yield f"rollout.vllm.lora={vllm.lora} with model.lora.rank=0, which trains without an adapter"
        if rank and vllm.lora == "adapter" and vllm.transfer in ("nccl", "ipc"):
            yield (
                f"rollout.vllm.transfer={vllm.transfer} with rollout.vllm.lora=adapter: servers load adapters from "
                "files; valid: auto, file, or rollout.vllm.lora=merged"
            )
        if cluster == "ray" and vllm.placement == "dedicated" and vllm.devices is not None:
            yield f"rollout.vllm.devices={vllm.devices} with cluster.kind=ray: Ray chooses the GPUs; valid: null"
        for address in vllm.addresses:
            if not address.startswith(("http://", "https://")):
                yield f"rollout.vllm.addresses: {address!r} is not an address; valid: http://HOST:PORT"

    def check_machine(self, settings: EngineSections, *, longest: int, training_gpus: int) -> None:
        from agentrl.rollout.engines.vllm.plan import policy_servers

        if settings.rollout.vllm.placement == "external":
            return
        path = str(settings.model.path)
        policy_servers(
            settings.rollout,
            settings.model,
            path,
            served=path,
            longest=longest,
            training_gpus=training_gpus,
            backend="file",
        )
