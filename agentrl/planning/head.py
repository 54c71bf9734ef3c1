"""Bytes of the fused head: docs/kernels.md has the methods, ``agentrl.kernels.backends`` the sizes of their blocks.

``N`` tokens, ``D`` hidden units, ``V`` tokens of vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agentrl.planning.memory import ModelShape, TrainingSetup

_FLOAT32 = 4
_BLOCK = 1 << 23  # elements of a block of rows (chunked)
_PIECE = 1 << 21  # elements that one elementwise pass of it touches
_TILE = 1 << 24  # elements of a tile (triton)
_SLICE = 2048  # rows of the weight in a tile's slice
_STATISTICS = 12  # float32 numbers that a token's statistics and its loss keep


def head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """The most that the head needs at once, on top of the hidden states of the whole micro-batch.

    That is the copy of the states of its tokens, its statistics, and in backward the backend's blocks and gradients.
    """
    tokens = setup.tokens
    states = tokens * shape.hidden * setup.size
    statistics = tokens * _STATISTICS * _FLOAT32
    return states + statistics + _BACKENDS[setup.head_backend](shape, setup)


def reference_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``reference`` holds all logits and what autograd keeps of them: five times ``4 N V``, and the gradients."""
    return 5 * _FLOAT32 * setup.tokens * shape.vocabulary + _gradients(shape, setup)


def chunked_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``chunked``: a block of logits, three pieces of it, and the gradients; up to ``2^23`` logits are kept whole.

    The gradient of a bfloat16 weight is added up in float32, ``4 D V``, and converted at the end.
    """
    elements = setup.tokens * shape.vocabulary
    if elements <= _BLOCK:
        logits = 3 * elements
    else:
        logits = max(shape.vocabulary, _BLOCK // shape.vocabulary * shape.vocabulary) + 3 * min(_PIECE, elements)
    summed = _FLOAT32 * shape.vocabulary * shape.hidden if setup.bfloat16 and not setup.lora_rank else 0
    return _FLOAT32 * logits + summed + _gradients(shape, setup)


def triton_head_bytes(shape: ModelShape, setup: TrainingSetup) -> int:
    """``triton``: a tile of float32 logits and its bfloat16 gradient, float32 gradients of the states and of a slice
    of the weight, and the gradients."""
    tile = min(_TILE, setup.tokens * _SLICE)
    halves = (2 * tile + _FLOAT32 * (setup.tokens + _SLICE) * shape.hidden) if setup.bfloat16 else 0
    return _FLOAT32 * tile + halves + _gradients(shape, setup)


def _gradients(shape: ModelShape, setup: TrainingSetup) -> int:
    """Of the states [N, D] and, unless adapters are trained, of the weight [V, D], in their dtypes."""
    weight = 0 if setup.lora_rank else shape.vocabulary
    return (setup.tokens + weight) * shape.hidden * setup.size


_BACKENDS: Mapping[str, Callable[[ModelShape, TrainingSetup], int]] = {
    "reference": reference_head_bytes,
    "chunked": chunked_head_bytes,
    "triton": triton_head_bytes,
}
