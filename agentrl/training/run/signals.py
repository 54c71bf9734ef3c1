"""SIGTERM and Ctrl-C as requests to stop: the first signal asks, a later one forces.

A thread receives them at once; a handler in Python would wait for a backward pass or a collective to return.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code of a run that stopped on request."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds within which further signals count as the same request: a launcher passes on a signal that the terminal has
# already sent to every process.
_SAME = 1.0


@contextmanager
def stop_requests(ask: Callable[[], None], insist: Callable[[], None], *, announce: bool) -> Iterator[None]:
    """Call ``ask`` at the first signal and ``insist`` at later ones, in a thread. Enter it in the main thread only.

    With ``announce``, print a message at the first signal. Set it in one process of a run only.
    """

    def first() -> None:
        if announce:
            print("stopping at the next safe point (repeat to stop at once)", file=sys.stderr, flush=True)
        ask()

    heard, signalled = os.pipe()
    os.set_blocking(signalled, False)
    listener = threading.Thread(target=_listen, args=(heard, first, insist), daemon=True, name="stop-requests")
    listener.start()
    wakeup = signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    handlers = {name: signal.signal(name, _leave_to_thread) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(signalled)  # ends the thread
        listener.join()
        os.close(heard)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, while there is nothing to save yet."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave_to_thread(number: int, frame: object) -> None:
    """Do nothing: Python writes the signal's number only for a signal that has a handler."""


def _listen(heard: int, ask: Callable[[], None], insist: Callable[[], None]) -> None:
    first: float | None = None
    while number := os.read(heard, 1):
        if number[0] not in _SIGNALS:  # it belongs to another handler
            continue
        if first is None:
            first = time.monotonic()
            ask()
        elif time.monotonic() - first >= _SAME:
            insist()
