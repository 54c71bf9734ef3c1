"""Closed-form memory estimates of a training rank and of a vLLM server, from the shape of a model.

Symbols: ``n`` ranks; ``P`` parameters; ``A`` trained parameters (``P``, or the adapters' parameters); ``N`` tokens of a
micro-batch on one rank; ``D`` hidden units; ``V`` vocabulary size; ``s`` bytes of a weight.

Sources: the ZeRO paper (arXiv 1910.02054, section 5) for the sharding of each stage; DeepSpeed 0.19's code for buffers;
`transformers`' Llama, Qwen and Gemma layers for the tensors that autograd keeps; docs/concepts/kernels.md for the
methods of the head. `benchmarks/plan.py` compares the estimate with real steps.

Not estimated: layers without a gated MLP (GPT-2 keeps about 50 % more), and the workspace of kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import torch

from agentrl.errors import SettingsError
from agentrl.models.attention import reason_not_packable
from agentrl.models.loading import read_config
from agentrl.models.lora import target_layers
from agentrl.models.settings import LoRASettings, ModelSettings
from agentrl_envs.registry import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


GB = 10**9
"""``--memory`` and the messages of a plan use GB, like the names of GPUs."""
CONTEXT = 2**30
"""Assumed for each process on a GPU: CUDA context, NCCL's buffers, the libraries' kernels."""
SLACK = 0.05
"""Fraction of a GPU's memory assumed lost to fragmentation."""
SERVER_OVERHEAD = 2 * 2**30
"""Assumed for a GPU of a vLLM server: its context, profiled activations and CUDA graphs."""
REDUCE_BUCKET = 500_000_000
"""Maximum number of gradient elements that DeepSpeed collects before it reduces them."""

_LIVE = 1_000_000_000  # maximum number of gathered elements in ZeRO-3 (stage3_max_live_parameters)
_STATISTICS = 12  # float32 numbers per token for its statistics and its loss
# The blocks of the head, as in agentrl.kernels.
_KEPT = 1 << 23  # chunked: logits that are kept for backward, in elements
_BLOCK = {"cpu": 1 << 23, "cuda": 1 << 26}  # chunked: elements of a block of rows
_PIECE = {"cpu": 1 << 21, "cuda": 1 << 24}  # chunked: elements that one elementwise operation touches
_TILE = 1 << 24  # triton: elements of a tile
_SLICE = 2048  # triton: rows of the weight in a tile's slice

