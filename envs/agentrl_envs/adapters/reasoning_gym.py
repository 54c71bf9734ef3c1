"""Procedural data sets of reasoning-gym: ``--env reasoning_gym:NAME``, with the extra ``reasoning-gym``.

Problems are generated on demand. Answers are scored by the data set's own rules, including partial credit.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentrl_envs.registry import PluginError, did_you_mean, install_command
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX = "reasoning_gym:"
# reasoning-gym draws problem i with seed + i, so the seeds of disjoint data sets must be at least this far apart.
_DATASET_SIZE = 1 << 14
_HELDOUT_SEED_OFFSET = 1 << 30
SPLITS = ("train", "heldout")


class ReasoningGymSource:
    """The problems of a data set, seed and split. ``options`` are passed to the data set's configuration.

    The two splits have different seeds. If a data set has few distinct problems, the splits may still share problems.
    """

    size = _DATASET_SIZE

    def __init__(self, name: str, *, split: str = "train", seed: int = 0, options: Mapping[str, object]) -> None:
        """Create a source. Raises PluginError if the package is missing, or if the name or options are invalid."""
        if split not in SPLITS:
            raise PluginError(f"{PREFIX}{name}: unknown split {split!r}; valid: {', '.join(SPLITS)}")
        self._first = seed * _DATASET_SIZE + (_HELDOUT_SEED_OFFSET if split == "heldout" else 0)
        self._options = dict(options)
        self._dataset = _load_dataset(name, json.dumps(self._options, sort_keys=True), self._first)
        self._kind = name
        self.name = f"{PREFIX}{name}" + (":heldout" if split == "heldout" else "")
        self.identity = f"{self.name}-{seed}-{json.dumps(self._options, sort_keys=True)}"

    def problem(self, index: int) -> Problem:
        """Return problem ``index``. Its ``info`` contains everything that `score` needs."""
        entry = self._dataset[index]
        return Problem(
            id=f"{self._kind}-{self._first + index}",
            statement=entry["question"],
            answer=None if entry["answer"] is None else str(entry["answer"]),
            source=self.name,
            family=self._kind,
            info={"dataset": self._kind, "options": self._options, "first": self._first, "index": index},
        )


def score(answer: str, problem: Problem) -> float:
    """Return the data set's score of an answer, from 0 to 1. Used as ``grader.function``."""
    info = problem.info
    dataset = _load_dataset(str(info["dataset"]), json.dumps(info["options"], sort_keys=True), int(info["first"]))
    return min(1.0, max(0.0, float(dataset.score_answer(answer, dataset[int(info["index"])]))))


@functools.lru_cache(maxsize=64)
def _load_dataset(name: str, options: str, seed: int) -> ProceduralDataset:
    try:
        from reasoning_gym import create_dataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise PluginError(f"{PREFIX}{name}: {error}; install it: {install_command('reasoning-gym')}") from error
    if name not in DATASETS:
        raise PluginError(
            f"{PREFIX}{name}: reasoning-gym has no data set of this name{did_you_mean(name, DATASETS)} "
            f"(it has {len(DATASETS)} data sets)"
        )
    try:
        return create_dataset(name, seed=seed, size=_DATASET_SIZE, **json.loads(options))
    except (AssertionError, TypeError, ValueError) as error:
        raise PluginError(f"{PREFIX}{name}: invalid options {options}: {error}") from error
