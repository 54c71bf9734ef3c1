"""The command line: names, options and help. Every command hands over at once; heavy imports happen inside it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.config import Command, Settings

app = typer.Typer(
    name="agentrl",
    help="Train language-model agents that solve mathematics by writing Python and seeing what it prints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SHORT_SPINNING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""How OpenMP threads wait at a barrier; see :func:`shorten_spinning`."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="settings, for example rollout.group_size=8", show_default=False),
]
Config = Annotated[
    str | None, typer.Option(help="YAML file, or the name of a shipped one such as word_problems", metavar="FILE")
]


@app.command()
def train(
    overrides: Overrides = None,
    env: Annotated[str | None, typer.Option(help="environment: simpletir, or module:Class", metavar="NAME")] = None,
    config: Config = None,
    num_processes: Annotated[int | None, typer.Option(help="training ranks on this machine", metavar="N")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run of this name, or the newest")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show settings, passes and memory; run nothing")] = False,
) -> None:
    """Train a policy. Without model.path=...: the embedded tiny one, on this machine, in minutes."""
    extra = [] if num_processes is None else [f"training.num_processes={num_processes}"]
    settings = _load("train", env, config, [*(overrides or []), *extra], resume=resume)
    if dry_run:
        from agentrl.training import dry_run as preview

        preview.dry_run(settings)
        return
    from agentrl.training import run

    raise typer.Exit(run.train(settings, resume))


@app.command()
def coldstart(
    output: Annotated[Path, typer.Option(help="directory for the model (Hugging Face format)", metavar="DIR")],
    overrides: Overrides = None,
    demonstrations: Annotated[
        str | None, typer.Option(help="JSONL file, builtin:arithmetic or formula:FILE", metavar="FILE")
    ] = None,
    model: Annotated[str | None, typer.Option(help="model to start from; none: a new tiny one", metavar="PATH")] = None,
    config: Config = None,
) -> None:
    """Teach a model the protocol by supervised training on demonstrations."""
    extra = [] if demonstrations is None else [_quoted("coldstart.demonstrations", demonstrations)]
    extra += [] if model is None else [_quoted("model.path", model)]
    settings = _load("coldstart", None, config, [*(overrides or []), *extra])
    from agentrl.training.policy import coldstart_command

    coldstart_command(settings, output)


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Option(help="model directory, for example runs/tiny-1/policy", metavar="PATH")],
    overrides: Overrides = None,
    benchmarks: Annotated[
        str, typer.Option(help="names or files, separated by commas; none: the sources of data.eval", metavar="NAMES")
    ] = "",
    data_dir: Annotated[Path | None, typer.Option(help="where the benchmarks' files lie", metavar="DIR")] = None,
    n: Annotated[int | None, typer.Option("--n", help="samples of each problem (avg@n)", metavar="N")] = None,
    falsified: Annotated[bool, typer.Option("--falsified", help="also with falsified observations")] = False,
    config: Annotated[
        str | None, typer.Option(help="YAML file or shipped name; none: of the run the model lies in", metavar="FILE")
    ] = None,
) -> None:
    """Evaluate a model on held-out problems or benchmark files: avg@n with a 95 % interval."""
    from agentrl.config import run_config_of

    extra = [] if n is None else [f"evaluation.samples={n}"]
    extra += ["evaluation.falsified=true"] if falsified else []
    extra = [*(overrides or []), _quoted("model.path", model), *extra]
    settings = _load("eval", None, config or run_config_of(model), extra)
    from agentrl.evaluation.run import evaluate_command

    names = [name.strip() for name in benchmarks.split(",") if name.strip()]
    evaluate_command(settings, model, names, data_dir, settings.evaluation.samples)


@app.command(name="serve-policy")
def serve_policy(
    model: Annotated[str, typer.Option(help="model directory or Hugging Face id", metavar="PATH")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="address to listen on", metavar="HOST")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="port to listen on; none: a free one", metavar="N")] = None,
    config: Config = None,
) -> None:
    """Start a vLLM server for rollout.vllm.placement=external and print its address; runs until Ctrl-C."""
    extra = [_quoted("model.path", model), "rollout.engine=vllm", "rollout.vllm.placement=dedicated"]
    extra += ["rollout.vllm.addresses=[]", "rollout.vllm.replicas=1"]
    settings = _load("eval", None, config, [*(overrides or []), *extra])
    from agentrl.training.serving import serve_command

    serve_command(settings, model, host=host, port=port)


@app.command()
def doctor() -> None:
    """Say what is found here: cores, GPU, libraries, compiler, and the sandbox with its isolation."""
    from agentrl.doctor import report

    for line in report():
        typer.echo(line)


sandbox = typer.Typer(help="The service that runs programs.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


@sandbox.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve the sandbox over HTTP: --port N and more, as `agentrl-sandbox serve --help` says."""
    from agentrl_sandbox.service.commands import main as command

    raise typer.Exit(command(["serve", *context.args]))


@sandbox.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def check(context: typer.Context) -> None:
    """Try a sandbox, URL, with ordinary programs and attacks, as `agentrl-sandbox check --help` says."""
    from agentrl_sandbox.service.commands import main as command

    raise typer.Exit(command(["check", *context.args]))


def main() -> None:
    """Run a command; what the user or the world did wrong becomes one message and an exit code, never a traceback."""
    shorten_spinning()
    sys.path.append("")  # --env module:Class may lie in the working directory, as under python -m
    try:
        app()
    except SystemExit:
        raise
    except AgentRLError as error:
        _fail(error, error.exit_code)
    except _errors_of_other_packages() as error:
        _fail(error, 2)


def shorten_spinning() -> None:
    """Let OpenMP threads sleep after a few microseconds at a barrier, unless the user has set OMP_WAIT_POLICY.

    Must come before torch is imported: OpenMP reads its variables once. By default libgomp's threads spin for about a
    millisecond; two of them on a machine of two cores starve each other as soon as a sandboxed program wants a core
    (128 sequences of 64 tokens took 35 s to sample, and 0.75 s with sleeping ones). Threads that sleep at once make a
    small matrix product on an idle machine two to five times as slow. ``active`` because libgomp otherwise shortens
    the count by itself once two threads compute with threads of their own; the others' runtimes read KMP_BLOCKTIME.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SHORT_SPINNING.items():
            os.environ.setdefault(name, value)


def _load(
    command: Command, env: str | None, config: str | None, overrides: list[str], *, resume: bool = False
) -> Settings:
    from agentrl.config import load_settings, settings_warnings

    settings = load_settings(env, config, overrides, resume=resume, command=command)
    for warning in settings_warnings(settings) if command == "train" else []:
        typer.echo(f"warning: {warning}", err=True)
    return settings


def _quoted(key: str, text: str) -> str:
    """``key=text`` that YAML reads as this very text."""
    escaped = text.replace("'", "''")
    return f"{key}='{escaped}'"


def _errors_of_other_packages() -> tuple[type[Exception], ...]:
    """The errors that are the user's in packages below the trainer; imported only when something has gone wrong."""
    from agentrl_envs.episode import EnvironmentContractError, EnvironmentLookupError
    from agentrl_sandbox.client import SandboxError

    return (EnvironmentContractError, EnvironmentLookupError, SandboxError)


def _fail(error: Exception, code: int) -> None:
    typer.echo(f"error: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
