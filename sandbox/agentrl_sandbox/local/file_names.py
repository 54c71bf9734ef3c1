"""Checks the names of files that are written to or fetched from a scratch directory: relative paths inside it.

>>> check_names(["data/points.csv", "notes"])
>>> check_names(["../secret"])
Traceback (most recent call last):
ValueError: bad file name '../secret': a component is '..'; a name is a relative path such as 'data/points.csv'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MOST_FILES = 1024
_DEEPEST = 32
_LONGEST = 255  # bytes of a component
LONGEST_NAME = 4096
"""Most characters of a whole name."""
_PAGE = 4096


def check_names(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is not a relative path inside the directory, or for too many names."""
    count = 0
    for name in names:
        count += 1
        why = _fault(name)
        if why:
            raise ValueError(f"bad file name {name!r}: {why}; a name is a relative path such as 'data/points.csv'")
    if count > MOST_FILES:
        raise ValueError(f"{count} files; at most {MOST_FILES} are taken")


def check_files(files: Mapping[str, bytes], room: int) -> None:
    """Raises ValueError for bad names, names that are both file and directory, and more than ``room`` bytes."""
    check_names(files)
    for name in files:
        parts = name.split("/")
        for end in range(1, len(parts)):
            if "/".join(parts[:end]) in files:
                raise ValueError(f"bad file name {name!r}: {'/'.join(parts[:end])!r} is a file, not a directory")
    needed = sum(-(-len(content) // _PAGE) * _PAGE for content in files.values())
    if needed > room:
        raise ValueError(f"the files take {needed} bytes; the scratch directory has {room} (see scratch_mb)")


def _fault(name: str) -> str:
    if not name:
        return "it is empty"
    if "\0" in name:
        return "it holds a NUL"
    if name.startswith("/"):
        return "it is absolute"
    if len(name) > LONGEST_NAME:
        return f"it is longer than {LONGEST_NAME} characters"
    parts = name.split("/")
    if len(parts) > _DEEPEST:
        return f"it is deeper than {_DEEPEST}"
    for part in parts:
        if part in ("", ".", ".."):
            return f"a component is {part!r}"
        try:
            size = len(part.encode())
        except UnicodeEncodeError:
            return "it is not Unicode text"
        if size > _LONGEST:
            return f"a component is longer than {_LONGEST} bytes"
    return ""
