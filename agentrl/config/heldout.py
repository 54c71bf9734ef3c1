"""What is evaluated where only a preset names ``data.eval``: what the sources in ``data.train`` hold out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from agentrl.config.overlays import Layer
from agentrl.problems.settings import BUILTIN, DEFAULT_SPLIT, REASONING_GYM

_OF_TRAINING = ("limit", "weight")


def evaluate_on_heldout(layers: Sequence[Layer], presets: Collection[str], train: object) -> list[Layer]:
    """The layers, with what ``train`` holds out as ``data.eval`` of those whose origin is in ``presets``.

    ``train`` is ``data.train`` as all layers give it, not yet validated.
    """
    entries = train if isinstance(train, list) else []
    heldout = [found for entry in entries if isinstance(entry, dict) and (found := _heldout(entry)) is not None]
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
    """The held-out part of a source to train on; None if it has none, as a file without ``part=train``.

    >>> _heldout({"path": "builtin:seeds", "limit": 9})
    {'path': 'builtin:seeds', 'split': 'heldout'}
    >>> _heldout({"path": "mine.jsonl", "part": "train"})
    {'path': 'mine.jsonl', 'part': 'heldout'}
    >>> _heldout({"path": "mine.jsonl"})
    """
    kept = {key: value for key, value in entry.items() if key not in _OF_TRAINING}
    if str(entry.get("path")).startswith((BUILTIN, REASONING_GYM)):
        return kept | {"split": "heldout"} if entry.get("split", DEFAULT_SPLIT) == DEFAULT_SPLIT else None
    return kept | {"part": "heldout"} if entry.get("part") == "train" else None
