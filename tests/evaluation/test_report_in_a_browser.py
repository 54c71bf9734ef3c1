"""The report in a real browser, where there is one: its script runs under its own security policy."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from evaluation.runs import WrittenEngine, play, problem_set, results, transcript

from agentrl.evaluation.transcript import Sample, Turn

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_the_page_draws_its_problems_and_opens_a_conversation(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        text = f"I am sample {sample.number} of {sample.problem.id} <b>not bold</b>."
        return transcript(sample, correct=sample.number > 1, turns=(Turn(origin="model", text=text, tokens=9),))

    sets = [problem_set(2)]
    asyncio.run(play(WrittenEngine(write), tmp_path, sets))
    results(tmp_path, sets)
    page = f"file://{tmp_path / 'report.html'}#p1s3"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page],
        capture_output=True,
        text=True,
        timeout=300,
    )
    drawn = done.stdout.partition("<script type=")[0]
    assert drawn.count('class="cell correct open') == 4
    assert drawn.count('class="cell incorrect open') == 4
    assert [name in drawn for name in ("correct 4", "incorrect 4", "void turn 0")] == [True, True, True]
    # The address's end opens one conversation, whose text is no markup.
    assert drawn.count('class="conversation"') == 1
    assert "I am sample 3 of p1 &lt;b&gt;not bold&lt;/b&gt;." in drawn
