"""The settings that a run was made with, and its plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml

from agentrl.telemetry.run_directory import RunDirectory
from agentrl_envs.plugins import load_plugins
from agentrl_envs.registry import PluginError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where libyaml is there


def run_settings(run: RunDirectory) -> Mapping[str, object]:
    """``config.yaml`` as it stands; empty where it is damaged."""
    try:
        settings = yaml.load(run.config.read_bytes(), Loader=_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def model_path(settings: Mapping[str, object]) -> object:
    """The model that a run began with: a folder, a name of the Hugging Face hub, or None."""
    model = settings.get("model")
    return model.get("path") if isinstance(model, Mapping) else None


def load_run_plugins(run: RunDirectory) -> list[str]:
    """Load the modules in which the run's estimators and losses were registered; returns what could not be loaded.

    A plug-in that is gone matters only to a run that took its estimator or loss from it, so it is no error here. A file
    that came with the run is not loaded: whoever opens the run of someone else must not run their code.
    """
    named = run_settings(run).get("plugins")
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
