"""`report.html`: one file with an evaluation's page, in which text of a model is never markup."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from evaluation.runs import HOSTILE, WrittenSampler, failed, play, problem_set, results, transcript
from viewer.conftest import client_of
from viewer.test_export import answers

from agentrl.evaluation.transcripts import RESULT_KINDS, Sample, Turn
from agentrl.telemetry.plots import palette_css
from agentrl.viewer.evaluations import parse_formulas_to_mathml

COLUMNS = {"db": HOSTILE, "rows": [1, {"a": None}]}


def hostile(sample: Sample) -> Any:
    if sample.number == 3:
        return failed(sample)
    turns = (Turn(origin="model", text=HOSTILE, tokens=3), Turn(origin="observation", text=HOSTILE, tokens=3))
    return transcript(sample, correct=sample.number == 1, turns=turns, answer=HOSTILE)


@pytest.fixture
async def evaluation(tmp_path: Path) -> Path:
    sets = [problem_set(2, name=HOSTILE, statement=HOSTILE, answer=HOSTILE, info=COLUMNS)]
    await play(WrittenSampler(hostile), tmp_path, sets, "rollout.retries=0")
    await asyncio.to_thread(results, tmp_path, sets, "rollout.retries=0")
    return tmp_path


def page_of(evaluation: Path) -> str:
    return (evaluation / "report.html").read_text(encoding="utf-8")


def rollouts_in(evaluation: Path) -> list[Any]:
    held = answers(page_of(evaluation))
    return [held[address] for address in held if re.fullmatch(r"/evaluations/evaluation/\d+", address)]


def test_the_report_contains_the_answers_of_the_server(evaluation: Path) -> None:
    client = client_of(evaluation)
    (about,) = client.get("/api/library").json()["evaluations"]
    held = answers(page_of(evaluation))
    assert held["/evaluations/evaluation"] == client.get(f"/api/evaluations/{about['id']}").json()
    chosen = [address for address in held if re.fullmatch(r"/evaluations/evaluation/\d+", address)]
    for address in chosen:
        index = address.rpartition("/")[2]
        assert held[address] == client.get(f"/api/evaluations/{about['id']}/{index}").json()
    samples = sorted((one["rollout"]["problem"], one["rollout"]["sample"]) for one in rollouts_in(evaluation))
    assert samples == [(problem, sample) for problem in ("p0", "p1") for sample in range(4)]


def test_hostile_text_is_data(evaluation: Path) -> None:
    page = page_of(evaluation)
    assert HOSTILE not in page
    assert "http://evil" not in page
    (one, *_) = rollouts_in(evaluation)
    assert one["problem"]["prompt"] == f"Solve: {HOSTILE}"
    assert one["problem"]["info"] == COLUMNS
    assert [turn["text"] for turn in one["rollout"]["turns"]] == [HOSTILE, HOSTILE]
    assert answers(page)["/evaluations/evaluation"]["problems"][0]["answer"] == HOSTILE  # type: ignore[index]


def test_nothing_comes_from_outside_and_only_one_script_may_run(evaluation: Path) -> None:
    page = page_of(evaluation)
    start = page.index("<script>") + len("<script>")
    script = page[start : page.index("</script>", start)]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'" in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page[:start])
    assert "innerHTML" not in page


def test_outcomes_have_the_colours_of_plots(evaluation: Path) -> None:
    page = page_of(evaluation)
    assert palette_css() in page
    colours = [re.search(rf"\.cell\.{kind} {{ background: (var\(--line-\d\)); }}", page) for kind in RESULT_KINDS]
    assert (
        len({found[1] for found in colours if found}) == len(RESULT_KINDS) - 1
    )  # excluded rollouts have a border only


async def test_the_last_attempt_is_what_is_shown(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        return failed(sample) if sample.attempt == 0 and sample.number == 0 else transcript(sample)

    sets = [problem_set(1)]
    await play(WrittenSampler(write), tmp_path, sets, "rollout.retries=1")
    await asyncio.to_thread(results, tmp_path, sets, "rollout.retries=1")
    page: Any = answers(page_of(tmp_path))["/evaluations/evaluation"]
    assert [row["kind"] for row in page["rollouts"]] == ["correct"] * 4
    assert [one["rollout"]["verdict"] for one in rollouts_in(tmp_path)] == ["correct"] * 4


async def test_a_report_holds_all_conversations_or_as_many_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(sample: Sample) -> Any:
        text = random.Random(f"{sample.problem.id}/{sample.number}").randbytes(2000).hex()
        return transcript(sample, turns=(Turn(origin="model", text=text, tokens=9),))

    sets = [problem_set(3)]
    await play(WrittenSampler(write), tmp_path, sets)
    for largest, opened in ((1_000_000, 4), (25_000, 2), (1, 1)):
        monkeypatch.setattr("agentrl.viewer.export._LARGEST_REPORT", largest)
        await asyncio.to_thread(results, tmp_path, sets)
        assert len(rollouts_in(tmp_path)) == 3 * opened


def test_formulas_are_trees_of_text_and_known_elements() -> None:
    found = parse_formulas_to_mathml(
        [r"So $\frac12$ and \(x_1\), \[a \le b\] $$c$$", "```py\nprint('$not$')\n```", r"$\href{javascript:x}{y}$"]
    )
    assert set(found) == {r"\frac12", "x_1", r"a \le b", "c", r"\href{javascript:x}{y}"}
    assert parse_formulas_to_mathml([r"$\pi$"]) == {r"\pi": ["math", {}, ["mrow", {}, ["mi", {}, "π"]]]}
    assert found[r"\frac12"] == ["math", {}, ["mrow", {}, ["mfrac", {}, ["mn", {}, "1"], ["mn", {}, "2"]]]]


@pytest.mark.parametrize("tex", [r"\frac", "{" * 900, r"\begin{matrix}", "x" * 2000, r"\left(", "^", "&&&"])
def test_a_formula_that_cannot_be_parsed_stays_text(tex: str) -> None:
    json.dumps(parse_formulas_to_mathml([f"${tex}$"]))  # nothing is raised
