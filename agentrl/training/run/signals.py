"""Handling of SIGTERM and Ctrl-C: the first signal requests a stop, and a later signal forces it.

A thread receives the signals immediately. A Python signal handler would wait until a backward pass or a collective
returns.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Seconds within which further signals count as the same request, because a launcher forwards a signal that the terminal
# has already sent to every process.
_REPEAT_SECONDS = 1.0


@contextmanager
def handle_stop_signals(
    request_stop: Callable[[], None], force_stop: Callable[[], None] | None, *, announce: bool
) -> Iterator[None]:
    """Call ``request_stop`` at the first signal and ``force_stop`` at later signals, in a thread.

    Without ``force_stop``, a later signal raises KeyboardInterrupt in the main thread, so that a program that calls
    `agentrl.train` can continue. With ``announce``, print a message at the first signal; set it in one process of a run
    only. Has no effect outside the main thread, where Python cannot install signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first_signal_at: float | None = None

    def on_first_signal() -> None:
        if announce:
            print("stopping at the next safe point (repeat to stop at once)", file=sys.stderr, flush=True)
        request_stop()

    def handle(number: int, frame: object) -> None:
        # The listener thread acts on signals. Python writes signal numbers to the thread's pipe only if a handler is
        # installed.
        nonlocal first_signal_at
        first_signal_at = first_signal_at or time.monotonic()
        if force_stop is None and time.monotonic() - first_signal_at >= _REPEAT_SECONDS:
            raise KeyboardInterrupt

    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    listener = threading.Thread(
        target=_dispatch_signals,
        args=(read_end, on_first_signal, force_stop or (lambda: None)),
        daemon=True,
        name="stop-requests",
    )
    listener.start()
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    handlers = {name: signal.signal(name, handle) for name in _SIGNALS}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(write_end)  # ends the thread
        listener.join()
        os.close(read_end)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, while there is nothing to save yet.

    Has no effect outside the main thread, where Python cannot install signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dispatch_signals(read_end: int, on_first: Callable[[], None], on_later: Callable[[], None]) -> None:
    """Read signal numbers from the pipe and call their handlers until the pipe is closed."""
    first: float | None = None
    while number := os.read(read_end, 1):
        if number[0] not in _SIGNALS:  # a signal for another handler
            continue
        if first is None:
            first = time.monotonic()
            on_first()
        elif time.monotonic() - first >= _REPEAT_SECONDS:
            on_later()
