"""Closed-form memory estimates of a training rank and of a vLLM server, from the shape of a model.

Symbols: ``n`` ranks; ``P`` parameters; ``A`` trained parameters (``P``, or the adapters' parameters); ``N`` tokens of a
micro-batch on one rank; ``D`` hidden units; ``V`` vocabulary size; ``s`` bytes of a weight.

Sources: the ZeRO paper (arXiv 1910.02054, section 5) for the sharding of each stage; DeepSpeed 0.19's code for buffers;
`transformers`' Llama, Qwen and Gemma layers for the tensors that autograd keeps; docs/concepts/kernels.md for the
methods of the head. `benchmarks/plan.py` compares the estimate with real steps.

Not estimated: layers without a gated MLP (GPT-2 keeps about 50 % more), and the workspace of kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from agentrl.kernels import chunked, sliced
from agentrl.models.shape import ModelShape

GB = 10**9
"""``--memory`` and the messages of a plan use GB, like the names of GPUs."""
CONTEXT = 2**30
"""Bytes assumed for each process on a GPU: CUDA context, NCCL's buffers and the libraries' kernels."""
SLACK = 0.05
"""Fraction of a GPU's memory assumed lost to fragmentation."""
SERVER_OVERHEAD = 2 * 2**30
"""Bytes assumed for each GPU of a vLLM server: CUDA context, profiled activations and CUDA graphs."""
REDUCE_BUCKET = 500_000_000
"""Maximum number of gradient elements that DeepSpeed collects before it reduces them."""

_LIVE = 1_000_000_000  # maximum number of gathered elements in ZeRO-3 (stage3_max_live_parameters)

