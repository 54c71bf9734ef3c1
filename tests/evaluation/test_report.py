"""The report: one file that needs nothing from outside, and in which a model's text is never markup."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from evaluation.runs import HOSTILE, WrittenEngine, failed, play, problem_set, results, transcript

from agentrl.evaluation import report
from agentrl.evaluation.report import formulas_of
from agentrl.evaluation.transcripts import KINDS, Sample, Turn
from agentrl.telemetry.plots import palette_css

COLUMNS = {"db": HOSTILE, "rows": [1, {"a": None}], "long": "x" * 3000}


class Page(HTMLParser):
    """The elements and scripts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._id = dict(attributes).get("id") or "script" if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._id = None

    def handle_data(self, data: str) -> None:
        if self._id is not None:
            self.scripts[self._id] = self.scripts.get(self._id, "") + data

    def conversations(self, place: int) -> dict[str, Any]:
        return json.loads(gzip.decompress(base64.b64decode(self.scripts[f"c{place}"])))


def hostile(sample: Sample) -> Any:
    if sample.number == 3:
        return failed(sample)
    turns = (Turn(origin="model", text=HOSTILE, tokens=3), Turn(origin="observation", text=HOSTILE, tokens=3))
    return transcript(sample, correct=sample.number == 1, turns=turns, answer=HOSTILE)


@pytest.fixture
async def page(tmp_path: Path) -> str:
    sets = [problem_set(2, name=HOSTILE, statement=HOSTILE, answer=HOSTILE, info=COLUMNS)]
    overrides = ("rollout.retries=0", "telemetry.plots=true")
    await play(WrittenEngine(hostile), tmp_path, sets, *overrides)
    await asyncio.to_thread(results, tmp_path, sets, *overrides, conversations=2)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


async def test_hostile_text_is_data(page: str) -> None:
    parsed = Page(page)
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert {tag for tag, _ in parsed.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "details", "summary", "pre"),
        *("table", "caption", "tr", "th", "td", "img", "picture", "source", "script", "input", "select", "span"),
    }
    found = parsed.conversations(0)
    assert found["answer"] == HOSTILE
    assert found["prompt"] == f"Solve: {HOSTILE}"
    assert found["columns"] == f'db: {HOSTILE}\nrows: [1, {{"a": null}}]\nlong: {"x" * 2000} …'
    assert found["rollouts"][0]["turns"] == [["model", HOSTILE], ["observation", HOSTILE]]
    index = json.loads(parsed.scripts["index"])
    assert index["problems"][0]["kinds"] == ["incorrect", "correct", "incorrect", "no_data"]
    assert index["problems"][0]["open"] == [0, 1]  # a wrong one and a right one
    assert index["counts"] == {"incorrect": 4, "correct": 2, "no_data": 2}


async def test_nothing_comes_from_outside_and_only_its_own_script_runs(page: str) -> None:
    parsed = Page(page)
    for _, attributes in parsed.tags:
        source = attributes.get("src") or attributes.get("srcset") or attributes.get("href") or ""
        assert source == "" or source.startswith("data:image/png;base64,")
    assert sum(tag == "img" for tag, _ in parsed.tags) == 4
    (policy,) = (attributes["content"] for tag, attributes in parsed.tags if attributes.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(parsed.scripts["script"].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    assert "innerHTML" not in page


async def test_outcomes_have_the_colours_of_pictures(page: str) -> None:
    assert palette_css() in page
    colours = [
        re.search(rf"\.{kind} {{ background: (var\(--line-\d\)); }}", page) for kind in KINDS if kind != "no_data"
    ]
    assert len({found[1] for found in colours if found}) == len(KINDS) - 1


async def test_the_last_attempt_is_what_is_shown(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        return failed(sample) if sample.attempt == 0 and sample.number == 0 else transcript(sample)

    sets = [problem_set(1)]
    await play(WrittenEngine(write), tmp_path, sets, "rollout.retries=1")
    await asyncio.to_thread(results, tmp_path, sets, "rollout.retries=1", conversations=9)
    parsed = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert [one["kind"] for one in parsed.conversations(0)["rollouts"]] == ["correct"] * 4


def test_formulas_are_trees_of_text_and_known_elements() -> None:
    found = formulas_of(
        [r"So $\frac12$ and \(x_1\), \[a \le b\] $$c$$", "```py\nprint('$not$')\n```", r"$\href{javascript:x}{y}$"]
    )
    assert set(found) == {r"\frac12", "x_1", r"a \le b", "c", r"\href{javascript:x}{y}"}
    assert formulas_of([r"$\pi$"]) == {r"\pi": ["math", {}, ["mrow", {}, ["mi", {}, "π"]]]}
    assert found[r"\frac12"] == ["math", {}, ["mrow", {}, ["mfrac", {}, ["mn", {}, "1"], ["mn", {}, "2"]]]]


@pytest.mark.parametrize("tex", [r"\frac", "{" * 900, r"\begin{matrix}", "x" * 2000, r"\left(", "^", "&&&"])
def test_a_formula_that_cannot_be_read_stays_text(tex: str) -> None:
    json.dumps(formulas_of([f"${tex}$"]))  # nothing is raised


async def test_a_report_holds_all_conversations_or_as_many_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(sample: Sample) -> Any:
        text = random.Random(f"{sample.problem.id}/{sample.number}").randbytes(2000).hex()
        return transcript(sample, turns=(Turn(origin="model", text=text, tokens=9),))

    sets = [problem_set(3)]
    await play(WrittenEngine(write), tmp_path, sets)
    for most, opened in ((1_000_000, 4), (20_000, 2), (1, 1)):
        monkeypatch.setattr(report, "_MOST", most)
        await asyncio.to_thread(results, tmp_path, sets)
        parsed = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert [len(parsed.conversations(place)["rollouts"]) for place in range(3)] == [opened] * 3


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("problems", [3, 7, 30])
async def test_scores_of_exactly_zero_and_one_are_drawn(tmp_path: Path, problems: int, correct: bool) -> None:
    """Bounds at such a mean once lay 7e-18 on its wrong side, and error bars cannot be negative."""
    sets = [problem_set(problems)]
    overrides = ("evaluation.samples=2", "telemetry.plots=true")
    await play(WrittenEngine(lambda sample: transcript(sample, correct=correct)), tmp_path, sets, *overrides)
    found = await asyncio.to_thread(results, tmp_path, sets, *overrides)
    assert found["benchmarks"]["toy"]["avg"]["mean"] == float(correct)
    assert (tmp_path / "plots" / "scores.png").is_file()
    assert (tmp_path / "report.html").is_file()
