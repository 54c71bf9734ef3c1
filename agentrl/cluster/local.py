"""Single-node cluster on this machine, with child processes and their log files."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from agentrl.cluster.plan import UnplaceableError
from agentrl.cluster.processes import (
    ALL_GPUS,
    PARENT_VARIABLE,
    Bundle,
    ClusterNode,
    ProcessSpec,
    Reservation,
    free_port,
)

_POLL_INTERVAL = 0.5  # seconds between two polls
_OUTPUT, _ERRORS = 1, 2  # file descriptors of standard output and standard error


def log_file(folder: Path, node: str, role: str, number: int) -> Path:
    """Return the path of a process's log in ``folder``, the directory of a run or an evaluation.

    >>> str(log_file(Path("runs/a"), "n1", "rank", 3))
    'runs/a/logs/n1-rank-3.log'
    """
    return folder / "logs" / f"{node}-{role}-{number}.log"


class TeeProcess:
    """Appends everything written to ``write_end`` to a file, and copies it to a file descriptor of this process.

    The program ``tee`` runs as a separate process, so that no output is lost if a writer or this process is killed.
    """

    def __init__(self, log: Path, handle: int) -> None:
        read_end, self.write_end = os.pipe()
        try:
            command = ["tee", "-a", str(log)]
            self._process = subprocess.Popen(command, stdin=read_end, stdout=handle, start_new_session=True)
        except BaseException:
            os.close(self.write_end)
            raise
        finally:
            os.close(read_end)

    def close_write_end(self) -> None:
        """Close this process's end of the pipe. Copying continues while another process has ``write_end`` open."""
        os.close(self.write_end)

    def wait_for_exit(self, seconds: float) -> None:
        """Wait up to ``seconds`` for ``tee``, which exits once all writers have closed ``write_end``."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)


def tee_output_to_log(log: Path, *, keep_terminal_output: bool) -> None:
    """Copy all further output of this process to a log file. See :class:`ProcessSpec` for ``keep_terminal_output``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for handle in file_descriptors_to_log(keep_terminal_output=keep_terminal_output):
        tee = TeeProcess(log, handle)
        os.dup2(tee.write_end, handle)
        tee.close_write_end()


def file_descriptors_to_log(*, keep_terminal_output: bool) -> tuple[int, ...]:
    """Return the descriptors to log. Omits standard output if it is a terminal and ``keep_terminal_output`` is set."""
    return (_ERRORS,) if keep_terminal_output and os.isatty(_OUTPUT) else (_OUTPUT, _ERRORS)


def _write_to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class LogPrinter:
    """Prints lines as they are appended to log files in a folder shared by all machines."""

    def __init__(self, show: Callable[[str], None] = _write_to_stdout) -> None:
        self._show = show
        self._shown: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_until_closed, daemon=True, name="relay-logs")
        self._thread.start()

    def follow(self, log: Path) -> None:
        """Print further lines of a log file, starting at its current end."""
        with self._lock:
            self._shown[log] = log.stat().st_size if log.exists() else 0

    def close(self) -> None:
        """Print the remaining output and stop."""
        self._ended.set()
        self._thread.join()
        self._print_new_output(whole_lines=False)

    def _print_until_closed(self) -> None:
        while not self._ended.wait(_POLL_INTERVAL):
            self._print_new_output(whole_lines=True)

    def _print_new_output(self, *, whole_lines: bool) -> None:
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


# Seconds to wait for the remaining output of a process that has exited.
_DRAIN_SECONDS = 2.0

THIS_MACHINE = Reservation(number=0, node=socket.gethostname(), address="127.0.0.1")
"""Reservation of this machine that names no GPUs."""


