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
  math-verify all words are units, so ``5 \text{ million}`` is 5, and so are most single letters, so ``3t`` is 3.
- **No answer although something can be read.** Signs that math-verify drops from between two digits (``1'74``,
  ``1$74``), numbers side by side (``17 0``, ``10\%1``), and a box with something beside it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import sympy
from math_verify import ExprExtractionConfig, parse, verify
from sympy.core.expr import UnevaluatedExpr

from agentrl_envs.answers import last_boxed
from agentrl_envs.grading.latex import read_latex
from agentrl_envs.grading.notation import python_notation
from agentrl_envs.grading.spelling import respelled, words_in
from agentrl_envs.types import Verdict

_NUMBER = (ExprExtractionConfig(),)
_ONLY_A_NUMBER = re.compile(
    r"[+-]?[$€£¥]? ?(?:\d+|\d{1,3}(?:[, ]\d{3})+)?(?:\.\d+)? ?(?:[$€£¥%]|percent|pct)?", re.ASCII
)
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+", re.ASCII)
# Two numbers: to math-verify a product ("17 0" would be 0), or one number (4"08 would be 408).
_SIDE_BY_SIDE = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d|\d\s*(?:\\?[$%]|['\"])[\\$%'\"\s]*\d")
_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])")
_SUBSCRIPT = re.compile(r"(?<=\d)[\s'\"]*_(?:\{([^{}]*)\}|([\w.]+))", re.ASCII)
_NUMERAL = re.compile(r"([0-9]+)_(?:\{\d+\}|\d+)", re.ASCII)
_ATTACHED_LETTER = re.compile(r"[\d}]([cdghlmost])$", re.ASCII)  # those that math-verify takes for units
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_UNITS_OF_ONE_LETTER = "msghl"
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MEANT = re.compile(
    r"\b(?:(?:hundred|thousand|million|billion|trillion|dozen|third|fourth|fifth|sixth|tenth)s?|half|halves|squared|cubed"
    r"|at least|at most|(?:or )?(?:more|less|fewer)|about|nearly|not|to)\b",
    re.IGNORECASE,
)
_I = sympy.Symbol("i", real=True)
_TOO_NEAR = 2e-6  # absolute: math-verify rounds decimals to six digits
_EXACT = 1e-12  # relative: double precision
_ROUGHLY = 0.05  # relative: what is called approximately equal
_DIGITS_END = 1e9  # from here on floats leave too few digits behind the point
_LEADING_DIGITS = 1e-2  # relative: farther apart is different, however small


def compare(answer: str, gold: str) -> Verdict:
    """The verdict on an answer. One whose comparison needs too much memory is as wrong as one that takes too long."""
    try:
        gold_forms = _forms(gold)
    except (MemoryError, RecursionError):
        return Verdict.GRADER_TIMEOUT
    try:
        answer_forms = _forms(answer)
        if _same(answer, gold, answer_forms, gold_forms):
            return Verdict.CORRECT
    except (MemoryError, RecursionError):
        return Verdict.ANSWER_TIMEOUT
    if not _understood(gold_forms, gold):
        return Verdict.UNPARSABLE_GOLD
    return Verdict.INCORRECT if _understood(answer_forms, answer) else Verdict.UNPARSABLE_ANSWER


def read_gold(gold: str) -> None:
    """Read a gold answer ahead of `compare`, which remembers it: what that takes is not the answer's fault."""
    with suppress(MemoryError, RecursionError):  # said by `compare`
        _forms(gold)


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
    if not _bases_agree(answer, gold) or not _letters_agree(answer, gold):
        return False
    if _DECIMAL_COMMA.fullmatch(answer):
        answer_forms = [*answer_forms, sympy.Float(answer.replace(",", "."))]
    return _any_equal(gold_forms, answer_forms)


def _bases_agree(answer: str, gold: str) -> bool:
    """Whether the subscripts of numerals are those of the gold answer, which the LaTeX parser drops.

    An answer may leave them out, and may write one where the gold answer is nothing but its digits.
    """
    said, wanted = _subscripts(answer), _subscripts(gold)
    if not said or said == wanted:
        return True
    numeral = _NUMERAL.fullmatch(answer)
    return numeral is not None and numeral[1] == gold


def _subscripts(text: str) -> list[str]:
    return [(braced or bare).strip() for braced, bare in _SUBSCRIPT.findall(text)] if "_" in text else []


