r"""Parser of an answer's structure: lists, sets, tuples, intervals, relations, words and expressions.

>>> tuple(parse_answer(text).kind for text in (r"(1, 2]", r"1 < x \le 2", r"\{1,2\}", "1,2"))
('(]', '(]', 'set', 'list')
>>> parse_answer("5 # 6")
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

from agentrl_envs.grading.expression_parser import ExpressionSyntaxError, parse_expression
from agentrl_envs.grading.expressions import Expression, FunctionCall, Number, Symbol, symbol_names
from agentrl_envs.grading.spelling import (
    NO_SOLUTION,
    NO_VALUE,
    TEXT_COMMAND,
    can_name_requested_quantity,
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
    """An expression and its unit.

    ``with_unit_letter`` is the alternative parse, in which the last letter is a unit (``5m``).
    """

    text: str
    tree: Expression
    unit: Unit | None = None
    with_unit_letter: Quantity | None = None


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

AND, OR = "\x1f", "\x1e"  # replace the words "and" and "or" between answers
TO = "\x1d"  # replaces the word "to" in a ratio
_CONJUNCTION = re.compile(
    r",?\s*\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*,?\s*\}\s*|,?\s*(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])\s*"
)
_RELATION_SIGNS = {
    "=": "=", "==": "=", ":=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=",
    r"\lt": "<", r"\gt": ">", r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=",
    r"\geqslant": ">=", r"\ne": "!=", r"\neq": "!=", r"\approx": "~", r"\in": "in", r"\notin": "notin",
}  # fmt: skip
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_TOKEN_PATTERN = re.compile(r"\\[A-Za-z]+|\\.|<=|>=|:=|==|(?<![\d)}])!=|.", re.DOTALL)
_OPENING_BRACKETS = frozenset({"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"})
_CLOSING_BRACKETS = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"})
_BRACKET_KINDS = {"()": "()", "[]": "[]", "(]": "(]", "[)": "[)", r"\{\}": "set", "{}": "set", r"\langle\rangle": "<>"}
_REVERSED_BRACKETS = {"]": "(", "[": ")"}  # ]1,2[ is the open interval (1,2)
_THOUSANDS = re.compile(
    r"[+-]?\s*\\?\$?\d{1,3}(?:,\d{3})+(?:\.\d+)?(?:\s*\\[a-z]+\{[^{}]*\}|\s*[a-z][a-z ]*|\s*\\?[%$])?"
)
_TO_BETWEEN_NUMBERS = re.compile(r"(?<=[\d)}])\s*(?:\\text\s*\{\s*to\s*\}|(?<![A-Za-z])to(?![A-Za-z]))\s*(?=[\d({\\])")
_TIME_OF_DAY = re.compile(
    r"(\d{1,2})(?::(\d\d)(?::(\d\d))?)?\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:([ap])\.? ?m\.?)?\s*\}?", re.IGNORECASE
)
_NUMERAL_WITH_BASE = re.compile(
    r"[({]?\s*(?P<digits>-?[0-9A-F]+(?:\.[0-9A-F]+)?|[01]{1,4}(?: [01]{3,4})+)\s*[)}]?\s*"
    r"(?:_\s*(?P<base>\d+|[({]*\s*\w+\s*[)}]*)|[({]?\s*(?:in )?base\s*[({]*\s*(?P<named>\w+)\s*[)}]*)\s*",
    re.IGNORECASE,
)
_TWO_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z])[a-z]{4,}|(?<![\\A-Za-z])[A-Z][a-z]{3,}")
_FUNCTION_WORDS = re.compile(
    r"\\(?:begin|end)\{[a-zA-Z]*\}|(?<![A-Za-z\\])(?:a?sin|a?cos|a?tan|arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|cbrt|root|Rational|Integer|Float"
    r"|Fraction|factorial|binomial|floor|ceil(?:ing)?|infinity)(?![A-Za-z])"
)
_INFINITY = FunctionCall("infinity", ())
_REAL_LINE = (Quantity("", FunctionCall("neg", (_INFINITY,))), Quantity("", _INFINITY))
_MAY_HAVE_UNIT = re.compile(r"\\text|\\mbox|\\mathrm|[\d}] ?[a-z]{2,}|\\circ|[$€£¥\u4e00-\u9fff]")
_PROBABILITY_NOTATION = re.compile(r"(?:P|E|\\?Pr|Var)\s*[(\[].*[)\]]")
INTERVALS = frozenset({"()", "[]", "(]", "[)"})
_REAL_LINE_NAMES = frozenset(
    {r"\mathbb{R}", r"\mathbb R", r"\R", r"\text{all real numbers}", "all real numbers", r"\Reals"}
)
_PYTHON_MATRIX = re.compile(r"(?:Matrix|(?:np\.)?array)\((\[\[.*\]\])\)", re.DOTALL)


@lru_cache(maxsize=4096)
def parse_answer(text: str) -> Answer:
    """Parse the whole text. Returns `UnparsedText` if the text cannot be parsed."""
    text = normalize_spelling(text)
    quantity = _parse_sum_of_quantities(text)
    if quantity is not None:
        return quantity
    text = _CONJUNCTION.sub(lambda match: OR if "or" in match.group() else AND, text)
    return _parse_list(_TO_BETWEEN_NUMBERS.sub(TO, text))


def _parse_list(text: str, *, bracketed: bool = False) -> Answer:
    """Parse one or several answers. In brackets, a comma is never a thousands separator."""
    if not text:
        return UnparsedText(text)
    if not bracketed and _THOUSANDS.fullmatch(text):
        return _parse_part(text)
    for separators in ((";",), (AND, OR, ",")):
        pieces, _ = _split_outside_brackets(text, separators)
        if not pieces:
            return UnparsedText(text)
        if len(pieces) > 1:
            parts = _expand_plus_minus(_parse_list(piece.strip()) for piece in pieces)
            if any(isinstance(part, UnparsedText) for part in parts):
                return _words_or_unparsed(text)
            ors = OR in text and all(isinstance(part, Bracketed) and part.kind in INTERVALS for part in parts)
            return Bracketed(text, "union" if ors else "list", parts)
    return _parse_relation(text)


def _expand_plus_minus(parts: Iterable[Answer]) -> tuple[Answer, ...]:
    r"""Return the parts, with each ``\pm`` replaced by its two values."""
    values: list[Answer] = []
    for part in parts:
        two_signs = isinstance(part, Bracketed) and part.kind == "list" and _TWO_SIGNS.search(part.text)
        values += part.parts if isinstance(part, Bracketed) and two_signs else [part]
    return tuple(values)


def _words_or_unparsed(text: str) -> Answer:
    plain = text.replace(AND, " and ").replace(OR, " or ").replace(TO, " to ")
    words = plain_words(plain)
    return UnparsedText(plain) if words is None else Words(words)


def _split_outside_brackets(text: str, marks: Container[str]) -> tuple[list[str], list[str]]:
    """Split at separators outside of brackets.

    Returns the pieces and the separators. Both are empty if the brackets are unbalanced.
    """
    pieces: list[str] = []
    separators: list[str] = []
    start = depth = 0
    for token in _TOKEN_PATTERN.finditer(text):
        symbol = token.group()
        depth += (symbol in _OPENING_BRACKETS) - (symbol in _CLOSING_BRACKETS)
        if depth == 0 and symbol in marks:
            pieces.append(text[start : token.start()])
            separators.append(symbol)
            start = token.end()
    return ([], []) if depth else ([*pieces, text[start:]], separators)


def _parse_relation(text: str) -> Answer:
    """Parse a chain of relations, or a single answer."""
    pieces, relation_signs = _split_outside_brackets(text, _RELATION_SIGNS)
    signs = [_RELATION_SIGNS[sign] for sign in relation_signs]
    if not signs:
        return _parse_part(text)
    parts = tuple(_parse_part(piece.strip()) for piece in pieces)
    if isinstance(parts[0], UnparsedText) and _PROBABILITY_NOTATION.fullmatch(pieces[0].strip()):
        parts = (Words(pieces[0].strip()), *parts[1:])
    if any(isinstance(part, UnparsedText) for part in parts):
        return UnparsedText(text)
    if signs in (["="], ["~"]):
        return _make_equation(text, parts, tuple(signs))
    if signs == ["in"] and isinstance(parts[1], Bracketed) and isinstance(parts[0], Quantity):
        return replace(parts[1], text=text, variable=parts[0].tree)
    return _inequality_to_interval(text, parts, signs) or Relation(text, parts, tuple(signs))


def _make_equation(text: str, parts: tuple[Answer, ...], signs: tuple[str, ...]) -> Answer:
    r"""Return an equation with the unknown on its left, or two equations for ``x = \pm 2``."""
    left, right = parts
    if not is_name_answer(left) and (is_name_answer(right) or (_has_variables(right) and not _has_variables(left))):
        left, right = right, left
    values = _expand_plus_minus([right])
    if len(values) > 1:
        return Bracketed(text, "list", tuple(Relation("", (left, value), signs) for value in values))
    return Relation(text, (left, right), signs)


def is_name_answer(answer: Answer) -> bool:
    """Return True if an answer is a name: a symbol, a function's value, a ratio or tuple of names, or words."""
    match answer:
        case Words():
            return answer.number is None and can_name_requested_quantity(answer.text)
        case Bracketed(kind="()" | "ratio" | "list"):
            return all(map(is_name_answer, answer.parts))
        case Quantity():
            return _contains_only_names(answer.tree)
    return False


