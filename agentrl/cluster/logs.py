"""The logs of processes: where they lie, and how their starter shows what is written there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Seconds between two looks.
_LOOK = 0.5
_OUTPUT, _ERRORS = 1, 2  # the handles of every process


def log_file(folder: Path, node: str, role: str, number: int) -> Path:
    """The log of a process that works for the run or evaluation in ``folder``.

    >>> str(log_file(Path("runs/a"), "n1", "rank", 3))
    'runs/a/logs/n1-rank-3.log'
    """
    return folder / "logs" / f"{node}-{role}-{number}.log"


class Tee:
    """The program ``tee``: what is written to ``inlet`` goes to the end of a file and to a handle of this process.

    It is a process of its own, so that nothing is lost if a writer or this process is killed.
    """

    def __init__(self, log: Path, handle: int) -> None:
        outlet, self.inlet = os.pipe()
        try:
            command = ["tee", "-a", str(log)]
            self._process = subprocess.Popen(command, stdin=outlet, stdout=handle, start_new_session=True)
        except BaseException:
            os.close(self.inlet)
            raise
        finally:
            os.close(outlet)

    def close(self) -> None:
        """Close this process's end. It goes on for as long as a writer has one."""
        os.close(self.inlet)

    def wait(self, seconds: float) -> None:
        """Return when all is written, after ``seconds`` at most: a writer may live on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def keep_log(log: Path, *, draws: bool) -> None:
    """Keep what this process says from now on in a file too. ``draws``: as of :class:`ProcessSpec`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for handle in copied_handles(draws=draws):
        tee = Tee(log, handle)
        os.dup2(tee.inlet, handle)
        tee.close()


def copied_handles(*, draws: bool) -> tuple[int, ...]:
    """Which of standard output and standard error a log gets a copy of: not of what is drawn on a terminal."""
    return (_ERRORS,) if draws and os.isatty(_OUTPUT) else (_OUTPUT, _ERRORS)


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
