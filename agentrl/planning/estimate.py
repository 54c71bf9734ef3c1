"""The memory of a rank and of a server, put together from the formulas, and the largest micro-batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agentrl.planning.activations import backbone_bytes
from agentrl.planning.formulas import (
    bucket_bytes,
    gathered_bytes,
    gradient_bytes,
    head_bytes,
    host_bytes,
    master_bytes,
    moment_bytes,
    reduces_early,
    reduction_bytes,
    step_bytes,
    weight_bytes,
)
from agentrl.planning.memory import GIB, Bytes, ModelShape, RankMemory, ServerMemory, TrainingSetup

CONTEXT = 1 * GIB
"""Assumed for each process on a GPU: CUDA context, NCCL's buffers, the libraries' kernels."""
SLACK = 0.05
"""Share of a GPU's memory assumed lost to the allocator's fragments."""
SERVER_OVERHEAD = 2 * GIB
"""Assumed for a GPU of a vLLM server: its context, profiled activations and CUDA graphs."""
TOKEN_STEP = 1024
"""Micro-batches are planned in multiples of it."""
MOST_TOKENS = 64 * TOKEN_STEP
"""No plan proposes a larger micro-batch: by then a GPU is busy."""


def rank_memory(shape: ModelShape, setup: TrainingSetup, *, kv_tokens: int = 0, context: int = 0) -> RankMemory:
    """The parts of one rank; ``kv_tokens`` of the transformers engine, ``context`` as assumed on a GPU."""
    return RankMemory(
        static=_static(shape, setup)
        | {"KV cache": kv_tokens * kv_bytes(shape, setup.size), "context (assumed)": context},
        phases=_phases(shape, setup),
        host=host_bytes(shape, setup) + backbone_bytes(shape, setup).host,
    )


def static_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """What stays on the device between micro-batches."""
    return sum(_static(shape, setup).values())


def _static(shape: ModelShape, setup: TrainingSetup) -> Bytes:
    weights, gradients = weight_bytes(shape, setup), gradient_bytes(shape, setup)
    master, moments = master_bytes(shape, setup), moment_bytes(shape, setup)
    return {
        "weights": weights,
        "gathered weights": gathered_bytes(shape, setup),
        "master copy": master,
        "optimizer": moments,
        "gradients": gradients,
        "gradient bucket": bucket_bytes(shape, setup) if setup.stage in (1, 3) else 0,
        "reference": weights if setup.reference and not setup.lora_rank else 0,
        "critic": weights + gradients + master + moments if setup.critic else 0,
    }


def _phases(shape: ModelShape, setup: TrainingSetup) -> dict[str, Bytes]:
    """The head comes before the first gradient, the reduction of the last bucket after the last activation.

    Stage 1 reduces in the step, where the bucket takes the place of the gradients.
    """
    backbone = backbone_bytes(shape, setup)
    saved = {"activations": backbone.saved}
    bucket = {"gradient bucket": bucket_bytes(shape, setup)} if setup.stage == 2 else {}
    reduction = {"reduction": reduction_bytes(shape, setup)}
    backward = saved | bucket | {"backward": backbone.peak - backbone.saved}
    phases = {
        "head": saved | {"head": head_bytes(shape, setup)},
        "backward": backward | (reduction if reduces_early(shape, setup) else {}),
    }
    if setup.stage == 1:
        return phases
    return phases | {"reduction": bucket | reduction, "step": {"step": step_bytes(shape, setup)}}


def kv_bytes(shape: ModelShape, size: int) -> int:
    """Of one token in a KV cache: a key and a value of every layer and KV head."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * size


def server_memory(shape: ModelShape, *, memory: int, share: float, tensor_parallel: int, size: int = 2) -> ServerMemory:
    """One GPU of a vLLM server that may use ``share`` of ``memory`` bytes. KV heads fewer than GPUs are held twice."""
    weights = -(-shape.parameters * size // tensor_parallel)
    left = max(0, int(share * memory) - weights - SERVER_OVERHEAD)
    divided = min(tensor_parallel, shape.kv_heads)
    return ServerMemory(
        share=share,
        weights=weights,
        overhead=SERVER_OVERHEAD,
        kv_cache=left,
        kv_tokens=left * divided // kv_bytes(shape, size),
    )


def usable(memory: int) -> int:
    """Bytes of a GPU with ``memory`` that a plan may fill."""
    return int(memory * (1 - SLACK))


def largest_micro_batch(shape: ModelShape, setup: TrainingSetup, *, memory: int) -> int:
    """Tokens, a multiple of :data:`TOKEN_STEP`, of the largest micro-batch that fits ``memory``; 0 if none does.

    No more than :data:`MOST_TOKENS`.
    """

    def fits(steps: int) -> bool:
        found = rank_memory(shape, replace(setup, tokens=steps * TOKEN_STEP), context=CONTEXT)
        return found.total <= usable(memory)

    most = MOST_TOKENS // TOKEN_STEP
    return MOST_TOKENS if fits(most) else TOKEN_STEP * _last_true(fits, most)


def _last_true(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to ``most`` for which ``holds`` is true, by halving; 0 if it is not even for 1."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
