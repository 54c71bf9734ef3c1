"""Resolution of a run's settings from layers.

The layers, in increasing precedence: the defaults of the settings models (the published values for large models), the
``tiny`` preset if ``model.path`` is not set, ``--config FILE`` with its ``base`` chain, and ``key=value`` arguments.
Mappings are merged key by key, ``plugins`` are concatenated, and all other values are replaced. On resume, the run's
``config.yaml`` replaces the defaults and the preset, so a plain ``--resume`` continues with the run's settings.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.checks import Command, check_settings
from agentrl.config.messages import CONVERTED, REMOVED, RENAMED, format_value, settings_error, unknown_key_message
from agentrl.config.overlays import Layer, interpolate_variables, parse_yaml, read_overlay_chain, short_form_key
from agentrl.config.settings import RESUME_MAY_CHANGE, SIMPLETIR, Settings, resume_conflicts, settings_model
from agentrl.errors import SettingsError
from agentrl.problems.settings import BUILTIN, DEFAULT_SPLIT, FORMULA, HARBOR, REASONING_GYM, is_generated
from agentrl.rollout.gateway.settings import is_agent_program
from agentrl_envs.registry import ADAPTERS, ENVIRONMENTS, PluginError, did_you_mean, load_plugins

_log = logging.getLogger(__name__)
PRESET = "tiny"
_PRESETS = (PRESET, "arithmetic")  # presets for the embedded policy; the user's model and data override them
COMMAND_LINE = "command line"
_ENV_OPTION = "--env"

_LAYER_SELECTING_KEYS = ("env", "plugins", "name", "runs_dir", "model", "coldstart")
_DIRECT_ANSWER_KEYS = ("direct_share", "direct_turn", "direct_steps")
_TRAINING_ONLY_KEYS = ("limit", "weight")  # keys of a training source that do not apply to its held-out part

Override = tuple[list[str], object]
"""Parts of a dotted key, and the value to set."""


def load_settings(
    env: str | None = None,
    config_file: str | Path | Sequence[str] | None = None,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    command: Command = "train",
) -> Settings:
    """Resolve the settings of a run and check them for ``command``. The resolved ``name`` is always set.

    ``config_file`` is a path, the name of a shipped overlay, or a sequence of paths and names in increasing precedence.
    ``overrides`` are ``key=value`` with dotted keys and YAML values. Raises SettingsError with one line per problem.
    """
    named = [str(config_file)] if isinstance(config_file, str | Path) else [str(name) for name in config_file or ()]
    files = [
        _migrate_saved_layer(layer) if Path(layer.origin).with_name("metrics.jsonl").is_file() else layer
        for name in named
        for layer in read_overlay_chain(name)
    ]
    if env is not None:
        overrides = [f"env={env}", *overrides]
    top = [_parse_override(text) for text in overrides]
    basics = _values_that_select_layers(files, top)
    env = str(basics["env"])
    if env.startswith(REASONING_GYM):  # selects SimpleTIR with the problems and the grading of a data set
        score = "agentrl_envs.adapters.reasoning_gym:score"
        values = {"data": {"train": [{"path": env}]}, "grader": {"function": score}}
        files = [Layer(origin=f"{_ENV_OPTION} {env}", values=values), *files]
        top.append((["env"], SIMPLETIR))
        basics = _values_that_select_layers(files, top)
    if env.startswith(HARBOR):  # harbor:DIRECTORY and harbor:DIRECTORY:COMMAND train on the tasks in the directory
        path = HARBOR + env.removeprefix(HARBOR).partition(":")[0]
        files = [Layer(origin=f"{_ENV_OPTION} {env}", values={"data": {"train": [{"path": path}]}}), *files]
    model = basics["model"]
    presets = {layer.origin for name in _PRESETS for layer in read_overlay_chain(name)}  # of the embedded policy
    # An evaluation has a model or an endpoint, and never uses the embedded policy.
    uses_preset = not resume and command not in ("eval", "check-data", "regrade")
    if uses_preset and isinstance(model, dict) and model.get("path") is None:
        named_origins = {layer.origin for layer in files}
        files = [*(layer for layer in read_overlay_chain(PRESET) if layer.origin not in named_origins), *files]
    layers = [_without_unsuitable_values(layer, basics) if layer.origin in presets else layer for layer in files]
    layers = _add_heldout_evaluation(layers, presets, top)
    if resume:
        return _settings_of_resumed_run(find_run_to_resume(basics), layers, top)
    settings = _merge_and_validate(layers, top, command)
    if settings.name is not None:
        return settings
    model_name = PRESET if settings.model.path is None else Path(settings.model.path).name
    stem = "-".join(Path(name).stem for name in named) or model_name
    runs = Path(settings.runs_dir)
    taken = {path.name for path in runs.iterdir()} if runs.is_dir() else set()
    names = (f"{stem}-{number}" for number in itertools.count(1))
    return settings.model_copy(update={"name": next(name for name in names if name not in taken)})


def _add_heldout_evaluation(layers: list[Layer], presets: set[str], top: Sequence[Override]) -> list[Layer]:
    """Add a layer that evaluates the held-out part of ``data.train``, below all other layers.

    ``data.eval`` of any layer or of ``top`` overrides it. Without presets and ``--env`` layers, ``layers`` are returned
    unchanged.
    """
    origins = {
        layer.origin for layer in layers if layer.origin in presets or layer.origin.startswith(f"{_ENV_OPTION} ")
    }
    if not origins:
        return layers
    layers = [_reset_overridden_sources(layer, top) if layer.origin in origins else layer for layer in layers]
    of_training = [one for one in top if one[0][:2] in (["data"], ["data", "train"])]
    data = _merge_all(SIMPLETIR, layers, of_training)["data"]
    train = data.get("train") if isinstance(data, dict) else None
    entries = train if isinstance(train, list) else []
    heldout = [part for entry in entries if isinstance(entry, dict) and (part := _heldout_source(entry)) is not None]
    derived = Layer(origin="held-out part of data.train", values={"data": {"eval": heldout}})
    return [_reset_overridden_sources(derived, top), *layers]


def _heldout_source(entry: Mapping[str, object]) -> dict[str, object] | None:
    """Return the held-out part of a training source, or None for a source without one (a file without ``part=train``).

    >>> _heldout_source({"path": "builtin:seeds", "limit": 9})
    {'path': 'builtin:seeds', 'split': 'heldout'}
    >>> _heldout_source({"path": "mine.jsonl", "part": "train"})
    {'path': 'mine.jsonl', 'part': 'heldout'}
    >>> _heldout_source({"path": "mine.jsonl"})
    """
    kept = {key: value for key, value in entry.items() if key not in _TRAINING_ONLY_KEYS}
    if is_generated(str(entry.get("path"))):
        return kept | {"split": "heldout"} if entry.get("split", DEFAULT_SPLIT) == DEFAULT_SPLIT else None
    return kept | {"part": "heldout"} if entry.get("part") == "train" else None


def _reset_overridden_sources(preset: Layer, top: Sequence[Override]) -> Layer:
    """Replace each preset source whose path the user overrides. The source's split is also discarded."""
    values = copy.deepcopy(dict(preset.values))
    for keys, path in top:
        if len(keys) == 4 and keys[0] == "data" and keys[3] == "path" and not is_generated(str(path)):
            data = values.get("data")
            sources = data.get(keys[1], []) if isinstance(data, dict) else []
            if keys[2].isdigit() and int(keys[2]) < len(sources):
                sources[int(keys[2])] = {"path": path}
    return replace(preset, values=values)


