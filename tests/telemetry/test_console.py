from __future__ import annotations

import io

import pytest

from agentrl.telemetry.console import Console, format_duration, format_step
from agentrl.telemetry.settings import TelemetrySettings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(**settings: object) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(TelemetrySettings(**settings), file=out), out  # type: ignore[arg-type]


def test_a_note_is_one_line_whatever_it_holds() -> None:
    said, out = console()
    text = "[bold]not markup[/bold] :smile: " + "x" * 300
    said.note(text)
    said.warning("look")
    assert out.getvalue() == f"{text}\nwarning: look\n"


def test_plain_progress_is_a_line_a_step() -> None:
    said, out = console()
    with said.progress(4, done=2) as progress:
        progress.update(3, {"reward/mean": 0.5, "policy/entropy": 0.25, "tokens_per_s": 900.0})
        said.note("saved")
        progress.update(4, {"reward/mean": 0.7})
    first, note, last = out.getvalue().splitlines()
    assert first.startswith("step 3/4  reward 0.500 (avg 0.500)  entropy 0.250  900 tokens/s  ")
    assert first.endswith(" left")
    assert note == "saved"
    assert last == "step 4/4  reward 0.700 (avg 0.600)  0:00 left"


def test_a_copy_gets_the_same_in_plain_lines_also_of_a_live_display() -> None:
    out, copy = Terminal(), io.StringIO()
    said = Console(TelemetrySettings(), out, copy)
    assert said.live
    with said.progress(2) as progress:
        progress.update(1, {"reward/mean": 0.5})
        said.warning("look")
        progress.update(2, {"reward/mean": 0.5})
    first, warning, last = copy.getvalue().splitlines()
    assert first.startswith("step 1/2  reward 0.500 (avg 0.500)  ")
    assert (warning, last) == ("warning: look", "step 2/2  reward 0.500 (avg 0.500)  0:00 left")


def test_a_narrow_terminal_breaks_no_word_and_cuts_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    said = Console(TelemetrySettings(), out)
    words = [f"word{number:02d}" for number in range(30)]
    said.note(" ".join(words))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines).split() == words
    with said.progress(300) as progress:
        progress.update(
            1, {"reward/mean": 0.5, "policy/entropy": 0.25, "rollout/turns_mean": 2.0, "tokens_per_s": 5210.0}
        )
    for figure in ("reward 0.500 (avg 0.500)", "entropy 0.250", "turns 2.0", "5.2k tokens/s"):
        assert figure in out.getvalue()


def test_plain_lines_can_be_thinned_and_the_last_is_always_shown() -> None:
    said, out = console(plain_every=10)
    with said.progress(25) as progress:
        for step in range(1, 26):
            progress.update(step, {})
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["10/25", "20/25", "25/25"]


def test_a_long_loop_says_few_lines() -> None:
    said, out = console()
    with said.progress(100, lines=4) as progress:
        for step in range(1, 101):
            progress.update(step, {})
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["25/100", "50/100", "75/100", "100/100"]


def test_off_keeps_notes_and_tables() -> None:
    said, out = console(console="off")
    with said.progress(1) as progress:
        progress.update(1, {"reward/mean": 1.0})
    said.table("Held-out", ["family", "avg@8"], [["boxes [x]", "0.31"]])
    assert "step" not in out.getvalue()
    assert all(word in out.getvalue() for word in ("Held-out", "family", "boxes [x]", "0.31"))


def test_figures() -> None:
    assert format_step({}, None) == ""
    assert format_step({"policy/loss": 1.5}, None) == "loss 1.500"
    assert format_step({"reward/mean": 0.5, "policy/loss": 1.5}, 0.4) == "reward 0.500 (avg 0.400)"
    assert format_step({"tokens_per_s": 5210.0, "rollout/turns_mean": 2.04}, None) == "turns 2.0  5.2k tokens/s"
    assert [format_duration(seconds) for seconds in (0.2, 59.6, 192.4, 7322, None)] == [
        "0:00",
        "1:00",
        "3:12",
        "2:02:02",
        "?",
    ]
