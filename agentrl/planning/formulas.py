"""Bytes of one rank by formula: weights, gradients and optimizer, and the fused head.

``n`` ranks; ``P`` parameters of the model and ``A`` trained ones (``P``, or those of the adapters). Sources: the ZeRO
paper (arXiv 1910.02054, section 5) for what each stage shards, and DeepSpeed 0.19's own code for its buffers.
docs/kernels.md has the methods of the head, ``agentrl.kernels.backends`` the sizes of its blocks; ``N`` tokens, ``D``
hidden units, ``V`` tokens of vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.planning.memory import ModelShape, TrainingSetup

REDUCE_BUCKET = 500_000_000
"""Elements of gradients that DeepSpeed collects at most before it reduces them."""
_LIVE = 1_000_000_000
"""Gathered elements that ZeRO-3 keeps at most (stage3_max_live_parameters)."""
_FLOAT32 = 4
_KEPT = 1 << 23  # elements that are kept for backward (chunked)
_BLOCK = {"cpu": 1 << 23, "cuda": 1 << 26}  # elements of a block of rows (chunked)
_PIECE = {"cpu": 1 << 21, "cuda": 1 << 24}  # elements that one elementwise pass of it touches
_TILE = 1 << 24  # elements of a tile (triton)
_SLICE = 2048  # rows of the weight in a tile's slice
_STATISTICS = 12  # float32 numbers that a token's statistics and its loss keep


def trained_parameters(shape: ModelShape, setup: TrainingSetup) -> int:
    """``A``: all, or ``r (inputs + outputs)`` of each adapted layer with adapters of rank r (arXiv 2106.09685)."""
    return setup.lora_rank * shape.adapted if setup.lora_rank else shape.parameters


def weight_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``P`` times 2 or 4 bytes, over ``n`` at stage 3; adapters on top; none if all is offloaded."""
    if setup.offload == "all":
        return 0
    adapters = trained_parameters(shape, setup) if setup.lora_rank else 0
    return _shared(shape.parameters + adapters, setup, from_stage=3) * setup.size


def master_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """A float32 copy of the trained weights, over ``n`` (ZeRO's optimizer keeps one of float32 weights too)."""
    needed = setup.stage >= 1 and setup.offload == "none"
    return _shared(trained_parameters(shape, setup), setup, from_stage=1) * _FLOAT32 if needed else 0


def moment_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """AdamW's two float32 moments, ``8 A`` bytes, over ``n`` from stage 1 on."""
    return 2 * _FLOAT32 * _shared(trained_parameters(shape, setup), setup, from_stage=1) * (setup.offload == "none")


def gradient_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Gradients, added up in float32: ``4 A`` bytes, over ``n`` from stage 2 on. With the optimizer offloaded, stage 3
    keeps them in the host's memory; stages 1 and 2 add them up on the device all the same."""
    if setup.offload != "none" and setup.stage == 3:
        return 0
    return _FLOAT32 * _shared(trained_parameters(shape, setup), setup, from_stage=2)


def gathered_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Stage 3: the weights that are gathered at a time, up to DeepSpeed's limit, but at least the largest tensor."""
    if setup.stage < 3 or setup.ranks == 1:
        return 0
    return min(shape.parameters, max(_LIVE, shape.largest_parameter)) * setup.size


def bucket_elements(shape: ModelShape, setup: TrainingSetup) -> int:
    """Of the bucket that gradients wait in: those of all trained parameters, or as many as it holds."""
    return min(REDUCE_BUCKET, trained_parameters(shape, setup))


def bucket_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """The bucket: float32 and always there at stage 3; in the weights' dtype at stage 1 from an update's first gradient
    on, at stage 2 from that of a backward."""
    if setup.stage == 0:
        return 0
    return bucket_elements(shape, setup) * (_FLOAT32 if setup.stage == 3 else setup.size)


def reduction_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """Stage 2: the flat copy of the bucket that is reduced, and in bfloat16 the float32 copy of that, or of one
    larger tensor."""
    if setup.stage != 2:
        return 0
    filled = bucket_elements(shape, setup)
    wide = _FLOAT32 * max(filled, largest_trained(shape, setup)) if setup.bfloat16 else 0
    return filled * setup.size + wide


