"""Run a command of the command line in a process of its own, and show what it prints."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

from agentrl.errors import SettingsError, WorldError

_INTERRUPTED = 130
# A notebook's kernel sets these to have colours; the command would draw as on a terminal.
_TERMINAL_VARIABLES = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
_STEP = re.compile(r"(\S+) (\d+)/(\d+)  (.*)\n")
_FORMAT = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} {unit}s{postfix}"


def run_command(arguments: Sequence[str], *, progress: bool) -> None:
    """Run ``agentrl ARGUMENTS`` until it ends.

    An interrupt is passed on: the command saves and ends. Raises KeyboardInterrupt for a command that was stopped,
    SettingsError and WorldError with the command's message for one that failed.
    """
    with (
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), *arguments],
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # an interrupt arrives once: from here
        ) as process,
        _interrupts_go_to(process),
    ):
        error = _read_all(process, _Bar() if progress else _Lines())
    code = process.returncode
    if code == 0:
        return
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    message = error or f"agentrl {arguments[0]} ended with exit code {code}"
    raise SettingsError(message) if code == SettingsError.exit_code else WorldError(message)


class _Screen(Protocol):
    def show(self, line: str) -> None: ...
    def close(self) -> None: ...


def _read_all(process: subprocess.Popen[str], display: _Screen) -> str:
    """Show every line until the output ends. Returns the error message, which is not shown."""
    assert process.stdout is not None
    error: list[str] = []
    try:
        for line in process.stdout:
            if error or line.startswith("error: "):
                error.append(line)
            else:
                display.show(line)
    finally:
        display.close()
    return "".join(error).removeprefix("error: ").rstrip("\n")


@contextmanager
def _interrupts_go_to(process: subprocess.Popen[str]) -> Iterator[None]:
    """Pass Ctrl-C on to the command. An exception here could come anywhere, and in a finalizer it would be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: process.send_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Lines:
    """Every line as it comes."""

    def show(self, line: str) -> None:
        print(line, end="", flush=True)

    def close(self) -> None:
        """Nothing to take down."""


class _Bar:
    """A progress bar for the steps, and every other line above it."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None

    def show(self, line: str) -> None:
        step = _STEP.fullmatch(line)
        if step is None:
            tqdm.write(line, file=sys.stdout, end="")
            return
        unit, done, total, figures = step.groups()
        if self._bar is None:
            self._bar = tqdm(total=int(total), unit=unit, bar_format=_FORMAT, dynamic_ncols=True)
        self._bar.set_postfix_str(figures, refresh=False)
        self._bar.n = int(done)
        self._bar.refresh()
        if done == total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None


def _environment() -> dict[str, str]:
    """The variables of the command: it finds the modules that this process finds, and prints plain lines."""
    installed = (sys.prefix, sys.base_prefix)
    own = [os.path.abspath(path) for path in sys.path if not path.startswith(installed)]
    variables = {name: value for name, value in os.environ.items() if name not in _TERMINAL_VARIABLES}
    return {**variables, "PYTHONPATH": os.pathsep.join(own), "PYTHONUNBUFFERED": "1"}


def stop_with(parent: int) -> None:
    """Ask this process to stop and save as soon as ``parent`` ends."""
    try:
        ended = os.pidfd_open(parent)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return

    def wait() -> None:
        select.select([ended], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name="stop-with-parent").start()


if __name__ == "__main__":
    from agentrl.cli import main

    stop_with(int(sys.argv.pop(1)))
    sys.argv[0] = "agentrl"
    main()
