r"""What an answer is made of: lists, sets, tuples, intervals with their kind of bracket, relations, words, expressions.

>>> tuple(read_answer(text).kind for text in (r"(1, 2]", r"1 < x \le 2", r"\{1,2\}", "1,2"))
('(]', '(]', 'set', 'list')
>>> read_answer("5 # 6")
Unread(text='5 # 6')

Kinds of a `Bracketed`: ``list`` (no bracket), ``set``, ``()``, ``[]``, ``(]``, ``[)``, ``<>``, ``union``, ``ratio``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from agentrl_envs.grading.reading.expressions import Apply, Expression, Number, Symbol, symbols
from agentrl_envs.grading.reading.numerals import number_in_words, scaled_by_words
from agentrl_envs.grading.reading.reader import read_expression
from agentrl_envs.grading.reading.spelling import respelled, unstyled, words_in
from agentrl_envs.grading.reading.tokens import UnreadableError
from agentrl_envs.grading.reading.units import split_letter, split_words


@dataclass(frozen=True, slots=True)
class Unread:
    """A text that is not understood."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """Plain words in small letters; ``number``: the one that they name."""

    text: str
    number: Expression | None = None


@dataclass(frozen=True, slots=True)
class Numeral:
    """Digits of a base that is given beside them; its value is not calculated."""

    text: str
    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Leaf:
    """An expression with the unit behind it. ``bare``: without the letter behind it, should that be a unit (``5m``)."""

    text: str
    tree: Expression
    unit: str | None = None
    bare: Expression | None = None


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Several answers in one kind of bracket. ``variable``: whose interval it is, where a relation says so."""

    text: str
    kind: str
    parts: tuple[Answer, ...]
    variable: Expression | None = None


@dataclass(frozen=True, slots=True)
class Relation:
    """``parts[0] signs[0] parts[1] ...``; signs are ``= < <= > >= != ~ in notin``."""

    text: str
    parts: tuple[Answer, ...]
    signs: tuple[str, ...]


Answer: TypeAlias = Unread | Words | Numeral | Leaf | Bracketed | Relation

AND, OR = "\x1f", "\x1e"  # between answers, in place of the words
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
_NUMERAL = re.compile(r"(-?[0-9A-Fa-f]+(?:\.[0-9]+)?)\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))(?:\\text\{[^{}]*\})?")
_STYLED_DIGITS = re.compile(r"^\\text\s*\{\s*([0-9A-Za-z]+)\s*\}(?=_)")
_TWO_SIGNS = re.compile(r"\\(pm|mp)(?![A-Za-z])")
_WORD_RUN = re.compile(r"(?<![\\A-Za-z])[a-z]{4,}|(?<![\\A-Za-z])[A-Z][a-z]{3,}")
_FUNCTION_WORDS = re.compile(
    r"\\(?:begin|end)\{[a-zA-Z]*\}|(?<![A-Za-z\\])(?:a?sin|a?cos|a?tan|arcsin|arccos|arctan|sinh|cosh|tanh|sqrt|cbrt|root|Rational|Integer|Float"
    r"|Fraction|factorial|binomial|floor|ceil(?:ing)?|infinity)(?![A-Za-z])"
)
_INFINITY = Apply("infinity", ())
_LINE = (Leaf("", Apply("neg", (_INFINITY,))), Leaf("", _INFINITY))
INTERVALS = frozenset({"()", "[]", "(]", "[)"})
_REALS = frozenset({r"\mathbb{R}", r"\mathbb R", r"\R", r"\text{all real numbers}", "all real numbers", r"\Reals"})
_PYTHON_MATRIX = re.compile(r"(?:Matrix|(?:np\.)?array)\((\[\[.*\]\])\)", re.DOTALL)


@lru_cache(maxsize=4096)
def read_answer(text: str) -> Answer:
    """What the text says; `Unread` where it cannot be understood as a whole."""
    return _list(_CONJUNCTION.sub(lambda said: OR if "or" in said.group() else AND, respelled(text)))


def _list(text: str, *, bracketed: bool = False) -> Answer:
    """A text that may be several answers side by side. In brackets a comma is no mark of thousands."""
    if not text:
        return Unread(text)
    if not bracketed and _THOUSANDS.fullmatch(text):
        return _part(text)
    for separators in ((";",), (AND, OR, ",")):
        pieces, _ = _split(text, separators)
        if not pieces:
            return Unread(text)
        if len(pieces) > 1:
            parts = tuple(_list(piece.strip()) for piece in pieces)
            if any(isinstance(part, Unread) for part in parts):
                return _worded(text)
            ors = OR in text and all(isinstance(part, Bracketed) and part.kind in INTERVALS for part in parts)
            return Bracketed(text, "union" if ors else "list", parts)
    return _related(text)


def _worded(text: str) -> Answer:
    plain = text.replace(AND, " and ").replace(OR, " or ")
    words = words_in(plain)
    return Unread(plain) if words is None else Words(words)


def _split(text: str, marks: Container[str]) -> tuple[list[str], list[str]]:
    """The pieces between marks that stand in no bracket, and these marks; nothing where brackets do not balance."""
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
    """A chain of relations, or one answer."""
    pieces, found = _split(text, _SIGNS)
    signs = [_SIGNS[sign] for sign in found]
    if not signs:
        return _part(text)
    parts = tuple(_part(piece.strip()) for piece in pieces)
    if any(isinstance(part, Unread) for part in parts):
        return Unread(text)
    if signs == ["in"] and isinstance(parts[1], Bracketed) and isinstance(parts[0], Leaf):
        return replace(parts[1], text=text, variable=parts[0].tree)
    return _interval(text, parts, signs) or Relation(text, parts, tuple(signs))


