"""Every tutorial can be followed in an empty folder, and prints what its page shows."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from shell import ROOT, Shell

from agentrl.config import load_settings

FOLLOW = runpy.run_path(str(ROOT / "docs" / "follow_tutorial.py"))
TUTORIALS = ROOT / "docs" / "tutorials"


def follow(page: str, shell: Shell) -> None:
    FOLLOW["follow"]((TUTORIALS / page).read_text(encoding="utf-8"), shell.folder, shell.run)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A folder in which the tutorial of the plots was followed. Other tutorials continue its run ``words``."""
    shell = Shell(tmp_path_factory.mktemp("words"))
    follow("plots.md", shell)
    return shell


@pytest.mark.slow
def test_the_run_of_the_plots_learns(words: Shell) -> None:
    summary = json.loads((words.folder / "runs" / "words" / "summary.json").read_text())
    scores = [row["eval/avg_at_k"] for row in summary["evaluations"] if "eval/avg_at_k" in row]
    assert scores[0] < 0.5 < 0.8 < scores[-1]


@pytest.mark.slow
@pytest.mark.parametrize("page", ["scores.md", "debug.md", "estimator.md"])
def test_a_tutorial_that_continues_the_first_can_be_followed(page: str, words: Shell) -> None:
    follow(page, words)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["environment.md", "agent.md", "scale.md"])
def test_the_tutorial_can_be_followed(page: str, tmp_path: Path) -> None:
    follow(page, Shell(tmp_path))


def test_a_larger_model_takes_the_environments_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    shown = list(FOLLOW["blocks"]((TUTORIALS / "environment.md").read_text(encoding="utf-8")))
    for block in shown:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    (command,) = (block.text for block in shown if block.language == "sh")
    overrides = command.replace("\\\n", " ").split()[4:]
    settings = load_settings(None, tmp_path / "config.yaml", overrides)
    assert settings.coldstart.demonstrations is None
    assert settings.rollout.max_turn_tokens == 256


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
