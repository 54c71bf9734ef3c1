"""Every tutorial can be followed in an empty folder, and prints what its page shows."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from shell import ROOT, Shell

FOLLOW = runpy.run_path(str(ROOT / "docs" / "follow_tutorial.py"))
TUTORIALS = ROOT / "docs" / "tutorials"


def follow(page: str, shell: Shell) -> None:
    FOLLOW["follow"]((TUTORIALS / page).read_text(encoding="utf-8"), shell.folder, shell.run)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A folder after the tutorial of the first run, which others continue."""
    shell = Shell(tmp_path_factory.mktemp("first"))
    follow("first-run.md", shell)
    return shell


@pytest.mark.slow
def test_the_first_run_can_be_followed(first_run: Shell) -> None:
    summary = json.loads((first_run.folder / "runs" / "first" / "summary.json").read_text())
    scores = [row["eval/avg_at_k"] for row in summary["evaluations"] if "eval/avg_at_k" in row]
    assert scores[0] < 0.5 < 0.8 < scores[-1]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["environment.md", "agent.md"])
def test_the_tutorial_can_be_followed(page: str, tmp_path: Path) -> None:
    follow(page, Shell(tmp_path))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```console\n$ echo step 1\n```\n```text\nstep 2\nreward\n```\n", "a line that was not printed: 'reward'"),
        ("```console\nls\n```\n", "a line that is not a command"),
        ("```python\nx = 1\n```\n", "a python block has no title"),
    ],
)
def test_a_page_that_cannot_be_followed_is_reported(page: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        FOLLOW["follow"](page, tmp_path, Shell(tmp_path).run)
