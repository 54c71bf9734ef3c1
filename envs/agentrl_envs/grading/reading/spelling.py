r"""Other spellings of an answer, brought to the one that the readers know. Text in, text out; nothing is computed.

>>> respelled(r"$\left( \dfrac{1}{2},\, 90° \right)$."), respelled("12 000"), respelled("2 1/2")
('( \\frac{1}{2}, 90^{\\circ} )', '12000', '2\\frac{1}{2}')
>>> respelled(r"**x₂**"), respelled(r"\boxed{\boxed{0.\overline{3}}}"), respelled(r"\color{red}{204}")
('x_{2}', '\\frac{3}{9}', '204')
>>> words_in(r"\text{Saint  Anne}"), words_in(r"\sqrt{2}") is None
('saint anne', True)
"""

from __future__ import annotations

import re

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi _ pi rho _ sigma tau upsilon phi chi psi"
)
_CHARACTERS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # of full width
    | {chr(0x3B1 + place): f"\\{name} " for place, name in enumerate(_GREEK.split()) if name != "_"}
    | dict.fromkeys("−–", "-")
    | dict.fromkeys("⁄∕÷", "/")
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
    | dict.fromkeys("′’", "'")
    | {
        "＄": r"\$", "°": r"^{\circ}", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "±": r"\pm ",
        "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ",
        "∈": r"\in ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "∛": r"\sqrt[3]", "⟨": r"\langle ", "⟩": r"\rangle ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    }
)  # fmt: skip
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_MATH_SIGNS = [pair.split() for pair in (r"$$ $$", "$ $", r"\( \)", r"\[ \]", "** **", "__ __", "` `", "* *")]
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_INNER = r"[^{}]*(?:\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}[^{}]*)*"
_ARGUMENT = rf"\{{({_INNER})\}}"
_REWRITTEN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\(?=[A-Za-z])(?!\w*\s*[&\\])(?<!\\\\\\\\)(?=frac|sqrt|text|pi|left|right|cup|infty|le|ge)", r"\\"),
        (r"(?<!\\)\$((?:[^$\\]|\\.)+)\$", r"\1"),
        (r"\\(?:math|text)(?:bf|rm|it)?\s*\{\s*(\d[\d.]*)\s*\}", r"\1"),
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|biggl?|biggr?|displaystyle|textstyle|limits)(?![A-Za-z])\s?", ""),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (rf"\\textcolor\s*\{{[^{{}}]*\}}\s*{_ARGUMENT}", r"\1"),
        (rf"\{{\\color\s*\{{[^{{}}]*\}}\s*({_INNER})\}}|\\color\s*\{{[^{{}}]*\}}\s*(?:{_ARGUMENT})?", r"\1\2"),
        (r"(?<=\d)(?:,\s*\\!\s*|\\[,;: ]|~|\{,\})(?=\d{3}(?!\d))", ""),
        (r"\\!", ""),
        (r"\\q?quad(?![A-Za-z])", " "),
        (r"(?<![\d.])(\d*)\.(\d*)\\overline\s*\{(\d+)\}", "REPEATING"),
        (r"(\\(?:mathrm|text)\s*\{[^{}^]*)\^\{?([23])\}?\s*\}", r"\1}^{\2}"),
        (r"\\operatorname\*?\s*\{([a-z]+)\}", r"\\\1 "),
        (r"(?<![\d}])(?<![\d}] )\\(?:mathrm|mathit|rm|text)\s*\{\s*([a-zA-Z])\s*\}(?=\s*[-+*^/=)},]|$)", r"\1"),
        (r"\\frac\s*\\pi(?![A-Za-z])", r"\\frac{\\pi}"),
        (r"\\frac\{([^{}]*)\}\s*(\\pi(?![A-Za-z])|[0-9A-Za-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\phantom\s*(?:\{[^{}]*\}|[^{}\s])", ""),
        (r"[\[(]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
        (r"^(?:\\approx(?![A-Za-z])|=)\s*", ""),
        (r"(?<!\\)\\(?:[,;:>]|(?= ))|~", " "),
        (r"√\s*(\d+|\([^()]*\)|[a-z])", r"\\sqrt{\1}"),
        (r"\\sqrt\[3\]\s*(\d+|\([^()]*\)|[a-z])", r"\\sqrt[3]{\1}"),
        (r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r" \\cup "),
        (r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty "),
        (r"(?<=[(,\s])\+\s*\\infty", r"\\infty"),
        (r"\\text\s*\{[\s.,]*\}", ""),
        (r"\s*(?:\\text\s*\{\s*)?\b(?:percentage|percent|pct)\b(?:\s*\})?", r"\\%"),
        (r" {2,}", " "),
    )
)
_AROUND_SIGNS = re.compile(r"(?<=[^A-Za-z0-9.]) | (?=[^A-Za-z0-9.])")
_BEHIND = " \t\r\n.,;"
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_MIXED = re.compile(r"(?P<whole>[+-]?\d+) (?P<over>\d+)/(?P<under>\d+)", re.ASCII)
_STYLE = re.compile(r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}\\]*)\}")
_WORDS = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*(?: [^\W_]+(?:['’-][^\W_]+)*)*")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")


def respelled(text: str) -> str:
    """The answer without math signs, boxes and marks around it, sizes, thin spaces, unicode signs, a full stop."""
    if _PLAIN.fullmatch(text):
        return text
    text = re.sub(r"[₀-₉]+", lambda digits: f"_{{{digits.group().translate(_SUBSCRIPTS)}}}", text)
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻]+", lambda digits: f"^{{{digits.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _bare(text.translate(_CHARACTERS))
    for pattern, replacement in _REWRITTEN:
        text = pattern.sub(_repeating if replacement == "REPEATING" else replacement, text)
    text = _bare(text)
    if _SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    mixed = _MIXED.fullmatch(text)
    if mixed:
        return f"{mixed['whole']}\\frac{{{mixed['over']}}}{{{mixed['under']}}}"
    return text


def unstyled(text: str) -> str:
    """What is set as text, where that is all there is, and words in quotes without them."""
    style = _STYLE.fullmatch(text)
    plain = text if style is None else style[1].strip()
    return plain[1:-1] if len(plain) > 2 and plain[0] == plain[-1] == "'" else plain


def squeezed(text: str) -> str:
    """Without the blanks beside signs, which mean nothing."""
    return _AROUND_SIGNS.sub("", text)


def words_in(text: str) -> str | None:
    """Plain words (one of four letters at least), in small letters, without the commands that set them as text."""
    plain = " ".join(_STYLE.sub(r" \1 ", text).split()).strip("\"'“”‘’.")
    return plain.casefold() if _WORDS.fullmatch(plain) and _LONG_WORD.search(plain) else None


def _repeating(match: re.Match[str]) -> str:
    """``0.1\\overline{6}`` as a fraction."""
    whole, fixed, period = match[1], match[2], match[3]
    over = int((whole + fixed + period) or 0) - int((whole + fixed) or 0)
    return f"\\frac{{{over}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _bare(text: str) -> str:
    """Without what stands around all of it, however often."""
    before = None
    while text != before:
        before = text
        text = _without_box(_without_math_signs(_without_trailing(text.strip()).strip()))
    return text


def _without_box(text: str) -> str:
    box = _BOX.match(text)
    if box is None:
        return text
    inner = text[box.end() :]
    if not inner.startswith("{"):
        return inner if re.fullmatch(r"[+-]?[\w.]+", inner) else text
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", inner):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return inner[1:-1].strip() if brace.end() == len(inner) else text
    return text


def _without_math_signs(text: str) -> str:
    for left, right in _MATH_SIGNS:
        inner = text[len(left) : len(text) - len(right)]
        once = left not in inner.replace("\\$", "") and right not in inner.replace("\\$", "")
        if text.startswith(left) and text.endswith(right) and inner.strip() and once:
            return inner.strip()
    return text


def _without_trailing(text: str) -> str:
    """Without full stops and line breaks behind it, unless they are all there is."""
    shorter = text.rstrip(_BEHIND)
    while shorter.endswith("\\\\"):
        shorter = shorter[:-2].rstrip(_BEHIND)
    return shorter or text
