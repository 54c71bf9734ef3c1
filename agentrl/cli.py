"""The command line: commands, options and help. Commands contain no logic and import heavy libraries when called."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer.models import ArgumentInfo, OptionInfo

from agentrl.errors import append_help_link, reported_exit_code

if TYPE_CHECKING:
    from agentrl.config import Command, Settings

app = typer.Typer(
    name="agentrl",
    help="Train language-model agents that solve mathematics by writing and running Python programs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

SHORT_SPIN_VARIABLES = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""Environment variables for short spinning of OpenMP threads; see :func:`shorten_spinning`."""


def _option(metavar: str, about: str, *names: str, minimum: int | None = None) -> OptionInfo:
    option: OptionInfo = typer.Option(*names, help=about, metavar=metavar, min=minimum)
    return option


def _settings_argument(example: str) -> ArgumentInfo:
    about = f"settings, for example {example}"
    argument: ArgumentInfo = typer.Argument(metavar="[KEY=VALUE]...", help=about, show_default=False)
    return argument


Overrides = Annotated[list[str] | None, _settings_argument("rollout.group_size=8")]
Config = Annotated[
    list[str] | None,
    _option("FILE", "YAML file or name of a shipped config such as word_problems; later files take precedence"),
]
Env = Annotated[
    str | None,
    _option(
        "NAME",
        "simpletir, reasoning, an installed name, module:Class, agent:module:function, agent:COMMAND, worker:COMMAND, "
        "trl:module:Class, reasoning_gym:NAME, openenv:URL, verifiers:TASKSET, harbor:DIRECTORY",
    ),
]


@app.command()
def train(
    overrides: Overrides = None,
    env: Env = None,
    config: Config = None,
    reward: Annotated[str | None, _option("MODULE:NAME", "function (problem, conversation, verdict) -> float")] = None,
    num_processes: Annotated[int | None, _option("N", "training ranks on this machine")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume the run set by name=NAME, or the newest")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print settings, passes and memory, then exit")] = False,
) -> None:
    """Train a policy. Without model.path=..., train the embedded tiny model on this machine in minutes."""
    rewards = None if reward is None else {reward: 1.0}
    options = {"training.num_processes": num_processes, "reward.functions": rewards}
    settings = _load_settings("train", overrides, env=env, config=config, options=options, resume=resume)
    if dry_run:
        from agentrl.training.run.preflight import dry_run as preview

        preview(settings)
        return
    from agentrl.training.run.start import train as run

    raise typer.Exit(run(settings, resume))


@app.command()
def plan(
    overrides: Overrides = None,
    model: Annotated[
        str | None, _option("MODEL", "directory, config.json or Hugging Face id; no weights are read")
    ] = None,
    config: Config = None,
    gpus: Annotated[
        int | None, _option("N", "GPUs for training and servers; default: all GPUs of this machine", minimum=1)
    ] = None,
    memory: Annotated[
        float | None, _option("GB", "memory of one GPU; default: memory of this machine's GPU", minimum=1)
    ] = None,
    context: Annotated[
        int | None, _option("TOKENS", "maximum tokens of prompt plus response; default: from the settings", minimum=64)
    ] = None,
    write: Annotated[Path | None, _option("FILE", "write the overlay to FILE, for agentrl train --config FILE")] = None,
) -> None:
    """Estimate the GPU memory needed to train a model. If the model fits, print a YAML overlay for these GPUs."""
    settings = _load_settings("plan", overrides, config=config, options={"model.path": model})
    from agentrl.planning.plan import plan_command
    from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_requirements

    critic = "values" in estimator_requirements(ObjectiveSettings.from_settings(settings)).inputs
    for line in plan_command(
        settings, critic=critic, gpus=gpus, memory=memory, context=context, base=config, write=write
    ):
        typer.echo(line)


@app.command()
def coldstart(
    output: Annotated[Path, _option("DIR", "directory for the model (Hugging Face format)")],
    overrides: Overrides = None,
    env: Env = None,
    demonstrations: Annotated[str | None, _option("FILE", "JSONL file, builtin:arithmetic or formula:FILE")] = None,
    model: Annotated[str | None, _option("PATH", "model to start from; default: a new tiny model")] = None,
    config: Config = None,
) -> None:
    """Teach a model the protocol by supervised fine-tuning on demonstrations."""
    options = {"coldstart.demonstrations": demonstrations, "model.path": model}
    settings = _load_settings("coldstart", overrides, env=env, config=config, options=options)
    from agentrl.training.coldstart.policy import coldstart_command

    coldstart_command(settings, output)


