"""The command ``agentrl-sandbox``: ``serve`` runs a gateway, ``runner`` a runner, ``check`` tests a sandbox."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl_sandbox.service.links import check_answers_fit
from agentrl_sandbox.settings import NO_TOKEN, GatewaySettings, SandboxSettings, read_settings
from agentrl_sandbox.types import SandboxError, StartError

# Runners on this machine, for a gateway without Docker.

_STOP_SECONDS = 10.0
_EARLY_EXIT_SECONDS = 5.0  # a runner that exits sooner is restarted after a pause
_RESTART_PAUSE_SECONDS = 1.0
_PASSED_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONPATH")


def runner_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a runner needs, without the token."""
    wanted = {
        name: text for name, text in environment.items() if name in _PASSED_VARIABLES or name.startswith("SANDBOX_")
    }
    wanted.pop("SANDBOX_TOKEN", None)
    return wanted


async def _supervise_runner(sockets: str, number: int, arguments: Sequence[str]) -> None:
    """Start a runner, and restart it whenever it exits. Raises StartError if it cannot start."""
    command = [
        *(sys.executable, "-m", "agentrl_sandbox", "runner", "--sockets", sockets),
        *("--name", f"local-{number}", "--parent", str(os.getpid()), *arguments),
    ]
    while True:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, env=runner_environment(os.environ), start_new_session=True
        )
        try:
            status = await process.wait()
        finally:
            if process.returncode is None:
                await _stop_runner(process)
        if status == 2:
            raise StartError("the runner could not start (see its message above)")
        if time.monotonic() - started < _EARLY_EXIT_SECONDS:
            await asyncio.sleep(_RESTART_PAUSE_SECONDS)


async def _stop_runner(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


_CLIENT_SETTINGS = ("url", "token", "retry_deadline", "service_deadline")  # settings that do not apply to a runner
_ATTACK_WARNING = (
    "The attacks are real: without isolation they kill processes and write files. They stop on their own at "
    "3000 processes, 3 GB of memory or disk and 100 MB of output."
)
_SOCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. User errors and failures of the machine end with one message and exit code 2."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    options = _parser().parse_args(arguments)
    try:
        if options.command == "runner":
            return _run_runner(options)
        return _run_check(options) if options.command == "check" else _run_serve(options)
    except SandboxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agentrl-sandbox", description="Run Python programs in isolation, over HTTP.")
    commands = parser.add_subparsers(dest="command", required=True)
    runner_settings = ", ".join(name for name in SandboxSettings.model_fields if name not in _CLIENT_SETTINGS)
    gateway_settings = ", ".join(GatewaySettings.model_fields)
    epilog = (
        f"Settings of runners: {runner_settings}; of the gateway: {gateway_settings}. Or set variables SANDBOX_NAME."
    )
    serve = commands.add_parser("serve", help="serve HTTP requests", epilog=epilog)
    serve.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", help="port (default 8080); 0 picks a free port")
    serve.add_argument("--no-token", action="store_true", help="disable authentication")
    serve.add_argument("--sockets", type=Path, help="directory of the runners' sockets (default: start new runners)")
    serve.add_argument("--runners", type=int, default=1, help="number of runners to start on this machine")
    runner = commands.add_parser("runner", help="run programs for a gateway", epilog=f"Settings: {runner_settings}.")
    runner.add_argument("--sockets", type=Path, required=True, help="directory of the runner's socket")
    runner.add_argument("--name", default=socket.gethostname(), help="name of the socket (default: the host name)")
    runner.add_argument("--linger", type=float, help="seconds without a gateway after which the runner exits")
    runner.add_argument("--parent", type=int, help="process id; the runner exits when this process exits")
    check = commands.add_parser(
        "check",
        help="run programs that a sandbox must support and attacks that it must withstand",
        epilog=_ATTACK_WARNING,
    )
    check.add_argument("url", nargs="?", default="local://", help="local://, docker://IMAGE or http://HOST:PORT")
    for command in (serve, runner, check):
        command.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings, for example memory_mb=1024")
    return parser


def _run_runner(options: argparse.Namespace) -> int:
    from agentrl_sandbox.service.runner import serve_runner

    if not _SOCKET_NAME.fullmatch(options.name):
        raise SandboxError(
            f"{options.name!r} is not a valid socket name: use letters, digits, dots, underscores and dashes"
        )
    settings = read_settings(SandboxSettings, os.environ, options.settings, without=_CLIENT_SETTINGS)
    ends = {"linger": options.linger, "parent": options.parent}
    asyncio.run(serve_runner(settings, options.sockets, options.name, **ends))
    return 0


def _run_check(options: argparse.Namespace) -> int:
    from agentrl_sandbox.check.suite import run_checks

    # The table reports missing properties, so they must not stop the check.
    given = ["allow_unisolated=true", *options.settings, f"url={options.url}"]
    return asyncio.run(run_checks(read_settings(SandboxSettings, os.environ, given)))


def _run_serve(options: argparse.Namespace) -> int:
    named = {name: value for name, value in (("host", options.host), ("port", options.port)) if value is not None}
    if options.no_token:
        named["token"] = NO_TOKEN
    arguments = [*options.settings, *(f"{name}={value}" for name, value in named.items())]
    gateway_settings = [text for text in arguments if text.partition("=")[0] in GatewaySettings.model_fields]
    runner_settings = [text for text in arguments if text not in gateway_settings]
    checked_settings = read_settings(SandboxSettings, os.environ, runner_settings, without=_CLIENT_SETTINGS)
    check_answers_fit(checked_settings)  # fail here, not in a child
    if options.sockets is not None and runner_settings:
        raise SandboxError(
            f"{runner_settings[0]!r} is a runner setting, but --sockets starts no runners: set it where the runners "
            "are started"
        )
    settings = read_settings(GatewaySettings, os.environ, gateway_settings)
    import uvloop

    return uvloop.run(_serve_gateway(settings, options.sockets, options.runners, runner_settings))


async def _serve_gateway(
    settings: GatewaySettings, sockets: Path | None, runners: int, arguments: Sequence[str]
) -> int:
    from agentrl_sandbox.service.gateway import serve_gateway

    def print_address(port: int) -> None:
        print(f"listening at http://{settings.host}:{port}", flush=True)

    if sockets is not None:
        await serve_gateway(settings, sockets, on_listening=print_address)
        return 0
    with tempfile.TemporaryDirectory(prefix="agentrl-sandbox-") as directory:
        try:
            async with asyncio.TaskGroup() as group:
                supervisors = [group.create_task(_supervise_runner(directory, n, arguments)) for n in range(runners)]
                await serve_gateway(settings, Path(directory), on_listening=print_address)
                for supervisor in supervisors:
                    supervisor.cancel()
        except BaseExceptionGroup as errors:  # the gateway or a runner could not start
            raise errors.exceptions[0] from None
    return 0
