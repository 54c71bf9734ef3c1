"""Where the seconds of training went, on CPUs by the clock and on GPUs by events that nothing waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up the seconds of named sections on one device.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> with watch.section("forward"):
    ...     pass
    >>> list(watch.take()), watch.take()
    (['forward'], {})
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._measured: list[tuple[str, Callable[[], float]]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count what happens inside under ``name``, also where it raises."""
        seconds = (_of_stream if self._device.type == "cuda" else _of_clock)()
        try:
            yield
        finally:
            self._measured.append((name, seconds()))

    def take(self) -> dict[str, float]:
        """The seconds of each name since the last call. Waits for the GPU."""
        if self._device.type == "cuda" and self._measured:
            torch.cuda.synchronize(self._device)
        totals: dict[str, float] = {}
        for name, seconds in self._measured:
            totals[name] = totals.get(name, 0.0) + seconds()
        self._measured.clear()
        return totals


def _of_clock() -> Callable[[], Callable[[], float]]:
    began = time.monotonic()

    def end() -> Callable[[], float]:
        seconds = time.monotonic() - began
        return lambda: seconds

    return end


def _of_stream() -> Callable[[], Callable[[], float]]:
    """Of the current stream, readable once the GPU is that far."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()

    def end() -> Callable[[], float]:
        last.record()
        return lambda: first.elapsed_time(last) / 1000

    return end
