"""Evaluations in the viewer: scores, rollouts, conversations, comparison, and unfinished evaluations."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from viewer.conftest import client_of
from viewer.made_evaluation import better, made_evaluation, written

from agentrl.evaluation.compare import compare_results
from agentrl.evaluation.directory import EvaluationDirectory


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    return made_evaluation(tmp_path / "scores", written)


def test_scores_rollouts_and_a_conversation_are_told(evaluation: Path) -> None:
    client = client_of(evaluation)
    (about,) = client.get("/api/library").json()["evaluations"]
    (score,) = about["benchmarks"].values()
    assert (about["name"], about["finished"], score["mean"]) == ("scores", True, 0.5)
    page = client.get(f"/api/evaluations/{about['id']}").json()
    assert len(page["rollouts"]) == 8
    chosen = next(row for row in page["rollouts"] if (row["problem"], row["sample"]) == ("p1", 3))
    one = client.get(f"/api/evaluations/{about['id']}/{chosen['index']}").json()
    assert one["rollout"]["turns"][0]["text"] == "I am sample 3."
    assert one["problem"]["id"] == "p1"
    assert client.get(f"/api/evaluations/{about['id']}/search", params={"text": "SAMPLE 3"}).json() == [
        row["index"] for row in page["rollouts"] if row["sample"] == 3
    ]
    gone = client.get(f"/api/evaluations/{about['id']}/99")
    assert [row["answer"] for row in page["problems"]] == ["0", "1"]
    assert (gone.status_code, "has no rollout 99" in gone.json()["error"]) == (404, True)


def test_an_evaluation_that_goes_on_shows_its_whole_rollouts(evaluation: Path) -> None:
    (evaluation / "results.json").unlink()
    rollouts = evaluation / "rollouts.jsonl.zst"
    rollouts.write_bytes(rollouts.read_bytes()[:-5])
    client = client_of(evaluation)
    (about,) = client.get("/api/library").json()["evaluations"]
    assert (about["finished"], about["benchmarks"]) == (False, {})
    assert len(client.get(f"/api/evaluations/{about['id']}").json()["rollouts"]) == 7


def test_a_rollout_without_its_problem_is_reported(evaluation: Path) -> None:
    client = client_of(evaluation)
    (about,) = client.get("/api/library").json()["evaluations"]
    address = f"/api/evaluations/{about['id']}"
    (evaluation / "problems.jsonl").write_text("")
    without = client.get(f"{address}/0")
    assert "a rollout or its problem is damaged (KeyError" in without.json()["error"]
    (evaluation / "problems.jsonl").write_text('{"id": "p0"}\n')
    for answer in (client.get(f"{address}/0"), client.get(f"{address}/search", params={"text": "x"})):
        assert answer.status_code == without.status_code
        assert "problems.jsonl is damaged (KeyError: 'benchmark')" in answer.json()["error"]


def test_two_are_compared_problem_by_problem(evaluation: Path) -> None:
    made_evaluation(evaluation.parent / "better", better)
    client = client_of(evaluation.parent)
    ids = {one["name"]: one["id"] for one in client.get("/api/library").json()["evaluations"]}
    found = client.get(f"/api/comparisons/{ids['scores']}/{ids['better']}").json()
    before, after = (EvaluationDirectory(evaluation.parent / name).results() for name in ("scores", "better"))
    assert found["differences"]["toy"] == json.loads(json.dumps(asdict(compare_results(before, after)["toy"])))
    assert found["scores"]["toy"] == [0.5, 0.75]
    assert [(row["problem"], row["first"]["correct"], row["second"]["correct"]) for row in found["problems"]] == [
        ("p0", 2, 2),
        ("p1", 2, 4),
    ]
    (evaluation / "results.json").unlink()
    refused = client.get(f"/api/comparisons/{ids['scores']}/{ids['better']}")
    assert (refused.status_code, "is not finished" in refused.json()["error"]) == (404, True)
