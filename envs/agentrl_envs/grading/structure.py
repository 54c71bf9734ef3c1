r"""Parser of an answer's structure: lists, sets, tuples, intervals, relations, words and expressions.

>>> tuple(read_answer(text).kind for text in (r"(1, 2]", r"1 < x \le 2", r"\{1,2\}", "1,2"))
('(]', '(]', 'set', 'list')
>>> read_answer("5 # 6")
UnparsedText(text='5 # 6')

Kinds of a `Bracketed`: ``list`` (no bracket), ``set``, ``()``, ``[]``, ``(]``, ``[)``, ``<>``, ``union``, ``ratio``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TypeAlias

from agentrl_envs.grading.expressions import Expression, FunctionCall, Number, Symbol, symbol_names
from agentrl_envs.grading.reader import UnreadableError, read_expression
from agentrl_envs.grading.spelling import (
    NO_SOLUTION,
    NO_VALUE,
    STYLE,
    names_the_quantity,
    normalize_spelling,
    plain_words,
    remove_text_commands,
)
from agentrl_envs.grading.units import (
    Unit,
    number_from_words,
    split_quantities,
    split_scaling_word,
    split_unit_letter,
    split_unit_words,
)


@dataclass(frozen=True, slots=True)
class UnparsedText:
    """Text that could not be parsed."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """Plain words in lower case. ``number`` is the number that the words spell, if any."""

    text: str
    number: Fraction | None = None


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits with an explicit base. The value is not computed."""

    text: str
    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class TimeOfDay:
    """A time of day. ``seconds`` counts from 0:00, as written. ``am_or_pm`` is ``am``, ``pm`` or empty."""

    text: str
    seconds: int
    am_or_pm: str


