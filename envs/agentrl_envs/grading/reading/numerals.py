"""Numbers in words.

>>> number_in_words("one hundred and three").value, number_in_words("evelyn")
(Fraction(103, 1), None)
>>> scaled_by_words("5 million"), scaled_by_words("5 miles")
(('5', Fraction(1000000, 1)), None)
"""

from __future__ import annotations

import re
from fractions import Fraction

from agentrl_envs.grading.reading.expressions import Number

_SMALL = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen
"""
_TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {name: value for value, name in enumerate(_SMALL.split())}
_VALUES |= {name: 10 * value for value, name in enumerate(_TENS.split()) if name != "_"}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(
    rf"(?P<rest>.*\d)\s*(?:\\text\s*\{{\s*)?(?P<scale>hundred|{'|'.join(_SCALES)})(?:\s*\}})?", re.DOTALL
)


def number_in_words(words: str) -> Number | None:
    """The integer that all of the words name, or None."""
    total = part = 0
    found = False
    for word in re.split(r"[\s-]+", words.strip().casefold()):
        if word in _VALUES:
            part, found = part + _VALUES[word], True
        elif word == "hundred" and part:
            part *= 100
        elif word in _SCALES and part:
            total, part = total + part * _SCALES[word], 0
        elif word != "and" or not found:
            return None
    return Number(Fraction(total + part)) if found else None


def scaled_by_words(text: str) -> tuple[str, Fraction] | None:
    """What stands before ``million`` and the like at the end, and what it multiplies by; or None."""
    match = _SCALED.fullmatch(text)
    return None if match is None else (match["rest"], Fraction(_SCALES.get(match["scale"], 100)))
