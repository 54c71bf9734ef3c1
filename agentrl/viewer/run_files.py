"""Shared readers of a run: its settings, plug-ins and tokenizer, and conversion of values to strict JSON."""

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
from agentrl.telemetry.files import contained, world_errors
from agentrl.telemetry.run_directory import RunDirectory
from agentrl_envs.registry import PluginError, load_plugins

_POINTS = 1_000  # maximum number of points of a curve; of a longer one every second, third, ... token is drawn


def to_json(value: object) -> str:
    """Return strict JSON for browsers, with the strings "NaN", "Infinity" and "-Infinity" for non-finite numbers.

    Escapes all characters outside ASCII, because strings may contain lone surrogates, which UTF-8 cannot encode.
    Dates and other values that JSON does not have are written as strings.
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


def finite(values: np.ndarray) -> list[object]:
    """Return exact values for JSON, with None in place of numbers that are not finite."""
    listed: list[object] = values.tolist()
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return [value if kept else None for value, kept in zip(listed, np.isfinite(values), strict=True)]
    return listed


def drawn_indices(length: int) -> np.ndarray:
    """Return the indices at which a curve of ``length`` values is drawn."""
    return np.arange(0, length, max(1, -(-length // _POINTS)))


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, available if PyYAML has libyaml
_LARGEST_CONFIG, _DEEPEST = 1 << 20, 32  # a resolved config.yaml has about 10 kB and a depth of 5


def run_settings(run: RunDirectory) -> Mapping[str, object]:
    """Return ``config.yaml`` as it is stored. Raises WorldError if training cannot have written it.

    Size and depth are limited and aliases rejected, because a few hundred bytes of aliases can expand to gigabytes.
    """
    with world_errors(run.config, "read"), contained(run.config, run.path).open("rb") as file:
        content = file.read(_LARGEST_CONFIG + 1)
    if len(content) > _LARGEST_CONFIG:
        raise WorldError(f"{run.config} is damaged: larger than {_LARGEST_CONFIG >> 20} MB")
    try:
        depth = 0
        for event in yaml.parse(content, Loader=_LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST or isinstance(event, yaml.AliasEvent):
                raise WorldError(f"{run.config} is damaged: it has aliases or more than {_DEEPEST} levels")
        settings = yaml.load(content, Loader=_LOADER)
    except (ValueError, yaml.YAMLError) as error:
        raise WorldError(f"{run.config} is damaged: invalid YAML ({error})") from error
    if not isinstance(settings, Mapping):
        raise WorldError(f"{run.config} is damaged: not a mapping of settings")
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
            problems.append(f"the plug-in {name!r} was not loaded, because it is inside the run directory")
            continue
        try:
            load_plugins([name])
        except PluginError as error:
            problems.append(str(error))
    return problems


_TOKENIZER = "tokenizer.json"
_LARGEST_TOKENIZER = 1 << 28  # the largest vocabularies take about 40 MB


class TokenText:
    """Splits a run's token ids into pieces of text. Without the run's tokenizer, every piece is None.

    ``problem`` is the reason why an existing tokenizer cannot be used, or empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, problem: str = "") -> None:
        self._tokenizer, self.problem = tokenizer, problem
        added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, about in added.items() if about.special)

    @property
    def known(self) -> bool:
        return self._tokenizer is not None

    def pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return the text that each token adds: "" if a later token completes its character."""
        if self._tokenizer is None:
            return [None] * len(token_ids)
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token) or "" for token in token_ids]

    def specials(self, token_ids: Sequence[int]) -> list[int]:
        """Return the indices of special tokens."""
        return [index for index, token in enumerate(token_ids) if token in self._special]


def token_text(run: RunDirectory) -> TokenText:
    """Return the tokenizer of a run, from the file that training writes at its start or from a saved policy."""
    for folder in (run.path, run.path / "policy", run.path / "best"):
        if (folder / _TOKENIZER).is_file():
            return _open_tokenizer(folder / _TOKENIZER, run.path, (folder / _TOKENIZER).stat().st_mtime_ns)
    return TokenText(None)


# Keyed by the modification time, so that a tokenizer that changes is read again.
@lru_cache(maxsize=4)
def _open_tokenizer(path: Path, folder: Path, _changed: int) -> TokenText:
    try:
        path = contained(path, folder)
        if path.stat().st_size > _LARGEST_TOKENIZER:
            return TokenText(None, f"{path} is damaged: larger than {_LARGEST_TOKENIZER >> 20} MB")
        return TokenText(Tokenizer.from_file(str(path)))
    except (WorldError, OSError) as error:
        return TokenText(None, str(error))
    except Exception as error:  # noqa: BLE001  (tokenizers raises a plain Exception for a damaged file)
        return TokenText(None, f"{path} is damaged: not a tokenizer ({error})")