@dataclass(frozen=True, slots=True)
class Quantity:
    """An expression and its unit. ``measured`` is the alternative parse with the last letter as a unit (``5m``)."""

    text: str
    tree: Expression
    unit: Unit | None = None
    measured: Quantity | None = None


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Several answers in one kind of bracket.

    ``variable`` is the variable of an interval that was written as a relation.
    """

    text: str
    kind: str
    parts: tuple[Answer, ...]
    variable: Expression | None = None


@dataclass(frozen=True, slots=True)
class Relation:
    """A chain ``parts[0] signs[0] parts[1] ...`` with the signs ``= < <= > >= != ~ in notin``."""

    text: str
    parts: tuple[Answer, ...]
    signs: tuple[str, ...]


Answer: TypeAlias = UnparsedText | Words | Numeral | TimeOfDay | Quantity | Bracketed | Relation

AND, OR = "\x1f", "\x1e"  # replace the words between answers
TO = "\x1d"  # replaces the word "to" in a ratio
_CONJUNCTION = re.compile(
    r",?\s*\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}\s*|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*"
)
_SIGNS = {
    "=": "=", "==": "=", ":=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=",
    r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=",
    r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\approx": "~", r"\in": "in", r"\notin": "notin",
}  # fmt: skip
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|<=|>=|:=|==|(?<![\d)}])!=|.", re.DOTALL)
_OPENING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\langle": r"\rangle", r"\lfloor": "", r"\lceil": ""}
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"})
_KINDS = {"()": "()", "[]": "[]", "(]": "(]", "[)": "[)", r"\{\}": "set", "{}": "set", r"\langle\rangle": "<>"}
_TURNED = {"]": "(", "[": ")"}  # ]1,2[ is the open interval
_THOUSANDS = re.compile(
    r"[+-]?\s*\\?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:\s*\\[a-z]+\{[^{}]*\}|\s*[a-z][a-z ]*|\s*\\?[%$])?"
)
_TO = re.compile(r"(?<=[\d)}])\s*(?:\\text\s*\{\s*to\s*\}|(?<![A-Za-z])to(?![A-Za-z]))\s*(?=[\d({\\])")
_CLOCK = re.compile(
    r"(\d{1,2})(?::(\d\d)(?::(\d\d))?)?\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:([ap])\.? ?m\.?)?\s*\}?", re.IGNORECASE
)
_NUMERAL = re.compile(
    r"[({]?\s*(?P<digits>-?[0-9A-F]+(?:\.[0-9A-F]+)?|[01]{1,4}(?: [01]{3,4})+)\s*[)}]?\s*"
    r"(?:_\s*(?P<base>\d+|[({]*\s*\w+\s*[)}]*)|[({]?\s*(?:in )?base\s*[({]*\s*(?P<named>\w+)\s*[)}]*)\s*",
    re.IGNORECASE,
)
_TWO_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_WORD_RUN = re.compile(r"(?<![\\A-Za-z])[a-z]{4,}|(?<![\\A-Za-z])[A-Z][a-z]{3,}")
_FUNCTION_WORDS = re.compile(
    r"\\(?:begin|end)\{[a-zA-Z]*\}|(?<![A-Za-z\\])(?:a?sin|a?cos|a?tan|arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|cbrt|root|Rational|Integer|Float"
    r"|Fraction|factorial|binomial|floor|ceil(?:ing)?|infinity)(?![A-Za-z])"
)
_INFINITY = FunctionCall("infinity", ())
_LINE = (Quantity("", FunctionCall("neg", (_INFINITY,))), Quantity("", _INFINITY))
_MAY_HAVE_UNIT = re.compile(r"\\text|\\mbox|\\mathrm|[\d}] ?[a-z]{2,}|\\circ|[$€£¥\u4e00-\u9fff]")
_PROBABILITY = re.compile(r"(?:P|E|\\?Pr|Var)\s*[(\[].*[)\]]")
INTERVALS = frozenset({"()", "[]", "(]", "[)"})
_REALS = frozenset({r"\mathbb{R}", r"\mathbb R", r"\R", r"\text{all real numbers}", "all real numbers", r"\Reals"})
_PYTHON_MATRIX = re.compile(r"(?:Matrix|(?:np\.)?array)\((\[\[.*\]\])\)", re.DOTALL)


@lru_cache(maxsize=4096)
def read_answer(text: str) -> Answer:
    """Parse the whole text. Returns `UnparsedText` if the text cannot be parsed."""
    text = normalize_spelling(text)
    quantity = _sum_of_quantities(text)
    if quantity is not None:
        return quantity
    text = _CONJUNCTION.sub(lambda said: OR if "or" in said.group() else AND, text)
    return _list(_TO.sub(TO, text))


def _list(text: str, *, bracketed: bool = False) -> Answer:
    """Parse one or several answers. In brackets, a comma is never a thousands separator."""
    if not text:
        return UnparsedText(text)
    if not bracketed and _THOUSANDS.fullmatch(text):
        return _part(text)
    for separators in ((";",), (AND, OR, ",")):
        pieces, _ = _split(text, separators)
        if not pieces:
            return UnparsedText(text)
        if len(pieces) > 1:
            parts = _flat(_list(piece.strip()) for piece in pieces)
            if any(isinstance(part, UnparsedText) for part in parts):
                return _worded(text)
            ors = OR in text and all(isinstance(part, Bracketed) and part.kind in INTERVALS for part in parts)
            return Bracketed(text, "union" if ors else "list", parts)
    return _related(text)


def _flat(parts: Iterable[Answer]) -> tuple[Answer, ...]:
    r"""Return the parts, with each ``\pm`` replaced by its two values."""
    return tuple(
        value
        for part in parts
        for value in (
            part.parts
            if isinstance(part, Bracketed) and part.kind == "list" and _TWO_SIGNS.search(part.text)
            else [part]
        )
    )


def _worded(text: str) -> Answer:
    plain = text.replace(AND, " and ").replace(OR, " or ").replace(TO, " to ")
    words = plain_words(plain)
    return UnparsedText(plain) if words is None else Words(words)


def _split(text: str, marks: Container[str]) -> tuple[list[str], list[str]]:
    """Split at separators outside of brackets.

    Returns the pieces and the separators. Both are empty if the brackets are unbalanced.
    """
    pieces: list[str] = []
    found: list[str] = []
    start = depth = 0
    for token in _TOKEN.finditer(text):
        said = token.group()
        depth += (said in _OPENING) - (said in _CLOSING)
        if depth == 0 and said in marks:
            pieces.append(text[start : token.start()])
            found.append(said)
            start = token.end()
    return ([], []) if depth else ([*pieces, text[start:]], found)


def _related(text: str) -> Answer:
    """Parse a chain of relations, or a single answer."""
    pieces, found = _split(text, _SIGNS)
    signs = [_SIGNS[sign] for sign in found]
    if not signs:
        return _part(text)
    parts = tuple(_part(piece.strip()) for piece in pieces)
    if isinstance(parts[0], UnparsedText) and _PROBABILITY.fullmatch(pieces[0].strip()):
        parts = (Words(pieces[0].strip()), *parts[1:])
    if any(isinstance(part, UnparsedText) for part in parts):
        return UnparsedText(text)
    if signs in (["="], ["~"]):
        return _equation(text, parts, tuple(signs))
    if signs == ["in"] and isinstance(parts[1], Bracketed) and isinstance(parts[0], Quantity):
        return replace(parts[1], text=text, variable=parts[0].tree)
    return _interval(text, parts, signs) or Relation(text, parts, tuple(signs))


def _equation(text: str, parts: tuple[Answer, ...], signs: tuple[str, ...]) -> Answer:
    r"""Return an equation with the unknown on its left, or two equations for ``x = \pm 2``."""
    left, right = parts
    if not is_name_answer(left) and (is_name_answer(right) or (_variables(right) and not _variables(left))):
        left, right = right, left
    values = _flat([right])
    if len(values) > 1:
        return Bracketed(text, "list", tuple(Relation("", (left, value), signs) for value in values))
    return Relation(text, (left, right), signs)


def is_name_answer(answer: Answer) -> bool:
    """Return True if an answer is a name: a symbol, a function's value, a ratio or tuple of names, or words."""
    match answer:
        case Words():
            return answer.number is None and names_the_quantity(answer.text)
        case Bracketed(kind="()" | "ratio" | "list"):
            return all(map(is_name_answer, answer.parts))
        case Quantity():
            return _names_only(answer.tree)
    return False


