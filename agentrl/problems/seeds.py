"""Problems without content (``builtin:seeds``), for environments that generate a task from a seed."""

from __future__ import annotations

from agentrl.problems.problem_errors import ProblemError
from agentrl_envs.registry import did_you_mean
from agentrl_envs.types import Problem

SPLITS = ("train", "heldout")


class SeedSource:
    """Problem ``i`` of a split and a seed. A problem has only an id, from which an environment derives its seed.

    >>> SeedSource(split="heldout", seed=3).problem(7).id
    'seeds-heldout-3-7'
    """

    size = None

    def __init__(self, *, split: str = "train", seed: int = 0) -> None:
        """Raises ProblemError for an unknown split."""
        if split not in SPLITS:
            raise ProblemError(
                f"builtin:seeds: unknown split {split!r}; valid: {', '.join(SPLITS)}{did_you_mean(split, SPLITS)}"
            )
        self.name = "seeds" if split == "train" else f"seeds:{split}"
        self.identity = f"seeds-{split}-{seed}"

    def problem(self, index: int) -> Problem:
        """Return problem ``index``. Its statement is its id, and it has no answer."""
        name = f"{self.identity}-{index}"
        return Problem(id=name, statement=name, answer=None, source=self.name)
