"""Run a command that ends together with its parent: ``python -m agentrl.cluster.supervise PARENT COMMAND...``.

A vLLM server consists of several processes, and its compute processes outlive a killed HTTP process. The supervisor
starts the command in a separate process group and kills the whole group when the command or the process PARENT exits.
On SIGTERM it waits for the command to exit first. It imports no heavy library.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from types import FrameType

_EXIT_SECONDS = 15.0  # seconds to wait for the command to exit after SIGTERM


def supervise_command() -> int:
    """Wait until the command or the parent exits. Returns the command's exit code."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    child = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        _wait_for_exit_or_signal(parent, child)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def _wait_for_exit_or_signal(parent: int, child: subprocess.Popen[bytes]) -> None:
    read_end, write_end = os.pipe()

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(write_end, b".")

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends SIGINT to every process; the parent sends SIGTERM
    watched = select.poll()
    watched.register(read_end, select.POLLIN)
    watched.register(os.pidfd_open(child.pid), select.POLLIN)
    try:
        watched.register(os.pidfd_open(parent), select.POLLIN)
    except ProcessLookupError:
        return
    ready = [handle for handle, _ in watched.poll()]
    if ready == [read_end]:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_EXIT_SECONDS)


if __name__ == "__main__":
    sys.exit(supervise_command())