def _settings_of_resumed_run(run: Path, files: list[Layer], top: list[Override]) -> Settings:
    """Apply the requested changes to a run's saved settings. Raises SettingsError with a list of forbidden changes."""
    saved = [_migrate_saved_layer(layer) for layer in read_overlay_chain(str(run / "config.yaml"))]
    identity: list[Override] = [(["name"], run.name), (["runs_dir"], str(run.parent))]
    before = _merge_and_validate(saved, identity, "train")
    settings = _merge_and_validate([*saved, *files], [*top, *identity], "train")
    conflicts = resume_conflicts(before, settings)
    if conflicts:
        changes = "\n".join(f"  {line}" for line in conflicts)
        raise SettingsError(
            f"--resume: {run} was started with different settings (saved -> requested):\n{changes}\n"
            "omit these settings to continue as saved, or start a new run without --resume; --resume may change: "
            + ", ".join(key + "*" if key.endswith(".") else key for key in RESUME_MAY_CHANGE)
        )
    return settings


def _migrate_saved_layer(layer: Layer) -> Layer:
    """Migrate the layer of a run's ``config.yaml``: rename renamed settings and drop removed settings.

    A new name that the layer already contains keeps its value.
    """
    values = copy.deepcopy(dict(layer.values))
    dropped = []
    for key in (*RENAMED, *REMOVED):
        *sections, last = key.split(".")
        inner: object = values
        for section in sections:
            inner = inner.get(section) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last not in inner:
            continue
        value = inner.pop(last)
        if key in REMOVED:
            dropped.append(f"{key} ({REMOVED[key]})")
        elif value is not None:  # drop null, which was the default of every optional setting
            *sections, last = RENAMED[key].split(".")
            renewed: Any = values
            for section in sections:
                renewed = renewed.setdefault(section, {})
            renewed.setdefault(last, CONVERTED.get(key, lambda same: same)(value))
    if dropped:
        _log.warning("%s: ignored settings that were removed: %s", layer.origin, ", ".join(dropped))
    return replace(layer, values=values)