@app.command(name="eval")
def evaluate(
    overrides: Overrides = None,
    env: Env = None,
    model: Annotated[
        str | None, _option("MODEL", "directory or Hugging Face id; with --base-url, the model name at the endpoint")
    ] = None,
    base_url: Annotated[str | None, _option("URL", "OpenAI-compatible endpoint to sample from")] = None,
    benchmarks: Annotated[str, _option("NAMES", "names or files, separated by commas; default: data.eval")] = "",
    data_dir: Annotated[Path | None, _option("DIR", "directory of the benchmark files")] = None,
    n: Annotated[int | None, _option("N", "samples per problem (avg@n)", "--n")] = None,
    k: Annotated[str, _option("K", "k of pass@k, separated by commas; default: 1, 2, 4 .. n", "--k")] = "",
    preset: Annotated[str | None, _option("NAME", "simpletir or otb-paper")] = None,
    output: Annotated[Path | None, _option("DIR", "output directory; default: evaluations/MODEL-HASH")] = None,
    falsified: Annotated[bool, typer.Option("--falsified", help="also evaluate with falsified observations")] = False,
    check_data: Annotated[
        bool,
        typer.Option("--check-data", help="grade every reference answer against itself and exit; requires no model"),
    ] = False,
    config: Annotated[
        list[str] | None, _option("FILE", "YAML file or name of a shipped config; default: config of the model's run")
    ] = None,
) -> None:
    """Evaluate a model on benchmarks: avg@n with intervals, pass@k, maj@n, conversations. Resumes automatically."""
    from agentrl.config import run_config_for_model
    from agentrl.evaluation.settings import EvaluationOptions, overrides_from_options, parse_integers

    from_options = overrides_from_options(model=model, base_url=base_url, preset=preset, n=n, falsified=falsified)
    run_config = None if model is None or base_url is not None else run_config_for_model(model)
    command: Command = "check-data" if check_data else "eval"
    settings = _load_settings(command, [*from_options, *(overrides or [])], env=env, config=config or run_config)
    request = EvaluationOptions(
        benchmarks=tuple(name.strip() for name in benchmarks.split(",") if name.strip()),
        data_dir=data_dir,
        output=output,
        ks=parse_integers("--k", k),
    )
    if check_data:
        from agentrl.evaluation.benchmarks import check_benchmarks_command

        check_benchmarks_command(settings, request)
        return
    from agentrl.evaluation.run import evaluate_command
    from agentrl.viewer.export import export_evaluation_page

    evaluate_command(settings, request, write_report=export_evaluation_page)


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(help="directory of a training run", metavar="RUN")],
    step: Annotated[int, _option("S", "step with stored trajectories and token statistics")],
    trajectory: Annotated[int, _option("T", "index of the trajectory in the step, from 0")],
    token: Annotated[int, _option("K", "index of a model token in the response, from 0")],
) -> None:
    """Explain the gradient of a token: reward, return, baseline, advantage, correction, clipping, loss weight."""
    from agentrl.viewer.explain import explain_command

    for line in explain_command(run, step=step, trajectory=trajectory, token=token):
        typer.echo(line)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="directory of an evaluation", metavar="A")],
    second: Annotated[Path, typer.Argument(help="directory of an evaluation", metavar="B")],
) -> None:
    """Compare evaluation B with evaluation A: the difference on each benchmark, paired by problem."""
    from agentrl.evaluation.compare import compare_command

    compare_command(first, second)


@app.command()
def regrade(
    run: Annotated[Path, typer.Argument(help="directory of an evaluation", metavar="RUN")],
    overrides: Annotated[list[str] | None, _settings_argument("grader.deadline=10")] = None,
    grader: Annotated[
        str | None, _option("MODULE:NAME", "function (answer, reference) -> bool; default: the built-in grader")
    ] = None,
    extract: Annotated[
        bool, typer.Option("--extract", help="extract the answers from the stored conversations again before grading")
    ] = False,
) -> None:
    """Regrade the stored answers of an evaluation without sampling, and print what changed."""
    settings = _load_settings("regrade", overrides)
    from agentrl.evaluation.regrade import regrade_command

    regrade_command(run, settings, grader, extract=extract)


