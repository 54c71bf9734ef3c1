"""Raw rows from JSON Lines, parquet and the Hugging Face ``datasets`` library, each with its location.

Errors about a row contain its location (``mawps.jsonl:17``, ``train.parquet row 3``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import require_package
from agentrl.problems.problem_errors import ProblemError, ProblemFileError

Row = dict[str, object]

_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # the escape of one half of a surrogate pair


def read_jsonl(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield ``(location, row)`` for each line that is not blank. Raises ProblemFileError with file and line number."""
    require_file(path)
    # Read as bytes, so that invalid UTF-8 is an error of its line.
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
                raise ProblemFileError(f"{location}: expected a JSON object, but the line is {type(row).__name__}")
            if _HALF.search(line):
                _require_whole_characters(row, location)
            yield location, row


def _require_whole_characters(row: Row, location: str) -> None:
    """Raise ProblemFileError for a lone surrogate, which no tokenizer can encode and no file can store."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ProblemFileError(f"{location}: contains half a character (a lone surrogate such as \\ud83d)") from error


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
        raise ProblemFileError(f"{path}: not readable as parquet ({error})") from error


def read_hub(name: str, *, split: str, subset: str | None, revision: str | None) -> Iterator[tuple[str, Row]]:
    """Yield ``(location, row)`` for each row of a Hugging Face data set, or of a local folder in one of its layouts.

    Raises ProblemError if the data set, split or subset does not exist or cannot be reached, and SettingsError without
    the extra ``hub``.
    """
    require_package("datasets", extra="hub", purpose=f"data set {name!r}")
    import datasets

    try:
        rows = datasets.load_dataset(name, name=subset, split=split, revision=revision)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ProblemError(f"data set {name!r}, split {split!r}: cannot be loaded ({reason})") from error
    for number, row in enumerate(rows):
        yield f"{name}[{split}] row {number}", row


def require_file(path: Path) -> None:
    """Raise ProblemFileError unless ``path`` is a file."""
    if path.is_dir():
        raise ProblemFileError(f"{path}: is a folder, not a file")
    if not path.exists():
        files = sorted(entry.name for entry in path.parent.glob(f"*{path.suffix}"))[:8] if path.parent.is_dir() else []
        hint = f"; in that folder: {', '.join(files)}" if files else ""
        hint = hint if path.parent.is_dir() else f"; there is no folder {path.parent}"
        raise ProblemFileError(f"{path}: no such file{hint}")
