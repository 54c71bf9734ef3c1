"""Conversion of the options of ``agentrl eval`` to settings. Imports no heavy library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import SettingsError
from agentrl.evaluation.settings import PRESETS
from agentrl_envs.registry import did_you_mean


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """Options that are not settings.

    ``ks`` is empty for 1, 2, 4 .. n. ``conversations`` limits the conversations per problem in the report; None stands
    for as many as fit into 10 MB.
    """

    benchmarks: tuple[str, ...] = ()
    data_dir: Path | None = None
    output: Path | None = None
    ks: tuple[int, ...] = ()
    conversations: int | None = None


def overrides_of(
    *, model: str | None, base_url: str | None, preset: str | None, n: int | None, falsified: bool
) -> list[str]:
    """Convert the options to ``key=value``, in increasing precedence. Raises SettingsError for an unknown preset.

    >>> overrides_of(model="it's", base_url=None, preset=None, n=4, falsified=True)
    ["model.path='it''s'", 'evaluation.samples=4', 'evaluation.falsified=true']
    """
    overrides = []
    if preset is not None:
        if preset not in PRESETS:
            hint = did_you_mean(preset, PRESETS)
            raise SettingsError(f"--preset {preset}: unknown preset; valid: {', '.join(PRESETS)}{hint}")
        overrides += [f"{key}={value}" for key, value in PRESETS[preset].items()]
    if base_url is not None:
        overrides.append(quoted("evaluation.endpoint.url", base_url))
    if model is not None:
        overrides.append(quoted("model.path" if base_url is None else "evaluation.endpoint.model", model))
    overrides += [] if n is None else [f"evaluation.samples={n}"]
    overrides += ["evaluation.falsified=true"] if falsified else []
    return overrides


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse positive integers separated by commas into a sorted tuple without duplicates. Raises SettingsError.

    >>> whole_numbers("--k", "8, 1,8")
    (1, 8)
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise SettingsError(f"{option}={text}: expected positive whole numbers, separated by commas")
    return tuple(sorted({int(part) for part in parts}))


def quoted(key: str, text: str) -> str:
    """Format ``key=text``, quoted so that YAML reads exactly this text."""
    escaped = text.replace("'", "''")
    return f"{key}='{escaped}'"
