"""``agentrl.train`` and ``agentrl.evaluate``: the commands of the command line as Python functions.

A single rank trains in the calling process. Several ranks, other machines and asynchronous schedules require further
processes, which are started as on the command line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.api.inputs import (
    INPUTS,
    Inputs,
    Problems,
    check_file,
    check_keywords,
    to_overrides,
    without_command_line_origin,
)
from agentrl.api.run import EvaluationRun, Run
from agentrl.cli import configure_openmp_and_logging
from agentrl.config import load_settings, run_config_for_model, settings_warnings
from agentrl.errors import EXIT_INTERRUPTED, SettingsError, WorldError
from agentrl.evaluation.settings import EvaluationOptions, overrides_from_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from agentrl.training.run.callbacks import EvaluatedStep, SavedCheckpoint, TrainedStep


def train(
    *,
    env: str | type | None = None,
    model: str | Path | PreTrainedModel | Mapping[str, object] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    problems: str | Path | Problems | None = None,
    eval_problems: str | Path | Problems | None = None,
    reward: object = None,
    config: str | Path | None = None,
    resume: bool = False,
    on_step: Callable[[TrainedStep], object] | None = None,
    on_evaluation: Callable[[EvaluatedStep], object] | None = None,
    on_checkpoint: Callable[[SavedCheckpoint], object] | None = None,
    **settings: object,
) -> Run:
    """Train a policy as ``agentrl train`` does, and return the finished run.

    Args:
        env: name of an environment, or a class or function that creates one.
        model: directory or Hugging Face id of a model, a loaded `transformers` model, or settings of the section
            ``model``.
        tokenizer: the tokenizer of a loaded model.
        problems: problems to train on: a file, rows with at least a statement (and an answer, if it is graded), a
            pandas DataFrame, or a Dataset of the ``datasets`` package.
        eval_problems: problems to evaluate on. If only ``problems`` is passed, nothing is evaluated.
        reward: a reward function or its name, a list of them, or a mapping from them to weights.
        config: a YAML file, or the name of a shipped configuration.
        resume: continue the run called ``name``, or by default the newest run.
        on_step: called with a :class:`TrainedStep` after each step.
        on_evaluation: called with an :class:`EvaluatedStep` after each evaluation.
        on_checkpoint: called with a :class:`SavedCheckpoint` for each checkpoint.
        settings: any setting, by section (``training={"steps": 20}``) or by its dotted name
            (``**{"training.steps": 20}``).

    One rank runs in this process, so that callbacks, rewards and environments can use any object of the program. With
    several ranks, callbacks are called in this process, up to a second later. An exception in a callback ends the run
    and is raised here.

    An interrupt (Ctrl-C, or a notebook's stop button) saves a checkpoint before KeyboardInterrupt is raised;
    ``resume=True`` continues the run. A second interrupt raises KeyboardInterrupt immediately. Interrupts are not
    handled outside the main thread.

    Raises:
        SettingsError: a setting, problem or function is invalid. Nothing was trained.
        WorldError: the run failed for a reason other than its settings.
    """
    check_keywords(train, settings)
    inputs = Inputs(Path(str(settings.get("runs_dir") or "runs")) / INPUTS)
    settings |= {} if model is None else inputs.model_settings(model, tokenizer)
    if problems is not None:
        settings["data.train"] = [{"path": inputs.problems_path(problems)}]
        settings["data.eval"] = []
    if eval_problems is not None:
        settings["data.eval"] = [{"path": inputs.problems_path(eval_problems)}]
    environment = None if env is None else inputs.importable_name(env)
    rewards = [] if reward is None else [inputs.reward_override(reward)]
    overrides = to_overrides(inputs.add_plugins(settings)) + rewards
    with without_command_line_origin():
        resolved = load_settings(environment, config, overrides, resume=resume)
        for source in [*resolved.data.train, *resolved.data.eval]:
            check_file(source.path)
        for warning in settings_warnings(resolved):
            print(f"warning: {warning}", file=sys.stderr)
        with prepared_process_state():
            from agentrl.training.run.callbacks import Callbacks
            from agentrl.training.run.start import runs_in_one_process
            from agentrl.training.run.start import train as run

            if not runs_in_one_process(resolved):
                inputs.require_picklable()
            calls = (on_step, on_evaluation, on_checkpoint)
            callbacks = Callbacks(on_step=on_step, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint)
            code = run(resolved, resume, callbacks=callbacks if any(calls) else None, embedded=True)
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        failure = SettingsError if code == SettingsError.exit_code else WorldError
        raise failure(f"the training ranks exited with code {code}; the reason is in their output")
    return Run(resolved.run_path)


def evaluate(
    model: str | Path | Run,
    *,
    env: str | type | None = None,
    problems: str | Path | Problems | None = None,
    benchmarks: Iterable[str] = (),
    n: int | None = None,
    base_url: str | None = None,
    output: str | Path | None = None,
    config: str | Path | None = None,
    **settings: object,
) -> EvaluationRun:
    """Evaluate a model on ``n`` samples of every problem, as ``agentrl eval`` does, and return the evaluation.

    Args:
        model: a model directory, a Hugging Face id, a finished run, or with ``base_url`` the endpoint's model name.
        env: name of an environment, or a class or function that creates one.
        problems: problems to evaluate on: a file, or rows with at least a statement and an answer.
        benchmarks: names or files of benchmarks, in addition to ``problems``. If both are omitted: ``data.eval``.
        n: samples per problem; default: ``evaluation.samples``.
        base_url: an OpenAI-compatible endpoint to sample from.
        output: directory of the evaluation. Default: a directory named after the model and the arguments, so that
            repeating the call continues an interrupted evaluation.
        config: a YAML file, or the name of a shipped configuration; default: the configuration of the model's run.
        settings: any setting, as in :func:`train`.

    Raises SettingsError and WorldError as :func:`train` does, and KeyboardInterrupt after an interrupt.
    """
    check_keywords(evaluate, settings)
    root = Path("evaluations")
    inputs = Inputs(root / INPUTS)
    wanted = [*benchmarks, *([] if problems is None else [inputs.problems_path(problems)])]
    for path in wanted:
        check_file(path)
    name = str(model.policy if isinstance(model, Run) else model)
    environment = None if env is None else inputs.importable_name(env)
    options = overrides_from_options(model=name, base_url=base_url, preset=None, n=n, falsified=False)
    overrides = options + to_overrides(inputs.add_plugins(settings))
    digest = hashlib.sha256(json.dumps([environment, str(config), wanted, overrides]).encode()).hexdigest()[:8]
    folder = root / f"{Path(name).name}-{digest}" if output is None else Path(output)
    with without_command_line_origin():
        found = run_config_for_model(name) if base_url is None else None
        resolved = load_settings(environment, config or found, overrides, command="eval")
        with prepared_process_state():
            from agentrl.evaluation.run import evaluate_command
            from agentrl.viewer.export import export_evaluation_page

            request = EvaluationOptions(benchmarks=tuple(wanted), output=folder)
            evaluate_command(resolved, request, write_report=export_evaluation_page)
    return EvaluationRun(folder)


@contextmanager
def prepared_process_state() -> Iterator[None]:
    """Prepare this process to run a command inside a Python program, and restore the process on exit.

    A notebook cell runs inside the event loop of its kernel, where `asyncio.run` raises an error. Therefore the loop is
    hidden. As in any blocking call, the loop does not run during the command. Child processes can import the modules
    that this process can import.
    """
    configure_openmp_and_logging()
    running, path = asyncio._get_running_loop(), os.environ.get("PYTHONPATH")
    installed = (sys.prefix, sys.base_prefix)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        os.path.abspath(entry) for entry in sys.path if not entry.startswith(installed)
    )
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        if running is not None:
            asyncio.set_event_loop(running)  # asyncio.run sets the current loop to None
        asyncio._set_running_loop(running)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