def find_run_to_resume(merged: Mapping[str, object]) -> Path:
    """Return the run directory called ``name``, or the newest run. Raises SettingsError if there is no such run."""
    runs = Path(str(merged.get("runs_dir") or Settings().runs_dir))
    directories = [path.parent for path in runs.glob("*/config.yaml")]
    name = merged.get("name")
    if name is None:
        if not directories:
            raise SettingsError(f"--resume: no run in {runs} (no folder there has a config.yaml)")
        return max(directories, key=lambda path: ((path / "config.yaml").stat().st_mtime_ns, path.name))
    if runs / str(name) not in directories:
        names = sorted(path.name for path in directories)
        hint = did_you_mean(str(name), names) or f"; existing runs: {', '.join(names) or 'none'}"
        raise SettingsError(f"--resume: name={name!r} is not a run in {runs}{hint}")
    return runs / str(name)


def _without_unsuitable_values(preset: Layer, requested: Mapping[str, object]) -> Layer:
    """Remove settings of a preset layer that do not fit the user's environment, model or data.

    For other environments, the settings of SimpleTIR's environment are removed. With the user's demonstrations, the
    settings of direct answers are removed, because only generated demonstrations support them. With the user's model,
    the cold start is removed.
    """
    values = dict(preset.values)
    evaluation, coldstart = values.get("evaluation"), values.get("coldstart")
    if requested["env"] != SIMPLETIR:
        values.pop("environment", None)
        if isinstance(evaluation, dict):
            values["evaluation"] = {key: value for key, value in evaluation.items() if key != "falsified"}
    requested_coldstart, model, dropped = requested["coldstart"], requested["model"], set[str]()
    assert isinstance(requested_coldstart, dict)
    assert isinstance(model, dict)
    demonstrations = requested_coldstart.get("demonstrations")
    if isinstance(demonstrations, str) and not demonstrations.startswith((BUILTIN, FORMULA)):
        dropped.update(_DIRECT_ANSWER_KEYS)
    if model.get("path") is not None:
        dropped.add("demonstrations")
    if isinstance(coldstart, dict):
        values["coldstart"] = {key: value for key, value in coldstart.items() if key not in dropped}
    return replace(preset, values=values)


def _values_that_select_layers(layers: Sequence[Layer], top: Sequence[Override]) -> dict[str, object]:
    """Return the current values of the settings that determine which other layers apply."""
    return _merge_all(SIMPLETIR, layers, [one for one in top if one[0][0] in _LAYER_SELECTING_KEYS])


