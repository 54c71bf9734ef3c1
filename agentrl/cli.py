"""The command line: names, options and help. Commands hold no logic, and import what is heavy when they run."""

from __future__ import annotations

import logging
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

Env = Annotated[str | None, typer.Option(help="environment: simpletir, reasoning, or module:Class", metavar="NAME")]


@app.command()
def train(
    overrides: Overrides = None,
    env: Env = None,
    config: Config = None,
    reward: Annotated[
        str | None,
        typer.Option(help="function (problem, conversation, verdict) -> float", metavar="MODULE:NAME"),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(help="training ranks on this machine", metavar="N")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run of this name, or the newest")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show settings, passes and memory; run nothing")] = False,
) -> None:
    """Train a policy. Without model.path=..., train the embedded tiny model on this machine in minutes."""
    from agentrl.evaluation.options import quoted

    extra = [] if num_processes is None else [f"training.num_processes={num_processes}"]
    extra += [] if reward is None else [quoted("reward.function", reward)]
    settings = _load("train", env, config, [*(overrides or []), *extra], resume=resume)
    if dry_run:
        from agentrl.training.run import dry_run as preview

        preview.dry_run(settings)
        return
    from agentrl.training.run import start as run

    raise typer.Exit(run.train(settings, resume))


@app.command()
def coldstart(
    output: Annotated[Path, typer.Option(help="directory for the model (Hugging Face format)", metavar="DIR")],
    overrides: Overrides = None,
    demonstrations: Annotated[
        str | None, typer.Option(help="JSONL file, builtin:arithmetic or formula:FILE", metavar="FILE")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="model to start from; default: a new tiny model", metavar="PATH")
    ] = None,
    config: Config = None,
) -> None:
    """Teach a model the protocol by supervised training on demonstrations."""
    from agentrl.evaluation.options import quoted

    extra = [] if demonstrations is None else [quoted("coldstart.demonstrations", demonstrations)]
    extra += [] if model is None else [quoted("model.path", model)]
    settings = _load("coldstart", None, config, [*(overrides or []), *extra])
    from agentrl.training.coldstart.policy import coldstart_command

    coldstart_command(settings, output)


@app.command(name="eval")
def evaluate(
    overrides: Overrides = None,
    env: Env = None,
    model: Annotated[
        str | None,
        typer.Option(help="directory or Hugging Face id; with --base-url, the endpoint's name for it", metavar="MODEL"),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible endpoint to sample from", metavar="URL")
    ] = None,
    benchmarks: Annotated[
        str, typer.Option(help="names or files, separated by commas; default: data.eval", metavar="NAMES")
    ] = "",
    data_dir: Annotated[Path | None, typer.Option(help="directory of the benchmark files", metavar="DIR")] = None,
    n: Annotated[int | None, typer.Option("--n", help="samples per problem (avg@n)", metavar="N")] = None,
    k: Annotated[
        str, typer.Option("--k", help="k of pass@k, separated by commas; default: 1, 2, 4 .. n", metavar="K")
    ] = "",
    preset: Annotated[str | None, typer.Option(help="simpletir or otb-paper", metavar="NAME")] = None,
    output: Annotated[
        Path | None, typer.Option(help="output directory; default: evaluations/MODEL-HASH", metavar="DIR")
    ] = None,
    conversations: Annotated[
        int | None,
        typer.Option(
            help="conversations per problem in report.html; default: as many as fit into 10 MB", metavar="N", min=0
        ),
    ] = None,
    falsified: Annotated[bool, typer.Option("--falsified", help="also evaluate with falsified observations")] = False,
    check_data: Annotated[
        bool, typer.Option("--check-data", help="grade every gold answer against itself and stop; needs no model")
    ] = False,
    config: Annotated[
        str | None, typer.Option(help="YAML file or shipped name; default: that of the model's run", metavar="FILE")
    ] = None,
) -> None:
    """Score a model on benchmarks: avg@n with intervals, pass@k, maj@n and every conversation. Resumes by itself."""
    from agentrl.config import run_config_of
    from agentrl.evaluation.options import EvaluationRequest, overrides_of, whole_numbers

    given = overrides_of(model=model, base_url=base_url, preset=preset, n=n, falsified=falsified)
    found = None if model is None or base_url is not None else run_config_of(model)
    settings = _load("check-data" if check_data else "eval", env, config or found, [*given, *(overrides or [])])
    request = EvaluationRequest(
        benchmarks=tuple(name.strip() for name in benchmarks.split(",") if name.strip()),
        data_dir=data_dir,
        output=output,
        ks=whole_numbers("--k", k),
        conversations=conversations,
    )
    if check_data:
        from agentrl.evaluation.data.data_check import check_data_command

        check_data_command(settings, request)
        return
    from agentrl.evaluation.play.run import evaluate_command

    evaluate_command(settings, request)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="directory of an evaluation", metavar="A")],
    second: Annotated[Path, typer.Argument(help="directory of an evaluation", metavar="B")],
) -> None:
    """Compare two evaluations, B against A: the difference of each benchmark, paired by problem."""
    from agentrl.evaluation.results.comparison import compare_command

    compare_command(first, second)


