"""The agent that searches: BM25 ranks as its formula says, the data are the same every time, demonstrations right."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from worked.playing import EXAMPLES, call, follow_page, in_folder, make_data, play, rows

from agentrl_envs.types import Ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_folder(tmp_path_factory.mktemp("search"), "search")


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(EXAMPLES / "search")


def test_demonstrations_find_the_answer_and_earn_the_reward() -> None:
    shown = rows("demonstrations")[:10]
    assert {len(row["turns"]) for row in shown} == {2, 3}
    for row in shown:
        *found, last = play("search", row)
        assert (last.reward, last.ended) == (1.0, Ended.ANSWERED), row
        assert str(row["answer"]) in found[-1].observation, row


def test_what_is_not_there_is_said_and_a_wrong_answer_earns_nothing() -> None:
    nothing, last = play("search", rows("train")[0], [call("search", query="zebra"), "zebra"])
    assert "nothing found" in nothing.observation
    assert (last.reward, last.ended) == (0.0, Ended.ANSWERED)


def test_the_best_document_is_that_of_the_formula() -> None:
    from bm25 import Index

    documents = ["red red fish", "red bird in a tree", "blue fish"]
    index = Index(documents, k=1.0, b=0.5)
    assert index.search("blue", 3) == ["blue fish"]
    assert index.search("red", 1) == ["red red fish"]
    # By hand, for "red": idf is the same, and only frequency and length differ.
    mean = (3 + 5 + 2) / 3
    twice, once = 2 * 2 / (2 + 0.5 + 0.5 * 3 / mean), 2 / (1 + 0.5 + 0.5 * 5 / mean)
    rare = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    assert dict(index.scores["red"]) == pytest.approx({0: rare * twice, 1: rare * once})


def test_the_same_files_every_time_and_nobody_is_in_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {path.name: path.read_bytes() for path in Path("data").iterdir()}
    monkeypatch.chdir(tmp_path)
    assert make_data("search") == first
    train, heldout = ({row["problem"] for row in rows(name)} for name in ("train", "heldout"))
    assert not train & heldout


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    assert follow_page("search", tmp_path)["steps"] == 1