Offload = Literal["none", "optimizer", "all"]
Bytes = dict[str, int]
"""Bytes of named parts."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Dimensions of a model that determine its memory use. No weights are read."""

    name: str
    config: PreTrainedConfig
    parameters: int
    largest_parameter: int  # elements of the largest tensor
    adapted: int  # sum of inputs plus outputs over the linear layers that adapters change
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int  # hidden units of the MLP for one token, summed over its experts
    experts: int  # experts of a token; 0 without routing
    norms: int  # per layer, over the hidden units
    head_norms: bool  # whether queries and keys are normalized


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The settings that determine the memory of a training rank."""

    ranks: int
    stage: int  # of ZeRO, as DeepSpeed runs it
    bfloat16: bool
    tokens: int  # of a micro-batch, on all ranks of its sequence-parallel group
    checkpointing: bool = False
    checkpoint_offload: bool = False
    offload: Offload = "none"
    sequence_parallel: int = 1
    lora_rank: int = 0
    head_backend: str = "triton"
    device: Literal["cpu", "cuda"] = "cuda"  # for the blocks of "chunked"
    reference: bool = False
    teacher: int = 0  # parameters
    critic: bool = False

    @property
    def size(self) -> int:
        """Bytes of a weight."""
        return 2 if self.bfloat16 else 4

    @property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return -(-self.tokens // self.sequence_parallel)

    def elements_per_rank(self, elements: int, *, from_stage: int) -> int:
        """Return the elements per rank if ZeRO shards them from this stage on. The last shard is padded."""
        return -(-elements // self.ranks) if self.stage >= from_stage else elements


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of a training rank in bytes: static memory, and the additional memory of each phase of a step."""

    static: Bytes
    phases: dict[str, Bytes]
    host: int  # bytes in host memory, for all offloaded parts

    @property
    def busiest_phase(self) -> str:
        """The phase with the largest memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.static.values()) + sum(self.phases[self.busiest_phase].values())

    def lines(self) -> Iterator[str]:
        yield from memory_lines(self.static | self.phases[self.busiest_phase], f"total, at the {self.busiest_phase}")
        if self.host:
            yield from memory_lines({"in host memory": self.host})


def memory_lines(parts: Bytes, total: str = "") -> Iterator[str]:
    """Yield a line for each part that is not 0, and a line for the sum if ``total`` names it."""
    for name, size in (parts | ({total: sum(parts.values())} if total else {})).items():
        if size:
            yield f"  {name:<26} {size / 2**20:12,.1f} MiB"


def rank_memory(shape: ModelShape, setup: TrainingSetup, *, kv_tokens: int = 0, context: int = 0) -> RankMemory:
    """Estimate the memory of a rank. ``kv_tokens``: the built-in engine's cache; ``context``: assumed CUDA bytes."""
    adapters = setup.lora_rank * shape.adapted  # r (inputs + outputs) of each adapted layer (arXiv 2106.09685)
    trained = adapters or shape.parameters
    largest = 0 if adapters else shape.largest_parameter  # of the trained tensors; the tensors of adapters are small
    part = setup.elements_per_rank(trained, from_stage=1)
    on_device = setup.offload == "none"

    # Weights take s P / n at stage 3, gradients 4 A / n from stage 2, AdamW's moments 8 A / n and the float32 master
    # copy 4 A / n from stage 1. ZeRO also copies float32 weights. With an offloaded optimizer, stage 3 keeps gradients
    # in host memory, but stages 1 and 2 still accumulate them on the device.
    weights = setup.elements_per_rank(shape.parameters + adapters, from_stage=3) * setup.size * (setup.offload != "all")
    gradients = 4 * setup.elements_per_rank(trained, from_stage=2) * (on_device or setup.stage < 3)
    moments = 8 * part * on_device
    master = 4 * part * (on_device and setup.stage >= 1)
    gathers = setup.stage == 3 and setup.ranks > 1
    gathered = min(shape.parameters, max(_LIVE, shape.largest_parameter)) * setup.size * gathers

    # The bucket is float32 and always allocated at stage 3. It has the weights' dtype at stage 1 (from the first
    # gradient of an update on) and at stage 2 (during each backward). Stage 2 also holds a flat copy of the bucket and,
    # in bfloat16, a float32 copy of the flat copy or of a single larger tensor.
    filled = min(REDUCE_BUCKET, trained)
    bucket = filled * (4 if setup.stage == 3 else setup.size) * (setup.stage > 0)
    wide = 4 * max(filled, largest) if setup.bfloat16 else 0
    reduction = {"reduction": filled * setup.size + wide if setup.stage == 2 else 0}
    # An optimizer step computes the norms of single tensors in float64. Stage 3, and float32 at stages 1 and 2, copy
    # the rank's gradients. Without ZeRO, AdamW works in place.
    copied = 4 * part if setup.stage == 3 or not setup.bfloat16 else 0
    step = max(8 * min(largest, part), copied) * (setup.stage > 0 and on_device)

    kept, peak, moved = activation_memory(shape, setup)
    saved = {"activations": kept}
    waiting = {"gradient bucket": bucket} if setup.stage == 2 else {}
    early = reduction if trained > REDUCE_BUCKET else {}  # the bucket fills while activations are still allocated
    phases = {
        "head": saved | {"head": head_bytes(shape, setup)},
        "backward": saved | waiting | {"backward": peak - kept} | early,
    }
    if setup.stage != 1:  # stage 1 reduces in the step, in place of the gradients
        phases |= {"reduction": waiting | reduction, "step": {"step": step}}
    if not on_device:  # in host memory: gradients, master copy, moments; below stage 3 also the weight
        moved += (16 + (setup.size if setup.stage < 3 else 0)) * part
        moved += setup.elements_per_rank(shape.parameters, from_stage=3) * setup.size * (setup.offload == "all")
    return RankMemory(
        static={
            "weights": weights,
            "gathered weights": gathered,
            "master copy": master,
            "optimizer": moments,
            "gradients": gradients,
            "gradient bucket": bucket if setup.stage in (1, 3) else 0,
            "reference": weights if setup.reference and not adapters else 0,
            "teacher": setup.elements_per_rank(setup.teacher, from_stage=3) * setup.size * (setup.offload != "all"),
            "critic": weights + gradients + master + moments if setup.critic else 0,
            "KV cache": kv_tokens * kv_bytes(shape, setup.size),
            "context (assumed)": context,
        },
        phases=phases,
        host=moved,
    )


