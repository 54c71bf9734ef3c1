"""Checksums of a directory's files, to detect files that changed after they were written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError if it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damaged(folder: Path, expected: Mapping[str, str], *, part: int = 0, parts: int = 1) -> list[str]:
    """Return a message for each damaged file of ``expected``, checking every ``parts``-th file from ``part`` on."""
    messages = []
    for name in sorted(expected)[part::parts]:
        try:
            if checksum(folder / name) != expected[name]:
                messages.append(f"{name} has changed since it was written")
        except OSError as error:
            messages.append(f"{name}: {error.strerror or error}")
    return messages