@app.command()
def regrade(
    run: Annotated[Path, typer.Argument(help="directory of an evaluation", metavar="RUN")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="settings, for example grader.deadline=10", show_default=False),
    ] = None,
    grader: Annotated[
        str | None,
        typer.Option(help="a function (answer, gold) -> bool; default: the built-in grader", metavar="MODULE:NAME"),
    ] = None,
    extract: Annotated[
        bool, typer.Option("--extract", help="first extract the answers again from the stored conversations")
    ] = False,
) -> None:
    """Grade the stored answers of an evaluation again, without generating, and show what changed."""
    settings = _load("regrade", None, None, list(overrides or []))
    from agentrl.evaluation.results.regrade import regrade_command

    regrade_command(run, settings, grader, extract=extract)


@app.command()
def variance(
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="model directory; default: the tiny preset's cold-start policy", metavar="PATH")
    ] = None,
    problems: Annotated[
        str | None, typer.Option(help="number of problems from data.train, or a problem file", metavar="P")
    ] = None,
    group_sizes: Annotated[
        str | None, typer.Option(help="trajectories in a group, separated by commas", metavar="N,N")
    ] = None,
    estimators: Annotated[
        str | None,
        typer.Option(help="names, with options as tir_otb:leave_one_out=true; default: all", metavar="NAMES"),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="trajectories sampled per problem", metavar="S")] = None,
    output: Annotated[Path, typer.Option(help="directory for the result and its plots", metavar="DIR")] = Path(
        "variance"
    ),
    config: Config = None,
) -> None:
    """Measure the exact variance of every estimator's gradient on real rollouts of a small model."""
    from agentrl.config import run_config_of
    from agentrl.evaluation.options import quoted

    extra = [] if model is None else [quoted("model.path", model), "coldstart.demonstrations=null"]
    settings = _load(
        "variance", None, config or (run_config_of(model) if model else None), [*(overrides or []), *extra]
    )
    from agentrl.lab.run import prepare, variance_command
    from agentrl.telemetry.console import Console
    from agentrl.training.coldstart.policy import quieten_libraries, set_threads, starting_policy
    from agentrl.training.engine.determinism import set_determinism

    lab, drawn = prepare(settings, problems=problems, group_sizes=group_sizes, estimators=estimators, samples=samples)
    quieten_libraries()
    set_determinism(settings.training)
    set_threads(settings, processes=1)
    policy = starting_policy(settings, Console(settings.telemetry))
    variance_command(settings, policy, lab, drawn, output, head_backend=settings.training.head_backend)


@app.command(name="serve-policy")
def serve_policy(
    model: Annotated[str, typer.Option(help="model directory or Hugging Face id", metavar="PATH")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="address to listen on", metavar="HOST")] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(help="port to listen on; default: a free one", metavar="N")] = None,
    config: Config = None,
) -> None:
    """Start a vLLM server for rollout.vllm.placement=external and print its address. Runs until Ctrl-C."""
    from agentrl.evaluation.options import quoted

    extra = [quoted("model.path", model), "rollout.engine=vllm", "rollout.vllm.placement=dedicated"]
    extra += ["rollout.vllm.addresses=[]", "rollout.vllm.replicas=1"]
    settings = _load("eval", None, config, [*(overrides or []), *extra])
    from agentrl.training.worker.serving import serve_command

    serve_command(settings, model, host=host, port=port)


@app.command()
def doctor() -> None:
    """Show this machine's cores, GPUs, libraries and compiler, and the sandbox with its isolation."""
    from agentrl.doctor import report

    for line in report():
        typer.echo(line)


sandbox = typer.Typer(help="The service that runs programs.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


@sandbox.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve the sandbox over HTTP. Options: `agentrl-sandbox serve --help`."""
    from agentrl_sandbox.service.commands import main as command

    raise typer.Exit(command(["serve", *context.args]))


@sandbox.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False)
def check(context: typer.Context) -> None:
    """Test the sandbox at URL with ordinary programs and attacks. Options: `agentrl-sandbox check --help`."""
    from agentrl_sandbox.service.commands import main as command

    raise typer.Exit(command(["check", *context.args]))


def main() -> None:
    """Run a command. Errors of the user or of the world end with one message and an exit code, without traceback."""
    shorten_spinning()
    logging.getLogger("stamina").setLevel(logging.ERROR)  # it logs every retry; the caller reports what failed
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


def _errors_of_other_packages() -> tuple[type[Exception], ...]:
    """User errors of the packages below the trainer, imported only once something has failed."""
    from agentrl_envs.episode import EnvironmentContractError
    from agentrl_envs.registry import PluginError
    from agentrl_sandbox.client import SandboxError

    return (EnvironmentContractError, PluginError, SandboxError)


def _fail(error: Exception, code: int) -> None:
    typer.echo(f"error: {error}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