Offload = Literal["none", "optimizer", "all"]
Bytes = dict[str, int]  # bytes by component


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The settings that determine the memory of a training rank."""

    ranks: int
    stage: int  # effective stage of ZeRO
    bfloat16: bool
    tokens: int  # maximum number in a micro-batch, summed over its sequence-parallel group
    checkpointing: bool = False
    checkpoint_offload: bool = False
    offload: Offload = "none"
    sequence_parallel: int = 1
    lora_rank: int = 0
    head_backend: str = "triton"
    device: Literal["cpu", "cuda"] = "cuda"  # determines the block size of "chunked"
    reference: bool = False
    teacher: int = 0  # number of the teacher's parameters
    critic: bool = False

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a weight, without its gradient and optimizer state."""
        return 2 if self.bfloat16 else 4

    @property
    def tokens_per_rank(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return -(-self.tokens // self.sequence_parallel)

    def elements_per_rank(self, elements: int, *, from_stage: int) -> int:
        """Return the elements per rank. ZeRO shards them from stage ``from_stage`` on; the last shard is padded."""
        return -(-elements // self.ranks) if self.stage >= from_stage else elements


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a training rank in bytes: static memory, and the additional memory of each phase of a step."""

    static: Bytes
    phases: dict[str, Bytes]
    host: int  # bytes in host memory, for all offloaded parts

    @property
    def busiest_phase(self) -> str:
        """The phase with the highest memory use."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def peak_parts(self) -> Bytes:
        """Memory by component in the phase with the highest memory use."""
        return self.static | self.phases[self.busiest_phase]

    @property
    def total(self) -> int:
        """Memory at the peak, in bytes."""
        return sum(self.peak_parts.values())

    def format_parts(self) -> Iterator[str]:
        """Yield a line for each component of the peak memory that is not 0, the total, and the host memory."""
        sizes = self.peak_parts | {f"total, at the {self.busiest_phase}": self.total, "in host memory": self.host}
        yield from (f"  {name:<26} {size / 2**20:12,.1f} MiB" for name, size in sizes.items() if size)


def rank_memory(shape: ModelShape, setup: TrainingSetup, *, kv_tokens: int = 0, context: int = 0) -> RankMemory:
    """Estimate the memory of a training rank.

    ``kv_tokens`` is the number of tokens in the built-in engine's cache. ``context`` is the assumed number of bytes for
    CUDA contexts.
    """
    adapters = setup.lora_rank * shape.adapted  # r (inputs + outputs) of each adapted layer (arXiv 2106.09685)
    trained = adapters or shape.parameters
    largest = 0 if adapters else shape.largest_parameter  # largest trained tensor; tensors of adapters are small
    part = setup.elements_per_rank(trained, from_stage=1)
    on_device = setup.offload == "none"

    # Weights take s P / n at stage 3, gradients 4 A / n from stage 2, AdamW's moments 8 A / n and the float32 master
    # copy 4 A / n from stage 1. ZeRO also copies float32 weights. With an offloaded optimizer, stage 3 keeps gradients
    # in host memory, but stages 1 and 2 still accumulate them on the device.
    weights = (
        setup.elements_per_rank(shape.parameters + adapters, from_stage=3)
        * setup.dtype_bytes
        * (setup.offload != "all")
    )
    gradients = 4 * setup.elements_per_rank(trained, from_stage=2) * (on_device or setup.stage < 3)
    moments = 8 * part * on_device
    master = 4 * part * (on_device and setup.stage >= 1)
    gathers = setup.stage == 3 and setup.ranks > 1
    gathered = min(shape.parameters, max(_LIVE, shape.largest_parameter)) * setup.dtype_bytes * gathers

    # The bucket is float32 and always allocated at stage 3. It has the weights' dtype at stage 1 (from the first
    # gradient of an update on) and at stage 2 (during each backward pass). Stage 2 also holds a flat copy of the bucket
    # and, in bfloat16, a float32 copy of the flat copy or of a single larger tensor.
    filled = min(REDUCE_BUCKET, trained)
    bucket = filled * (4 if setup.stage == 3 else setup.dtype_bytes) * (setup.stage > 0)
    wide = 4 * max(filled, largest) if setup.bfloat16 else 0
    reduction = {"reduction": filled * setup.dtype_bytes + wide if setup.stage == 2 else 0}
    # An optimizer step computes the norms of single tensors in float64. The rank's gradients are copied at stage 3, and
    # in float32 also at stages 1 and 2. Without ZeRO, AdamW works in place.
    copied = 4 * part if setup.stage == 3 or not setup.bfloat16 else 0
    step = max(8 * min(largest, part), copied) * (setup.stage > 0 and on_device)

    kept, peak, moved = activation_bytes_kept_peak_host(shape, setup)
    saved = {"activations": kept}
    waiting = {"gradient bucket": bucket} if setup.stage == 2 else {}
    early = reduction if trained > REDUCE_BUCKET else {}  # the bucket fills while activations are still allocated
    phases = {
        "head": saved | {"head": head_peak_bytes(shape, setup)},
        "backward": saved | waiting | {"backward": peak - kept} | early,
    }
    if setup.stage != 1:  # stage 1 reduces in the step and reuses the memory of the gradients
        phases |= {"reduction": waiting | reduction, "step": {"step": step}}
    if not on_device:  # in host memory: gradients, master copy, moments and, below stage 3, weights
        moved += (16 + (setup.dtype_bytes if setup.stage < 3 else 0)) * part
        moved += setup.elements_per_rank(shape.parameters, from_stage=3) * setup.dtype_bytes * (setup.offload == "all")
    return RankMemory(
        static={
            "weights": weights,
            "gathered weights": gathered,
            "master copy": master,
            "optimizer": moments,
            "gradients": gradients,
            "gradient bucket": bucket if setup.stage in (1, 3) else 0,
            "reference": weights if setup.reference and not adapters else 0,
            "teacher": setup.elements_per_rank(setup.teacher, from_stage=3)
            * setup.dtype_bytes
            * (setup.offload != "all"),
            "critic": weights + gradients + master + moments if setup.critic else 0,
            "KV cache": kv_tokens * kv_bytes_per_token(shape, setup.dtype_bytes),
            "context (assumed)": context,
        },
        phases=phases,
        host=moved,
    )


def activation_bytes_kept_peak_host(shape: ModelShape, setup: TrainingSetup) -> tuple[int, int, int]:
    """Estimate the bytes that autograd keeps for ``N`` tokens in a decoder with RMS norms, attention and a gated MLP.

    Returns the bytes after the forward pass, at the peak of both passes, and in host memory. A layer keeps, for each
    token:

    - for a norm: its input in float32 and, if its weight is trained, the normalized input: ``4 D + s D``. The two norms
      before projections also keep their output, ``s D``;
    - for fused attention (arXiv 2307.08691): queries, keys, values and the result, and a float32 number per head.
      Sequence-parallel ranks keep the result twice, and copies of key-value heads if there are fewer heads than ranks;
    - for the MLP: four tensors of its width. Routing copies the input and the result for each expert.

    The backward pass holds three gradients of the MLP's width in the last layer, or five float32 tensors in the final
    norm. With checkpointing, a layer keeps only its input, and one layer is recomputed at a time.
    """
    size, hidden, queries = setup.dtype_bytes, shape.hidden, shape.heads * shape.head_dim
    tokens = setup.tokens_per_rank
    of_norm = 4 + size * (not setup.lora_rank)
    norm = of_norm * hidden
    keys = max(shape.kv_heads, setup.sequence_parallel) * shape.head_dim
    results = 2 if setup.sequence_parallel > 1 else 1
    attention = size * ((1 + results) * queries + 2 * keys) + 4 * shape.heads
    normed_heads = of_norm * (queries + shape.kv_heads * shape.head_dim) * shape.head_norms
    mlp = size * (4 * shape.mlp + 2 * shape.experts * hidden)
    layer = shape.norms * norm + 2 * size * hidden + normed_heads + attention + mlp
    final = norm + size * hidden
    rotary = 2 * size * shape.head_dim  # cosines and sines
    inputs, width = shape.layers * size * hidden, 3 * size * shape.mlp
    if not setup.checkpointing:
        saved = shape.layers * layer + final + rotary
        return tokens * saved, tokens * (saved + max(20 * hidden, width - final)), 0
    # In float32, a layer's input is also the saved input of its first norm, without a copy.
    recomputed = rotary + layer + width - (0 if setup.bfloat16 else size * hidden)
    if setup.checkpoint_offload:
        # The final norm's input is saved for two operations, and both copies are moved.
        moved = inputs + norm + 4 * hidden
        return tokens * (rotary + size * hidden), tokens * (size * hidden + recomputed), tokens * moved
    saved = inputs + final + rotary
    return tokens * saved, tokens * max(saved, inputs + recomputed), 0


def head_peak_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the head's peak memory in bytes, in addition to the hidden states of the micro-batch.

    The head needs a copy of the tokens' states, and 12 float32 numbers per token for statistics and loss. The backward
    pass adds gradients of the states [N, D] and of a trained weight [V, D]. The backends add:

    - ``reference``: all logits and the tensors that autograd saves, ``5 x 4 N V``;
    - ``chunked``: a block of logits and three pieces of it. Up to ``2^23`` logits are kept whole. The gradient of a
      bfloat16 weight is accumulated in float32, ``4 D V`` (on a GPU, from a bfloat16 copy of the block);
    - ``triton``: a tile of float32 logits and, in bfloat16, the tile's gradient and float32 gradients of the states and
      of a slice of the weight.
    """
    tokens, size, logits = setup.tokens_per_rank, setup.dtype_bytes, setup.tokens_per_rank * shape.vocabulary
    trained = 0 if setup.lora_rank else shape.vocabulary
    common = tokens * (shape.hidden * size + 48) + (tokens + trained) * shape.hidden * size
    if setup.head_backend == "reference":
        return common + 20 * logits
    if setup.head_backend == "triton":
        tile = min(sliced.TILE_ELEMENTS[setup.device], tokens * sliced.SLICE)
        return common + 4 * tile + (2 * tile + 4 * (tokens + sliced.SLICE) * shape.hidden) * setup.bfloat16
    block, held = logits, 3 * logits
    if logits > chunked.KEEP_ELEMENTS:
        block = max(1, min(tokens, chunked.BLOCK_ELEMENTS[setup.device] // shape.vocabulary)) * shape.vocabulary
        held = block + 3 * min(chunked.PIECE_ELEMENTS[setup.device], block)
    summed = 4 * shape.vocabulary * shape.hidden + (2 * block if setup.device == "cuda" else 0)
    return common + 4 * held + summed * bool(setup.bfloat16 and trained)


def kv_bytes_per_token(shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes of one token in a KV cache: a key and a value per layer and KV head."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * element_bytes


def server_cache_tokens(shape: ModelShape, *, memory: int, share: float, gpus: int) -> int:
    """Estimate how many tokens fit in the cache of a bfloat16 vLLM server on ``gpus`` GPUs of ``memory`` bytes.

    The server may use the fraction ``share`` of the memory. KV heads are replicated if there are fewer KV heads than
    GPUs.
    """
    weights = -(-shape.parameters * 2 // gpus)
    left = max(0, int(share * memory) - weights - SERVER_OVERHEAD)
    return left * min(gpus, shape.kv_heads) // kv_bytes_per_token(shape, 2)


def usable_gpu_bytes(memory: int) -> int:
    """Return how many of a GPU's ``memory`` bytes a plan may use."""
    return int(memory * (1 - SLACK))
