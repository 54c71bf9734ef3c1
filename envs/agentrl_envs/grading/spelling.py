r"""Normalization of an answer's spelling for the parsers. Nothing is evaluated.

>>> tuple(map(normalize_spelling, (r"$\left( \dfrac{1}{2},\, 90° \right)$.", "12 000", "2 1/2")))
('( \\frac{1}{2}, 90^{\\circ} )', '12000', '2\\frac{1}{2}')
>>> tuple(map(normalize_spelling, (r"**x₂**", r"\boxed{\boxed{0.\overline{3}}}", r"\color{red}{204}")))
('x_{2}', '\\frac{3}{9}', '204')
>>> plain_words(r"\text{Saint  Anne}"), plain_words(r"\sqrt{2}") is None
('saint anne', True)
"""

from __future__ import annotations

import re
import unicodedata

_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi _ pi rho _ sigma tau upsilon phi chi psi"
)
_SIGN_REPLACEMENTS = r"""
    - −; / ⁄∕÷; : ∶; ' ′’; | ∣; , 、; . 。; * ∗; = ⩵; \$ ＄; \cdot ·⋅∙•・; \times ×✕✖⨯; \le ≤≦⩽; \ge ≥≧⩾;
    \ne ≠; \approx ≈;
    \pm ±; \mp ∓; \cup ∪; \cap ∩; \in ∈; \notin ∉; \emptyset ∅; \setminus ∖; \infty ∞; \sum ∑; \prod ∏; \int ∫;
    \langle ⟨; \rangle ⟩; \angle ∠; \triangle △; \parallel ∥; \odot ⊙; \circ ∘; ^{\circ} °˚; \mathbb{R} ℝ; \sqrt[3] ∛
"""  # each sign or command, followed by the characters that it replaces


class _CharacterReplacements(dict[int, str]):
    """Replacements of characters. Missing entries are derived from the Unicode properties of the character.

    Digits of any script, dashes and spaces become ASCII digits, minus signs and spaces. Invisible characters are
    dropped. Compatibility characters (full width, bold, fractions, circled numbers, unit squares) are decomposed.
    Superscripts and subscripts are enclosed in control characters, which `_unicode_to_latex` joins.
    """

    def __missing__(self, code: int) -> str:
        self[code] = spelled = self._replacement(chr(code))
        return spelled

    def _replacement(self, character: str) -> str:
        category = unicodedata.category(character)
        if category == "Nd":
            return str(unicodedata.decimal(character))
        if category in ("Cf", "Zs", "Pd"):
            return {"Cf": "", "Zs": " ", "Pd": "-"}[category]
        tag, *codes = unicodedata.decomposition(character).split() or [""]
        if tag and not tag.startswith("<"):
            # A single code point replaces the character. Several code points form an accented letter, which is kept.
            tag, codes = "", [] if codes else [tag]
        inner = "".join(chr(int(code, 16)) for code in codes).translate(self)
        if tag == "<fraction>":
            return "\\frac{{{}}}{{{}}}".format(*inner.split("/"))
        mark = {"<super>": "\x11{}\x12", "<sub>": "\x13{}\x14"}.get(tag, "{}")
        return mark.format(inner) if inner else character


_CHARACTER_REPLACEMENTS = _CharacterReplacements({code: chr(code) for code in range(128)})
_CHARACTER_REPLACEMENTS |= {0x3B1 + offset: f"\\{name} " for offset, name in enumerate(_GREEK.split()) if name != "_"}
for _sign, _others in (line.split() for line in _SIGN_REPLACEMENTS.replace("\n", "").split(";")):
    _CHARACTER_REPLACEMENTS |= dict.fromkeys(
        map(ord, _others), f"{_sign} " if re.search(r"\\[a-z]+$", _sign) else _sign
    )
