"""Evaluations in the viewer: scores, rollouts, one conversation, and an evaluation that goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from evaluation.runs import WrittenEngine, play, problem_set, results, transcript
from viewer.conftest import client_of

from agentrl.evaluation.records.transcript import Sample, Transcript, Turn


def written(sample: Sample) -> Transcript:
    turns = (Turn(origin="model", text=f"I am sample {sample.number}.", tokens=9),)
    return transcript(sample, correct=sample.number > 1, turns=turns)


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    sets = [problem_set(2)]
    asyncio.run(play(WrittenEngine(written), tmp_path / "scores", sets))
    results(tmp_path / "scores", sets)
    return tmp_path / "scores"


def test_scores_rollouts_and_a_conversation_are_told(evaluation: Path) -> None:
    client = client_of(evaluation)
    (about,) = client.get("/api/places").json()["evaluations"]
    (score,) = about["benchmarks"].values()
    assert (about["name"], about["finished"], score["mean"]) == ("scores", True, 0.5)
    page = client.get(f"/api/evaluations/{about['id']}").json()
    assert len(page["rollouts"]) == 8
    chosen = next(row for row in page["rollouts"] if (row["problem"], row["sample"]) == ("p1", 3))
    one = client.get(f"/api/evaluations/{about['id']}/{chosen['place']}").json()
    assert one["rollout"]["turns"][0]["text"] == "I am sample 3."
    assert one["problem"]["id"] == "p1"
    gone = client.get(f"/api/evaluations/{about['id']}/99")
    assert (gone.status_code, "has no rollout 99" in gone.json()["error"]) == (404, True)


def test_an_evaluation_that_goes_on_shows_its_whole_rollouts(evaluation: Path) -> None:
    (evaluation / "results.json").unlink()
    rollouts = evaluation / "rollouts.jsonl.zst"
    rollouts.write_bytes(rollouts.read_bytes()[:-5])
    client = client_of(evaluation)
    (about,) = client.get("/api/places").json()["evaluations"]
    assert (about["finished"], about["benchmarks"]) == (False, {})
    assert len(client.get(f"/api/evaluations/{about['id']}").json()["rollouts"]) == 7
