"""The table of engines: the facts that a run needs about its engine before opening it. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from agentrl.rollout.settings import RolloutSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """An engine as ``rollout`` configures it.

    ``opener``: ``module:class`` of its :class:`~agentrl.rollout.engines.managed.ManagedEngine`. ``in_process``: it
    computes in the rollout worker, with a model loaded there. ``reproducible``: the same requests give the same bits,
    regardless of when they arrive. ``kv_slots``: tokens of its KV cache, if a setting fixes the number.
    ``prompt_limit``: tokens of the longest prompt that it accepts. ``shares_gpus``: it shares GPUs with the training
    ranks, so one of the two is idle while the other computes. ``starts_servers``: it starts servers.
    ``start_seconds``: how long opening it may take beyond loading a model.
    """

    opener: str
    about: str
    in_process: bool
    reproducible: bool
    kv_slots: int | None = None
    prompt_limit: int | None = None
    shares_gpus: bool = False
    starts_servers: bool = False
    start_seconds: float = 0.0


def engine_facts(rollout: RolloutSettings) -> EngineFacts:
    """The facts about the engine named by ``rollout.engine``."""
    return ENGINES[rollout.engine](rollout)


def servers_on_nodes(rollout: RolloutSettings, cluster: str) -> bool:
    """Whether a cluster of this kind (``cluster.kind``) places the servers that the engine starts on its nodes."""
    return cluster == "ray" and engine_facts(rollout).starts_servers and rollout.vllm.placement == "dedicated"


def _transformers(rollout: RolloutSettings) -> EngineFacts:
    return EngineFacts(
        opener="agentrl.rollout.engines.managed:ManagedTransformers",
        about="the transformers engine in the rollout worker",
        in_process=True,
        reproducible=True,
        kv_slots=rollout.kv_cache_tokens,
    )


def _vllm(rollout: RolloutSettings) -> EngineFacts:
    vllm = rollout.vllm
    external = vllm.placement == "external"
    started = f"vLLM, {vllm.placement}: {vllm.replicas} servers of {vllm.tensor_parallel_size} GPUs"
    return EngineFacts(
        opener="agentrl.rollout.engines.managed:ManagedVLLM",
        about=f"vLLM servers at {', '.join(vllm.addresses)}" if external else started,
        in_process=False,
        reproducible=False,
        prompt_limit=rollout.max_prompt_tokens,
        shares_gpus=vllm.placement == "colocated",
        starts_servers=not external,
        start_seconds=vllm.start_deadline,
    )


ENGINES: Mapping[str, Callable[[RolloutSettings], EngineFacts]] = {"transformers": _transformers, "vllm": _vllm}
"""Facts by the value of ``rollout.engine``."""