def activation_memory(shape: ModelShape, setup: TrainingSetup) -> tuple[int, int, int]:
    """Estimate the bytes that autograd keeps for ``N`` tokens in a decoder with RMS norms, attention and a gated MLP.

    Returns the bytes after the forward, at the peak of forward and backward, and in host memory. A layer keeps, for
    each token:

    - for a norm: its input in float32 and, if its weight is trained, the normalized input: ``4 D + s D``. The two norms
      before projections also keep their output, ``s D``;
    - for fused attention (arXiv 2307.08691): queries, keys, values and the result, and a float32 number per head.
      Sequence-parallel ranks keep the result twice, and copies of key-value heads if there are fewer heads than ranks;
    - for the MLP: four tensors of its width. Routing copies the input and the result for each expert.

    Backward holds three gradients of the MLP's width in the last layer, or five float32 tensors in the final norm.
    With checkpointing, a layer keeps only its input, and one layer is recomputed at a time.
    """
    size, hidden, queries, tokens = setup.size, shape.hidden, shape.heads * shape.head_dim, setup.local_tokens
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


def head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the head's peak memory in bytes, in addition to the hidden states of the micro-batch.

    The head needs a copy of the tokens' states and their statistics. Backward adds gradients of the states [N, D] and
    of a trained weight [V, D]. The backends add:

    - ``reference``: all logits and the tensors that autograd saves, ``5 x 4 N V``;
    - ``chunked``: a block of logits and three pieces of it. Up to ``2^23`` logits are kept whole. The gradient of a
      bfloat16 weight is accumulated in float32, ``4 D V``, on a GPU from a bfloat16 copy of the block;
    - ``triton``: a tile of float32 logits. In bfloat16 also its gradient, and float32 gradients of the states and of a
      slice of the weight.
    """
    tokens, size, logits = setup.local_tokens, setup.size, setup.local_tokens * shape.vocabulary
    trained = 0 if setup.lora_rank else shape.vocabulary
    common = tokens * (shape.hidden * size + _STATISTICS * 4) + (tokens + trained) * shape.hidden * size
    if setup.head_backend == "reference":
        return common + 20 * logits
    if setup.head_backend == "triton":
        tile = min(_TILE, tokens * _SLICE)
        return common + 4 * tile + (2 * tile + 4 * (tokens + _SLICE) * shape.hidden) * setup.bfloat16
    block, held = logits, 3 * logits
    if logits > _KEPT:
        block = max(1, min(tokens, _BLOCK[setup.device] // shape.vocabulary)) * shape.vocabulary
        held = block + 3 * min(_PIECE[setup.device], block)
    summed = 4 * shape.vocabulary * shape.hidden + (2 * block if setup.device == "cuda" else 0)
    return common + 4 * held + summed * bool(setup.bfloat16 and trained)


def kv_bytes(shape: ModelShape, size: int) -> int:
    """Return the bytes of one token in a KV cache: a key and a value per layer and KV head."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * size


