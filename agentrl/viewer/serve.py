"""`agentrl view`: serve the viewer to this machine only, and open it in the browser.

Computations that need torch or a run's plug-ins run in a separate process (:class:`CalculationClient`), because the
viewer imports neither.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import multiprocessing
import os
import platform
import re
import secrets
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import uvicorn

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.app import make_app
from agentrl.viewer.export import export_run_page
from agentrl.viewer.runs import RunLibrary

_DEADLINE = 120.0  # seconds to wait for a response; the first response includes the import of torch


class CalculationClient:
    """Client of a process that answers requests of `agentrl.viewer.calculations`. Sends one request at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._run: Path | None = None

    def request(self, run: Path, question: dict[str, object]) -> object:
        """Return the result. Raises SettingsError if the request is invalid, and WorldError if the process fails."""
        with self._lock:
            connection = self._connect(run.resolve())
            try:
                connection.send(question)
                if not connection.poll(_DEADLINE):
                    raise TimeoutError(f"no response within {_DEADLINE:g} s")
                answer = json.loads(connection.recv())
            except (OSError, EOFError) as error:
                self._stop_process()
                raise WorldError(f"the calculation process of {run} failed: {error or 'no response'}") from error
        if "error" in answer:
            raise SettingsError(str(answer["error"]))
        return answer["answer"]

    def close(self) -> None:
        """Stop the process."""
        with self._lock:
            self._stop_process()

    def _connect(self, run: Path) -> Connection:
        """Return the connection to the process of ``run``, starting the process if it is not running."""
        if self._connection is None or self._run != run or self._process is None or not self._process.is_alive():
            self._stop_process()
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_answer_requests, args=(run, theirs), daemon=True)
            self._process.start()
            theirs.close()  # so that a read fails if the process ends
            self._run = run
        return self._connection

    def _stop_process(self) -> None:
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
        self._process = self._connection = None


def _answer_requests(run: Path, connection: Connection) -> None:
    """Answer requests until the viewer closes the connection. Runs in the calculation process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the viewer handles Ctrl-C and stops this process
    from agentrl.viewer.calculations import CalculationHandlers  # imports torch

    handlers = CalculationHandlers(RunDirectory(run))
    with contextlib.suppress(EOFError):
        while True:
            connection.send(handlers.answer(connection.recv()))


HOST = "127.0.0.1"
PORT = 8642


def view_command(paths: Sequence[Path], *, port: int | None, browse: bool, echo: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. Raises SettingsError if there is no run or evaluation, or if the port is in use."""
    library = RunLibrary(paths)
    listener = open_local_listener(port)
    token = read_or_create_viewer_token()
    calculator = CalculationClient()
    config = uvicorn.Config(
        make_app(library, token=token, calculate=calculator.request),
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=1,
    )
    at = listener.getsockname()[1]
    address = f"http://{HOST}:{at}/?token={token}"
    echo(
        f"{address}\nfrom another machine: run ssh -L {at}:{HOST}:{at} {getpass.getuser()}@{platform.node()} there and "
        "open the same address\npress Ctrl-C to stop the viewer"
    )
    if browse:
        webbrowser.open(address)
    try:
        uvicorn.Server(config).run([listener])
    finally:
        calculator.close()


def export_command(
    paths: Sequence[Path], out: Path | None, *, steps: Sequence[int], groups: int | None, echo: Callable[[str], object]
) -> None:
    """Write the page of one run to ``out``.

    Raises SettingsError if ``paths`` is not a single run or ``out`` is None.
    """
    if out is None:
        raise SettingsError("--steps and --groups apply only to --export FILE: add --export")
    if len(paths) != 1 or not (paths[0] / "config.yaml").is_file():
        raise SettingsError("--export requires exactly one run: pass its directory, for example runs/NAME")
    export_run_page(RunDirectory(paths[0]), out, steps=steps, groups=groups)
    echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB, can be opened in any browser without network access")


def open_local_listener(port: int | None) -> socket.socket:
    """Return a socket that accepts connections from this machine only.

    Without ``port``, the socket listens on :data:`PORT` or, if it is in use, on a free port. Raises SettingsError
    if ``port`` is in use.
    """
    try:
        return socket.create_server((HOST, port or PORT))
    except OSError as error:
        if port is None:
            return socket.create_server((HOST, 0))
        raise SettingsError(
            f"--port {port}: cannot listen on {HOST}: {os.strerror(error.errno or 0)}; omit --port to use a free port"
        ) from error


def read_or_create_viewer_token() -> str:
    """Return the user's viewer token, which does not change between starts, so that bookmarks remain valid.

    The token is stored in ``~/.cache/agentrl/view-token``, readable by the user only. Returns a new token if the file
    cannot be used.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "view-token"
    fresh = secrets.token_urlsafe(16)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(fresh)
        # If the file is a link or a pipe, do not follow it or block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            token = file.read(100)
    except OSError:
        return fresh
    private = about.st_uid == os.getuid() and not about.st_mode & 0o077
    return token if private and re.fullmatch(r"[\w-]{22}", token, re.ASCII) else fresh
