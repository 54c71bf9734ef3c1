"""`agentrl view`: serve the viewer to this machine only, and open it in the browser."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path

import uvicorn

from agentrl.errors import SettingsError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.viewer.app import make_app
from agentrl.viewer.calculator import Calculator
from agentrl.viewer.export.page import export_page
from agentrl.viewer.library import Library

HOST = "127.0.0.1"
PORT = 8642


def view_command(paths: Sequence[Path], *, port: int | None, browse: bool, echo: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. Raises SettingsError if there is nothing to view or the port is in use."""
    library = Library(paths)
    listener = listen(port)
    token = stored_token()
    calculator = Calculator()
    config = uvicorn.Config(
        make_app(library, token=token, calculator=calculator),
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
        "open the same address\nCtrl-C ends the viewer"
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
    """Write one run as a page. Raises SettingsError if ``paths`` are not one run, or ``out`` is missing."""
    if out is None:
        raise SettingsError("--steps and --groups apply only to --export FILE: add --export")
    if len(paths) != 1 or not (paths[0] / "config.yaml").is_file():
        raise SettingsError("--export writes one run: pass the run's directory, for example runs/NAME")
    export_page(RunDirectory(paths[0]), out, steps=steps, groups=groups)
    echo(f"{out}: {out.stat().st_size / 1e6:.1f} MB, opens in any browser without network access")


def listen(port: int | None) -> socket.socket:
    """Return a socket that accepts connections from this machine only.

    Without ``port``, it listens on :data:`PORT` or, if that is taken, on a free port. Raises SettingsError if ``port``
    is in use.
    """
    try:
        return socket.create_server((HOST, port or PORT))
    except OSError as error:
        if port is None:
            return socket.create_server((HOST, 0))
        raise SettingsError(
            f"--port {port}: cannot listen on {HOST}: {os.strerror(error.errno or 0)}; omit --port to use a free port"
        ) from error


def stored_token() -> str:
    """Return the token of this user's viewer. It stays the same between starts, so that bookmarks keep working.

    The token is stored in ``~/.cache/agentrl/view-token``, readable by the user only. Returns a new token if that file
    cannot be used.
    """
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "view-token"
    fresh = secrets.token_urlsafe(16)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.touch(mode=0o600, exist_ok=False)
            path.write_text(fresh)
        # A link or a pipe in place of the file must not be followed or block.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            token = file.read(100)
    except OSError:
        return fresh
    private = about.st_uid == os.getuid() and not about.st_mode & 0o077
    return token if private and re.fullmatch(r"[\w-]{22}", token, re.ASCII) else fresh
