"""Shows here what processes on other machines write to their logs, as they write it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Seconds between two looks.
_LOOK = 0.5


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class LogRelay:
    """Follows log files in a folder that all machines share, whole lines at a time."""

    def __init__(self, show: Callable[[str], None] = _show) -> None:
        self._show = show
        self._shown: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="relay-logs")
        self._thread.start()

    def follow(self, log: Path) -> None:
        """Show what is added to the file from now on."""
        with self._lock:
            self._shown[log] = log.stat().st_size if log.exists() else 0

    def close(self) -> None:
        """Show the rest, and stop."""
        self._ended.set()
        self._thread.join()
        self._look(whole_lines=False)

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK):
            self._look(whole_lines=True)

    def _look(self, *, whole_lines: bool) -> None:
        with self._lock:
            for log, shown in self._shown.items():
                if log.exists():
                    with log.open("rb") as file:
                        file.seek(shown)
                        new = file.read()
                    kept = new[: new.rfind(b"\n") + 1] if whole_lines else new
                    self._shown[log] = shown + len(kept)
                    if kept:
                        self._show(kept.decode(errors="replace"))
