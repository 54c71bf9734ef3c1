"""Comparison of two evaluations, and regrading."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from evaluation.runs import WrittenSampler, failed, play, problem_set, results, settings, transcript

from agentrl.errors import SettingsError
from agentrl.evaluation.compare import compare_command, compare_results
from agentrl.evaluation.provenance import list_differences
from agentrl.evaluation.regrade import FunctionGrader, regrade_command
from agentrl.evaluation.transcripts import Sample
from agentrl_envs.registry import PluginError
from agentrl_envs.types import Ended, Verdict


def run(output: Path, counts: tuple[int, ...], *overrides: str, fingerprint: str = "f1") -> dict[str, Any]:
    """Write an evaluation in which the first ``counts[i]`` samples of problem ``p<i>`` are correct."""
    sets = [problem_set(len(counts))]

    def write(sample: Sample) -> Any:
        return transcript(sample, correct=sample.number < counts[int(sample.problem.id[1:])])

    asyncio.run(play(WrittenSampler(write, fingerprint=fingerprint), output, sets, *overrides))
    return results(output, sets, *overrides)


def test_a_difference_is_paired_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", (4, 2, 0, 1))
    run(tmp_path / "b", (4, 3, 2, 0), fingerprint="f2")
    found = compare_command(tmp_path / "a", tmp_path / "b")["toy"]
    assert found.mean == pytest.approx((0 + 1 + 2 - 1) / 16)
    assert (found.won, found.lost, found.tied, found.problems) == (2, 1, 1, 4)
    shown = capsys.readouterr().out
    assert "+0.125" in shown
    assert "Differences, paired by problem" in shown


def test_seeds_models_and_numbers_of_samples_may_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a", (4, 2))
    run(tmp_path / "b", (2, 1), "evaluation.samples=2", "seed=9")
    assert compare_command(tmp_path / "a", tmp_path / "b")["toy"].mean == 0.0
    shown = capsys.readouterr().out
    assert "A has 4 samples per problem and B has 2" in shown
    assert "A and B have the same model fingerprint, 'f1'" in shown


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("evaluation.temperature=0.6", "sampling.temperature: 1.0 in A, 0.6 in B"),
        ("environment.max_turns=5", "protocol.max_turns: 10 in A, 5 in B"),
        ("evaluation.max_response_tokens=9000", "limits.max_response_tokens: 8192 in A, 9000 in B"),
        ("grader.max_length=99", "grader.max_length: 2000 in A, 99 in B"),
    ],
)
def test_different_protocols_are_refused_by_name(tmp_path: Path, override: str, named: str) -> None:
    run(tmp_path / "a", (4, 2))
    run(tmp_path / "b", (4, 2), override)
    with pytest.raises(SettingsError, match="because their protocols differ") as refused:
        compare_command(tmp_path / "a", tmp_path / "b")
    assert [line.strip() for line in str(refused.value).splitlines()[1:]] == [named]


def test_an_empty_section_is_no_setting() -> None:
    first: dict[str, Any] = {"protocol": {"template_options": {}}}
    second = {"protocol": {"template_options": {"thinking": False}}}
    assert list_differences(first, second) == [("protocol.template_options.thinking", "(absent)", False)]
    assert list_differences(first, {"protocol": {}}) == []


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    first = run(tmp_path / "a", (4, 2))
    other = copy.deepcopy(first)
    other["benchmarks"]["toy"]["sha256"] = "0" * 64
    with pytest.raises(SettingsError, match="toy: the problems of A and B differ"):
        compare_results(first, other)
    other["benchmarks"] = {"else": other["benchmarks"]["toy"]}
    with pytest.raises(SettingsError, match="A and B have no benchmark in common: A has toy; B has else"):
        compare_results(first, other)
    (tmp_path / "a" / "results.json").unlink()
    with pytest.raises(SettingsError, match="is not finished: repeat the command that started it"):
        compare_command(tmp_path / "a", tmp_path / "a")
    with pytest.raises(SettingsError, match="is not an evaluation"):
        compare_command(tmp_path, tmp_path / "a")


# -- grading again -----------------------------------------------------------------------------------------------------


def test_regrading_says_what_changed_and_leaves_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(sample: Sample) -> Any:
        if sample.number == 0:  # right, but called wrong
            return transcript(sample, verdict=Verdict.INCORRECT, reward=0.0)
        if sample.number == 1:  # the grader failed after the answer was there
            return transcript(sample, verdict=None, reward=0.0, ended=Ended.INFRASTRUCTURE_FAILURE)
        if sample.number == 2:
            return failed(sample)
        return transcript(sample, verdict=None, answer=None, reward=0.0, ended=Ended.VOID_TURN)

    sets = [problem_set(2)]
    asyncio.run(play(WrittenSampler(write), tmp_path, sets, "rollout.retries=0"))
    before = results(tmp_path, sets, "rollout.retries=0")
    assert before["benchmarks"]["toy"]["avg"]["mean"] == 0.0
    kept = (tmp_path / "results.json").read_bytes(), (tmp_path / "rollouts.jsonl.zst").read_bytes()
    record = regrade_command(tmp_path, settings(), None)
    assert kept == ((tmp_path / "results.json").read_bytes(), (tmp_path / "rollouts.jsonl.zst").read_bytes())
    assert record == json.loads((tmp_path / "regraded.json").read_text())
    assert [(one["problem"], one["sample"], one["before"], one["after"]) for one in record["changed"]] == [
        ("p0", 0, "incorrect", "correct"),
        ("p1", 0, "incorrect", "correct"),
        ("p0", 1, "none", "correct"),
        ("p1", 1, "none", "correct"),
    ]
    after = record["benchmarks"]["toy"]
    assert after["avg"]["mean"] == pytest.approx(2 / 3)
    assert after["excluded"]["total"] == 2
    shown = capsys.readouterr().out
    assert "incorrect -> correct" in shown
    assert "toy: 0.0000 -> 0.6667" in shown


def test_an_own_grader_and_unchanged_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", (4, 2))
    assert regrade_command(tmp_path / "run", settings(), None)["changed"] == []
    assert "no verdict changed" in capsys.readouterr().out
    (tmp_path / "strict.py").write_text("def never(answer, gold):\n    return False\n")
    monkeypatch.syspath_prepend(tmp_path)
    record = regrade_command(tmp_path / "run", settings(), "strict:never")
    assert (len(record["changed"]), record["grader"]) == (6, "strict:never")
    assert record["benchmarks"]["toy"]["avg"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("strict", "is not of the form module:attribute"),
        ("nowhere_at_all:f", "there is no module 'nowhere_at_all'"),
        ("json:__name__", "--grader must be a function .*; 'json:__name__' is a str"),
        ("json:nothing", r"module 'json' \(.*\) has no 'nothing'"),
    ],
)
def test_graders_that_are_none(path: str, expected: str) -> None:
    with pytest.raises(PluginError, match=expected):
        FunctionGrader(path)


async def test_an_own_grader_may_wait_and_give_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow.py").write_text(
        "from agentrl_envs.types import Verdict\n"
        "async def grade(answer, gold):\n    return Verdict.UNPARSABLE_ANSWER if answer == '?' else answer == gold\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    grader = FunctionGrader("slow:grade")
    assert [await grader.grade(answer, "5") for answer in ("5", "6", "?", " ", None)] == [
        Verdict.CORRECT,
        Verdict.INCORRECT,
        Verdict.UNPARSABLE_ANSWER,
        Verdict.NO_ANSWER,
        Verdict.NO_ANSWER,
    ]
