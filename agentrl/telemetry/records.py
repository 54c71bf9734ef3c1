"""Types of the JSON records in checkpoints, ``metrics.jsonl``, ``summary.json`` and evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

Metrics = dict[str, float]
"""A row of ``metrics.jsonl``: finite numbers by name, including the integer ``step``."""


JsonRecord = dict[str, Any]
"""An object from a JSON file."""


class IntervalRecord(TypedDict):
    """A 95 % confidence interval."""

    low: float
    high: float


class ScoreRecord(TypedDict):
    """Mean score with both intervals, as in `agentrl.evaluation.scores.Score`."""

    mean: float
    this_benchmark: IntervalRecord
    problems_like_these: IntervalRecord
    problems: int
    samples: int
    problems_without_samples: int


class EvaluationRecord(ScoreRecord):
    """Score of one evaluation during training: avg@k at a step."""

    step: int
    falsified: bool
    k: int


class BestRecord(EvaluationRecord):
    """The best evaluation. ``policy`` is the policy's directory in the run directory, or None if it was not kept."""

    policy: str | None


class ChangeRecord(TypedDict):
    """Means at the start and the end of training.

    ``standard_errors`` is the rise in standard errors, or None if the standard error is 0.
    """

    start: float
    end: float
    standard_errors: float | None


class Summary(TypedDict):
    """Content of ``summary.json``.

    ``evaluations`` contains the rows of evaluations in ``metrics.jsonl``, and ``scores`` their records.
    ``worse_than_start`` is true if the held-out score (or the reward, without evaluations) fell by at least three
    standard errors. ``alerts`` contains the first alert of each rule in ``alerts.jsonl``, causes before symptoms.
    """

    agentrl: str
    steps: int
    updates: int
    seed: int
    train_seconds: float
    evaluations: list[Metrics]
    scores: list[EvaluationRecord]
    best: BestRecord | None
    worse_than_start: bool
    reward_change: ChangeRecord | None
    held_out_change: ChangeRecord | None
    alerts: list[JsonRecord]


def dotted_keys(record: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings, and lists of mappings, to dotted keys, as in ``key=value`` settings.

    >>> dotted_keys({"seed": 1, "model": {"path": None}, "data": {"eval": [{"path": "a.jsonl"}], "train": []}})
    {'seed': 1, 'model.path': None, 'data.eval.0.path': 'a.jsonl', 'data.train': []}
    """
    flat: dict[str, object] = {}
    for key, value in record.items():
        nested = value
        if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            nested = {str(index): item for index, item in enumerate(value)}
        if isinstance(nested, Mapping) and nested:
            flat |= dotted_keys(nested, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