def _interval(text: str, parts: tuple[Answer, ...], signs: list[str]) -> Bracketed | None:
    """An inequality of a single variable is an interval."""
    if all(sign in (">", ">=") for sign in signs):
        parts, signs = parts[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    leaves = [part for part in parts if isinstance(part, Leaf)]
    if len(leaves) != len(parts) or not all(sign in ("<", "<=") for sign in signs):
        return None
    if len(leaves) == 2 and _is_variable(leaves[1].tree):
        leaves, signs = [*leaves, _LINE[1]], [*signs, "<"]
    elif len(leaves) == 2:
        leaves, signs = [_LINE[0], *leaves], ["<", *signs]
    if len(leaves) != 3:
        return None
    low, middle, high = leaves
    if not _is_variable(middle.tree) or symbols(middle.tree) & (symbols(low.tree) | symbols(high.tree)):
        return None
    kind = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Bracketed(text, kind, (low, high), middle.tree)


def _is_variable(tree: Expression) -> bool:
    return isinstance(tree, Symbol) or (isinstance(tree, Apply) and tree.function.startswith("call "))


def _part(text: str) -> Answer:
    """One answer: brackets and what stands in them, a union, a ratio, two signs, or an expression."""
    text = text.strip()
    if text in _REALS:
        return Bracketed(text, "()", _LINE)
    if text in (r"\emptyset", r"\varnothing", r"\{\}"):
        return Bracketed(text, "set", ())
    matrix = _PYTHON_MATRIX.fullmatch(text)
    if matrix is not None:
        return _part(matrix[1])
    union, _ = _split(text, (r"\cup",))
    if len(union) > 1:
        return _group(text, "union", [_part(piece) for piece in union])
    return _bracketed(text) or _with_two_signs(text) or _ratio(text) or _leaf(text)


def _group(text: str, kind: str, parts: Sequence[Answer]) -> Answer:
    return Unread(text) if any(isinstance(part, Unread) for part in parts) else Bracketed(text, kind, tuple(parts))


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
    if tokens[0].group() == r"\{" and not isinstance(said, Unread):
        return Bracketed(text, kind, (said,))
    if kind == "<>":
        return None
    if kind == "[]":
        return Bracketed(text, kind, (said,)) if not isinstance(said, Unread) else None
    return said if kind == "()" or tokens[0].group() == "{" else None


def _closes_at_the_end(tokens: Sequence[re.Match[str]]) -> bool:
    depth = 0
    for place, token in enumerate(tokens):
        depth += (token.group() in _OPENING) - (token.group() in _CLOSING)
        if depth == 0:
            return place == len(tokens) - 1
    return False


def _with_two_signs(text: str) -> Answer | None:
    r"""``a \pm b`` is two answers."""
    if _TWO_SIGNS.search(text) is None:
        return None
    upper = _TWO_SIGNS.sub(lambda sign: "+" if sign[1] == "pm" else "-", text)
    lower = _TWO_SIGNS.sub(lambda sign: "-" if sign[1] == "pm" else "+", text)
    return _group(text, "list", [_part(upper), _part(lower)])


def _ratio(text: str) -> Answer | None:
    pieces, _ = _split(text, (":",))
    if len(pieces) < 2:
        return None
    last = pieces[-1].strip()
    words = split_words(last)  # 4:30 p.m.
    parts = [_leaf(piece.strip()) for piece in ([*pieces[:-1], words[0]] if words else pieces)]
    if words and isinstance(parts[-1], Leaf):
        parts[-1] = replace(parts[-1], text=last, unit=words[1])
    return _group(text, "ratio", parts)


def _leaf(text: str) -> Answer:
    plain = unstyled(text)
    if plain != text:
        said = number_in_words(plain)
        if said is None and len(plain) > 1 and plain.replace(" ", "").isalpha():
            return Words(plain.casefold())
        return Words(plain.casefold(), said) if said is not None else _list(plain)
    numeral = _NUMERAL.fullmatch(_STYLED_DIGITS.sub(r"\1", text))
    if numeral is not None and any(character.isdigit() for character in numeral[1]):
        return Numeral(text, numeral[1].upper(), numeral[2] or numeral[3])
    if _is_word(text):
        return _quantity(text) or _spoken(text)
    known = split_words(text) if re.search(r"\\text|\\mbox|\\mathrm|[\d}] ?[a-z]{2,}|\\circ|\$", text) else None
    if known is not None:
        return _quantity(text) or Unread(text)
    try:
        tree = read_expression(text)
    except UnreadableError:
        return _quantity(text) or _spoken(text)
    return Leaf(text, tree, bare=_tree_or_none(split_letter(text)))


def _is_word(text: str) -> bool:
    return _WORD_RUN.search(_FUNCTION_WORDS.sub("", text)) is not None


def _quantity(text: str) -> Leaf | None:
    """A number with a unit behind it, or with a word that multiplies it."""
    scaled = scaled_by_words(text)
    if scaled is not None:
        tree = _tree_or_none(scaled[0])
        return None if tree is None else Leaf(text, Apply("*", (tree, Number(scaled[1]))))
    split = split_words(text)
    tree = _tree_or_none(split[0]) if split is not None else None
    if tree is None or split is None:
        return None
    return Leaf(text, tree, split[1])


def _tree_or_none(text: str | None) -> Expression | None:
    try:
        return None if text is None else read_expression(text.strip().replace(",", "") if text[:1].isdigit() else text)
    except UnreadableError:
        return None


def _spoken(text: str) -> Answer:
    words = words_in(text)
    if words is None:
        return Unread(text)
    return Words(words, number_in_words(words))