def _merge_all(env: str, layers: Sequence[Layer], top: Sequence[Override]) -> dict[str, object]:
    """Merge the defaults of ``env``, then ``layers``, then ``top``, in increasing precedence."""
    merged: dict[str, object] = settings_model(env)().model_dump(mode="json")
    for layer in layers:
        plugins = _concatenate_plugins(merged["plugins"], layer.values.get("plugins", []))
        merged = _merge(merged, layer.values) | {"plugins": plugins}
    for keys, value in top:
        _set_value(merged, keys, _concatenate_plugins(merged["plugins"], value) if keys == ["plugins"] else value)
    return merged


def _concatenate_plugins(below: object, above: object) -> object:
    """Concatenate the plug-ins of two layers, because a layer's settings may use names that its plug-ins register."""
    if not isinstance(below, list) or not isinstance(above, list):
        return above
    return [*below, *(name for name in above if name not in below)]


def _merge(below: dict[str, object], above: Mapping[str, object]) -> dict[str, object]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    return merged


def _parse_override(text: str) -> Override:
    key, equals, value = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise SettingsError(f"{text!r} is not a setting: use key=value, for example rollout.group_size=8")
    parsed = parse_yaml(value, f"{key}={value!r}") if value else ""
    short = short_form_key(key, parsed)
    return [*key.split("."), *([] if short is None else [short])], parsed


def _set_value(merged: dict[str, object], keys: list[str], value: object) -> None:
    """Set one dotted key. A number is a list index, and the index after the last entry appends."""
    key = ".".join(keys)

    def updated(section: object, depth: int) -> object:
        if depth == len(keys):
            return value
        part = keys[depth]
        if section is None:
            section = [] if part.isdigit() else {}
        if isinstance(section, dict):
            section[part] = updated(section.get(part), depth + 1)
        elif isinstance(section, list):
            path, size = ".".join(keys[:depth]), len(section)
            if not part.isdigit() or int(part) > size:
                raise SettingsError(
                    f"{key}={format_value(value)}: {path} has {size} entries; valid indices: 0 to {size}"
                )
            index = int(part)
            section[index : index + 1] = [updated(section[index] if index < size else {}, depth + 1)]
        else:
            raise SettingsError(
                unknown_key_message(key, value, str(merged.get("env", SIMPLETIR)), f" ({COMMAND_LINE})")
            )
        return section

    updated(merged, 0)


def _command_line_layers(top: Sequence[Override]) -> list[Layer]:
    """Convert overrides to layers, so that messages can name the origin of a value."""
    layers = []
    for keys, value in top:
        values: dict[str, object] = {keys[-1]: value}
        for part in reversed(keys[:-1]):
            values = {part: values}
        layers.append(Layer(origin=COMMAND_LINE, values=values))
    return layers


def _merge_and_validate(below: Sequence[Layer], top: Sequence[Override], command: Command) -> Settings:
    basics = _values_that_select_layers(below, top)
    plugins = interpolate_variables(basics["plugins"], path="plugins")
    if isinstance(plugins, list) and all(isinstance(name, str) for name in plugins):  # otherwise validation fails below
        load_plugins(plugins)  # first, because other settings may use names that plug-ins register
    env = _require_known_env(basics["env"])
    merged = interpolate_variables(_merge_all(env, below, top))
    try:
        # Strict JSON validation rejects 8.0, "8" and true as integers, but converts lists to tuples and strings to
        # enums.
        settings = settings_model(env).model_validate_json(json.dumps(merged), strict=True)
    except ValidationError as error:
        raise settings_error(error, env, [*below, *_command_line_layers(top)]) from error
    check_settings(settings, command)
    return settings


def _require_known_env(env: object) -> str:
    if is_agent_program(str(env)) or str(env).partition(":")[0] in ADAPTERS:
        return str(env)
    try:
        ENVIRONMENTS.check(str(env))
    except PluginError as error:
        raise SettingsError(f"env={format_value(env)}: {error}") from error
    return str(env)


def run_config_for_model(model: str) -> str | None:
    """Return the ``config.yaml`` of the run directory that contains a model directory, or None outside of runs."""
    for folder in Path(model).absolute().parents:
        if (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file():
            return str(folder / "config.yaml")
    return None