def _contains_only_names(tree: Expression) -> bool:
    match tree:
        case Symbol():
            return True
        case FunctionCall("abs", (inner,)) | FunctionCall("over", (inner,)):
            return _contains_only_names(inner)
        case FunctionCall("*", (over, FunctionCall("over", (under,)))):
            return _contains_only_names(over) and _contains_only_names(under)
        case FunctionCall(function, _):
            return function.startswith("call ")
    return False


def _has_variables(answer: Answer) -> bool:
    return isinstance(answer, Quantity) and bool(symbol_names(answer.tree))


def _inequality_to_interval(text: str, parts: tuple[Answer, ...], signs: list[str]) -> Bracketed | None:
    """Convert an inequality in a single variable to an interval. Returns None for other relations."""
    if all(sign in (">", ">=") for sign in signs):
        parts, signs = parts[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    leaves = [part for part in parts if isinstance(part, Quantity)]
    if len(leaves) != len(parts) or not all(sign in ("<", "<=") for sign in signs):
        return None
    if len(leaves) == 2 and _is_variable(leaves[1].tree):
        leaves, signs = [*leaves, _REAL_LINE[1]], [*signs, "<"]
    elif len(leaves) == 2:
        leaves, signs = [_REAL_LINE[0], *leaves], ["<", *signs]
    if len(leaves) != 3:
        return None
    low, middle, high = leaves
    if not _is_variable(middle.tree) or symbol_names(middle.tree) & (symbol_names(low.tree) | symbol_names(high.tree)):
        return None
    kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Bracketed(text, kind, (low, high), middle.tree)


def _is_variable(tree: Expression) -> bool:
    return isinstance(tree, Symbol) or (isinstance(tree, FunctionCall) and tree.function.startswith("call "))


def _parse_part(text: str) -> Answer:
    r"""Parse one answer: brackets with their content, a union, ``a \pm b``, a time, a ratio, or an expression."""
    text = text.strip()
    if text in _REAL_LINE_NAMES:
        return Bracketed(text, "()", _REAL_LINE)
    words = plain_words(text)
    if text in (r"\emptyset", r"\varnothing", r"\{\}") or words == NO_SOLUTION:
        return Bracketed(text, "set", ())
    if words == NO_VALUE:
        return Words(words)
    matrix = _PYTHON_MATRIX.fullmatch(text)
    if matrix is not None:
        return _parse_part(matrix[1])
    union, _ = _split_outside_brackets(text, (r"\cup",))
    if len(union) > 1:
        return _bracketed_or_unparsed(text, "union", [_parse_part(piece) for piece in union])
    signs = _TWO_SIGNS.findall(text)
    # A tuple with one sign, or with the linked signs \pm and \mp, stands for two points.
    if text[:1] == "(" and (len(signs) == 1 or "mp" in signs):
        return _parse_plus_minus(text) or UnparsedText(text)
    return (
        _parse_brackets(text)
        or _parse_plus_minus(text)
        or _parse_time_of_day(text)
        or _parse_ratio(text)
        or _parse_single(text)
    )


def _bracketed_or_unparsed(text: str, kind: str, parts: Sequence[Answer]) -> Answer:
    if any(isinstance(part, UnparsedText) for part in parts):
        return UnparsedText(text)
    return Bracketed(text, kind, tuple(parts))


def _parse_brackets(text: str) -> Answer | None:
    if text[:1] == "]" or text[-1:] == "[":
        first, last = text[:1], text[-1:]
        if len(text) > 2:
            first, last = _REVERSED_BRACKETS.get(first, first), _REVERSED_BRACKETS.get(last, last)
            text = first + text[1:-1] + last
        if first not in "([" or last not in ")]":
            return None
    tokens = list(_TOKEN_PATTERN.finditer(text))
    if len(tokens) < 2 or tokens[0].group() not in _OPENING_BRACKETS or not _closes_at_the_end(tokens):
        return None
    kind = _BRACKET_KINDS.get(tokens[0].group() + tokens[-1].group())
    inner = text[tokens[0].end() : tokens[-1].start()].strip().removesuffix(",")
    if kind is None or not inner:
        return None
    content = _parse_list(inner, bracketed=True)
    if isinstance(content, Bracketed) and content.kind == "list" and content.text == inner:
        return Bracketed(text, kind, content.parts)
    if tokens[0].group() == r"\{" and not isinstance(content, UnparsedText):
        return Bracketed(text, kind, (content,))
    if kind == "<>":
        return None
    if kind == "[]":
        return Bracketed(text, kind, (content,)) if not isinstance(content, UnparsedText) else None
    return content if kind == "()" or tokens[0].group() == "{" else None


def _closes_at_the_end(tokens: Sequence[re.Match[str]]) -> bool:
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token.group() in _OPENING_BRACKETS) - (token.group() in _CLOSING_BRACKETS)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _parse_plus_minus(text: str) -> Answer | None:
    r"""Parse ``a \pm b`` as two answers."""
    if _TWO_SIGNS.search(text) is None:
        return None
    upper = _TWO_SIGNS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
    lower = _TWO_SIGNS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
    return _bracketed_or_unparsed(text, "list", [_parse_part(upper), _parse_part(lower)])


