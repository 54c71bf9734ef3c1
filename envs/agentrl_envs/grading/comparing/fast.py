"""Comparisons that need no algebra: equal spellings, plain numbers and plain words.

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

from agentrl_envs.grading.reading.expressions import LEADING, ROUNDED, ROUNDED_PLACES
from agentrl_envs.grading.reading.spelling import respelled, squeezed, words_in
from agentrl_envs.types import Verdict

_FRACTION = re.compile(r"([+-]?)\\frac(?:\{(-?[0-9]+)\}\{([0-9]+)\}| *([0-9])([0-9]))")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?|[0-9]*\.[0-9]+|[0-9]+/0*[1-9][0-9]*)")
_LONGEST_NUMBER = 4000  # characters; Python reads no integer of more than 4300 digits
_BRACKETS = re.compile(r"[()\[\]{}]")


def quick_verdict(answer: str, gold: str) -> Verdict | None:
    """The verdict if it is certain without algebra, otherwise None.

    Equal spellings are correct. Integers and ratios are compared exactly, a decimal to six decimal places, two decimals
    to the places of the shorter one. Numbers may have a sign, leading zeros and thousands separators. Words are
    compared by their letters.
    """
    if answer == gold and gold.strip():
        return Verdict.CORRECT
    answer, gold = respelled(answer), respelled(gold)
    if gold and squeezed(answer) == squeezed(gold):
        return Verdict.CORRECT
    return _by_value(answer, gold) or _by_words(answer, gold)


def within_bounds(text: str, *, max_length: int, max_depth: int) -> bool:
    """Whether a text is short and flat enough for a parser. Counts brackets, balanced or not."""
    if len(text) > max_length:
        return False
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= max_depth


def is_plain_number(text: str) -> bool:
    """Whether a text is an integer, a decimal or a ratio in plain notation."""
    return _number(respelled(text)) is not None


def _by_value(answer: str, gold: str) -> Verdict | None:
    answer_value, gold_value = _number(answer), _number(gold)
    if answer_value is None or gold_value is None:
        return None
    if answer_value == gold_value:
        return Verdict.CORRECT
    apart = abs(answer_value - gold_value)
    places = [len(text.partition(".")[2]) for text in (answer, gold) if "." in text]
    if len(places) == 2 and apart > Fraction(1, 2 * 10 ** min(places)):
        return Verdict.INCORRECT  # neither is the other, rounded
    near = apart < ROUNDED and apart <= LEADING * max(abs(answer_value), abs(gold_value))
    return Verdict.CORRECT if near and max(places, default=0) >= ROUNDED_PLACES else Verdict.INCORRECT


def _by_words(answer: str, gold: str) -> Verdict | None:
    answer_words, gold_words = words_in(answer), words_in(gold)
    if answer_words is None or gold_words is None:
        return None
    if answer_words == gold_words:
        return Verdict.CORRECT
    numbers = any(character.isdigit() for character in answer_words + gold_words)
    return None if numbers else Verdict.INCORRECT


def _number(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a ratio in plain notation."""
    fraction = _FRACTION.fullmatch(text)
    plain = text if fraction is None else fraction.expand(r"\1\2\4/\3\5")
    if len(plain) > _LONGEST_NUMBER or _NUMBER.fullmatch(plain) is None:
        return None
    return Fraction(plain.replace(",", ""))
