"""``agentrl.train`` and ``agentrl.evaluate``: the command line's commands, called from Python.

A command runs in a process of its own, so it works where an event loop already runs (a notebook), leaves no state of
DeepSpeed or OpenMP behind, and is the very command that a terminal would run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from agentrl.api.child import run_command
from agentrl.api.inputs import Names, Problems, problem_file
from agentrl.api.run import EvaluationRun, Run
from agentrl.config import Settings, load_settings
from agentrl.config.layers import COMMAND_LINE
from agentrl.config.messages import nearest_key
from agentrl.config.settings import SIMPLETIR
from agentrl.errors import SettingsError
from agentrl.problems.rows import require_file
from agentrl.problems.sources import FILE_KINDS, expand
from agentrl_envs.registry import did_you_mean

INPUTS = ".inputs"
"""Folder in ``runs_dir`` for problems and functions that were passed as Python objects."""


def train(
    *,
    env: str | type | None = None,
    problems: str | Path | Problems | None = None,
    eval_problems: str | Path | Problems | None = None,
    reward: object = None,
    config: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    **settings: object,
) -> Run:
    """Train a policy as ``agentrl train`` does, and return the finished run.

    Args:
        env: name of an environment, or a class or function that makes one.
        problems: problems to train on: a file, rows with at least a statement (and an answer, if it is graded), a
            pandas DataFrame, or a Dataset of the ``datasets`` package.
        eval_problems: problems to evaluate on. With ``problems`` and without this, nothing is evaluated.
        reward: a reward function or the name of one; several as a list, or with their weights as a mapping of names.
        config: a YAML file, or the name of a shipped one.
        resume: continue the run called ``name``, or the newest one.
        progress: show a progress bar; without it, the run's console lines.
        settings: any setting, by section (``training={"steps": 20}``) or by its dotted name
            (``**{"training.steps": 20}``).

    An interrupt (Ctrl-C, or a notebook's stop button) saves a checkpoint before KeyboardInterrupt is raised;
    ``resume=True`` continues.

    Raises:
        SettingsError: settings, problems or functions are not usable; nothing was started, or nothing was trained.
        WorldError: the run failed for reasons outside of the settings.
    """
    check_keywords(train, settings)
    folder = Path(str(settings.get("runs_dir") or "runs")) / INPUTS
    names = Names(folder)
    given = dict(settings)
    if problems is not None:
        given["data.train"] = [{"path": _path_of(problems, folder)}]
        given["data.eval"] = []
    if eval_problems is not None:
        given["data.eval"] = [{"path": _path_of(eval_problems, folder)}]
    environment = None if env is None else names.of(env)
    rewards = _rewards(reward, names)
    overrides = overrides_from(_with_plugins(given, names)) + rewards
    with errors_of_a_call():
        resolved = load_settings(environment, config, overrides, resume=resume)
    for source in [*resolved.data.train, *resolved.data.eval]:
        _check_file(source.path)
    path = resolved.run_path
    options = [] if environment is None else ["--env", environment]
    options += [] if config is None else ["--config", str(config)]
    options += ["--resume"] if resume else []
    named = [*overrides, f"name={json.dumps(path.name)}"]
    with errors_of_a_call():
        run_command(["train", *options, *named], progress=progress)
    return Run(path)


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
    progress: bool = True,
    **settings: object,
) -> EvaluationRun:
    """Evaluate a model as ``agentrl eval`` does: ``n`` samples of every problem, avg@n with intervals.

    Args:
        model: a model directory, a Hugging Face id, a finished run, or with ``base_url`` the endpoint's model name.
        env: name of an environment, or a class or function that makes one.
        problems: problems to evaluate on: a file, or rows with at least a statement and an answer.
        benchmarks: names or files of benchmarks, beside ``problems``. Without both, the problems of ``data.eval``.
        n: samples per problem; default: ``evaluation.samples``.
        base_url: an OpenAI-compatible endpoint to sample from.
        output: directory of the evaluation. Default: one named after the model and the arguments, so that the same
            call continues an evaluation that was interrupted.
        config: a YAML file, or the name of a shipped one; default: that of the model's run.
        progress: show a progress bar; without it, the console lines.
        settings: any setting, as in :func:`train`.

    Raises SettingsError and WorldError as :func:`train` does.
    """
    check_keywords(evaluate, settings)
    root = Path("evaluations")
    names = Names(root / INPUTS)
    wanted = list(benchmarks)
    if problems is not None:
        wanted.append(_path_of(problems, root / INPUTS))
    for path in wanted:
        _check_file(path)
    name = str(model.policy if isinstance(model, Run) else model)
    environment = None if env is None else names.of(env)
    options: dict[str, object] = {"--env": environment, "--model": name, "--base-url": base_url, "--n": n}
    options |= {"--benchmarks": ",".join(wanted) or None, "--config": config}
    arguments = [text for key, value in options.items() if value is not None for text in (key, str(value))]
    arguments += overrides_from(_with_plugins(settings, names))
    digest = hashlib.sha256(json.dumps(arguments).encode()).hexdigest()[:8]
    folder = root / f"{Path(name).name}-{digest}" if output is None else Path(output)
    with errors_of_a_call():
        run_command(["eval", *arguments, "--output", str(folder)], progress=progress)
    return EvaluationRun(folder)


def overrides_from(settings: Mapping[str, object], prefix: str = "") -> list[str]:
    """Settings as ``key=value``: mappings become dotted keys, values become JSON, which YAML reads.

    A mapping whose keys are no names of settings, such as the functions of a reward, is a value as a whole.

    >>> overrides_from({"training": {"steps": 5}, "rollout.group_size": 8, "name": "first"})
    ['training.steps=5', 'rollout.group_size=8', 'name="first"']
    """
    found = []
    for key, value in settings.items():
        if isinstance(value, Mapping) and all(name.isidentifier() for name in value):
            found += overrides_from(value, f"{prefix}{key}.")
        else:
            found.append(f"{prefix}{key}={_json(f'{prefix}{key}', value)}")
    return found


def check_keywords(call: Callable[..., object], settings: Mapping[str, object]) -> None:
    """Raise SettingsError for a keyword that is neither an argument of ``call`` nor a setting."""
    arguments = [name for name, one in inspect.signature(call).parameters.items() if one.kind is not one.VAR_KEYWORD]
    for name in settings:
        if name.partition(".")[0] not in Settings.model_fields:
            hint = did_you_mean(name, arguments) or f"; the nearest setting is {nearest_key(name, SIMPLETIR)}"
            raise SettingsError(f"agentrl.{call.__name__} has no argument and no setting {name!r}{hint}")


@contextmanager
def errors_of_a_call() -> Iterator[None]:
    """Remove "(command line)" from error messages: the settings came from a Python call."""
    try:
        yield
    except SettingsError as error:
        raise SettingsError(str(error).replace(f" ({COMMAND_LINE})", "")) from None


def _json(key: str, value: object) -> str:
    try:
        return json.dumps(str(value) if isinstance(value, Path) else value)
    except (TypeError, ValueError) as error:
        raise SettingsError(
            f"{key}={value!r:.200} cannot be a setting: {error}; pass functions and classes as env or reward, or by "
            "name as module:attribute"
        ) from None


def _check_file(path: str) -> None:
    """Raise ProblemFileError for a missing file now, because the command takes seconds to start."""
    if path.lower().endswith(FILE_KINDS):
        require_file(Path(expand(path)))


def _rewards(reward: object, names: Names) -> list[str]:
    """``reward.functions`` from a function, a name, a list of them, or a mapping from names to weights."""
    if reward is None:
        return []
    if isinstance(reward, Mapping):
        weights = {names.of(one): weight for one, weight in reward.items()}
    else:
        weights = {names.of(one): 1.0 for one in (reward if isinstance(reward, list | tuple) else [reward])}
    return [f"reward.functions={json.dumps(weights)}"]


def _with_plugins(settings: Mapping[str, object], names: Names) -> Mapping[str, object]:
    given = settings.get("plugins") or ()
    if not isinstance(given, list | tuple):
        raise SettingsError(f"plugins={given!r}: valid is a list of modules or files")
    return {**settings, "plugins": [*given, *names.plugins]} if names.plugins else settings


def _path_of(problems: str | Path | Problems, folder: Path) -> str:
    return str(problems if isinstance(problems, str | Path) else problem_file(problems, folder))