# Normalization does not change numbers of this form, so they are returned at once.
_PLAIN_NUMBER = re.compile(r"(\$?)([+-]?\d+(?:,\d+)*(?:\.\d+)?)\1", re.ASCII)
_MATH_DELIMITERS = [pair.split() for pair in (r"$$ $$", "$ $", r"\( \)", r"\[ \]", "** **", "__ __", "` `", "* *")]
_BOX_COMMAND = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_BALANCED_BRACES = r"[^{}]*(?:\{[^{}]*(?:\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[^{}]*)*\}[^{}]*)*"
_ARGUMENT = rf"\{{({_BALANCED_BRACES})\}}"
_COLOR_COMMAND = r"\\color\s*\{[^{}]*\}\s*"
_UPRIGHT_TEXT = r"\\(?:text|mathrm)\s*\{\s*"
# Triples (substring of every match, pattern, replacement). Patterns whose substring is missing are skipped, for speed.
_REWRITES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (needed, re.compile(pattern), replacement)
    for needed, pattern, replacement in (
        ("\\\\", r"\\\\(?!\w*\s*[&\\])(?<!\\\\\\\\)(?=frac|sqrt|text|pi|left|right|cup|infty|le|ge)", r"\\"),
        ("$", r"(?<!\\)\$((?:[^$\\]|\\.)+)\$", r"\1"),
        ("\\", r"\\(?:math|text)(?:bf|rm|it)?\s*\{\s*(\d[\d.]*)\s*\}", r"\1"),
        (".", r"\\(?:left|right)\s*\.", ""),
        ("\\", r"\\(?:left|right|[bB]ig[lr]?|bigg[lr]?|displaystyle|textstyle|limits)(?![A-Za-z])\s?", ""),
        (r"\lbrace", r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\rbrace", r"\\rbrace(?![A-Za-z])", r"\\}"),
        ("frac", r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        ("binom", r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\textcolor", rf"\\textcolor\s*\{{[^{{}}]*\}}\s*{_ARGUMENT}", r"\1"),
        (r"\color", rf"\{{{_COLOR_COMMAND}({_BALANCED_BRACES})\}}|{_COLOR_COMMAND}(?:{_ARGUMENT})?", r"\1\2"),
        ("", r"(?<=\d)(?:,\s*\\!\s*|\\[,;: ]|~|\{,\})(?=\d{3}(?!\d))", ""),
        (r"\!", r"\\!", ""),
        ("quad", r"\\q?quad(?![A-Za-z])", " "),
        (r"\colon", r"\\colon(?![A-Za-z])", ":"),
        ("{", r"\{\s*:\s*\}", ":"),
        ("+/-", r"(?<![\w)}])\+/-", r"\\pm "),
        ("angle", r"\\(?:measuredangle|sphericalangle)(?![A-Za-z])", r"\\angle"),
        (r"\circ", r"(?<=\d)\s*\\circ(?![A-Za-z])(?!\s*[\w(\\{])", r"^{\\circ}"),
        ("^", r"(?<=[\d)}])\s*\^\s*(?:o(?![A-Za-z])|(?:\\(?:text|mathrm))?\s*\{\s*o\s*\})", r"^{\\circ}"),
        (r"\degree", r"\^\s*\{\s*\\degrees?\s*\}|\^?\s*\\degrees?(?![A-Za-z])", r"^{\\circ}"),
        ("deg", rf"(?<=[\d)}}])\s*(?:{_UPRIGHT_TEXT}deg(?:rees?)?\s*\}}|deg(?:rees?)?(?![A-Za-z]))", r"^{\\circ}"),
        ("度", rf"(?<=[\d)}}])\s*(?:{_UPRIGHT_TEXT}度\s*\}}|度(?![A-Za-z]))", r"^{\\circ}"),
        (r"\operatorname", r"\\operatorname\*?\s*\{([a-z]+)\}", r"\\\1 "),
        ("\\", r"(?<!\\)\\(?:[,;:>]|(?= ))", " "),
        ("~", "~", " "),
        ("  ", r" {2,}", " "),
        (
            "{",
            r"(?<![\d}])(?<![\d}] )(?<!\\cdot)\\(?:mathrm|mathit|rm|text)\s*\{\s*([a-zA-Z])\s*\}(?=\s*[-+*^/=)},]|$)",
            r"\1",
        ),
        (r"\pi", r"\\frac\s*\\pi(?![A-Za-z])", r"\\frac{\\pi}"),
        (r"\frac", r"\\frac\{([^{}]*)\}\s*(\\pi(?![A-Za-z])|[0-9A-Za-z])", r"\\frac{\1}{\2}"),
        (r"\frac", r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\phantom", r"\\phantom\s*(?:\{[^{}]*\}|[^{}\s])", ""),
        (
            "{array}",
            r"[\[(]\s*\\begin\{array\}\s*\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        ("", r"^(?:\\approx(?![A-Za-z])|=)\s*", ""),
        ("√", r"√\s*(\d+|\([^()]*\)|[a-z])", r"\\sqrt{\1}"),
        (r"\sqrt[3]", r"\\sqrt\[3\]\s*(\d+|\([^()]*\)|[a-z])", r"\\sqrt[3]{\1}"),
        ("U", r"(?<=[)\]}])\s*U\s*(?=[(\[\\])", r" \\cup "),
        ("oo", r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty "),
        (r"\infty", r"(?<=[(,\s])\+\s*\\infty", r"\\infty"),
        (r"\text", r"\\text\s*\{[\s.,]*\}", ""),
        ("p", r"\s*(?:\\text\s*\{\s*)?\b(?:percentage|percent|pct)\b(?:\s*\})?", r"\\%"),
        ("  ", r" {2,}", " "),
    )
)
_SPACE_NEXT_TO_SIGN = re.compile(r"(?<=[^A-Za-z0-9.]) | (?=[^A-Za-z0-9.])")
_TRAILING_CHARACTERS = " \t\r\n,;"
_SPACED_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?: \d{3})+(?:\.\d+)?", re.ASCII)
_MIXED_NUMBER = re.compile(r"\A([+-]?\d+) (\d+)/(\d+)\Z", re.ASCII)
_REPEATING_DECIMAL = re.compile(
    r"""(?<![\d.])(?P<whole>\d*)\.(?:
        (?P<fixed>\d*)(?:
            \\(?:overline|bar)\s*(?:\{\s*)?(?P<line>(?<=\{)\d+|(?<=\{\s)\d+|\d)(?:\s*\})?
            | \\dot\s*\{?(?P<first>\d)\}?(?:(?P<middle>\d*)\\dot\s*\{?(?P<last>\d)\}?)?
            | \((?P<bracket>\d+)\)(?![\w(\[{^!.])
        )(?:\s*(?:\\[lc]?dots(?![A-Za-z])|\.\.\.))?
        | (?P<before>\d{0,30}?)(?P<again>\d{1,30}?)(?P=again)+\s*(?:\\[lc]?dots(?![A-Za-z])|\.\.\.)
    )""",
    re.VERBOSE | re.ASCII,
)
_TEXT_COMMAND_START = r"(?P<open>\\(?:text|textbf|mathrm|mbox)\s*\{\s*)?"
_TEXT_COMMAND_END = r"\s*(?P<closed>\})?\s*"
_CONCLUSION_WORD = re.compile(
    rf"{_TEXT_COMMAND_START}(?P<subject>(?:so|thus|hence|therefore|then)(?![A-Za-z])[,:]?){_TEXT_COMMAND_END}",
    re.IGNORECASE,
)
_SUBJECT_OF_SENTENCE = re.compile(
    rf"{_TEXT_COMMAND_START}(?P<subject>[A-Za-z](?:[A-Za-z ,'$]|\}}\s*\$?[A-Za-z]\$?\s*\\text\s*\{{)*?\s*"
    rf"(?:(?<![A-Za-z])(?:is|are|equals)(?![A-Za-z]):?|(?<=answer|result):)|(?:答案|结果)\s*[是为:]){_TEXT_COMMAND_END}",
    re.IGNORECASE,
)
_IS_THE_ANSWER = re.compile(
    r"(?P<answer>.*?)\s*(?:\\text\s*\{\s*)?(?<![A-Za-z])"
    r"is (?:the|my|our) (?:final |correct )?(?:answer|result)\.?(?:\s*\})?",
    re.DOTALL,
)
_OTHER_WORDS = """
    not no never neither nor half third quarter twice double triple thrice minus plus times over than negative opposite
    reciprocal inverse square squared cube cubed root wrong incorrect false unless if isn't aren't without except
"""
_WORDS_OF_OTHER_QUANTITIES = frozenset(_OTHER_WORDS.split())
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are) |has |have )?no (?:real )?(?:solutions?|roots?)(?: exists?)?|(?:the )?empty set|无解",
    re.IGNORECASE,
)
_NO_VALUE = re.compile(
    r"(?:(?:the )?(?:limit|value) |it )?(?:does not|doesn't) exist|(?:is )?(?:undefined|not defined)|d\.?n\.?e\.?"
    r"|不存在",
    re.IGNORECASE,
)
TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*\{([^{}\\]*)\}"
)
_PLAIN_WORDS = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*(?: [^\W_]+(?:['’-][^\W_]+)*)*")
_LONG_WORD = re.compile(r"[^\W\d_]{4}")
NO_SOLUTION, NO_VALUE = "no solution", "no value"


def normalize_spelling(text: str) -> str:
    """Normalize the spelling of an answer.

    Removes math delimiters, boxes, markup, sizes, thin spaces and the full stop. Converts Unicode signs.
    """
    plain = _PLAIN_NUMBER.fullmatch(text)
    if plain is not None:
        return plain[2]
    text = _extract_stated_answer(_strip_delimiters(text if text.isascii() else _unicode_to_latex(text)))
    for needed, pattern, replacement in _REWRITES:
        if needed in text:
            text = pattern.sub(replacement, text)
    text = _strip_delimiters(_REPEATING_DECIMAL.sub(_repeating_decimal_to_fraction, text) if "." in text else text)
    if _SPACED_THOUSANDS.fullmatch(text):
        return text.replace(" ", "")
    return _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)


def remove_text_commands(text: str) -> str:
    """Remove text commands and quotation marks if they enclose the whole answer."""
    style = TEXT_COMMAND.fullmatch(text)
    plain = text if style is None else style[1].strip()
    return plain[1:-1] if len(plain) > 2 and plain[0] == plain[-1] == "'" else plain


def remove_spaces_at_signs(text: str) -> str:
    """Remove the meaningless spaces next to signs."""
    return _SPACE_NEXT_TO_SIGN.sub("", text)


def plain_words(text: str) -> str | None:
    """Return plain words in lower case without text commands, or None. At least one word must have four letters."""
    plain = " ".join(TEXT_COMMAND.sub(r" \1 ", text).split()).strip("\"'“”‘’.")
    for pattern, meaning in ((_NO_SOLUTION, NO_SOLUTION), (_NO_VALUE, NO_VALUE)):
        if pattern.fullmatch(plain):
            return meaning
    return plain.casefold() if _PLAIN_WORDS.fullmatch(plain) and _LONG_WORD.search(plain) else None


def _unicode_to_latex(text: str) -> str:
    """Convert superscripts, subscripts, fractions, and lines and dots over digits to LaTeX."""
    text = re.sub(r"(?:\d[\u0304\u0305])+", lambda lined: f"\\overline{{{lined.group()[::2]}}}", text)
    text = re.sub(r"(\d)\u0307", r"\\dot{\1}", text).translate(_CHARACTER_REPLACEMENTS)
    text = re.sub(r"\x12\x11|\x14\x13", "", text)
    text = re.sub(r"\x11([^\x12]*)\x12\s*/\s*\x13([^\x14]*)\x14", r"\\frac{\1}{\2}", text)
    return text.translate({0x11: "^{", 0x12: "}", 0x13: "_{", 0x14: "}"})


def _extract_stated_answer(text: str) -> str:
    r"""Extract the answer from a sentence: ``42`` from ``\text{Thus the answer is } 42``. Return other text unchanged.

    The subject must name a quantity (`can_name_requested_quantity`), so ``half the answer is 42`` does not state 42.
    """
    behind = _IS_THE_ANSWER.fullmatch(text) if "is " in text else None
    if behind is not None:
        return behind["answer"]
    for pattern in (_CONCLUSION_WORD, _SUBJECT_OF_SENTENCE):
        start = pattern.match(text)
        rest = "" if start is None else text[start.end() :]
        if start is not None and rest and can_name_requested_quantity(start["subject"]):
            # If the text command is still open, wrap the answer in a new text command, so that the braces match.
            text = _strip_delimiters(f"\\text{{{rest}" if start["open"] and not start["closed"] else rest)
    return text


def can_name_requested_quantity(words: str) -> bool:
    """Return True if words can name the requested quantity. ``twice the area`` names a different quantity."""
    return _WORDS_OF_OTHER_QUANTITIES.isdisjoint(re.findall(r"[a-z']+", words.casefold()))


def _repeating_decimal_to_fraction(match: re.Match[str]) -> str:
    r"""Convert a repeating decimal to a fraction: ``0.1\overline{6}``, ``0.1\dot{6}``, ``0.1(6)`` or ``0.1666...``"""
    fixed = match["fixed"] or match["before"] or ""
    period = "".join(match[name] or "" for name in ("line", "first", "middle", "last", "bracket", "again"))
    start = match["whole"] + fixed
    over = int(start + period) - int(start or 0)
    return f"\\frac{{{over}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"


def _strip_delimiters(text: str) -> str:
    """Strip enclosing delimiters repeatedly."""
    before = None
    while text != before:
        before = text
        text = _strip_box(_strip_math_delimiters(_strip_trailing(text.strip()).strip()))
    return text


def _strip_box(text: str) -> str:
    box = _BOX_COMMAND.match(text)
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


def _strip_math_delimiters(text: str) -> str:
    for left, right in _MATH_DELIMITERS:
        if text.startswith(left) and text.endswith(right):
            inner = text[len(left) : len(text) - len(right)].strip()
            unescaped = inner.replace("\\$", "")
            if inner and left not in unescaped and right not in unescaped:
                return inner
    return text


def _strip_trailing(text: str) -> str:
    """Strip trailing full stops and line breaks, unless nothing else is left."""
    shorter, before = text, ""
    while shorter != before:
        before = shorter
        shorter = shorter.rstrip(_TRAILING_CHARACTERS).removesuffix("\\\\")
        if not shorter.endswith(".."):  # keep an ellipsis
            shorter = shorter.removesuffix(".")
    return shorter or text
