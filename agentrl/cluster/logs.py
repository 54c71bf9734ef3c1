"""Logs of processes: their location, and how their output is shown by the process that started them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

_POLL_INTERVAL = 0.5  # seconds
_OUTPUT, _ERRORS = 1, 2  # file descriptors of standard output and standard error


def log_file(folder: Path, node: str, role: str, number: int) -> Path:
    """Return the log of a process that belongs to the run or evaluation in ``folder``.

    >>> str(log_file(Path("runs/a"), "n1", "rank", 3))
    'runs/a/logs/n1-rank-3.log'
    """
    return folder / "logs" / f"{node}-{role}-{number}.log"


class Tee:
    """Copies everything that is written to ``inlet`` to the end of a file and to a handle of this process.

    The program ``tee`` copies in a separate process, so that nothing is lost if a writer or this process is killed.
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
        """Close this process's end. The copying continues while another process has the inlet open."""
        os.close(self.inlet)

    def wait(self, seconds: float) -> None:
        """Wait until everything is written, for at most ``seconds``, because a writer may still be running."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def keep_log(log: Path, *, draws: bool) -> None:
    """From now on, also write the output of this process to a file. ``draws``: see :class:`ProcessSpec`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for handle in copied_handles(draws=draws):
        tee = Tee(log, handle)
        os.dup2(tee.inlet, handle)
        tee.close()


def copied_handles(*, draws: bool) -> tuple[int, ...]:
    """Return which of standard output and standard error to log. Output drawn on a terminal is not logged."""
    return (_ERRORS,) if draws and os.isatty(_OUTPUT) else (_OUTPUT, _ERRORS)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class LogRelay:
    """Shows lines that are appended to log files in a folder that all machines share."""

    def __init__(self, show: Callable[[str], None] = _show) -> None:
        self._show = show
        self._shown: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="relay-logs")
        self._thread.start()

    def follow(self, log: Path) -> None:
        """Show what is appended to the file from now on."""
        with self._lock:
            self._shown[log] = log.stat().st_size if log.exists() else 0

    def close(self) -> None:
        """Show the remaining output and stop."""
        self._ended.set()
        self._thread.join()
        self._poll(whole_lines=False)

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_INTERVAL):
            self._poll(whole_lines=True)

    def _poll(self, *, whole_lines: bool) -> None:
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
