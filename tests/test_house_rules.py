"""Rules of the source tree that no linter knows: names that mean one thing, rooms of a readable size, typed records."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "agentrl", ROOT / "envs" / "agentrl_envs", ROOT / "sandbox" / "agentrl_sandbox")
FILES = [file for package in PACKAGES for file in sorted(package.rglob("*.py"))]

MOST_FILES_OF_A_ROOM = 12
MOST_FILES_OF_A_NAME = 3
MOST_LINES_WITH_ANY = 104
# A package owns the settings of what it does, under the name where everybody looks for them.
EVERYWHERE = {"__init__.py", "settings.py"}


def test_no_two_classes_share_a_name() -> None:
    found: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_no_file_name_stands_for_many_things() -> None:
    counts = Counter(file.name for file in FILES if file.name not in EVERYWHERE)
    assert {name: count for name, count in counts.items() if count > MOST_FILES_OF_A_NAME} == {}


def test_no_room_has_more_files_than_a_reader_keeps_in_mind() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in FILES if file.name != "__init__.py")
    assert {room: count for room, count in counts.items() if count > MOST_FILES_OF_A_ROOM} == {}


def test_few_lines_say_any() -> None:
    lines = [f"{file.relative_to(ROOT)}:{line}" for file in FILES for line in lines_with_any(file)]
    assert len(lines) <= MOST_LINES_WITH_ANY, f"{len(lines)} lines: give records types, or object what is checked next"


def lines_with_any(file: Path) -> list[int]:
    """Lines on which the name Any stands, imports left out.

    Tokens are looked at, so that comments and texts do not count.
    """
    tokens = list(tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline))
    found = {token.start[0] for token in tokens if (token.type, token.string) == (tokenize.NAME, "Any")}
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return sorted(found - imported)