def _names_only(tree: Expression) -> bool:
    match tree:
        case Symbol():
            return True
        case FunctionCall("abs", (inner,)) | FunctionCall("over", (inner,)):
            return _names_only(inner)
        case FunctionCall("*", (over, FunctionCall("over", (under,)))):
            return _names_only(over) and _names_only(under)
        case FunctionCall(function, _):
            return function.startswith("call ")
    return False


def _variables(answer: Answer) -> bool:
    return isinstance(answer, Quantity) and bool(symbol_names(answer.tree))


def _interval(text: str, parts: tuple[Answer, ...], signs: list[str]) -> Bracketed | None:
    """Convert an inequality of a single variable to an interval."""
    if all(sign in (">", ">=") for sign in signs):
        parts, signs = parts[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    leaves = [part for part in parts if isinstance(part, Quantity)]
    if len(leaves) != len(parts) or not all(sign in ("<", "<=") for sign in signs):
        return None
    if len(leaves) == 2 and _is_variable(leaves[1].tree):
        leaves, signs = [*leaves, _LINE[1]], [*signs, "<"]
    elif len(leaves) == 2:
        leaves, signs = [_LINE[0], *leaves], ["<", *signs]
    if len(leaves) != 3:
        return None
    low, middle, high = leaves
    if not _is_variable(middle.tree) or symbol_names(middle.tree) & (symbol_names(low.tree) | symbol_names(high.tree)):
        return None
    kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Bracketed(text, kind, (low, high), middle.tree)


def _is_variable(tree: Expression) -> bool:
    return isinstance(tree, Symbol) or (isinstance(tree, FunctionCall) and tree.function.startswith("call "))


def _part(text: str) -> Answer:
    """Parse one answer: a bracket with its content, a union, a ratio, a pair of signs, or an expression."""
    text = text.strip()
    if text in _REALS:
        return Bracketed(text, "()", _LINE)
    words = plain_words(text)
    if text in (r"\emptyset", r"\varnothing", r"\{\}") or words == NO_SOLUTION:
        return Bracketed(text, "set", ())
    if words == NO_VALUE:
        return Words(words)
    matrix = _PYTHON_MATRIX.fullmatch(text)
    if matrix is not None:
        return _part(matrix[1])
    union, _ = _split(text, (r"\cup",))
    if len(union) > 1:
        return _group(text, "union", [_part(piece) for piece in union])
    signs = _TWO_SIGNS.findall(text)
    if text[:1] == "(" and (len(signs) == 1 or "mp" in signs):  # two points, or Unread if the signs are independent
        return _with_two_signs(text) or UnparsedText(text)
    return _bracketed(text) or _with_two_signs(text) or _clock(text) or _ratio(text) or _leaf(text)


def _group(text: str, kind: str, parts: Sequence[Answer]) -> Answer:
    return (
        UnparsedText(text)
        if any(isinstance(part, UnparsedText) for part in parts)
        else Bracketed(text, kind, tuple(parts))
    )


def _bracketed(text: str) -> Answer | None:
    if text[:1] == "]" or text[-1:] == "[":
        text = (
            _TURNED.get(text[:1], text[:1]) + text[1:-1] + _TURNED.get(text[-1:], text[-1:]) if len(text) > 2 else text
        )
        if text[:1] not in "([" or text[-1:] not in ")]":
            return None
    tokens = list(_TOKEN.finditer(text))
    if len(tokens) < 2 or tokens[0].group() not in _OPENING or not _closes_at_the_end(tokens):
        return None
    kind = _KINDS.get(tokens[0].group() + tokens[-1].group())
    inner = text[tokens[0].end() : tokens[-1].start()].strip().removesuffix(",")
    if kind is None or not inner:
        return None
    said = _list(inner, bracketed=True)
    if isinstance(said, Bracketed) and said.kind == "list" and said.text == inner:
        return Bracketed(text, kind, said.parts)
    if tokens[0].group() == r"\{" and not isinstance(said, UnparsedText):
        return Bracketed(text, kind, (said,))
    if kind == "<>":
        return None
    if kind == "[]":
        return Bracketed(text, kind, (said,)) if not isinstance(said, UnparsedText) else None
    return said if kind == "()" or tokens[0].group() == "{" else None


def _closes_at_the_end(tokens: Sequence[re.Match[str]]) -> bool:
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.group() in _OPENING) - (token.group() in _CLOSING)
        if depth == 0:
            return place == len(tokens) - 1
    return False


