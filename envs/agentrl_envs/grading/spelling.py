r"""Other spellings of an answer, brought to the one that LaTeX readers know. Text in, text out; nothing is computed.

>>> respelled(r"$\left( \dfrac{1}{2},\, 90° \right)$."), respelled("12 000"), respelled("2 1/2")
('( \\frac{1}{2}, 90^{\\circ} )', '12000', '2\\frac{1}{2}')
>>> words_in(r"\text{Saint  Anne}"), words_in(r"\sqrt{2}") is None
('saint anne', True)
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "\u00a0": " ",
        "\u2009": " ",
        "\u202f": " ",
        "°": r"^{\circ}",
        "π": r"\pi ",
        "∞": r"\infty ",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}",
        "²": "^{2}",
        "³": "^{3}",
    }
)
_MATH_SIGNS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_UNITS = "dollars?|cents?|euros?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|degrees?|units?"
_REWRITTEN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|textstyle)(?![A-Za-z])\s?", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=\d)(?:,\s*\\!\s*|\\[,;: ]|~|\{,\})(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"\\frac\s*\\pi(?![A-Za-z])", r"\\frac{\\pi}"),
        (r"\\frac\{([^{}]*)\}\s*(\\pi(?![A-Za-z])|[0-9A-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\phantom\s*(?:\{[^{}]*\}|[^{}\s])", ""),
        (r"^(?:\\approx(?![A-Za-z])|=)\s*", ""),
        (r"(?<!\\)\\(?:[,;:]|(?= ))|~", " "),
        (r"√\s*(\d+|\([^()]*\))", r"\\sqrt{\1}"),
        (r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r" \\cup "),
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty "),
        (rf"(?<=\d)\s*({_UNITS})$", r"\\text{ \1}"),
        (r" {2,}", " "),
    )
)
_BEHIND = " \t\r\n.,;"
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_MIXED = re.compile(r"(?P<whole>[+-]?\d+) (?P<over>\d+)/(?P<under>\d+)", re.ASCII)
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}\\]*)\}")
_WORDS = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*(?: [^\W_]+(?:['’-][^\W_]+)*)*")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")


def respelled(text: str) -> str:
    """The answer without math signs around it, sizes, thin spaces, unicode signs and a full stop behind it."""
    text = _without_math_signs(text.translate(_CHARACTERS).strip())
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(replacement, text)
    text = _without_math_signs(_without_trailing(text).strip())
    if _SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return f"{mixed['whole']}\\frac{{{mixed['over']}}}{{{mixed['under']}}}"
    return text


def words_in(text: str) -> str | None:
    """Plain words (one of four letters at least), in small letters, without the commands that set them as text."""
    plain = " ".join(_STYLE.sub(r" \1 ", text).split()).strip("\"'“”‘’.")
    return plain.casefold() if _WORDS.fullmatch(plain) and _LONG_WORD.search(plain) else None


def _without_math_signs(text: str) -> str:
    for left, right in _MATH_SIGNS:
        inner = text[len(left) : len(text) - len(right)]
        if (
            text.startswith(left)
            and text.endswith(right)
            and inner.strip()
            and left not in inner
            and right not in inner
        ):
            return inner.strip()
    return text


def _without_trailing(text: str) -> str:
    """Without full stops and line breaks behind it, unless they are all there is."""
    shorter = text.rstrip(_BEHIND)
    while shorter.endswith("\\\\"):
        shorter = shorter[:-2].rstrip(_BEHIND)
    return shorter or text
