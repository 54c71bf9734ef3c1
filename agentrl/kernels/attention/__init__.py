"""Attention over documents that are packed into one row without padding; none sees another."""

from agentrl.kernels.attention.packed import attend
from agentrl.kernels.attention.row import (
    AttentionBackend,
    PackedRow,
    Stretch,
    current_row,
    pack_row,
    recompute_contexts,
)
from agentrl.kernels.attention.sequence import SequenceGroup

__all__ = [
    "AttentionBackend",
    "PackedRow",
    "SequenceGroup",
    "Stretch",
    "attend",
    "current_row",
    "pack_row",
    "recompute_contexts",
]
