"""Settings as text, and the differences between the settings of two runs."""

from __future__ import annotations

import yaml

from agentrl.config.overlays import leaf_paths
from agentrl.config.settings import Settings

_MAY_CHANGE = """
    name runs_dir model.gradient_checkpointing model.checkpoint_offload model.attention
    sandbox.url sandbox.workers sandbox.retry_deadline sandbox.service_deadline sandbox.first_user
    sandbox.allow_unisolated
    grader.workers grader.start_deadline grader.cache_size
    rollout.engine rollout.concurrency rollout.kv_high_watermark rollout.environment_deadline rollout.step_deadline
    rollout.retries rollout.max_batch_tokens rollout.kv_cache_tokens rollout.vllm. rollout.options reward.deadline
    training.steps training.micro_batch_tokens training.head_backend training.threads
    training.worker_timeout training.collective_deadline training.sequence_parallel
    training.num_processes training.zero_stage training.persistence_threshold training.offload
    cluster. checkpoint. evaluation. telemetry.
"""
RESUME_MAY_CHANGE = tuple(_MAY_CHANGE.split())
"""Keys, or prefixes of keys, that a resumed run may change. They affect duration, location and resources of a run,
but not the problems, the sampling distribution or the gradient."""


def dump_yaml(settings: Settings) -> str:
    """Format all resolved settings as YAML, which ``--config`` reads back as equal settings."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def settings_diff(old: Settings, new: Settings) -> list[str]:
    """Return ``key: old -> new`` for every setting that differs."""
    return [f"{key}: {before!r} -> {after!r}" for key, before, after in _changes(old, new)]


def resume_conflicts(old: Settings, new: Settings) -> list[str]:
    """Return the lines of :func:`settings_diff` for settings that a resumed run must not change."""
    return [
        f"{key}: {before!r} -> {after!r}" for key, before, after in _changes(old, new) if not may_change_on_resume(key)
    ]


def may_change_on_resume(key: str) -> bool:
    """Return True if a resumed run may change the dotted ``key``."""
    return any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in RESUME_MAY_CHANGE)


def _changes(old: Settings, new: Settings) -> list[tuple[str, object, object]]:
    before = dict(leaf_paths(old.model_dump(mode="json")))
    after = dict(leaf_paths(new.model_dump(mode="json")))
    absent = "(absent)"
    return [
        (key, before.get(key, absent), after.get(key, absent))
        for key in dict.fromkeys([*before, *after])
        if before.get(key, absent) != after.get(key, absent)
    ]
