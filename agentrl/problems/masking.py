"""Statements with their numbers masked, and splits that share none of them.

Two problems that differ in their numbers alone are the same exercise for a model that has seen one. So cold start,
training and evaluation are kept apart by *masked* statements.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.problems.numbers import NUMBER
from agentrl_envs.types import Problem

_SPACE = re.compile(r"\W+")


def masked_statement(statement: str) -> str:
    """``statement`` in lower case, numbers (digits and words) as ``#``, punctuation and spacing dropped.

    >>> masked_statement("Tom has 1,250 pens and twenty-six  cups!") == masked_statement("tom has 3 pens, and 2 cups")
    True
    >>> masked_statement("Tom has 1,250 pens and twenty-six  cups!")
    'tom has # pens and # cups'
    """
    masked = NUMBER.sub(" \0 ", statement.casefold())
    return _SPACE.sub(" ", masked.replace("\0", "_number_")).strip().replace("_number_", "#")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport:
    """What a split did with every problem it was given: the four counts add up to ``given``."""

    given: int
    train: int
    heldout: int
    excluded: int  # their masked statement stands in the excluded problems
    repeated: int  # statement and answer stood before

    def describe(self) -> str:
        """One line for the console."""
        return (
            f"{self.given} problems: {self.train} train, {self.heldout} held out,"
            f" {self.excluded} removed as in the excluded problems (numbers masked), {self.repeated} removed as repeats"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSplit:
    """Two parts without a common masked statement, in the order given."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    report: SplitReport


def split_by_masked_statement(
    problems: Sequence[Problem], *, heldout_fraction: float, exclude: Iterable[str] = ()
) -> MaskedSplit:
    """Split by a hash of the masked statement, after removing repeats and what ``exclude`` (statements) holds.

    The side of a problem depends on its masked statement and ``heldout_fraction`` (in [0, 1]) alone, so files that are
    split apart agree, and growing files move nothing.
    """
    if not 0 <= heldout_fraction <= 1:
        raise ValueError(f"heldout_fraction must be in [0, 1], got {heldout_fraction}")
    gone = {masked_statement(statement) for statement in exclude}
    seen: set[tuple[str, str]] = set()
    train: list[Problem] = []
    heldout: list[Problem] = []
    excluded = repeated = 0
    for problem in problems:
        key = masked_statement(problem.statement)
        content = (problem.statement.strip(), problem.answer)
        if key in gone:
            excluded += 1
        elif content in seen:
            repeated += 1
        else:
            (heldout if _position(key) < heldout_fraction else train).append(problem)
        seen.add(content)
    report = SplitReport(
        given=len(problems), train=len(train), heldout=len(heldout), excluded=excluded, repeated=repeated
    )
    return MaskedSplit(train=tuple(train), heldout=tuple(heldout), report=report)


def _position(key: str) -> float:
    """A fixed point in [0, 1) for every masked statement."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
