"""Extraction from stored conversations: the same rule returns the same answers, another rule shows its changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from envs.conftest import ScriptedSandbox, ran
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SettingsError
from agentrl.evaluation.regrade import extract_answer_again, protocol_from_provenance, regrade_command
from agentrl.evaluation.transcripts import Sample, Transcript, Turn
from agentrl_envs.execution import MAX_PRINTED_CHARACTERS
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.protocols.base import ParsedTurn
from agentrl_envs.protocols.simpletir import SimpleTIRProtocol
from agentrl_envs.protocols.texts import last_boxed_answer
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREpisode
from agentrl_envs.types import Ended, ToolCall, Verdict

from .runs import WrittenSampler, play, problem, problem_set, results, settings, transcript

PROTOCOL = SimpleTIRProtocol(instruction="", observation_limit=64)
PROGRAM = "Let me see.\n```py\nprint(1)\n```"
TEXTS = (
    PROGRAM,
    "So \\boxed{3}.\n```py\nprint(1)\n```",
    "So \\boxed{3}.",
    "I do not know.",
    "```py\n# \\boxed{4}\n```",
    "\\boxed{}\n```\n```",
)
OUTPUTS = (
    "",
    "1\n",
    "\\boxed{5}\n",
    "\\boxed{5}\n" + "x" * 500 + "\n\\boxed{6\n",
    "x" * (MAX_PRINTED_CHARACTERS + 10),
    "\\boxed{7}" + "x" * MAX_PRINTED_CHARACTERS,
)


async def played(turns: list[tuple[str, str, str]]) -> Transcript:
    """Build the transcript of an episode with these turns and outputs of programs."""
    sandbox = ScriptedSandbox([ran(stdout, stderr=stderr) for _, stdout, stderr in turns])
    grader = Grader(GraderSettings(workers=1))
    episode = SimpleTIREpisode(
        problem(3), settings=SimpleTIRSettings(max_turns=3, observation_limit=64), sandbox=sandbox, grader=grader
    )
    await episode.start()
    stored: list[Turn] = []
    calls: list[ToolCall] = []
    try:
        for text, _, _ in turns:
            step = await episode.step(text)
            stored.append(Turn(origin="model", text=text, tokens=1))
            calls.extend(step.tool_calls)
            if step.observation:
                stored.append(Turn(origin="observation", text=step.observation, tokens=1))
            if step.ended is not None:
                break
    finally:
        await grader.close()
    return transcript(
        Sample(benchmark="toy", problem=problem(3), number=0),
        turns=tuple(stored),
        ended=step.ended or Ended.TOKEN_LIMIT,
        verdict=step.verdict,
        answer=step.answer,
        reward=step.reward,
        tool_calls=tuple(calls),
    )


@given(
    st.lists(
        st.tuples(st.sampled_from(TEXTS), st.sampled_from(OUTPUTS), st.sampled_from(["", "Warning: \\boxed{9}"])),
        min_size=1,
        max_size=4,
    )
)
def test_the_rule_of_play_finds_what_play_found(turns: list[tuple[str, str, str]]) -> None:
    one = asyncio.run(played(turns))
    assert extract_answer_again(one, PROTOCOL) == one
    # An observation that did not fit, or was never stored, takes no answer away.
    shorter = replace(one, turns=tuple(turn for turn in one.turns if turn.origin == "model"))
    assert extract_answer_again(shorter, PROTOCOL) == shorter
    # Through the file's format too.
    assert Transcript.from_record(json.loads(json.dumps(one.to_record()))) == one


def test_an_answer_before_the_kept_end_of_the_output_stays() -> None:
    one = asyncio.run(played([(PROGRAM, "\\boxed{7}" + "x" * MAX_PRINTED_CHARACTERS, "")]))
    assert (one.answer, one.tool_calls[0].printed) == ("7", "x" * MAX_PRINTED_CHARACTERS)
    assert extract_answer_again(one, PROTOCOL) is one


@dataclass(frozen=True)
class AnotherRule:
    """Protocol that extracts ``Answer: X`` from text and ignores boxes in the output of programs."""

    def parse(self, text: str) -> ParsedTurn:
        words = text.rpartition("Answer: ")[2] if "Answer: " in text else None
        return ParsedTurn(program=PROTOCOL.parse(text).program, answer=words)

    def printed_answer(self, stdout: str) -> str | None:
        return None

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"extraction needs no {name}")


def test_another_rule_finds_loses_and_changes_answers() -> None:
    found = asyncio.run(played([(PROGRAM, "1", ""), ("I think.\nAnswer: 3", "", "")]))
    assert (found.answer, found.ended) == (None, Ended.VOID_TURN)
    new = extract_answer_again(found, AnotherRule())
    assert (new.answer, new.ended, new.verdict, new.reward) == ("3", Ended.ANSWERED, None, 0.0)

    lost = asyncio.run(played([(PROGRAM, "\\boxed{3}", "")]))
    assert (lost.answer, lost.verdict, lost.reward) == ("3", Verdict.CORRECT, 1.0)
    new = extract_answer_again(lost, AnotherRule())
    assert (new.answer, new.ended, new.verdict, new.reward) == (None, Ended.STOPPED, None, 0.0)

    # The first answer ends a conversation, whatever was played after it.
    early = replace(lost, turns=(Turn(origin="model", text="Answer: 2", tokens=1), *lost.turns))
    assert extract_answer_again(early, AnotherRule()).answer == "2"


def test_what_is_no_data_stays() -> None:
    one = asyncio.run(played([("So \\boxed{3}.", "", "")]))
    failure = replace(one, ended=Ended.INFRASTRUCTURE_FAILURE, verdict=None, answer=None)
    assert extract_answer_again(failure, PROTOCOL) is failure
    # The grader failed: its answer is there, and can be another one now.
    graderless = replace(failure, answer="8")
    assert extract_answer_again(graderless, PROTOCOL).answer == "3"


def test_regrading_with_extraction_shows_answers_and_verdicts_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(sample: Sample) -> Transcript:
        text = f"So \\boxed{{{sample.problem.answer}}}."
        turns = (Turn(origin="model", text=text, tokens=9),)
        stored: dict[str, Any] = {"turns": turns, "tool_calls": ()}
        match sample.number:
            case 0:  # another answer was read, which was wrong
                return transcript(sample, correct=False, **stored)
            case 1:  # none was read
                return transcript(sample, verdict=None, answer=None, reward=0.0, ended=Ended.VOID_TURN, **stored)
            case 2:  # the right one, but called wrong
                return transcript(sample, verdict=Verdict.INCORRECT, reward=0.0, **stored)
            case _:
                return transcript(sample, **stored)

    sets = [problem_set(1)]
    asyncio.run(play(WrittenSampler(write), tmp_path, sets))
    results(tmp_path, sets)
    capsys.readouterr()
    kept = (tmp_path / "rollouts.jsonl.zst").read_bytes()
    record = regrade_command(tmp_path, settings(), None, extract=True)
    shown = capsys.readouterr().out
    assert (tmp_path / "rollouts.jsonl.zst").read_bytes() == kept
    assert record == json.loads((tmp_path / "regraded.json").read_text())
    answers = [(one["sample"], one["answer_before"], one["answer"]) for one in record["changed_answers"]]
    assert answers == [(0, "-1", "0"), (1, None, "0")]
    verdicts = [(one["sample"], one["before"], one["after"]) for one in record["changed"]]
    assert verdicts == [(0, "incorrect", "correct"), (1, "none", "correct"), (2, "incorrect", "correct")]
    assert record["benchmarks"]["toy"]["avg"]["mean"] == 1.0
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    for row in (
        "different 1",
        "newly extracted 1",
        "incorrect -> correct unchanged 1",
        "incorrect -> correct changed 1",
        "none -> correct changed 1",
    ):
        assert any(row in line for line in lines), (row, shown)
    assert "2 changed answers, 3 changed verdicts" in shown

    # Without extraction the answers stay.
    record = regrade_command(tmp_path, settings(), None)
    assert (record["changed_answers"], record["extracted"]) == ([], False)
    assert [one["sample"] for one in record["changed"]] == [2]


def test_environments_that_find_answers_themselves_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"--extract supports .* used 'mine:Env'"):
        protocol_from_provenance({"protocol": {"env": "mine:Env"}})
    recorded = {"env": "simpletir", "instruction": "", "observation_limit": 64}
    with pytest.raises(SettingsError, match=r"--extract does not support the protocol hermes"):
        protocol_from_provenance({"protocol": {**recorded, "protocol": "hermes"}})
    protocol = protocol_from_provenance({"protocol": {**recorded, "protocol": "simpletir"}})
    assert protocol.printed_answer("\\boxed{1}") == last_boxed_answer("\\boxed{1}") == "1"
    said = {name: protocol_from_provenance({"protocol": {**recorded, "protocol": name}}) for name in ("retool", "torl")}
    assert all(one.printed_answer("\\boxed{1}") is None for one in said.values())
    reasoning = protocol_from_provenance({"protocol": {"env": "reasoning", "instruction": ""}})
    assert reasoning.parse("so \\boxed{2}").answer == "2"
