"""How tests are collected: files in any order on the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_files_of_a_folder_find_its_fixtures_in_any_order(tmp_path: Path) -> None:
    folder = tmp_path / "room"
    folder.mkdir()
    (folder / "conftest.py").write_text("import pytest\n\n@pytest.fixture\ndef one():\n    return 1\n")
    for name in ("first", "last"):
        (folder / f"test_{name}.py").write_text(f"def test_{name}(one):\n    assert one == 1\n")
    (tmp_path / "test_between.py").write_text("def test_between():\n    pass\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    options = ["-q", "-p", "conftest", "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "room/test_first.py", "test_between.py", "room/test_last.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
    assert "3 passed" in done.stdout, done.stdout
