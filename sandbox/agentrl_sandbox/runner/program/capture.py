"""One output stream of a program: drained while it runs, keeping its head and tail."""

from __future__ import annotations

import os
from collections import deque

_CHUNK = 65_536


class Capture:
    """Keeps the first and the last ``limit // 2`` bytes read from a non-blocking descriptor."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor = descriptor
        self.total = 0
        self.open = True
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def drain(self, most: int) -> bool:
        """Read available data, at most about ``most`` bytes. True while more may come later."""
        taken = 0
        while self.open and taken < most:
            try:
                data = os.read(self.descriptor, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                self.open = False
            taken += len(data)
            self._keep(data)
        return self.open

    def close(self) -> None:
        os.close(self.descriptor)

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self._half

    def text(self) -> bytes:
        """Head and tail, with a note between them if bytes were dropped."""
        tail = b"".join(self._tail)
        if not self.truncated:
            return bytes(self._head) + tail
        note = f"\n... [{self.total - 2 * self._half} bytes left out] ...\n".encode()
        return bytes(self._head) + note + tail[-self._half :]

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._half:
            self._tail_size -= len(self._tail.popleft())
