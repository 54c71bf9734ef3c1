"""The agent over SQLite: its data are the same every time, its demonstrations right, its database read-only."""

from __future__ import annotations

from pathlib import Path

import pytest
from worked.playing import EXAMPLES, call, follow_page, in_folder, make_data, play, rows

from agentrl_envs.types import Ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_folder(tmp_path_factory.mktemp("sql"), "sql")


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(EXAMPLES / "sql")


def test_demonstrations_earn_the_reward() -> None:
    for row in rows("demonstrations")[:8]:
        *_, last = play("sql", row)
        assert (last.reward, last.ended) == (1.0, Ended.ANSWERED), row


def test_a_wrong_answer_earns_nothing() -> None:
    (last,) = play("sql", rows("train")[0], ["I do not know"])
    assert (last.reward, last.ended) == (0.0, Ended.ANSWERED)


def test_the_model_reads_its_errors_and_cannot_write() -> None:
    turns = [call("query", sql="SELECT zebra"), call("query", sql="CREATE TABLE other (name TEXT)")]
    wrong, refused = play("sql", rows("train")[0], turns)
    assert "no such column: zebra" in wrong.observation
    assert "attempt to write a readonly database" in refused.observation
    assert wrong.ended is refused.ended is None


def test_the_same_files_every_time_and_no_database_is_in_both_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {path.name: path.read_bytes() for path in Path("data").glob("*.jsonl")}
    monkeypatch.chdir(tmp_path)
    assert make_data("sql") == first
    train, heldout = ({row["db"] for row in rows(name)} for name in ("train", "heldout"))
    assert not train & heldout


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    assert follow_page("sql", tmp_path)["steps"] == 1