def server_memory(shape: ModelShape, *, memory: int, share: float, tensor_parallel: int) -> tuple[Bytes, int]:
    """Estimate one GPU of a vLLM server in bfloat16, which may use the fraction ``share`` of ``memory`` bytes.

    Returns the bytes of its parts, and the tokens that the server holds. KV heads are replicated if there are fewer KV
    heads than ``tensor_parallel`` GPUs.
    """
    weights = -(-shape.parameters * 2 // tensor_parallel)
    left = max(0, int(share * memory) - weights - SERVER_OVERHEAD)
    tokens = left * min(tensor_parallel, shape.kv_heads) // kv_bytes(shape, 2)
    return {"weights": weights, "overhead (assumed)": SERVER_OVERHEAD, "KV cache": left}, tokens


def usable_bytes(memory: int) -> int:
    """Return how many of a GPU's ``memory`` bytes a plan may use."""
    return int(memory * (1 - SLACK))


def read_shape(model: ModelSettings) -> ModelShape:
    """Return the shape of ``model.path``, or of the embedded tiny policy. Raises the errors of ``config_of``.

    Also raises SettingsError if ``model.rows`` is packed and the model does not support packed rows.
    """
    config = load_config(model)
    obstacle = reason_not_packable(config) if model.rows == "packed" else None
    if obstacle is not None:
        raise SettingsError(obstacle)
    return shape_from_config(model.path or "the embedded tiny policy", config, model.lora)


def shape_from_config(name: str, config: PreTrainedConfig, lora: LoRASettings | None = None) -> ModelShape:
    """Build a model on the meta device and measure its shape. ``lora`` selects the adapted layers.

    Raises SettingsError if the model cannot be trained or has no such layers.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = [item.numel() for item in model.parameters()]
    head = model.get_output_embeddings()
    vectors = [item.numel() for name, item in model.named_parameters() if item.ndim == 1 and name.endswith("weight")]
    adapted = [model.get_submodule(name) for name in target_layers(model, lora or LoRASettings())]
    text = config.get_text_config()

    def dimension(field: str, default: int) -> int:  # missing in the configurations of some architectures
        return getattr(text, field, None) or default

    heads, experts = dimension("num_attention_heads", 1), dimension("num_experts_per_tok", 0)
    head_dim = dimension("head_dim", text.hidden_size // heads)
    dense = dimension("intermediate_size", 4 * text.hidden_size)
    return ModelShape(
        name=name,
        config=config,
        parameters=sum(sizes),
        largest_parameter=max(sizes),
        adapted=sum(item.in_features + item.out_features for item in adapted),
        vocabulary=head.weight.shape[0],
        hidden=head.weight.shape[1],
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=dimension("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp=experts * dimension("moe_intermediate_size", dense) if experts else dense,
        experts=experts,
        norms=(vectors.count(text.hidden_size) - 1) // text.num_hidden_layers,  # one norm follows the last layer
        head_norms=head_dim in vectors,
    )


def load_config(model: ModelSettings) -> PreTrainedConfig:
    """Return the configuration of ``model.path``, or of the embedded tiny policy.

    The shipped configurations serve plans without a network: they lack token ids and rotary settings. Raises
    SettingsError if the configuration cannot be read on this machine.
    """
    from transformers import AutoConfig

    path, shipped = model.path, shipped_shapes()
    if path in shipped:
        return AutoConfig.for_model(**shipped[path])
    why, found = "", None
    try:
        found = read_config(model)
    except (ValueError, TypeError, KeyError) as error:  # not a configuration that transformers supports
        why = f" ({str(error).partition('. ')[0][:200]})"
    if found is None:
        raise SettingsError(
            f"model.path={path!r}: the configuration cannot be read{why}{did_you_mean(str(path), shipped)}; valid: a "
            "model directory, a config.json in Hugging Face format with a model_type, or one of these names: "
            f"{', '.join(sorted(shipped))}"
        )
    return found


@cache
def shipped_shapes() -> dict[str, dict[str, Any]]:
    """Return shipped configurations by Hugging Face id."""
    text = resources.files("agentrl.planning").joinpath("shapes.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, Any]] = json.loads(text)
    return found
