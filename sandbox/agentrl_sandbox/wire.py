"""Frames between client and server: a length, a JSON header, and bytes that JSON need not escape.

>>> frames = FrameBuffer[dict[str, object]]()
>>> frames.feed(pack({"id": 1}, b"abc", b""))
[({'id': 1}, [b'abc', b''])]
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

_HEAD = struct.Struct("!II")  # bytes after this head, bytes of the JSON header
_MAX_FRAME = 1 << 30

_Header = TypeVar("_Header", bound=Mapping[str, object])

Frame = tuple[_Header, list[bytes]]


class FrameError(ValueError):
    """The received bytes are not valid frames."""


def pack(header: Mapping[str, object], *blobs: bytes) -> bytes:
    whole = {**header, "blobs": [len(blob) for blob in blobs]} if blobs else header
    # Not escaped: escapes could triple the size of file names, which the limits of messages do not allow for.
    text = json.dumps(whole, ensure_ascii=False).encode("utf-8", "surrogatepass")
    size = len(text) + sum(len(blob) for blob in blobs)
    if size > _MAX_FRAME:
        raise FrameError(f"a frame of {size} bytes exceeds {_MAX_FRAME}")
    return b"".join((_HEAD.pack(size, len(text)), text, *blobs))


class FrameBuffer(Generic[_Header]):
    """Cuts a stream of bytes into frames of at most ``limit`` bytes."""

    def __init__(self, limit: int = _MAX_FRAME) -> None:
        self._limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame[_Header]]:
        """Take bytes and return the frames they complete. Raises FrameError for invalid frames."""
        self._data += data
        frames: list[Frame[_Header]] = []
        position = 0
        while len(self._data) - position >= _HEAD.size:
            size, header_size = _HEAD.unpack_from(self._data, position)
            if size > self._limit or header_size > size:
                raise FrameError(f"impossible frame of {size} bytes with a header of {header_size}")
            end = position + _HEAD.size + size
            if len(self._data) < end:
                break
            frames.append(_unpack(bytes(self._data[position + _HEAD.size : end]), header_size))
            position = end
        del self._data[:position]
        return frames


def _unpack(body: bytes, header_size: int) -> tuple[Any, list[bytes]]:
    try:
        header = json.loads(body[:header_size])
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame's header is not JSON: {error}") from error
    sizes = header.pop("blobs", []) if isinstance(header, dict) else None
    if not isinstance(sizes, list) or not all(type(size) is int and size >= 0 for size in sizes):
        raise FrameError("a frame's header is not an object, or its sizes are invalid")
    if sum(sizes) != len(body) - header_size:
        raise FrameError("a frame's sizes do not add up")
    blobs: list[bytes] = []
    position = header_size
    for size in sizes:
        blobs.append(body[position : position + size])
        position += size
    return header, blobs


def fail_all(futures: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    """Give an error to each future that has no result yet; those without a waiter do not warn."""
    for future in futures:
        if not future.done():
            future.set_exception(error)
            future.exception()
