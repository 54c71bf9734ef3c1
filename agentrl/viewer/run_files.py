"""Readers of a run's settings, plug-ins and tokenizer, and conversion of values to strict JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from agentrl.errors import WorldError
from agentrl.telemetry.files import os_errors_as_world_errors, resolve_path_inside
from agentrl.telemetry.run_directory import RunDirectory
from agentrl_envs.registry import PluginError, load_plugins

_MOST_POINTS = 1_000  # maximum number of points of a curve; longer curves show every second, third, ... token


def to_json(value: object) -> str:
    """Encode strict JSON for browsers, with the strings "NaN", "Infinity" and "-Infinity" for non-finite numbers.

    Escapes all characters outside ASCII, because UTF-8 cannot encode lone surrogates. Dates and other values that JSON
    does not support are converted to strings.
    """
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        return json.dumps(_without_non_finite(value), separators=(",", ":"), default=str)


def _without_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _without_non_finite(inner) for key, inner in value.items()}
    return [_without_non_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def json_numbers(values: np.ndarray) -> list[object]:
    """Convert values to a list for JSON, with None for non-finite numbers."""
    listed: list[object] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [value if kept else None for value, kept in zip(listed, np.isfinite(values), strict=True)]
    return listed


def choose_plotted_indices(length: int) -> np.ndarray:
    """Return the indices of the drawn points of a curve with ``length`` values."""
    return np.arange(0, length, max(1, -(-length // _MOST_POINTS)))


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, available if PyYAML has libyaml
_LARGEST_CONFIG, _DEEPEST_CONFIG = 1 << 20, 32  # a resolved config.yaml has about 10 kB and a depth of 5


def read_run_settings(run: RunDirectory) -> Mapping[str, object]:
    """Read ``config.yaml``. Raises WorldError if training cannot have written the file.

    Size and depth are limited and aliases are rejected, because a few hundred bytes of aliases can expand to gigabytes.
    """
    with os_errors_as_world_errors(run.config, "read"), resolve_path_inside(run.config, run.path).open("rb") as file:
        content = file.read(_LARGEST_CONFIG + 1)
    if len(content) > _LARGEST_CONFIG:
        raise WorldError(f"{run.config} is damaged: it is larger than {_LARGEST_CONFIG >> 20} MB")
    try:
        depth = 0
        for event in yaml.parse(content, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST_CONFIG or isinstance(event, yaml.AliasEvent):
                raise WorldError(f"{run.config} is damaged: it has aliases or more than {_DEEPEST_CONFIG} levels")
        settings = yaml.load(content, Loader=_LOADER)
    except (ValueError, yaml.YAMLError) as error:
        raise WorldError(f"{run.config} is damaged: invalid YAML ({error})") from error
    if not isinstance(settings, Mapping):
        raise WorldError(f"{run.config} is damaged: it is not a mapping of settings")
    return settings


def load_run_plugins(run: RunDirectory) -> list[str]:
    """Load the run's plug-ins. Returns a message for each plug-in that could not be loaded.

    A missing plug-in is not an error, because it is required only if it defines the run's estimator or loss. Files
    inside the run directory are not loaded, because viewing a run must not execute code from it.
    """
    try:
        named = read_run_settings(run).get("plugins")
    except WorldError as error:
        return [str(error)]
    folder = run.path.resolve()
    warnings = []
    for name in map(str, named if isinstance(named, list) else []):
        if Path(name).expanduser().resolve().is_relative_to(folder):
            warnings.append(f"the plug-in {name!r} was not loaded, because it is inside the run directory")
            continue
        try:
            load_plugins([name])
        except PluginError as error:
            warnings.append(str(error))
    return warnings


_TOKENIZER = "tokenizer.json"
_LARGEST_TOKENIZER = 1 << 28  # the largest vocabularies take about 40 MB


class RunTokenizer:
    """Tokenizer of a run, which splits token ids into pieces of text. Without a tokenizer, every piece is None.

    ``error`` is the reason why an existing tokenizer cannot be used, or empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, error: str = "") -> None:
        self._tokenizer, self.error = tokenizer, error
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, about in added.items() if about.special)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def token_pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the text of each token, which is "" if a later token completes its character."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]

    def special_token_indices(self, token_ids: Sequence[int]) -> list[int]:
        """Return the indices of special tokens."""
        return [index for index, token in enumerate(token_ids) if token in self._special]


def read_run_tokenizer(run: RunDirectory) -> RunTokenizer:
    """Return the tokenizer of a run, from its ``tokenizer.json`` or from a saved policy."""
    for folder in (run.path, run.path / "policy", run.path / "best"):
        if (folder / _TOKENIZER).is_file():
            return _open_tokenizer(folder / _TOKENIZER, run.path, (folder / _TOKENIZER).stat().st_mtime_ns)
    return RunTokenizer(None)


# The modification time is part of the cache key, so that a changed tokenizer is read again.
@lru_cache(maxsize=4)
def _open_tokenizer(path: Path, folder: Path, _changed: int) -> RunTokenizer:
    try:
        path = resolve_path_inside(path, folder)
        if path.stat().st_size > _LARGEST_TOKENIZER:
            return RunTokenizer(None, f"{path} is damaged: it is larger than {_LARGEST_TOKENIZER >> 20} MB")
        return RunTokenizer(Tokenizer.from_file(str(path)))
    except (WorldError, OSError) as error:
        return RunTokenizer(None, str(error))
    except Exception as error:  # noqa: BLE001  (tokenizers raises a plain Exception for a damaged file)
        return RunTokenizer(None, f"{path} is damaged: not a tokenizer ({error})")
