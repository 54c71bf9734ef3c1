"""The comparisons that need no algebra: equal strings and plain numbers.

>>> quick_verdict("025", "25"), quick_verdict("1,234", "1234"), quick_verdict("27", "27.0")
(<Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>)
>>> quick_verdict("26", "27.0")
<Verdict.INCORRECT: 'incorrect'>
>>> quick_verdict("0.5", r"\\frac{1}{2}") is None
True
"""

from __future__ import annotations

import re

from agentrl_envs.types import Verdict

_INTEGER = re.compile(r"(?P<sign>[+-]?)(?P<digits>[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?", re.ASCII)
_BRACKETS = re.compile(r"[()\[\]{}]")


def quick_verdict(answer: str, gold: str) -> Verdict | None:
    """The verdict where it is certain without algebra, else None. Equal strings, and integers in plain notation.

    Integers may have a sign, leading zeros, thousands commas and a decimal point with nothing but zeros behind it.
    """
    answer, gold = _bare(answer), _bare(gold)
    if answer == gold and gold:
        return Verdict.CORRECT
    answer_integer, gold_integer = _integer(answer), _integer(gold)
    if answer_integer is None or gold_integer is None:
        return None
    return Verdict.CORRECT if answer_integer == gold_integer else Verdict.INCORRECT


def within_bounds(text: str, *, max_length: int, max_depth: int) -> bool:
    """Whether a text is short and flat enough to be given to a parser. Counts brackets, balanced or not."""
    if len(text) > max_length:
        return False
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= max_depth


def _bare(text: str) -> str:
    """Without blanks and dollar signs around it."""
    text = text.strip()
    return text[1:-1].strip() if len(text) > 2 and text[0] == text[-1] == "$" else text


def _integer(text: str) -> str | None:
    """The canonical digits of an integer ("-0" is "0"): a string, because very long ones are not cheap as int."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match["digits"].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match["sign"] == "-" and digits != "0" else digits
