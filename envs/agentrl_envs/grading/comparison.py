r"""Whether two answers mean the same, by math-verify: its readings, with what it is too lenient or too slow about.

Imports SymPy: for the grading process alone.

- **Readings.** LaTeX by math-verify and Python notation by us, of the respelled text. math-verify's fall-back, the last
  number that stands anywhere in a text it cannot read, is taken only where the number is all there is: otherwise every
  answer that hedges ("5 # 6") would be right. A decimal comma is read in answers only; in a gold answer it separates.
- **Refuted by value.** Expressions that differ in value are not sent through `simplify`, which takes a hundred times as
  long to find nothing. math-verify compares decimals to six digits behind the point; a small number must agree in its
  leading digits too, so 0.0000001 is not 0.0000002.
- **Not equal although the letters are.** Words that are anagrams (products of letters to a LaTeX parser), numerals of
  different bases, the right side of a false equation (``4=5`` is not 5), and words behind a number that change it: to
  math-verify all words are units, so ``5 \text{ million}`` is 5.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, parse, verify
from sympy.core.expr import UnevaluatedExpr

from agentrl_envs.grading.latex import read_latex
from agentrl_envs.grading.notation import python_notation
from agentrl_envs.grading.spelling import respelled, words_in
from agentrl_envs.types import Verdict

_NUMBER = (ExprExtractionConfig(),)
_ONLY_A_NUMBER = re.compile(
    r"[+-]?[$€£¥]? ?(?:\d+|\d{1,3}(?:[, ]\d{3})+)?(?:\.\d+)? ?(?:[$€£¥%]|percent|pct)?", re.ASCII
)
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")  # two numbers: to math-verify a product, and "17 0" would be 0
_NUMERAL = re.compile(r"(?P<digits>[0-9A-Za-z]+)_\{?(?P<base>\d+)\}?", re.ASCII)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MEANT = re.compile(
    r"\b(?:(?:hundred|thousand|million|billion|trillion|dozen|third|fourth|fifth|sixth|tenth)s?|half|halves|squared|cubed"
    r"|at least|at most|(?:or )?(?:more|less|fewer)|about|nearly|not|to)\b",
    re.IGNORECASE,
)
_I = sympy.Symbol("i", real=True)
_TOO_NEAR = 2e-6  # absolute: math-verify rounds decimals to six digits
_EXACT = 1e-12  # relative: double precision
_LEADING_DIGITS = 1e-2  # relative: farther apart is different, however small


def compare(answer: str, gold: str) -> Verdict:
    """The verdict on an answer. A comparison that needs too much memory times out."""
    try:
        gold_forms, answer_forms = _forms(gold), _forms(answer)
        if _same(answer, gold, answer_forms, gold_forms):
            return Verdict.CORRECT
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT
    if not _understood(gold_forms, gold):
        return Verdict.UNPARSABLE_GOLD
    return Verdict.INCORRECT if _understood(answer_forms, answer) else Verdict.UNPARSABLE_ANSWER


def check_gold(gold: str) -> Verdict:
    """`Verdict.CORRECT` where the gold answer can be read and equals itself; equal texts are not enough."""
    try:
        forms = _forms(gold)
        if not _understood(forms, gold):
            return Verdict.UNPARSABLE_GOLD
        return Verdict.CORRECT if words_in(gold) or _any_equal(forms, forms) else Verdict.UNPARSABLE_GOLD
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT


def _same(answer: str, gold: str, answer_forms: list[Any], gold_forms: list[Any]) -> bool:
    answer, gold = respelled(answer), respelled(gold)
    if not set(_MEANT.findall(answer.lower())) <= set(_MEANT.findall(gold.lower())):
        return False
    if "_" in answer and "_" in gold:
        answer_numeral, gold_numeral = _NUMERAL.fullmatch(answer), _NUMERAL.fullmatch(gold)
        if answer_numeral and gold_numeral and answer_numeral["base"] != gold_numeral["base"]:
            return False
    if _DECIMAL_COMMA.fullmatch(answer):
        answer_forms = [*answer_forms, sympy.Float(answer.replace(",", "."))]
    return _any_equal(gold_forms, answer_forms)


def _any_equal(gold_forms: list[Any], answer_forms: list[Any]) -> bool:
    return any(
        verify(gold, answer, timeout_seconds=None, allow_set_relation_comp=True)
        for gold in gold_forms
        for answer in answer_forms
        if not _false_equation(answer) and not _refuted(gold, answer)
    )


@lru_cache(maxsize=2048)
def _forms(text: str) -> list[Any]:
    """Every reading of a text; a text that cannot be read is among its readings as it stands."""
    text = respelled(text)
    if not _braces_balance(text) or _SIDE_BY_SIDE.search(text):
        return [text]
    in_latex = read_latex(text)
    forms: list[Any] = [] if in_latex is None else [in_latex]
    in_python = python_notation(text)
    if in_python is not None:
        forms = [in_python, *_as_matrix(in_python), *forms]
    if not forms and _ONLY_A_NUMBER.fullmatch(text):
        forms = [*parse(text, extraction_config=_NUMBER, parsing_timeout=None), *forms]
    return [*forms, *(form.xreplace({_I: sympy.I}) for form in forms if _has_i(form)), text]


def _has_i(form: Any) -> bool:
    """Whether math-verify read an i as a real variable: it may be the imaginary unit."""
    return isinstance(form, sympy.Basic) and _I in form.free_symbols


def _braces_balance(text: str) -> bool:
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth < 0:
            return False
    return depth == 0


def _as_matrix(value: Any) -> list[Any]:
    """A list of equally long lists may mean a matrix."""
    rows: tuple[Any, ...] = value.args if isinstance(value, sympy.Tuple) else ()
    if len(rows) > 0 and all(isinstance(row, sympy.Tuple) and len(row) == len(rows[0]) for row in rows):
        return [sympy.ImmutableMatrix([list(row) for row in rows])]
    return []


def _read(forms: list[Any]) -> bool:
    """Whether some reading is more than the bare string that math-verify falls back to."""
    return any(not isinstance(form, str) for form in forms)


def _understood(forms: list[Any], text: str) -> bool:
    return _read(forms) or words_in(text) is not None


def _false_equation(form: Any) -> bool:
    """An equation between numbers that are not equal."""
    if not isinstance(form, sympy.Eq) or form.free_symbols:
        return False
    left, right = _value(form.lhs), _value(form.rhs)
    return left is not None and right is not None and abs(left - right) > _TOO_NEAR


def _refuted(gold: Any, answer: Any) -> bool:
    """Whether two expressions certainly differ: their values do, at one point where both have one."""
    if not _comparable(gold) or not _comparable(answer) or gold.free_symbols != answer.free_symbols:
        return False
    left, right = _value(gold), _value(answer)
    if left is None or right is None:
        return False
    apart, size = abs(left - right), max(abs(left), abs(right))
    return apart > _TOO_NEAR + _EXACT * size or apart > _LEADING_DIGITS * size


def _comparable(form: Any) -> bool:
    """An expression proper. Percentages are left to math-verify: to it 9 % is both 9 and 0.09."""
    return isinstance(form, sympy.Expr) and not isinstance(form, sympy.Symbol) and not form.has(UnevaluatedExpr)


def _value(form: Any) -> complex | None:
    """The value with numbers in place of the symbols; None where there is none."""
    point = {symbol: sympy.Rational(1009 + 211 * i, 773) for i, symbol in enumerate(sorted(form.free_symbols, key=str))}
    try:
        form = form.doit() if form.has(UnevaluatedExpr) else form
        value = complex(form.subs(point).evalf(20) if point else form.evalf(20))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    except NotImplementedError:  # SymPy raises it where it knows no value, for example of a relation or a set
        return None
    return value if abs(value) < float("inf") else None
