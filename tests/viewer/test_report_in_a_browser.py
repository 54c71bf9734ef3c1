"""The report in a real browser, if one is installed: its script runs under the page's security policy."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from evaluation.runs import WrittenSampler, play, problem_set, results, transcript

from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.transcripts import Sample, Turn

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


HERE = CHROMIUM is not None or os.environ.get("CI") == "true"  # in CI there must be one
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HERE, reason="no chromium here")]


def dom(page: str, folder: Path) -> str:
    """Return the page's elements after its script has run."""
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*command, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", done.stdout, flags=re.DOTALL)


def report(folder: Path, write: Callable[[Sample], Any], sets: Sequence[ProblemSet]) -> str:
    asyncio.run(play(WrittenSampler(write), folder, sets))
    results(folder, sets)
    return f"file://{folder / 'report.html'}"


def test_the_page_draws_its_problems_and_opens_a_conversation(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        text = f"I am sample {sample.number} of {sample.problem.id} <b>not bold</b>."
        return transcript(sample, correct=sample.number > 1, turns=(Turn(origin="model", text=text, tokens=9),))

    page = report(tmp_path, write, [problem_set(2, info={"db": "<i>shop</i>"})])
    drawn = dom(page, tmp_path)
    cells = re.findall(r'<a class="cell (\w+)"[^>]*href="(#/evaluation/evaluation/\d+)"', drawn)
    assert Counter(kind for kind, _ in cells) == {"correct": 4, "incorrect": 4}
    assert "2 problems, 8 of 8 rollouts" in drawn
    opened = dom(page + cells[-1][1], tmp_path)
    assert "I am sample 3 of p1 &lt;b&gt;not bold&lt;/b&gt;." in opened
    assert "db: &lt;i&gt;shop&lt;/i&gt;" in opened
    assert opened.count('class="cell correct chosen"') == 1


def test_markdown_and_formulas_are_elements_and_nothing_else_is(tmp_path: Path) -> None:
    text = (
        "# Plan\n\n1. add **both** `x`\n2. halve\n\nSo $\\frac{1}{2}$ and $\\href{javascript:alert(1)}{y}$ "
        "<img src=x onerror=alert(1)> $\\frac$\n```py\nprint('**$1$**')\n```\n"
    )
    turns = (Turn(origin="model", text=text, tokens=9),)
    page = report(tmp_path, lambda sample: transcript(sample, turns=turns), [problem_set(1)])
    conversation = dom(f"{page}#/evaluation/evaluation/0", tmp_path).partition('class="segment model"')[2]
    for part in (
        "<h4>Plan</h4>",
        "<strong>both</strong>",
        "<code>x</code>",
        "<ol",
        "<mfrac><mrow><mn>1</mn></mrow>",
    ):
        assert part in conversation
    assert "```py\nprint('**$1$**')\n```" in conversation
    assert "&lt;img src=x onerror=alert(1)&gt;" in conversation
    assert "$\\frac$" in conversation
    assert "href=" not in conversation
    source = dom(f"{page}#/evaluation/evaluation/0?source=1", tmp_path).partition('class="segment model"')[2]
    assert "So $\\frac{1}{2}$ and" in source


def test_a_link_selects_an_outcome_a_benchmark_and_a_text(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        turns = (Turn(origin="model", text=f"word{sample.problem.id}x{sample.number}", tokens=9),)
        return transcript(sample, correct=sample.number < int(sample.problem.id[1:]), turns=turns)

    page = report(tmp_path, write, [problem_set(3, name="one"), problem_set(2, name="two")]) + "#/evaluation/evaluation"
    assert "2 problems, 8 of 20 rollouts" in dom(page + "?benchmark=two", tmp_path)
    assert "3 problems, 4 of 20 rollouts" in dom(page + "?kind=correct", tmp_path)
    assert "2 problems, 2 of 20 rollouts" in dom(page + "?text=WORDP1X3", tmp_path)
    assert "2 problems, 8 of 20 rollouts" in dom(page + "?text=what+is+1", tmp_path)