def _letters_agree(answer: str, gold: str) -> bool:
    """Whether a single letter attached to a number is in both: math-verify drops most of them as units.

    That of a gold answer is a variable (``2s``); that of an answer may be a unit (``5m`` for 5).
    """
    in_answer, in_gold = _ATTACHED_LETTER.search(answer), _ATTACHED_LETTER.search(gold)
    if in_gold is not None and in_gold[1] not in _COMMAND.sub("", answer):
        return False
    return in_answer is None or in_answer[1] in _UNITS_OF_ONE_LETTER or in_answer[1] in _COMMAND.sub("", gold)


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
    if _BOX.search(text):
        inner = last_boxed(text)
        if inner is None or text.replace(" ", "") != f"\\boxed{{{inner}}}".replace(" ", ""):
            return [text]
        text = inner
    if not _braces_balance(text) or _SIDE_BY_SIDE.search(text) or _falsely_rounded(text):
        return [text]
    in_latex = read_latex(text)
    forms: list[Any] = [] if in_latex is None else [in_latex]
    if _ATTACHED_LETTER.search(text) and (variable := read_latex(text, units=False)) is not None:
        forms.append(variable)
    in_python = python_notation(text)
    if in_python is not None:
        forms = [in_python, *_as_matrix(in_python), *forms]
    if not forms and _ONLY_A_NUMBER.fullmatch(text):
        forms = [*parse(text, extraction_config=_NUMBER, parsing_timeout=None), *forms]
    imaginary = [form for form in map(_with_imaginary_unit, forms) if form is not None]
    return [*forms, *imaginary, text]


def _with_imaginary_unit(form: Any) -> Any | None:
    """With the imaginary unit for an i that math-verify read as a real variable; None where there is none."""
    if not isinstance(form, sympy.Basic) or _I not in form.free_symbols:
        return None
    try:
        return form.xreplace({_I: sympy.I})
    except (TypeError, ValueError, NotImplementedError):  # SymPy's: complex numbers have no inequalities, no intervals
        return None


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
    left, right = _value(form.lhs, {}), _value(form.rhs, {})
    return left is not None and right is not None and abs(left - right) > _TOO_NEAR


def _refuted(gold: Any, answer: Any) -> bool:
    """Whether two forms certainly differ: in kind, or in value at one point where both have one."""
    if _kind(gold) != _kind(answer):
        return _kind(gold) is not None and _kind(answer) is not None
    if not _comparable(gold) or not _comparable(answer):
        return False
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    point = {name: sympy.Rational(1009 + 211 * place, 773) for place, name in enumerate(names)}
    left, right = _value(gold, point), _value(answer, point)
    if left is None or right is None:
        return False
    if min(abs(left), abs(right)) > _DIGITS_END and gold.has(sympy.Float) != answer.has(sympy.Float):
        apart_exactly = _value(_exact(gold) - _exact(answer), point)  # 2^100 + 0.5 is not 2^100
        return apart_exactly is not None and abs(apart_exactly) > _TOO_NEAR
    if math.isinf(abs(left)) or math.isinf(abs(right)):
        return math.isinf(abs(left)) != math.isinf(abs(right))
    if left == right == 0:
        return _far_from_one(gold / answer, point) or _far_from_one(answer / gold, point)  # 1/2004! is not 1/2064!
    apart, size = abs(left - right), max(abs(left), abs(right))
    return apart > _TOO_NEAR + _EXACT * size or apart > _LEADING_DIGITS * size


def _comparable(form: Any) -> bool:
    """An expression proper. Percentages are left to math-verify: to it 9 % is both 9 and 0.09."""
    return isinstance(form, sympy.Expr) and not isinstance(form, sympy.Symbol) and not form.has(UnevaluatedExpr)


def _far_from_one(ratio: Any, point: Mapping[str, Any]) -> bool:
    value = _value(ratio, point)
    return value is not None and abs(value - 1) > _LEADING_DIGITS


def _falsely_rounded(text: str) -> bool:
    """``2/3 \\approx 3.67``: to math-verify its first part is what is said."""
    exact, sign, rounded = text.partition(r"\approx")
    if not sign or not exact.strip():
        return False
    left, right = (_number(read_latex(respelled(part))) for part in (exact, rounded))
    return left is not None and right is not None and abs(left - right) > _ROUGHLY * max(abs(left), abs(right))


def _number(form: Any) -> complex | None:
    return _value(form, {}) if _comparable(form) and not form.free_symbols else None


def _exact(form: Any) -> Any:
    """With its decimals as fractions."""
    return form.xreplace({decimal: sympy.Rational(str(decimal)) for decimal in form.atoms(sympy.Float)})


def _kind(form: Any) -> str | None:
    """What no other kind can equal; None where that is not certain."""
    if isinstance(form, sympy.MatrixBase):
        return "matrix"
    if isinstance(form, (sympy.Interval, sympy.Union)):
        return "interval"
    return "expression" if _comparable(form) else None


def _value(form: Any, point: Mapping[str, Any]) -> complex | None:
    """The value with numbers in place of the symbols, by their names, perhaps infinite; None where there is none."""
    try:
        form = form.doit() if form.has(UnevaluatedExpr, sympy.oo, -sympy.oo) else form
        symbols = form.free_symbols
        value = complex(
            form.subs({symbol: point[symbol.name] for symbol in symbols}).evalf(20) if symbols else form.evalf(20)
        )
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    except NotImplementedError:  # SymPy raises it where it knows no value, for example of a relation or a set
        return None
    return None if math.isnan(abs(value)) else value