class LocalProcess:
    """A child process in a separate session, so that it does not receive signals from the terminal."""

    def __init__(self, spec: ProcessSpec, reservation: Reservation, handles: Sequence[int] = ()) -> None:
        """Start the process. It inherits the file descriptors ``handles``."""
        self.spec = spec
        self.reservation = reservation
        command = [sys.executable, *spec.arguments]
        if spec.supervised:
            command = [sys.executable, "-m", "agentrl.cluster.supervise", str(os.getpid()), *command]
        self._tees: list[TeeProcess] = []
        with contextlib.ExitStack() as opened:
            output, errors = self._output_descriptors(spec, opened)
            self._process = subprocess.Popen(
                command,
                cwd=spec.folder,
                env=_process_environment(spec, reservation),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=tuple(handles),
                # Only this process may receive signals from the terminal.
                start_new_session=True,
            )

    def _output_descriptors(self, spec: ProcessSpec, opened: contextlib.ExitStack) -> tuple[int | None, int | None]:
        """Return the descriptors for standard output and standard error. A descriptor of None is inherited."""
        if spec.log is None:
            return None, None
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        if not spec.show_output:
            log = opened.enter_context(spec.log.open("ab")).fileno()
            return log, log
        outlets: list[int | None] = [None, None]
        for handle in file_descriptors_to_log(keep_terminal_output=spec.keep_terminal_output):
            tee = TeeProcess(spec.log, handle)
            opened.callback(tee.close_write_end)
            self._tees.append(tee)
            outlets[handle - 1] = tee.write_end
        return outlets[0], outlets[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait_or_kill(self, seconds: float) -> None:
        """Wait until the process has ended, and kill it after ``seconds``."""
        if self.wait(seconds) is None:
            # A killed supervisor cannot end the process group of its command, so kill that group first.
            if self.spec.supervised:
                for child in psutil.Process(self.pid).children():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(child.pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
        for tee in self._tees:
            tee.wait_for_exit(_DRAIN_SECONDS)
        self._tees.clear()


class LocalCluster:
    """Cluster of this machine only. All started processes end with this process."""

    def __init__(self, gpus: Sequence[str] | None) -> None:
        """Create the cluster. ``gpus`` contains the names of the visible GPUs, or is None for CPU training."""
        self._gpus = gpus
        self._started: list[LocalProcess] = []

    def nodes(self) -> list[ClusterNode]:
        count = 0 if self._gpus is None else len(self._gpus)
        return [ClusterNode(name=THIS_MACHINE.node, address=THIS_MACHINE.address, cpus=os.cpu_count() or 1, gpus=count)]

    def reserve(self, bundles: Sequence[Bundle], *, wait_seconds: float = 0.0) -> list[Reservation]:
        """Reserve this machine's first GPUs for a single bundle."""
        (bundle,) = bundles
        if self._gpus is None:
            return [THIS_MACHINE]
        if bundle.gpus > len(self._gpus):
            raise UnplaceableError(
                f"training.num_processes={bundle.gpus} requires one GPU per rank, but only {len(self._gpus)} "
                "GPUs are visible: lower training.num_processes"
            )
        return [replace(THIS_MACHINE, gpus=tuple(self._gpus[: bundle.gpus]))]

    def reserve_on_node(self, bundle: Bundle, node: ClusterNode | None = None) -> Reservation:
        """Return this machine. The resources of ``bundle`` are not counted."""
        return THIS_MACHINE

    def is_reachable(self, reservation: Reservation) -> bool:
        return True

    def start(self, spec: ProcessSpec, reservation: Reservation) -> LocalProcess:
        gpu_variables = {} if self._gpus is None else {ALL_GPUS: ",".join(self._gpus)}
        process = LocalProcess(replace(spec, environment={**gpu_variables, **spec.environment}), reservation)
        self._started.append(process)
        return process

    def free_port(self, reservation: Reservation) -> int:
        return free_port(reservation.address)

    def can_access(self, reservation: Reservation, path: Path) -> bool:
        return path.exists()

    def release(self) -> None:
        for process in self._started:
            process.wait_or_kill(0.0)
        self._started.clear()

    def close(self) -> None:
        self.release()


def _process_environment(spec: ProcessSpec, reservation: Reservation) -> dict[str, str]:
    changes: dict[str, str | None] = {PARENT_VARIABLE: str(os.getpid())}
    if reservation.gpus:
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(reservation.gpus)
    changes |= spec.environment
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}
