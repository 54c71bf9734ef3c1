"""What gold answers are made of: numbers, fractions, brackets and letters in LaTeX."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Maker = Callable[[str, str, random.Random], str | None]
"""Makes another answer of a gold one, with a second gold answer and random numbers, or nothing."""

INTEGER = re.compile(r"-?\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
BRACKETED = re.compile(r"(?:\\left)?\s*([(\[])(.+?)(?:\\right)?\s*([)\]])", re.DOTALL)
LETTERS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z}])")


def pieces(gold: str) -> list[str]:
    """What stands between commas outside of brackets."""
    found, depth, last = [], 0, 0
    for match in re.finditer(r"[(\[{]|[)\]}]|,(?!\\!)", gold):
        if match.group() == ",":
            if depth == 0:
                found.append(gold[last : match.start()].strip())
                last = match.end()
        else:
            depth += 1 if match.group() in "([{" else -1
    return [*found, gold[last:].strip()]


def bracketed(gold: str) -> tuple[str, list[str], str] | None:
    """A tuple's or an interval's brackets and parts."""
    match = BRACKETED.fullmatch(gold.strip())
    if match is None or any(bracket in match[2] for bracket in ("(", ")", "[", "]")):
        return None
    parts = pieces(match[2])
    return (match[1], parts, match[3]) if len(parts) > 1 else None


def plain(gold: str) -> bool:
    """An expression alone: no words, relation, bracket, comma or second sign."""
    return not re.search(
        r"[,=<>\[\]:;$%_]|\\(?:text|textnormal|mbox|begin|pm|cup|leq?|geq?|in|approx|infty)(?![a-z])|\\\$|[A-Z]{2}",
        gold,
    )
