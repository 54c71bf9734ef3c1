"""Held-out parts of the sources in ``data.train`` as ``data.eval``, used if only a preset sets ``data.eval``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from agentrl.config.overlays import Layer
from agentrl.problems.settings import DEFAULT_SPLIT, is_generated

_OF_TRAINING = ("limit", "weight")


def evaluate_on_heldout(layers: Sequence[Layer], presets: Collection[str], train: object) -> list[Layer]:
    """Replace ``data.eval`` in the layers with an origin in ``presets`` by the held-out parts of ``train``.

    ``train`` is the merged ``data.train`` of all layers before validation.
    """
    entries = train if isinstance(train, list) else []
    heldout = [part for entry in entries if isinstance(entry, dict) and (part := _heldout(entry)) is not None]
    return [_with_eval(layer, heldout) if layer.origin in presets else layer for layer in layers]


def sets_evaluation(layer: Layer) -> bool:
    data = layer.values.get("data")
    return isinstance(data, dict) and "eval" in data


def _with_eval(layer: Layer, heldout: list[dict[str, object]]) -> Layer:
    data = layer.values.get("data")
    if not isinstance(data, dict) or not sets_evaluation(layer):
        return layer
    return replace(layer, values={**layer.values, "data": {**data, "eval": heldout}})


def _heldout(entry: Mapping[str, object]) -> dict[str, object] | None:
    """Held-out part of a training source, or None if it has none, like a file without ``part=train``.

    >>> _heldout({"path": "builtin:seeds", "limit": 9})
    {'path': 'builtin:seeds', 'split': 'heldout'}
    >>> _heldout({"path": "mine.jsonl", "part": "train"})
    {'path': 'mine.jsonl', 'part': 'heldout'}
    >>> _heldout({"path": "mine.jsonl"})
    """
    kept = {key: value for key, value in entry.items() if key not in _OF_TRAINING}
    if is_generated(str(entry.get("path"))):
        return kept | {"split": "heldout"} if entry.get("split", DEFAULT_SPLIT) == DEFAULT_SPLIT else None
    return kept | {"part": "heldout"} if entry.get("part") == "train" else None
