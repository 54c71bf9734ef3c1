"""What a plan is made of: the model's shape, how it is trained and served, and the bytes of each part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GIB = 2**30
GB = 10**9
"""``--memory`` and the messages of a plan count in these, as the names of GPUs do."""

Offload = Literal["none", "optimizer", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "all")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a model that its memory depends on. No weight is read."""

    name: str
    config: PreTrainedConfig
    parameters: int
    largest_parameter: int  # elements of the largest tensor
    adapted: int  # sum over the linear layers, the head left out, of inputs plus outputs
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """How one rank trains: the settings that decide its memory."""

    ranks: int
    stage: int  # of ZeRO, as DeepSpeed runs it
    bfloat16: bool
    tokens: int  # of a micro-batch, on all ranks that share its row
    checkpointing: bool = False
    checkpoint_offload: bool = False
    offload: Offload = "none"
    sequence_parallel: int = 1
    lora_rank: int = 0
    head_backend: Literal["reference", "chunked", "triton"] = "triton"
    device: Literal["cpu", "cuda"] = "cuda"  # for the blocks of "chunked"
    reference: bool = False
    critic: bool = False

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return 2 if self.bfloat16 else 4

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return -(-self.tokens // self.sequence_parallel)


Bytes = dict[str, int]
"""Parts by name."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of a training rank: what stays, and what each phase of a step needs for itself."""

    static: Bytes
    phases: dict[str, Bytes]
    host: int  # in the host's memory, for what is offloaded

    @property
    def busiest(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts().values())

    def parts(self) -> Bytes:
        """What stands on the device at the peak; parts of zero bytes are left out."""
        return {name: size for name, size in (self.static | self.phases[self.busiest]).items() if size}


@dataclass(frozen=True, kw_only=True)
class ServerMemory:
    """Bytes of one GPU of a vLLM server."""

    share: float  # of the GPU's memory, gpu_memory_utilization
    weights: int
    overhead: int  # assumed: profiled activations and CUDA graphs
    kv_cache: int  # what is left
    kv_tokens: int  # that the server's GPUs hold together

    @property
    def total(self) -> int:
        return self.weights + self.overhead + self.kv_cache
