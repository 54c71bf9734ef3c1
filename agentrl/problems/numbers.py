"""Integers in a text, as digits or as English words: find and replace them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# fmt: off
UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on
SCALES = {"hundred": 100, "thousand": 1000, "million": 1_000_000}

_SMALL = {word: value for value, word in enumerate(UNITS)} | {word: 10 * (2 + i) for i, word in enumerate(TENS)}
_WORD = "|".join(sorted([*_SMALL, *SCALES], key=len, reverse=True))

DIGITS = r"\d+(?:,\d{3})*(?:\.\d+)?"
WORDS = rf"\b(?:{_WORD})(?:(?:\s+and\s+|[\s-]+)(?:{_WORD}))*\b"
NUMBER = re.compile(rf"(?P<digits>{DIGITS})|(?P<words>{WORDS})", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mention:
    """The integer ``value`` at ``text[start:end]``."""

    start: int
    end: int
    value: int


def number_mentions(text: str) -> tuple[Mention, ...]:
    """Return every integer in ``text``, in order, without decimals, ordinals and numbers inside words.

    >>> [mention.value for mention in number_mentions("Twenty-six pens, 1,250 cups, 2.5 kg and the 3rd of two dozen.")]
    [26, 1250, 2]
    """
    mentions = []
    for match in NUMBER.finditer(text):
        value = _whole(match["digits"]) if match["digits"] else words_value(match["words"])
        if value is not None and not _glued(text, match.start(), match.end()):
            mentions.append(Mention(start=match.start(), end=match.end(), value=value))
    return tuple(mentions)


def replace_mentions(text: str, mentions: Sequence[Mention], replaced: Mapping[int, int]) -> str:
    """Return ``text`` with every mention of a key of ``replaced`` written as its value in digits.

    >>> replace_mentions("Two cups and 2 pens", number_mentions("Two cups and 2 pens"), {2: 31})
    '31 cups and 31 pens'
    """
    parts = []
    position = 0
    for mention in mentions:
        if mention.value in replaced:
            parts += [text[position : mention.start], str(replaced[mention.value])]
            position = mention.end
    return "".join([*parts, text[position:]])


def words_value(words: str) -> int | None:
    """Return the value of a number in English words, or None if the words are several consecutive numbers.

    >>> words_value("three hundred and forty-nine"), words_value("two thousand"), words_value("two three")
    (349, 2000, None)
    """
    total = group = 0
    previous = SCALES["million"] * 10  # the next small number must be below the preceding unit
    for word in re.split(r"[\s-]+", words.lower()):
        if word == "and":
            continue
        if word in SCALES:
            scale = SCALES[word]
            group = max(group, 1) * scale
            if scale > 100:
                total, group = total + group, 0
            previous = scale
            continue
        value = _SMALL[word]
        if value >= previous or (previous < 100 and (previous < 20 or value > 9)):
            return None
        group += value
        previous = value
    return total + group


def _whole(digits: str) -> int | None:
    plain = digits.replace(",", "")
    return None if "." in plain else int(plain)


def _glued(text: str, start: int, end: int) -> bool:
    """True if the match is part of a word or a larger number: ``3rd``, ``A4``, ``.5``, ``1/2``."""
    before, after = text[start - 1 : start], text[end : end + 1]
    if before.isalnum() or before in {".", "/"} or after.isalpha() or after == "/":
        return True
    return after == "-" and text[end + 1 : end + 2].isdigit()
