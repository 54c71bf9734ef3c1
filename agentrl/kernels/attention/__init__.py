"""Attention over documents packed into one row without padding. Documents do not attend to each other."""

from agentrl.kernels.attention.backends import attend
from agentrl.kernels.attention.row import (
    AttentionBackend,
    AttentionPass,
    PackedRow,
    PrefixTree,
    SequenceGroup,
    current_attention_pass,
    pack_padded,
    pack_row,
    packed_states,
    rank_slice,
    recompute_contexts,
)

__all__ = [
    "AttentionBackend",
    "AttentionPass",
    "PackedRow",
    "PrefixTree",
    "SequenceGroup",
    "attend",
    "current_attention_pass",
    "pack_padded",
    "pack_row",
    "packed_states",
    "rank_slice",
    "recompute_contexts",
]
