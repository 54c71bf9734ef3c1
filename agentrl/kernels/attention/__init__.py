"""Attention over documents that are packed into one row without padding; none sees another."""

from agentrl.kernels.attention.packed import attend
from agentrl.kernels.attention.row import AttentionBackend, PackedRow, Stretch, pack_row

__all__ = ["AttentionBackend", "PackedRow", "Stretch", "attend", "pack_row"]
