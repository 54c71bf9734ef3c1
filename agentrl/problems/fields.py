"""Convert a raw row to a Problem: the fields of statement and answer in common schemas, and errors in a row.

==========================================  ===========================  =============================
data set                                    statement                    answer
==========================================  ===========================  =============================
our files, aime_2024, aime25, MATH-500      ``problem``                  ``answer``
amc23, GSM8K-like                           ``question``                 ``answer`` (also ``27.0``)
DAPO-Math-17k                               ``prompt[0].content``        ``reward_model.ground_truth``
DAPO-Math-17k-Processed                     ``prompt``                   ``solution``
==========================================  ===========================  =============================
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from agentrl.problems.problem_errors import ProblemFieldError
from agentrl.problems.rows import Row
from agentrl.problems.settings import FieldName
from agentrl_envs.types import Problem

USUAL_FIELDS: Mapping[FieldName, tuple[str, ...]] = {
    "problem": ("problem", "question", "prompt.0.content", "prompt", "statement"),
    "answer": ("answer", "reward_model.ground_truth", "ground_truth", "solution"),
    "id": ("id", "unique_id"),
}

_DAPO_WRAPPER = re.compile(
    r"\ASolve the following math problem step by step\. The last line of your response should be of the form "
    r"Answer: \\?\$Answer.*?\n\n(?P<statement>.*?)\s*\n\n"
    r"Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z",
    re.DOTALL,
)
_WHOLE_FLOAT = re.compile(r"(?P<whole>[+-]?\d+)\.0+")


def problem_of(row: Row, place: str, *, source: str, fields: Mapping[FieldName, str]) -> Problem | None:
    """The problem in ``row``; None if its answer is missing or empty.

    Raises ProblemFieldError, which names ``place``, if the statement is missing or empty, if there is no field for the
    answer, or if statement or answer are not text (an answer may be a number).
    """
    statement = statement_of(row, place, fields=fields)
    answer = canonical_answer(_field(row, "answer", fields, place), place)
    if answer is None:
        return None
    return Problem(
        id=_id(row, fields, place, statement, answer, source),
        statement=statement,
        answer=answer,
        source=source,
        family=str(row.get("subject") or row.get("kind") or ""),
    )


def statement_of(row: Row, place: str, *, fields: Mapping[FieldName, str]) -> str:
    """The statement in ``row``. Raises ProblemFieldError if it is missing, empty or not text."""
    value = _field(row, "problem", fields, place)
    if value is not None and not isinstance(value, str):
        raise ProblemFieldError(f"{place}: the problem's statement must be text, found {type(value).__name__}")
    statement = unwrap(value or "")
    if not statement.strip():
        raise ProblemFieldError(f"{place}: the problem's statement is empty")
    return statement


def unwrap(statement: str) -> str:
    r"""The question without DAPO's instructions ("... Answer: $Answer ..."); any other statement unchanged."""
    wrapped = _DAPO_WRAPPER.match(statement)
    return wrapped["statement"] if wrapped else statement


def canonical_answer(value: object, place: str) -> str | None:
    r"""The answer as text; None if it is empty.

    Integral floats become integers. In a written solution, the answer is the last ``\boxed{}``, or the text after
    GSM8K's ``####``.

    >>> canonical_answer("27.0", ""), canonical_answer(27.0, ""), canonical_answer(3, ""), canonical_answer(" ", "")
    ('27', '27', '3', None)
    >>> canonical_answer(r"So the sum is $\boxed{\frac{1}{2}}$.", "")
    '\\frac{1}{2}'
    >>> canonical_answer("16 - 3 - 4 = 9 eggs, 9 * 2 = 18 dollars\n#### 18", "")
    '18'
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ProblemFieldError(f"{place}: the answer must be text or a number, found {type(value).__name__}")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ProblemFieldError(f"{place}: the answer is {value}, not a number to reach")
    text = str(value).rsplit("####", 1)[-1].strip()
    whole = _WHOLE_FLOAT.fullmatch(text)
    if whole:
        return whole["whole"]
    return (last_boxed(text) or text) or None


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` in ``text``, with balanced braces; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip() or None
    return None


def _field(row: Row, wanted: FieldName, fields: Mapping[FieldName, str], place: str) -> object:
    if wanted in fields:
        found, value = _lookup(row, fields[wanted])
        if not found:
            raise ProblemFieldError(
                f"{place}: no field {fields[wanted]!r} for the {wanted}; fields there: {_names(row)}"
            )
        return value
    empty = False
    for path in USUAL_FIELDS[wanted]:
        found, value = _lookup(row, path)
        if found and value is not None and not isinstance(value, (dict, list)):
            return value
        empty = empty or (found and value is None)
    if empty:
        return None
    raise ProblemFieldError(
        f"{place}: no field for the {wanted} (looked for {', '.join(USUAL_FIELDS[wanted])});"
        f" fields there: {_names(row)}; name it with fields.{wanted}"
    )


def _lookup(row: Row, path: str) -> tuple[bool, object]:
    """``(found, value)`` at a dotted path; numbers index lists. A field whose name contains dots takes precedence."""
    if path in row:
        return True, row[path]
    value: object = row
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            return False, None
    return True, value


def _names(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


def _id(row: Row, fields: Mapping[FieldName, str], place: str, statement: str, answer: str, source: str) -> str:
    """The row's own id, or else a hash of its content: equal rows have equal ids in every file and order."""
    if "id" in fields:
        return str(_field(row, "id", fields, place))
    for path in USUAL_FIELDS["id"]:
        found, value = _lookup(row, path)
        if found and isinstance(value, (str, int)) and value != "":
            return str(value)
    content = f"{statement}\0{answer}".encode()
    return f"{source}-{hashlib.sha256(content).hexdigest()[:16]}"