def _parse_time_of_day(text: str) -> TimeOfDay | None:
    time = _TIME_OF_DAY.fullmatch(text)
    if time is None or not (time[2] or time[4]):
        return None
    hours, minutes, seconds = (int(time[group] or 0) for group in (1, 2, 3))
    if hours > 23 or minutes > 59 or seconds > 59:
        return None
    return TimeOfDay(text, 3600 * hours + 60 * minutes + seconds, f"{time[4].lower()}m" if time[4] else "")


def _parse_ratio(text: str) -> Answer | None:
    pieces, _ = _split_outside_brackets(text, (":", TO))
    if len(pieces) < 2:
        return None
    return _bracketed_or_unparsed(text, "ratio", [_parse_single(piece.strip()) for piece in pieces])


def _parse_single(text: str) -> Answer:
    plain = remove_text_commands(text)
    if plain != text:
        number = number_from_words(plain)
        if number is None and len(plain) > 1 and plain.replace(" ", "").isalpha():
            return Words(plain.casefold())
        return Words(plain.casefold(), number) if number is not None else _parse_list(plain)
    numeral = _parse_numeral_with_base(text)
    if numeral is not None:
        return numeral
    if _contains_word(text):
        return _parse_quantity(text) or _parse_words(text)
    if _MAY_HAVE_UNIT.search(text) and split_unit_words(text) is not None:
        return _parse_quantity(text) or UnparsedText(text)
    try:
        tree = parse_expression(text)
    except ExpressionSyntaxError:
        return _parse_quantity(text) or _parse_words(text)
    letter = split_unit_letter(text)
    return Quantity(text, tree, with_unit_letter=None if letter is None else _quantity_with_unit(text, *letter))


