"""The settings that a run was made with, and its plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from agentrl.errors import WorldError
from agentrl.telemetry.files import contained, world_errors
from agentrl.telemetry.run_directory import RunDirectory
from agentrl_envs.plugins import load_plugins
from agentrl_envs.registry import PluginError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there
_MOST_BYTES, _DEEPEST = 1 << 20, 32  # a resolved config.yaml has about 10 kB and a depth of 5


def run_settings(run: RunDirectory) -> Mapping[str, object]:
    """Return ``config.yaml`` as it is stored. Raises WorldError if training cannot have written it.

    Limits size and depth, and refuses aliases, because a few hundred bytes of aliases can expand to gigabytes.
    """
    with world_errors(run.config, "read"), contained(run.config, run.path).open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise WorldError(f"{run.config}: damaged, over {_MOST_BYTES >> 20} MB")
    try:
        depth = 0
        for event in yaml.parse(content, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise WorldError(f"{run.config}: damaged, it has aliases or is nested deeper than {_DEEPEST} levels")
        settings = yaml.load(content, Loader=_LOADER)
    except (ValueError, yaml.YAMLError) as error:
        raise WorldError(f"{run.config}: damaged, not valid YAML ({error})") from error
    if not isinstance(settings, Mapping):
        raise WorldError(f"{run.config}: damaged, not a mapping of settings")
    return settings


def load_run_plugins(run: RunDirectory) -> list[str]:
    """Load the modules in which the run's estimators and losses were registered; returns what could not be loaded.

    A plug-in that is gone matters only to a run that took its estimator or loss from it, so it is no error here. A file
    that came with the run is not loaded: whoever opens the run of someone else must not run their code.
    """
    try:
        named = run_settings(run).get("plugins")
    except WorldError as error:
        return [str(error)]
    folder = run.path.resolve()
    problems = []
    for name in map(str, named if isinstance(named, list) else []):
        if Path(name).expanduser().resolve().is_relative_to(folder):
            problems.append(f"plugins {name!r}: it lies in the run's own folder, so it is not loaded")
            continue
        try:
            load_plugins([name])
        except PluginError as error:
            problems.append(str(error))
    return problems
