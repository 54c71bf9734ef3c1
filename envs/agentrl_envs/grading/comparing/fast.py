"""The comparisons that need no algebra: equal spellings, plain numbers and plain words.

>>> quick_verdict("025", "25"), quick_verdict("1,234", "1234"), quick_verdict("0.5", r"\\dfrac{1}{2}")
(<Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>)
>>> quick_verdict("26", "27.0"), quick_verdict("2/3", r"\\frac{3}{4}"), quick_verdict("odd", r"\\text{even}")
(<Verdict.INCORRECT: 'incorrect'>, <Verdict.INCORRECT: 'incorrect'>, None)
>>> quick_verdict("0.333333", r"\\frac{1}{3}"), quick_verdict("0.3333", r"\\frac{1}{3}")
(<Verdict.CORRECT: 'correct'>, <Verdict.INCORRECT: 'incorrect'>)
"""

from __future__ import annotations

import re
from fractions import Fraction

from agentrl_envs.grading.reading.expressions import ROUNDED_PLACES
from agentrl_envs.grading.reading.spelling import respelled, words_in
from agentrl_envs.types import Verdict

_INTEGER = re.compile(r"(?P<sign>[+-]?)(?P<digits>[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?", re.ASCII)
_DECIMAL = re.compile(r"(?P<sign>[+-]?)(?P<number>[0-9]{0,30}\.[0-9]{1,30})", re.ASCII)
_RATIO = re.compile(
    r"(?P<sign>[+-]?)(?:\\frac\{(?P<inner>-?)(?P<over>[0-9]{1,30})\}\{(?P<under>[0-9]{1,30})\}"
    r"|\\frac *(?P<over1>[0-9])(?P<under1>[0-9])"
    r"|(?P<over2>[0-9]{1,30})/(?P<under2>[0-9]{1,30}))",
    re.ASCII,
)
_BRACKETS = re.compile(r"[()\[\]{}]")
_AROUND_SIGNS = re.compile(r"(?<=[^A-Za-z0-9.]) | (?=[^A-Za-z0-9.])")
_ROUNDED = Fraction(1, 2 * 10**6)  # decimals count as equal when they agree in six digits behind the point
_LEADING_DIGITS = Fraction(1, 10**5)  # ... and, where they are small, in their leading digits


def quick_verdict(answer: str, gold: str) -> Verdict | None:
    """The verdict where it is certain without algebra, else None.

    Equal spellings are correct. Integers and ratios are compared exactly, decimals to six digits behind the point, two
    of them to the digits of the shorter; they may have a sign, leading zeros and thousands commas. Words are compared
    by their letters.
    """
    if answer == gold and gold.strip():
        return Verdict.CORRECT
    answer, gold = respelled(answer), respelled(gold)
    if gold and _AROUND_SIGNS.sub("", answer) == _AROUND_SIGNS.sub("", gold):
        return Verdict.CORRECT
    answer_integer, gold_integer = _integer(answer), _integer(gold)
    if answer_integer is not None and gold_integer is not None:
        return Verdict.CORRECT if answer_integer == gold_integer else Verdict.INCORRECT
    return _by_value(answer, gold) or _by_words(answer, gold)


def within_bounds(text: str, *, max_length: int, max_depth: int) -> bool:
    """Whether a text is short and flat enough to be given to a parser. Counts brackets, balanced or not."""
    if len(text) > max_length:
        return False
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= max_depth


def is_plain_number(text: str) -> bool:
    """Whether a text is an integer, a decimal or a ratio in plain notation."""
    text = respelled(text)
    return _integer(text) is not None or _rational(text) is not None


def _by_value(answer: str, gold: str) -> Verdict | None:
    answer_value, gold_value = _rational(answer), _rational(gold)
    if answer_value is None or gold_value is None:
        return None
    if answer_value == gold_value:
        return Verdict.CORRECT
    apart = abs(answer_value - gold_value)
    places = [len(text.partition(".")[2]) for text in (answer, gold) if _DECIMAL.fullmatch(text)]
    if len(places) == 2 and apart > Fraction(1, 2 * 10 ** min(places)):
        return Verdict.INCORRECT  # neither is the other, rounded
    near = apart < _ROUNDED and apart <= _LEADING_DIGITS * max(abs(answer_value), abs(gold_value))
    return Verdict.CORRECT if near and max(places, default=0) >= ROUNDED_PLACES else Verdict.INCORRECT


def _by_words(answer: str, gold: str) -> Verdict | None:
    answer_words, gold_words = words_in(answer), words_in(gold)
    if answer_words is None or gold_words is None:
        return None
    if answer_words == gold_words:
        return Verdict.CORRECT
    numbers = any(character.isdigit() for character in answer_words + gold_words)
    return None if numbers else Verdict.INCORRECT


def _integer(text: str) -> str | None:
    """The canonical digits of an integer ("-0" is "0"): a string, because very long ones are not cheap as int."""
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match["digits"].replace(",", "").lstrip("0") or "0"
    return "-" + digits if match["sign"] == "-" and digits != "0" else digits


def _rational(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a ratio in plain notation."""
    integer = _integer(text)
    if integer is not None:
        return Fraction(int(integer)) if len(integer) <= 30 else None
    decimal = _DECIMAL.fullmatch(text)
    if decimal is not None:
        value = Fraction("0" + decimal["number"])
        return -value if decimal["sign"] == "-" else value
    ratio = _RATIO.fullmatch(text)
    if ratio is None:
        return None
    over = ratio["over"] or ratio["over1"] or ratio["over2"]
    under = int(ratio["under"] or ratio["under1"] or ratio["under2"])
    if under == 0:
        return None
    value = Fraction(int(over), under)
    return -value if (ratio["sign"] == "-") != (ratio["inner"] == "-") else value
