"""Settings are read in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory without runs, and a data folder for the shipped configs that name one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGENTRL_DATA_DIR", str(tmp_path / "data"))
