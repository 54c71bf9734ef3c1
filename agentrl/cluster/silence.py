"""Notices that another machine has fallen silent, which closes no connection."""

from __future__ import annotations

import os
import socket
import threading
import time
from multiprocessing.connection import Connection

# Seconds between two looks, and for one of them.
_LOOK = 1.0
_PATIENCE = 5.0


def end_in_silence(connection: Connection, seconds: float) -> None:
    """Have the system end a TCP connection whose other machine has not answered for about so many seconds."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))


def accepts(address: tuple[str, int], seconds: float) -> bool:
    """Whether a port of another machine accepts a connection within so many seconds."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except OSError:
        return False
    return True


class PortWatch:
    """Looks again and again, in a thread, whether a port of another machine still accepts connections."""

    def __init__(self, address: tuple[str, int], deadline: float, *, look: float = _LOOK) -> None:
        """``deadline``: seconds without an answer after which it counts as lost. Who refuses twice is lost at once."""
        self.lost: str | None = None
        self._address = address
        self._deadline = deadline
        self._look = look
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watch-port").start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        heard, refused = time.monotonic(), 0
        while self.lost is None and not self._ended.wait(self._look):
            try:
                socket.create_connection(self._address, timeout=min(_PATIENCE, self._deadline)).close()
                heard, refused = time.monotonic(), 0
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                refused = 0
            if refused > 1:
                self.lost = "is gone"
            elif time.monotonic() > heard + self._deadline:
                self.lost = f"has not answered for {self._deadline:g} s"
