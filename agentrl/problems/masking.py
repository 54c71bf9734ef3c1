"""Masking of the numbers in statements, and splits without common masked statements.

Two problems that differ only in their numbers are the same exercise for a model that has seen one of them. Data of the
cold start, training and evaluation are therefore kept disjoint by *masked* statements.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentrl.problems.mixture import digest_of
from agentrl.problems.numbers import NUMBER
from agentrl_envs.types import Problem

_SPACE = re.compile(r"\W+")


def masked_statement(statement: str) -> str:
    """Return ``statement`` in lower case, with numbers (digits and words) as ``#`` and without punctuation.

    >>> masked_statement("Tom has 1,250 pens and twenty-six  cups!") == masked_statement("tom has 3 pens, and 2 cups")
    True
    >>> masked_statement("Tom has 1,250 pens and twenty-six  cups!")
    'tom has # pens and # cups'
    """
    # Numbers become a word before punctuation is removed, because `#` would be removed with it.
    masked = NUMBER.sub(" \0 ", statement.casefold())
    return _SPACE.sub(" ", masked.replace("\0", "_number_")).strip().replace("_number_", "#")


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedSplit:
    """Two parts in input order without a common masked statement, and the numbers of removed problems."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    excluded: int  # problems with the masked statement of an excluded problem
    repeated: int  # problems with the statement and answer of an earlier one


def split_by_masked_statement(
    problems: Sequence[Problem], *, heldout_fraction: float, exclude: Iterable[str] = ()
) -> MaskedSplit:
    """Remove repeats and the statements in ``exclude``, then split by a hash of the masked statement.

    The part of a problem depends only on its masked statement and ``heldout_fraction`` (in [0, 1]). Files that are
    split separately are therefore consistent, and adding problems to a file moves none of the others.
    """
    if not 0 <= heldout_fraction <= 1:
        raise ValueError(f"heldout_fraction must be in [0, 1], got {heldout_fraction}")
    excluded_keys = {masked_statement(statement) for statement in exclude}
    seen: set[tuple[str, str | None, str]] = set()
    train: list[Problem] = []
    heldout: list[Problem] = []
    excluded = repeated = 0
    for problem in problems:
        key = masked_statement(problem.statement)
        content = (problem.statement.strip(), problem.answer, digest_of(problem.info))
        if key in excluded_keys:
            excluded += 1
        elif content in seen:
            repeated += 1
        else:
            (heldout if _position(key) < heldout_fraction else train).append(problem)
        seen.add(content)
    return MaskedSplit(train=tuple(train), heldout=tuple(heldout), excluded=excluded, repeated=repeated)


def _position(key: str) -> float:
    """Map a masked statement to a fixed point in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