def _parse_numeral_with_base(text: str) -> Numeral | None:
    """Return a numeral with an explicit base, in digits or words."""
    match = _NUMERAL_WITH_BASE.fullmatch(TEXT_COMMAND.sub(r"\1", text)) if "_" in text or "base" in text else None
    if match is None:
        return None
    digits = match["digits"].upper().replace(" ", "")
    name = (match["base"] or match["named"]).strip("(){} ")
    base = Fraction(name) if name.isdecimal() else number_from_words(name)
    values = [int(digit, 16) for digit in digits if digit.isalnum()]
    if base is None or not max(values) < base <= 36 or digits.isalpha():
        return None
    return Numeral(text, re.sub(r"^(-?)0+(?=\w)", r"\1", digits), str(base))


def _contains_word(text: str) -> bool:
    return _LONG_WORD.search(_FUNCTION_WORDS.sub("", text)) is not None


def _parse_quantity(text: str) -> Quantity | None:
    """Parse a number with a unit or a scaling word."""
    scaled = split_scaling_word(text)
    if scaled is not None:
        number = _parse_single(scaled[0].strip())
        if not isinstance(number, Quantity):
            return None
        return replace(number, text=text, tree=FunctionCall("*", (number.tree, Number(scaled[1]))))
    split = split_unit_words(text)
    return None if split is None else _quantity_with_unit(text, *split)


def _quantity_with_unit(text: str, number: str, unit: Unit) -> Quantity | None:
    tree = _parse_expression_or_none(number)
    return None if tree is None else Quantity(text, tree, unit)


def _parse_sum_of_quantities(text: str) -> Quantity | None:
    """Return a sum such as ``5 ft 6 in`` as one quantity."""
    split = split_quantities(text) if text[:1].isdigit() else None
    if split is None:
        return None
    terms = [(_parse_expression_or_none(number), size) for number, size in split[0]]
    products = tuple(FunctionCall("*", (tree, Number(size))) for tree, size in terms if tree is not None)
    return Quantity(text, FunctionCall("+", products), split[1]) if len(products) == len(terms) else None


def _parse_expression_or_none(text: str) -> Expression | None:
    try:
        return parse_expression(text.strip().replace(",", "") if text[:1].isdigit() else text)
    except ExpressionSyntaxError:
        return None


def _parse_words(text: str) -> Answer:
    words = plain_words(text)
    if words is None:
        return UnparsedText(text)
    return Words(words, number_from_words(words))
