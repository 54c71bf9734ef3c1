"""Reads ``metrics.jsonl`` and ``alerts.jsonl`` piece by piece, while a run appends to them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """``rows`` that follow the position of an earlier read; ``whole`` where the file was read from its start.

    ``position`` is given to the next read. A file that was cut or replaced (``--resume``) is read from its start.
    """

    rows: list[dict[str, object]]
    position: str
    whole: bool


def read_new_rows(path: Path, position: str = "") -> NewRows:
    """The rows behind ``position``; a torn last line is left for the next read, and a damaged one is passed over."""
    try:
        with path.open("rb") as file:
            inode = path.stat().st_ino
            start = _offset(position, inode, file.seek(0, 2))
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return NewRows(rows=[], position="", whole=True)
    end = content.rfind(b"\n") + 1
    parsed = (_row(line) for line in content[:end].splitlines())
    return NewRows(rows=[row for row in parsed if row], position=f"{inode}:{start + end}", whole=start == 0)


def _offset(position: str, inode: int, size: int) -> int:
    """Where to read on, 0 for another file than the one that ``position`` speaks of."""
    known, _, offset = position.partition(":")
    if known != str(inode) or not offset.isdigit() or int(offset) > size:
        return 0
    return int(offset)


def _row(line: bytes) -> dict[str, object]:
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
