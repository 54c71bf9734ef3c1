"""Checksums of a directory's files, to find those that changed after they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def checksum(path: Path) -> str:
    """SHA-256 of a file. Raises OSError where it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged(folder: Path, expected: Mapping[str, str], *, part: int = 0, parts: int = 1) -> list[str]:
    """One message for each damaged file of ``expected``; of every ``parts``-th one, from ``part`` on."""
    found = []
    for name in sorted(expected)[part::parts]:
        try:
            if checksum(folder / name) != expected[name]:
                found.append(f"{name} has changed since it was written")
        except OSError as error:
            found.append(f"{name}: {error.strerror or error}")
    return found