@app.command()
def variance(
    overrides: Overrides = None,
    model: Annotated[
        str | None, _option("PATH", "model directory; default: the cold-start policy of the settings")
    ] = None,
    behaviour: Annotated[
        str | None,
        _option(
            "PATH",
            "older policy that samples the rollouts, or fp8 or int8 for the measured policy with rounded weights; "
            "gradients are then importance-weighted",
        ),
    ] = None,
    problems: Annotated[str | None, _option("P", "number of problems from data.train, or a problem file")] = None,
    group_sizes: Annotated[str | None, _option("N,N", "group sizes, separated by commas")] = None,
    estimators: Annotated[
        str | None,
        _option("NAMES", "names, with options like tir_otb:leave_one_out=true, comma-separated; default: all"),
    ] = None,
    samples: Annotated[int | None, _option("S", "trajectories sampled per problem")] = None,
    baseline: Annotated[
        str | None, _option("NAME", "reference estimator of the noise comparison; default: rloo")
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="also measure the gradient of the head alone")] = False,
    output: Annotated[Path, _option("DIR", "directory of the measurement; the same command resumes it")] = Path(
        "variance"
    ),
    config: Config = None,
) -> None:
    """Measure the exact variance of every estimator's gradient on real rollouts of a small model."""
    from agentrl.config import run_config_for_model

    overrides = [*(overrides or []), *([] if model is None else ["coldstart.demonstrations=null"])]
    run_config = None if model is None else run_config_for_model(model)
    settings = _load_settings("variance", overrides, config=config or run_config, options={"model.path": model})
    from agentrl.lab.rollouts import load_lab_problems
    from agentrl.lab.run import variance_command
    from agentrl.lab.settings import parse_lab_settings
    from agentrl.rollout.environment import check_environment
    from agentrl.telemetry.console import Console
    from agentrl.training.coldstart.policy import prepare_starting_policy
    from agentrl.training.engine.determinism import set_determinism, set_threads

    check_environment(settings)  # first, because the environment's module may register an estimator
    lab = parse_lab_settings(
        samples=samples, group_sizes=group_sizes, estimators=estimators, baseline=baseline, head=head
    )
    lab, drawn = load_lab_problems(settings, lab, problems)
    set_determinism(settings.training)
    set_threads(settings, processes=1)
    policy = prepare_starting_policy(settings, Console(settings.telemetry))
    variance_command(settings, policy, behaviour, lab, drawn, output, head_backend=settings.training.head_backend)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="study file (YAML), or a study.json to report on", metavar="FILE")],
    output: Annotated[Path | None, _option("DIR", "directory for the runs and the report; default: runs/NAME")] = None,
    jobs: Annotated[int | None, _option("N", "number of concurrent runs; default: from FILE", minimum=1)] = None,
    baseline: Annotated[
        str | None, _option("VARIANT", "variant to compare the other variants with; default: from FILE")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="restart failed runs")] = False,
    report_only: Annotated[bool, typer.Option("--report", help="report on the existing runs without training")] = False,
) -> None:
    """Train a grid of settings and seeds, and compare the results with intervals. The same command resumes a study."""
    from agentrl.lab.study.command import study_command
    from agentrl.training.run.signals import sigterm_as_ctrl_c

    with sigterm_as_ctrl_c():
        study_command(
            file,
            output,
            jobs=jobs,
            baseline=baseline,
            retry=retry,
            report_only=report_only,
            check=check_training_settings,
            echo=typer.echo,
        )


def check_training_settings(configs: list[str], overrides: list[str], env: str) -> None:
    """Raise SettingsError if ``agentrl train`` would reject these settings before it starts."""
    from agentrl.config import load_settings
    from agentrl.training.run.preflight import check_and_describe_inputs

    check_and_describe_inputs(load_settings(env, configs, overrides))


@app.command(name="serve-policy")
def serve_policy(
    model: Annotated[str, _option("PATH", "model directory or Hugging Face id")],
    overrides: Overrides = None,
    host: Annotated[str, _option("HOST", "address to listen on")] = "127.0.0.1",
    port: Annotated[int | None, _option("N", "port to listen on; default: a free one")] = None,
    config: Config = None,
) -> None:
    """Start a vLLM server for rollout.vllm.placement=external and print its address. Runs until Ctrl-C."""
    served = {"model.path": model, "rollout.engine": "vllm", "rollout.vllm.placement": "dedicated"}
    options = {**served, "rollout.vllm.addresses": [], "rollout.vllm.replicas": 1}
    settings = _load_settings("eval", overrides, config=config, options=options)
    from agentrl.rollout.engines.vllm.engine import serve_policy as serve
    from agentrl.rollout.settings import longest_request_tokens
    from agentrl.telemetry.console import Console

    longest = longest_request_tokens(settings.rollout, settings.evaluation.max_response_tokens)
    console = Console(settings.telemetry)
    serve(settings.rollout, settings.model, longest=longest, host=host, port=port, report=console.note)


