"""Common code of the scripts that generate a page of the documentation."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(target: Path, text: str) -> int:
    """Write the page, or compare it with ``--check``. Returns the exit code."""
    if sys.argv[1:] == ["--check"]:
        return int(target.read_text(encoding="utf-8") != text)
    target.write_text(text, encoding="utf-8")
    return 0