def reduces_early(shape: ModelShape, setup: TrainingSetup) -> bool:
    """Whether the bucket fills up while the activations are still there."""
    return trained_parameters(shape, setup) > REDUCE_BUCKET


def step_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """What an optimizer step takes for a moment.

    The norm is taken in float64 of one tensor after another. Stage 3, and float32 at stages 1 and 2, copy the gradients
    of the rank. Without ZeRO, AdamW works in place.
    """
    if setup.stage == 0 or setup.offload != "none":
        return 0
    part = _shared(trained_parameters(shape, setup), setup, from_stage=1)
    norm = 2 * _FLOAT32 * min(largest_trained(shape, setup), part)
    return max(norm, _FLOAT32 * part if setup.stage == 3 or not setup.bfloat16 else 0)


def largest_trained(shape: ModelShape, setup: TrainingSetup) -> int:
    """Elements of the largest tensor that is trained; an adapter's are small."""
    return 0 if setup.lora_rank else shape.largest_parameter


def host_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """In the host's memory for one rank: ``16 A / n`` with the optimizer offloaded, at stages 1 and 2 also a copy of
    the trained weights in their dtype; and the weights with all of it."""
    if setup.offload == "none":
        return 0
    each = 4 * _FLOAT32 + (setup.size if setup.stage < 3 else 0)
    moved = each * _shared(trained_parameters(shape, setup), setup, from_stage=1)
    weights = _shared(shape.parameters, setup, from_stage=3) * setup.size if setup.offload == "all" else 0
    return moved + weights


def _shared(elements: int, setup: TrainingSetup, *, from_stage: int) -> int:
    """Elements of one rank, divided from this stage on; the last rank's part is filled up."""
    return -(-elements // setup.ranks) if setup.stage >= from_stage else elements


def head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """The most that the head needs at once, on top of the hidden states of the whole micro-batch.

    That is the copy of the states of its tokens, its statistics, and in backward the backend's blocks and gradients.
    """
    tokens = setup.local_tokens
    states = tokens * shape.hidden * setup.size
    statistics = tokens * _STATISTICS * _FLOAT32
    return states + statistics + _BACKENDS[setup.head_backend](shape, setup)


def reference_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``reference`` holds all logits and what autograd keeps of them: five times ``4 N V``, and the gradients."""
    return 5 * _FLOAT32 * setup.local_tokens * shape.vocabulary + _gradients(shape, setup)


def chunked_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``chunked``: a block of logits, three pieces of it, and the gradients; up to ``2^23`` logits are kept whole.

    The gradient of a bfloat16 weight is added up in float32, ``4 D V``, and converted at the end; on a GPU from a
    bfloat16 copy of the block.
    """
    elements = setup.local_tokens * shape.vocabulary
    summed = 0
    if elements <= _KEPT:
        block, logits = elements, 3 * elements
    else:
        rows = max(1, min(setup.local_tokens, _BLOCK[setup.device] // shape.vocabulary))
        block = rows * shape.vocabulary
        logits = block + 3 * min(_PIECE[setup.device], block)
    if setup.bfloat16 and not setup.lora_rank:
        summed = _FLOAT32 * shape.vocabulary * shape.hidden + (2 * block if setup.device == "cuda" else 0)
    return _FLOAT32 * logits + summed + _gradients(shape, setup)


def triton_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``triton``: a tile of float32 logits and its bfloat16 gradient, float32 gradients of the states and of a slice
    of the weight, and the gradients."""
    tile = min(_TILE, setup.local_tokens * _SLICE)
    halves = (2 * tile + _FLOAT32 * (setup.local_tokens + _SLICE) * shape.hidden) if setup.bfloat16 else 0
    return _FLOAT32 * tile + halves + _gradients(shape, setup)


def _gradients(shape: ModelShape, setup: TrainingSetup) -> int:
    """Of the states [N, D] and, unless adapters are trained, of the weight [V, D], in their dtypes."""
    weight = 0 if setup.lora_rank else shape.vocabulary
    return (setup.local_tokens + weight) * shape.hidden * setup.size


_BACKENDS: Mapping[str, Callable[[ModelShape, TrainingSetup], int]] = {
    "reference": reference_head_bytes,
    "chunked": chunked_head_bytes,
    "triton": triton_head_bytes,
}