@app.command()
def view(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="runs, evaluations, or their parent folders; default: runs", metavar="[PATH]...", show_default=False
        ),
    ] = None,
    port: Annotated[
        int | None, _option("N", "port to listen on; default: 8642 or, if taken, a free one", minimum=1)
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", help="print the address without opening a browser")] = False,
    export: Annotated[Path | None, _option("FILE", "write one run as a standalone HTML page")] = None,
    steps: Annotated[
        str | None, _option("S,S", "steps with trajectories in --export; default: the newest step")
    ] = None,
    groups: Annotated[int | None, _option("N", "maximum number of groups per step in --export", minimum=1)] = None,
) -> None:
    """Show runs and evaluations in the browser: curves, trajectories and tokens. Changes no files."""
    from agentrl.evaluation.settings import parse_integers
    from agentrl.viewer.serve import export_command, view_command

    if (export, steps, groups) == (None, None, None):
        view_command(paths or [Path("runs")], port=port, browse=not no_open, echo=typer.echo)
    else:
        chosen = parse_integers("--steps", steps or "")
        export_command(paths or [], export, steps=chosen, groups=groups, echo=typer.echo)


@app.command()
def doctor() -> None:
    """Show this machine's cores, GPUs, libraries and compiler, and the sandbox with its isolation."""
    from agentrl.doctor import describe_machine_and_sandbox

    for line in describe_machine_and_sandbox():
        typer.echo(line)


new = typer.Typer(help="Generate the skeleton of a package.", no_args_is_help=True)
app.add_typer(new, name="new")


@new.command(name="environment")
def new_environment(
    name: Annotated[str, typer.Argument(help="name of the folder, the package and the environment", metavar="NAME")],
) -> None:
    """Generate an installable package in the folder NAME: an environment, data, a test and settings."""
    from agentrl.scaffold.package import new_environment_command

    for line in new_environment_command(name):
        typer.echo(line)


sandbox = typer.Typer(help="Serve or test a sandbox for programs.", no_args_is_help=True)
app.add_typer(sandbox, name="sandbox")


def _add_sandbox_command(name: str, about: str) -> None:
    """Add a command that passes all its arguments to the command ``name`` of ``agentrl-sandbox``."""
    everything = {"allow_extra_args": True, "ignore_unknown_options": True}

    @sandbox.command(name, help=about, context_settings=everything, add_help_option=False)
    def forwarded(context: typer.Context) -> None:
        from agentrl_sandbox.service.commands import main as command

        raise typer.Exit(command([name, *context.args]))


_add_sandbox_command("serve", "Serve the sandbox over HTTP. Options: `agentrl-sandbox serve --help`.")
_add_sandbox_command(
    "check", "Test the sandbox at URL with ordinary programs and attacks. Options: `agentrl-sandbox check --help`."
)


def main() -> None:
    """Run a command. User errors and external failures end with one message and an exit code, without a traceback."""
    configure_openmp_and_logging()
    sys.path.append("")  # the module of --env module:Class may be in the working directory, as with python -m
    try:
        app()
    except Exception as error:
        code = reported_exit_code(error)
        if code is None:
            raise
        typer.echo(f"error: {append_help_link(str(error))}", err=True)
        sys.exit(code)


def configure_openmp_and_logging() -> None:
    """Configure OpenMP and logging, before a command imports its libraries."""
    shorten_spinning()
    logging.getLogger("stamina").setLevel(logging.ERROR)  # stamina logs every retry; the caller reports the failure


def shorten_spinning() -> None:
    """Make OpenMP threads sleep after a few microseconds at a barrier, unless the user has set OMP_WAIT_POLICY.

    Call it before torch is imported, because OpenMP reads its variables once. By default, libgomp's threads spin for
    about a millisecond. On a machine with two cores, two spinning threads starve each other as soon as a sandboxed
    program needs a core: sampling 128 sequences of 64 tokens took 35 s, and 0.75 s with sleeping threads. Threads that
    sleep immediately make a small matrix product on an idle machine two to five times slower. The policy is ``active``
    because libgomp otherwise lowers the spin count when two threads have separate thread pools. Other OpenMP runtimes
    read KMP_BLOCKTIME.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        for name, value in SHORT_SPIN_VARIABLES.items():
            os.environ.setdefault(name, value)


def _load_settings(
    command: Command,
    overrides: list[str] | None,
    *,
    env: str | None = None,
    config: str | Sequence[str] | None = None,
    options: Mapping[str, object] | None = None,
    resume: bool = False,
) -> Settings:
    """Load a command's settings. ``options`` maps dotted keys to command-line options; None means not set."""
    from agentrl.config import load_settings, settings_warnings
    from agentrl.evaluation.settings import quoted_override

    from_options = [
        quoted_override(key, value) if isinstance(value, str) else f"{key}={value}"
        for key, value in (options or {}).items()
        if value is not None
    ]
    settings = load_settings(env, config, [*(overrides or []), *from_options], resume=resume, command=command)
    for warning in settings_warnings(settings) if command == "train" else []:
        typer.echo(f"warning: {warning}", err=True)
    return settings


if __name__ == "__main__":
    main()
