"""The limits of rollouts, compared with prompts and demonstrations before a cold start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentrl.config import Settings, load_settings
from agentrl.errors import SettingsError
from agentrl.training.coldstart.demonstrations import (
    EncodedDemonstration,
    problems_for_length_check,
    warn_of_exceeded_token_limits,
)
from agentrl.training.coldstart.train import check_token_limits, cold_start
from agentrl.training.run.preflight import dry_run

KEEPER = """
class Keeper:
    def reset(self, boxes):
        return f"There are {boxes} boxes."

    def look(self):
        'Look around.'
        return 'a box'
"""
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A class, its problems and its demonstrations, as overrides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("limited.py").write_text(KEEPER)
    rows = [{"problem": f"What is in box {n}?", "answer": "2", "boxes": n} for n in range(4)]
    shown = [row | {"turns": [{"model": CALL}, {"model": "2"}]} for row in rows]
    for name, lines in (("p.jsonl", rows), ("shown.jsonl", shown)):
        Path(name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ["data.train=[{path: p.jsonl}]", "coldstart.demonstrations=shown.jsonl"]


def limited(given: list[str], *overrides: str) -> Settings:
    return load_settings("limited:Keeper", overrides=[*given, *overrides])


def test_a_run_none_of_whose_prompts_fit_is_refused_before_the_cold_start(given: list[str], tmp_path: Path) -> None:
    settings = limited(given, "rollout.max_prompt_tokens=16")
    message = (
        r"rollout\.max_prompt_tokens=16, but each of the 4 prompts of data\.train is longer, up to (\d+) tokens: set"
    )
    with pytest.raises(SettingsError, match=message) as measured:
        asyncio.run(check_token_limits(settings, problems_for_length_check(settings)))
    steps: list[int] = []
    policy = tmp_path / "policy"
    with pytest.raises(SettingsError, match=message):
        asyncio.run(
            cold_start(settings, policy, lambda step, _: steps.append(step), problems_for_length_check(settings))
        )
    assert not steps
    assert not policy.exists()
    enough = limited(given, f"rollout.max_prompt_tokens={str(measured.value).split()[-1]}")
    asyncio.run(check_token_limits(enough, problems_for_length_check(enough)))


def test_a_limit_that_cuts_demonstrations_off_is_named(given: list[str], caplog: pytest.LogCaptureFixture) -> None:
    settings = limited(given, "rollout.max_response_tokens=3", "rollout.max_turn_tokens=2")
    asyncio.run(check_token_limits(settings, problems_for_length_check(settings)))
    response, turn = caplog.messages
    assert (
        "rollout.max_response_tokens=3: 4 of 4 demonstrations have longer responses; set rollout.max_resp" in response
    )
    assert "rollout.max_turn_tokens=2: 4 of 4 demonstrations have a longer turn; set rollout.max_turn_tokens=" in turn


def test_a_dry_run_measures_any_file_of_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    program = "```py\nfinal_answer(2+3)\n```"
    row = {"problem": "What is 2 + 3?", "answer": "5", "turns": [{"model": program}]}
    Path("mine.jsonl").write_text(json.dumps(row) + "\n")
    dry_run(load_settings(overrides=["coldstart.demonstrations=mine.jsonl", "rollout.max_turn_tokens=2"]))
    (turn,) = caplog.messages
    assert "rollout.max_turn_tokens=2: 1 of 1 demonstrations have a longer turn" in turn


def test_a_limit_holds_what_is_as_long(caplog: pytest.LogCaptureFixture) -> None:
    row = EncodedDemonstration(
        prompt_ids=(1,), response_ids=(1,) * 6, response_mask=(True, True, False, True, True, True)
    )
    assert row.longest_turn == 3
    settings = load_settings(
        overrides=["rollout.max_prompt_tokens=5", "rollout.max_response_tokens=6", "rollout.max_turn_tokens=3"]
    )
    warn_of_exceeded_token_limits(settings, [5, 5], [row])
    assert not caplog.messages
    warn_of_exceeded_token_limits(settings, [5, 9], [row])
    assert caplog.messages == [
        "rollout.max_prompt_tokens=5: 1 of 2 prompts of data.train are longer and are skipped; "
        "set rollout.max_prompt_tokens=9 to fit all of them"
    ]
