"""Detection of machines that stop responding, which does not close TCP connections."""

from __future__ import annotations

import os
import socket
import threading
import time
from multiprocessing.connection import Connection

# Seconds between two attempts to connect, and for one attempt.
_POLL_INTERVAL = 1.0
_CONNECT_SECONDS = 5.0


def end_in_silence(connection: Connection, seconds: float) -> None:
    """Configure a TCP connection to fail if the other machine has not responded for about ``seconds``."""
    with socket.socket(fileno=os.dup(connection.fileno())) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(seconds / 2)))
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(seconds / 8)))
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(seconds * 1000)))


def accepts(address: tuple[str, int], seconds: float) -> bool:
    """Return True if a port of another machine accepts a connection within ``seconds``."""
    try:
        socket.create_connection(address, timeout=seconds).close()
    except OSError:
        return False
    return True


class PortWatch:
    """Checks repeatedly, in a thread, whether a port of another machine accepts connections."""

    def __init__(self, address: tuple[str, int], deadline: float, *, look: float = _POLL_INTERVAL) -> None:
        """The port counts as lost after ``deadline`` seconds without a response, and at once after two refusals."""
        self.lost: str | None = None
        self._address = address
        self._deadline = deadline
        self._look = look
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name="watch-port").start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        last_answer, refused = time.monotonic(), 0
        while self.lost is None and not self._ended.wait(self._look):
            try:
                socket.create_connection(self._address, timeout=min(_CONNECT_SECONDS, self._deadline)).close()
                last_answer, refused = time.monotonic(), 0
            except ConnectionRefusedError:
                refused += 1
            except OSError:
                refused = 0
            if refused > 1:
                self.lost = "is gone"
            elif time.monotonic() > last_answer + self._deadline:
                self.lost = f"has not answered for {self._deadline:g} s"
