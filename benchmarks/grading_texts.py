"""Parts of gold answers: numbers, fractions, brackets and letters in LaTeX."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

Maker = Callable[[str, str, random.Random], str | None]
"""Function of a gold answer, a second gold answer and random numbers. Returns another answer, or None."""

INTEGER = re.compile(r"-?\d+")
FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")
BRACKETED = re.compile(r"(?:\\left)?\s*([(\[])(.+?)(?:\\right)?\s*([)\]])", re.DOTALL)
LETTERS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z](?![A-Za-z}])")


def pieces(gold: str) -> list[str]:
    """Split an answer at commas outside brackets."""
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
    """Return the brackets and parts of a tuple or an interval, or None."""
    match = BRACKETED.fullmatch(gold.strip())
    if match is None or any(bracket in match[2] for bracket in ("(", ")", "[", "]")):
        return None
    parts = pieces(match[2])
    return (match[1], parts, match[3]) if len(parts) > 1 else None


def plain(gold: str) -> bool:
    """Return True for a single expression, without words, relation, bracket, comma or second sign."""
    return not re.search(
        r"[,=<>\[\]:;$%_]|\\(?:text|textnormal|mbox|begin|pm|cup|leq?|geq?|in|approx|infty)(?![a-z])|\\\$|[A-Z]{2}",
        gold,
    )