def _with_two_signs(text: str) -> Answer | None:
    r"""Parse ``a \pm b`` as two answers."""
    if _TWO_SIGNS.search(text) is None:
        return None
    upper = _TWO_SIGNS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
    lower = _TWO_SIGNS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
    return _group(text, "list", [_part(upper), _part(lower)])


def _clock(text: str) -> TimeOfDay | None:
    time = _CLOCK.fullmatch(text)
    if time is None or not (time[2] or time[4]):
        return None
    hours, minutes, seconds = (int(time[place] or 0) for place in (1, 2, 3))
    if hours > 23 or minutes > 59 or seconds > 59:
        return None
    return TimeOfDay(text, 3600 * hours + 60 * minutes + seconds, f"{time[4].lower()}m" if time[4] else "")


def _ratio(text: str) -> Answer | None:
    pieces, _ = _split(text, (":", TO))
    return _group(text, "ratio", [_leaf(piece.strip()) for piece in pieces]) if len(pieces) > 1 else None


def _leaf(text: str) -> Answer:
    plain = remove_text_commands(text)
    if plain != text:
        said = number_from_words(plain)
        if said is None and len(plain) > 1 and plain.replace(" ", "").isalpha():
            return Words(plain.casefold())
        return Words(plain.casefold(), said) if said is not None else _list(plain)
    numeral = _numeral(text)
    if numeral is not None:
        return numeral
    if _is_word(text):
        return _quantity(text) or _spoken(text)
    if _MAY_HAVE_UNIT.search(text) and split_unit_words(text) is not None:
        return _quantity(text) or UnparsedText(text)
    try:
        tree = read_expression(text)
    except UnreadableError:
        return _quantity(text) or _spoken(text)
    letter = split_unit_letter(text)
    return Quantity(text, tree, measured=None if letter is None else _measured(text, *letter))


def _numeral(text: str) -> Numeral | None:
    """Return a numeral with an explicit base, in digits or words."""
    match = _NUMERAL.fullmatch(STYLE.sub(r"\1", text)) if "_" in text or "base" in text else None
    if match is None:
        return None
    digits = match["digits"].upper().replace(" ", "")
    name = (match["base"] or match["named"]).strip("(){} ")
    base = Fraction(name) if name.isdecimal() else number_from_words(name)
    values = [int(digit, 16) for digit in digits if digit.isalnum()]
    if base is None or not max(values) < base <= 36 or digits.isalpha():
        return None
    return Numeral(text, re.sub(r"^(-?)0+(?=\w)", r"\1", digits), str(base))


def _is_word(text: str) -> bool:
    return _WORD_RUN.search(_FUNCTION_WORDS.sub("", text)) is not None


def _quantity(text: str) -> Quantity | None:
    """Parse a number with a unit or a scaling word."""
    scaled = split_scaling_word(text)
    if scaled is not None:
        number = _leaf(scaled[0].strip())
        return (
            replace(number, text=text, tree=FunctionCall("*", (number.tree, Number(scaled[1]))))
            if isinstance(number, Quantity)
            else None
        )
    split = split_unit_words(text)
    return None if split is None else _measured(text, *split)


def _measured(text: str, number: str, unit: Unit) -> Quantity | None:
    tree = _tree_or_none(number)
    return None if tree is None else Quantity(text, tree, unit)


def _sum_of_quantities(text: str) -> Quantity | None:
    """Return a sum such as ``5 ft 6 in`` as one quantity."""
    found = split_quantities(text) if text[:1].isdigit() else None
    if found is None:
        return None
    terms = [(_tree_or_none(number), size) for number, size in found[0]]
    products = tuple(FunctionCall("*", (tree, Number(size))) for tree, size in terms if tree is not None)
    return Quantity(text, FunctionCall("+", products), found[1]) if len(products) == len(terms) else None


def _tree_or_none(text: str) -> Expression | None:
    try:
        return read_expression(text.strip().replace(",", "") if text[:1].isdigit() else text)
    except UnreadableError:
        return None


def _spoken(text: str) -> Answer:
    words = plain_words(text)
    if words is None:
        return UnparsedText(text)
    return Words(words, number_from_words(words))
