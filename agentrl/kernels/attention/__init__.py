"""Attention over documents packed into one row without padding. Documents do not attend to each other."""

from agentrl.kernels.attention.backends import attend
from agentrl.kernels.attention.row import (
    AttentionBackend,
    AttentionPass,
    PackedRow,
    PrefixTree,
    SequenceParallelGroup,
    attention_recompute_contexts,
    compute_packed_states,
    current_attention_pass,
    pack_padded,
    pack_row,
    rank_slice,
)

__all__ = [
    "AttentionBackend",
    "AttentionPass",
    "PackedRow",
    "PrefixTree",
    "SequenceParallelGroup",
    "attend",
    "attention_recompute_contexts",
    "compute_packed_states",
    "current_attention_pass",
    "pack_padded",
    "pack_row",
    "rank_slice",
]
