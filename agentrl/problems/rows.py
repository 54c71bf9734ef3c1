"""Rows of problem files and data sets, and their conversion to problems.

Rows come from JSON Lines, parquet and the Hugging Face ``datasets`` library. Errors about a row contain its location
(``mawps.jsonl:17``, ``train.parquet row 3``). Statement and answer are recognized in common schemas:

==========================================  ===========================  =============================
data set                                    statement                    answer
==========================================  ===========================  =============================
agentrl, aime_2024, aime25, MATH-500        ``problem``                  ``answer``
amc23, GSM8K-like                           ``question``                 ``answer`` (also ``27.0``)
DAPO-Math-17k                               ``prompt[0].content``        ``reward_model.ground_truth``
DAPO-Math-17k-Processed                     ``prompt``                   ``solution``
==========================================  ===========================  =============================

A statement may be a list of messages, each with a role and content. All columns except the statement, the answer and
the id are stored in ``Problem.info``.

ProblemLoadError(SettingsError, ValueError): reported by the command line, with exit code 2
├── ProblemFileError        the file is missing, malformed or of an unknown kind
├── ProblemFieldError       a row lacks a field, or its statement or answer is unusable
├── EmptyProblemsError      no problems remain to sample
└── SamplerStateError       a saved position refers to other problems
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from agentrl.errors import SettingsError, require_package
from agentrl.problems.settings import FieldName
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.types import ChatMessage, NotJSONError, Problem, freeze


class ProblemLoadError(SettingsError, ValueError):
    """The requested problems cannot be loaded; the message contains the reason and the valid values."""


class ProblemFileError(ProblemLoadError):
    """The file is missing, has an unknown extension, or has content that does not match its extension."""


class ProblemFieldError(ProblemLoadError):
    """The row lacks the requested fields, or its statement or answer is unusable."""


class EmptyProblemsError(ProblemLoadError):
    """The source has no problems, or none remain after a split or a filter."""


class SamplerStateError(ProblemLoadError):
    """The saved sampler position belongs to different sources or a different seed."""


Row = dict[str, object]

_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a cheap test before the check for lone surrogates


def read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield ``(location, row)`` for each line that is not blank. Raises ProblemFileError with file and line number."""
    require_file(path)
    # Read bytes, so that invalid UTF-8 is reported with its line number.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            location = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
                raise ProblemFileError(f"{location}: not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise ProblemFileError(f"{location}: each line must be a JSON object; got {type(row).__name__}")
            if _ESCAPED_SURROGATE.search(line):
                _reject_lone_surrogates(row, location)
            yield location, row


def _reject_lone_surrogates(row: Row, location: str) -> None:
    """Raise ProblemFileError for a lone surrogate, which no tokenizer can encode and no file can store."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ProblemFileError(
            f"{location}: contains half a character (a lone surrogate such as \\ud83d), which has no encoding; "
            "remove it"
        ) from error


def read_parquet(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield ``(location, row)`` for each row, read in batches. Raises ProblemFileError if the file is not parquet."""
    import pyarrow
    import pyarrow.parquet

    require_file(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except pyarrow.ArrowException as error:
        raise ProblemFileError(f"{path}: cannot be read as parquet ({error})") from error


def read_hub(name: str, *, split: str, subset: str | None, revision: str | None) -> Iterator[tuple[str, Row]]:
    """Yield ``(location, row)`` for each row of a Hugging Face data set, or of a local folder in one of its layouts.

    Raises ProblemLoadError if the data set, split or subset does not exist or cannot be reached, and SettingsError
    without the extra ``hub``.
    """
    require_package("datasets", extra="hub", purpose=f"data set {name!r}")
    import datasets

    try:
        rows = datasets.load_dataset(name, name=subset, split=split, revision=revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ProblemLoadError(f"data set {name!r}, split {split!r}: cannot be loaded ({reason})") from error
    for number, row in enumerate(rows):
        yield f"{name}[{split}] row {number}", row


def require_file(path: Path) -> None:
    """Raise ProblemFileError unless ``path`` is a file."""
    if path.is_dir():
        raise ProblemFileError(f"{path} is a folder, not a file")
    if not path.exists():
        files = sorted(entry.name for entry in path.parent.glob(f"*{path.suffix}"))[:8] if path.parent.is_dir() else []
        hint = f"; files in this folder: {', '.join(files)}" if files else ""
        hint = hint if path.parent.is_dir() else f"; there is no folder {path.parent}"
        raise ProblemFileError(f"{path}: no such file{hint}")


USUAL_FIELDS: Mapping[FieldName, tuple[str, ...]] = {
    "problem": ("problem", "question", "prompt", "statement"),
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


def problem_from_row(
    row: Row, location: str, *, source: str, fields: Mapping[str, str | None], answered: bool = True
) -> Problem:
    """Convert ``row`` to a problem. The problem's answer is None if it is missing or empty.

    Raises ProblemFieldError, with ``location`` in the message, if the statement is missing or empty, if the statement
    or the answer is not a string (an answer may be a number), or if a column is not JSON. Unless ``answered`` is False,
    a missing answer field is an error as well.
    """
    column, statement, messages = _read_column_statement_and_messages(row, location, fields)
    answer_column, value = _find_column_and_value(row, "answer", fields, location, required=answered)
    answer = canonical_answer(value, location)
    id_column, row_id = _read_column_and_id(row, fields, location)
    return Problem(
        id=_content_id(statement, answer, source) if row_id is None else row_id,
        statement=statement,
        answer=answer,
        source=source,
        family=str(row.get("subject") or row.get("kind") or ""),
        info=_other_columns(row, location, fields, {column, answer_column, id_column}),
        messages=messages,
    )


def statement_from_row(row: Row, location: str, *, fields: Mapping[str, str | None]) -> str:
    """Return the statement in ``row``. Raises ProblemFieldError if it is missing, empty or not a string."""
    return _read_column_statement_and_messages(row, location, fields)[1]


def _read_column_statement_and_messages(
    row: Row, location: str, fields: Mapping[str, str | None]
) -> tuple[str | None, str, tuple[ChatMessage, ...]]:
    """Return the statement's column, its text, and its messages if there are several."""
    column, value = _find_column_and_value(row, "problem", fields, location)
    messages = _read_messages(value, location) if isinstance(value, list) else ()
    if messages:
        value = _join_messages(messages)
    if value is not None and not isinstance(value, str):
        raise ProblemFieldError(
            f"{location}: the problem's statement must be a string or a list of messages; got {type(value).__name__}"
        )
    statement = remove_dapo_instructions(value or "")
    if not statement.strip():
        raise ProblemFieldError(f"{location}: the problem's statement is empty")
    return column, statement, messages if len(messages) > 1 else ()


def _read_messages(value: list[object], location: str) -> tuple[ChatMessage, ...]:
    messages: list[ChatMessage] = []
    for number, item in enumerate(value):
        role, content = (item.get("role"), item.get("content")) if isinstance(item, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ProblemFieldError(
                f"{location}: message {number} of the problem is {str(item)[:80]!r}, but must be an object with "
                'the strings "role" and "content"'
            )
        messages.append({"role": role, "content": content})
    return tuple(messages)


def _join_messages(messages: tuple[ChatMessage, ...]) -> str:
    """Join the contents of the messages. Includes the roles unless all are system or user."""
    if {message["role"] for message in messages} <= {"system", "user"}:
        return "\n\n".join(message["content"] for message in messages)
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)


def _other_columns(
    row: Row, location: str, fields: Mapping[str, str | None], used: set[str | None]
) -> dict[str, object]:
    """Return the other columns under the names in ``fields``. Raises ProblemFieldError for values that are not JSON."""
    columns = {name: path for name, path in fields.items() if name not in get_args(FieldName)}
    mapped = {path for path in columns.values() if path is not None}
    dropped = {name for name, path in columns.items() if path is None}
    info = {name: value for name, value in row.items() if name not in used | mapped | dropped}
    for name, path in columns.items():
        if path is not None:
            exists, info[name] = _value_at_path(row, path)
            if not exists:
                raise ProblemFieldError(f"{location}: no field {path!r} for fields.{name}; fields: {_field_names(row)}")
    for name, value in info.items():
        try:
            info[name] = freeze(value, name)
        except NotJSONError as error:
            raise ProblemFieldError(
                f"{location}: column {error}, which is not JSON (text, numbers, true, false, null, lists and objects): "
                f"convert it, or drop the column with fields.{name}=null"
            ) from error
    return info


def remove_dapo_instructions(statement: str) -> str:
    r"""Remove DAPO's instructions ("... Answer: $Answer ...") around a question. Return other statements unchanged."""
    wrapped = _DAPO_WRAPPER.match(statement)
    return wrapped["statement"] if wrapped else statement


def canonical_answer(value: object, location: str) -> str | None:
    r"""Return the answer as text, or None if it is empty.

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
        raise ProblemFieldError(f"{location}: the answer must be a string or a number; got {type(value).__name__}")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ProblemFieldError(f"{location}: the answer must be a finite number or text; got {value}")
    text = str(value).rsplit("####", 1)[-1].strip()
    whole = _WHOLE_FLOAT.fullmatch(text)
    if whole:
        return whole["whole"]
    return (last_boxed_answer(text) or text) or None


def _find_column_and_value(
    row: Row, wanted: FieldName, fields: Mapping[str, str | None], location: str, *, required: bool = True
) -> tuple[str | None, object]:
    """Return the column and the value of a field, or (None, None) if the field is missing and not ``required``."""
    path = fields.get(wanted)
    if path is not None:
        exists, value = _value_at_path(row, path)
        if not exists:
            raise ProblemFieldError(f"{location}: no field {path!r} for the {wanted}; fields: {_field_names(row)}")
        return path, value
    empty = None
    for path in USUAL_FIELDS[wanted]:
        exists, value = _value_at_path(row, path)
        if exists and value is not None and (wanted == "problem" or not isinstance(value, (dict, list))):
            return path, value
        empty = path if exists and value is None else empty
    if empty is not None or not required:
        return empty, None
    raise ProblemFieldError(
        f"{location}: no field for the {wanted} (expected {', '.join(USUAL_FIELDS[wanted])});"
        f" fields: {_field_names(row)}; set fields.{wanted} to the right column"
    )


def _value_at_path(row: Row, path: str) -> tuple[bool, object]:
    """Return ``(exists, value)`` at a dotted path. Numbers in the path index lists.

    A field whose name contains dots takes precedence.
    """
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


def _field_names(row: Row) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


def _read_column_and_id(row: Row, fields: Mapping[str, str | None], location: str) -> tuple[str | None, str | None]:
    """Return the id's column and the id of a row, or (None, None)."""
    if "id" in fields:
        column, value = _find_column_and_value(row, "id", fields, location)
        return column, str(value)
    for path in USUAL_FIELDS["id"]:
        exists, value = _value_at_path(row, path)
        if exists and isinstance(value, (str, int)) and value != "":
            return path, str(value)
    return None, None


def _content_id(statement: str, answer: str | None, source: str) -> str:
    """Return a hash of the content, so that equal rows have equal ids in every file and order."""
    content = f"{statement}\0{answer}".encode()
    return f"{source}-{hashlib.sha256(content).hexdigest()[:16]}"
