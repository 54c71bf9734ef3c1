r"""The tokens of LaTeX mathematics and of the plain notation that programs print.

>>> [token.text for token in tokens_of(r"2\pi r**2 - sqrt(AB)")]
['2', '\\pi', 'r', '^', '2', '-', '\\sqrt', '(', 'AB', ')']
>>> tokens_of("5 # 6")
Traceback (most recent call last):
agentrl_envs.grading.reading.tokens.UnreadableError: '#'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

_WORDS = {  # of plain notation: what LaTeX writes with a backslash
    "pi": r"\pi", "oo": r"\infty", "inf": r"\infty", "infinity": r"\infty", "ln": r"\ln", "log": r"\ln",
    "abs": r"\abs", "Abs": r"\abs", "asin": r"\arcsin", "acos": r"\arccos", "atan": r"\arctan",
    "ceiling": r"\ceil", "Fraction": r"\Rational",
}  # fmt: skip
_SAME = "sqrt cbrt root Rational Integer Float exp sin cos tan sec csc cot sinh cosh tanh binomial factorial floor ceil"
_WORDS |= {name: f"\\{name}" for name in (*_SAME.split(), "arcsin", "arccos", "arctan", "gcd", "lcm", "max", "min")}
# Scientific notation, but for what is rather a multiple of Euler's number: 2e+1, 3e-4.
_SCIENTIFIC = r"(?:\d*\.\d+[eE][-+]?\d+|1[eE][-+]?\d+|\d+[eE](?:\d+|[-+]\d{2,}))(?![\d.])"
_PATTERN = re.compile(
    r"(?P<blank>\s+)"
    rf"|(?P<number>{_SCIENTIFIC}|"
    r"\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+\.\d+|\d+|\.\d+)"
    rf"|(?P<word>(?<![A-Za-z\\])(?:{'|'.join(sorted(_WORDS, key=len, reverse=True))})(?![A-Za-z]))"
    r"|(?P<command>\\[A-Za-z]+|\\[%{}|\\])"
    r"|(?P<name>[A-Z]{2,}|[A-Za-z])"
    r"|(?P<sign>\*\*|[-+*/^_()\[\]{}|!',=&%:])",
    re.ASCII,
)
Kind = Literal["number", "command", "name", "sign", "end"]


class UnreadableError(Exception):
    """The text is not in a notation that is understood here."""


@dataclass(frozen=True, slots=True)
class Token:
    """``spaced``: a blank stands before it."""

    kind: Kind
    text: str
    spaced: bool = False


def tokens_of(text: str) -> list[Token]:
    """All of the text as tokens. Capitals side by side are one name: ``HHT`` is not ``THH``."""
    found: list[Token] = []
    place, spaced = 0, False
    while place < len(text):
        match = _PATTERN.match(text, place)
        if match is None:
            raise UnreadableError(repr(text[place]))
        place = match.end()
        if match.lastgroup != "blank":
            found.append(_token(str(match.lastgroup), match.group(), spaced))
        spaced = match.lastgroup == "blank"
    return found


def _token(group: str, text: str, spaced: bool) -> Token:
    match group:
        case "number":
            return Token("number", text.replace(",", ""), spaced)
        case "word":
            return Token("command", _WORDS[text], spaced)
        case "name":
            return Token("name", text, spaced)
        case "command" if text != r"\%":
            return Token("command", text, spaced)
    return Token("sign", {"**": "^", r"\%": "%"}.get(text, text), spaced)
