"""Whether a compressed file is whole, without decompressing it."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_HEADER = 3
_RLE = 1
_CHECKSUM = 4
_LONGEST_HEADER = 18


def frame_is_whole(path: Path) -> bool:
    """Whether ``path`` holds one Zstandard frame from its first to its last block, and nothing behind it.

    Follows the sizes in the block headers (RFC 8878, section 3.1.1.2). Not guarded: bits that changed inside a block.
    """
    import zstandard

    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(_LONGEST_HEADER)
        try:
            at = zstandard.frame_header_size(start)
            trailer = _CHECKSUM if zstandard.get_frame_parameters(start).has_checksum else 0
        except zstandard.ZstdError:
            return False
        last = False
        while not last:
            file.seek(at)
            header = file.read(_BLOCK_HEADER)
            if len(header) < _BLOCK_HEADER:
                return False
            number = int.from_bytes(header, "little")
            last, kind, length = bool(number & 1), number >> 1 & 3, number >> 3
            at += _BLOCK_HEADER + (1 if kind == _RLE else length)
    return at + trailer == size
