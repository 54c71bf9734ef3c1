"""Settings and plug-ins of a finished or active run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from agentrl.errors import WorldError
from agentrl.telemetry.files import contained, world_errors
from agentrl.telemetry.run_directory import RunDirectory
from agentrl_envs.registry import PluginError, load_plugins

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, available if PyYAML has libyaml
_MOST_BYTES, _DEEPEST = 1 << 20, 32  # a resolved config.yaml has about 10 kB and a depth of 5


def run_settings(run: RunDirectory) -> Mapping[str, object]:
    """Return ``config.yaml`` as it is stored. Raises WorldError if training cannot have written it.

    Size and depth are limited and aliases rejected, because a few hundred bytes of aliases can expand to gigabytes.
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
    """Load the modules that registered the run's estimators and losses. Returns messages for those that failed.

    A missing plug-in is not an error, because it matters only if the run's estimator or loss comes from it. Files
    inside the run directory are not loaded: opening a run from someone else must not execute their code.
    """
    try:
        named = run_settings(run).get("plugins")
    except WorldError as error:
        return [str(error)]
    folder = run.path.resolve()
    problems = []
    for name in map(str, named if isinstance(named, list) else []):
        if Path(name).expanduser().resolve().is_relative_to(folder):
            problems.append(f"plugins {name!r}: not loaded, because it is inside the run directory")
            continue
        try:
            load_plugins([name])
        except PluginError as error:
            problems.append(str(error))
    return problems
