"""Settings as text, and what differs between two runs' settings."""

from __future__ import annotations

from typing import Any

import yaml

from agentrl.config.overlays import leaf_paths
from agentrl.config.settings import Settings

RESUME_MAY_CHANGE = ("name", "runs_dir", "training.steps", "telemetry.", "checkpoint.", "evaluation.")
"""Keys, or beginnings of keys, whose change does not change what a resumed run has trained so far."""


def dump_yaml(settings: Settings) -> str:
    """Every setting with its resolved value, as YAML that ``--config`` reads back to equal settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def settings_diff(old: Settings, new: Settings) -> list[str]:
    """``key: old -> new`` for every setting that differs."""
    return [f"{key}: {before!r} -> {after!r}" for key, before, after in _changes(old, new)]


def resume_conflicts(old: Settings, new: Settings) -> list[str]:
    """The lines of :func:`settings_diff` that a resumed run may not have."""
    return [
        f"{key}: {before!r} -> {after!r}" for key, before, after in _changes(old, new) if not may_change_on_resume(key)
    ]


def may_change_on_resume(key: str) -> bool:
    """True when a run may be resumed with another value of the dotted ``key``."""
    return any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in RESUME_MAY_CHANGE)


def _changes(old: Settings, new: Settings) -> list[tuple[str, Any, Any]]:
    before = dict(leaf_paths(old.model_dump(mode="json")))
    after = dict(leaf_paths(new.model_dump(mode="json")))
    absent = "(absent)"
    return [
        (key, before.get(key, absent), after.get(key, absent))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, absent) != after.get(key, absent)
    ]
