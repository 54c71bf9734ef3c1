"""Checksums of a directory's files, to find those that changed after they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def checksums(folder: Path, *, part: int = 0, parts: int = 1) -> dict[str, str]:
    """SHA-256 of every file below ``folder`` by its relative path; of every ``parts``-th one, from ``part`` on.

    Raises OSError where a file cannot be read.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files[part::parts]}


def damaged(folder: Path, expected: Mapping[str, str], *, part: int = 0, parts: int = 1) -> list[str]:
    """One message for each damaged file of ``expected``. ``part`` as above."""
    found = []
    for name in sorted(expected)[part::parts]:
        try:
            if _digest(folder / name) != expected[name]:
                found.append(f"{name} has changed since it was written")
        except OSError as error:
            found.append(f"{name}: {error.strerror or error}")
    return found


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
