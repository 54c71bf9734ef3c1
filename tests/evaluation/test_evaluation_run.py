"""Complete evaluations: scores that equal closed forms, interruptions without lost rollouts, excluded failures."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import zstandard
from evaluation.runs import WrittenSampler, failed, play, problem, problem_set, results, settings, transcript

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.run import default_output_directory, evaluate_command
from agentrl.evaluation.settings import EvaluationOptions
from agentrl.evaluation.transcripts import Sample, Turn, read_rollouts
from agentrl.telemetry.trackers import SampleTable, TrackedRun, register_tracker
from agentrl.viewer.export import export_evaluation_page
from agentrl_envs.types import Ended, Verdict


def right_below(*counts: int) -> Any:
    """Write samples of which the first ``counts[i]`` of problem ``p<i>`` are correct."""
    return lambda sample: transcript(sample, correct=sample.number < counts[int(sample.problem.id[1:])])


async def finished(
    output: Path, engine: WrittenSampler, *overrides: str, count: int = 4, **request: Any
) -> dict[str, Any]:
    sets = [problem_set(count)]
    await play(engine, output, sets, *overrides)
    return await asyncio.to_thread(results, output, sets, *overrides)


async def test_scores_by_hand(tmp_path: Path) -> None:
    one = (await finished(tmp_path, WrittenSampler(right_below(4, 2, 1, 0))))["benchmarks"]["toy"]
    assert one["avg"]["mean"] == (4 + 2 + 1) / 16
    # 1 - C(n - c, k) / C(n, k): for k = 2 with c = 2: 1 - 1/6; with c = 1: 1 - 3/6.
    assert {k: value["value"] for k, value in one["pass"].items()} == pytest.approx(
        {"1": 7 / 16, "2": (1 + 5 / 6 + 1 / 2) / 4, "4": 3 / 4}
    )
    # Wrong answers are all the same: 2 against 2 is half a point, 1 against 3 is none.
    assert one["maj"] == (1 + 0.5) / 4
    assert one["per_problem"]["p1"] == {"samples": 4, "correct": 2}
    assert (one["turns"], one["tool_calls"]) == (1, {"mean": 1, "outcomes": {"ok": 16}})
    assert one["tokens"] == {"prompt_mean": 7, "model_mean": 10, "response_mean": 15, "model_total": 160}
    assert (one["truncated"]["share"], one["void_share"], one["seconds"]) == (0, 0, {"mean": 2, "max": 2})
    assert one["excluded"] == {"total": 0, "retried": 0}


async def test_what_rollouts_came_to_stands_in_columns(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "correct": {},
        "incorrect": {"correct": False},
        "no_answer": {"verdict": Verdict.NO_ANSWER, "answer": None, "ended": Ended.STOPPED},
        "unreadable": {"verdict": Verdict.UNPARSABLE_ANSWER, "answer": "((("},
        "grader_timeout": {"verdict": Verdict.ANSWER_TIMEOUT, "answer": "2^{9^9}"},
        "refused": {"verdict": None, "answer": None, "ended": Ended.VOID_TURN, "refused": True},
        "truncated": {"verdict": None, "answer": None, "ended": Ended.TOKEN_LIMIT},
        "void": {"verdict": None, "answer": None, "ended": Ended.VOID_TURN},
        "excluded": {"verdict": Verdict.UNPARSABLE_GOLD},
    }
    wrong = {"reward": 0.0}

    def write(sample: Sample) -> Any:
        kind = list(changes)[int(sample.problem.id[1:])]
        return transcript(sample, **(changes[kind] if kind == "correct" else wrong | changes[kind]))

    one = (await finished(tmp_path, WrittenSampler(write), count=9))["benchmarks"]["toy"]
    assert one["kinds"] == dict.fromkeys(changes, 4)
    assert one["avg"]["mean"] == 1 / 8  # all but what is no data count
    titles = ["benchmark", "correct", "incorrect", "no answer", "unreadable", "grader timeout", "refused", "truncated"]
    head, row = f"| {' | '.join([*titles, 'void turn', 'excluded'])} |", f"| toy |{' 4 |' * 9}"
    table = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert table[table.index(head) + 2] == row


async def test_trackers_are_told_what_an_evaluation_came_to(tmp_path: Path, own_registries: None) -> None:
    told: list[Any] = []

    class Told:
        id, location = "one", "here"

        def __init__(self, run: TrackedRun) -> None:
            told.append((run.name, run.resume_id, run.settings["seed"]))

        def metrics(self, step: int, row: Any) -> None:
            told.append((step, row))

        def trajectories(self, table: SampleTable) -> None:
            told.append([table.columns, *table.rows])

        def plots(self, files: Sequence[Path]) -> None:
            told.append([file.suffix for file in files])

        def close(self) -> None:
            told.append("closed")

    register_tracker("told")(Told)
    output, chosen = (
        tmp_path / "scores",
        ("telemetry.trackers=[told]", "telemetry.tracker_rows=2", "telemetry.plots=true"),
    )
    found = await finished(output, WrittenSampler(right_below(4, 2, 1, 0)), *chosen)
    assert told[0] == ("scores", None, found["provenance"]["seed"])
    step, row = told[1]
    score = found["benchmarks"]["toy"]["avg"]
    assert (step, row["eval/toy/avg"], row["eval/toy/maj"], row["eval/toy/pass_at_2"]) == (
        0,
        score["mean"],
        found["benchmarks"]["toy"]["maj"],
        found["benchmarks"]["toy"]["pass"]["2"]["value"],
    )
    assert row["eval/toy/low"] == score["problems_like_these"]["low"]
    columns, first, second = told[2]
    assert dict(zip(columns, first, strict=True))["verdict"] == "correct"
    assert len(second) == len(columns)
    assert told[3]
    assert set(told[3]) == {".png"}
    assert told[4:] == ["closed"]
    await asyncio.to_thread(results, output, [problem_set(4)], *chosen)
    assert told[5] == ("scores", "one", found["provenance"]["seed"])  # the same run again


def test_what_an_environment_without_answers_ends_is_incorrect() -> None:
    ended = transcript(Sample(benchmark="toy", problem=problem(0), number=0), verdict=None, answer=None, reward=0.25)
    assert ended.result_kind == "incorrect"
    assert replace(ended, verdict=Verdict.INCORRECT).result_kind == "incorrect"
    assert replace(ended, ended=Ended.STOPPED).result_kind == "no_answer"
    assert replace(ended, verdict=Verdict.NO_ANSWER).result_kind == "no_answer"
    assert replace(ended, reward=1.0).result_kind == "correct"


async def test_rows_with_half_characters_are_read_and_the_evaluation_goes_on(tmp_path: Path) -> None:
    """Text of an endpoint may have been stored with escapes, the only form of a lone surrogate in JSON."""

    def write(sample: Sample) -> Any:
        return transcript(sample, turns=(Turn(origin="model", text="so \\boxed{1}", tokens=3),))

    sets, engine = [problem_set(1)], WrittenSampler(write)
    await play(engine, tmp_path, sets, "evaluation.samples=1")
    log = tmp_path / "rollouts.jsonl.zst"
    row = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(log.read_bytes()))
    row["turns"][0]["text"] = row["answer"] = "\ud83d\ude00 \ud83d"
    log.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(json.dumps(row).encode() + b"\n"))
    await play(engine, tmp_path, sets, "evaluation.samples=1")
    assert len(engine.asked) == 1
    await asyncio.to_thread(results, tmp_path, sets, "evaluation.samples=1")
    (one,) = read_rollouts(log)
    assert one.answer == one.turns[0].text == "\U0001f600 \ufffd"
    assert one.turns[0].reasoning == ""


def test_a_scripted_engine_in_the_real_environment_gives_closed_forms(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(__file__).parent.parent.parent / "benchmarks" / "evaluation.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_evaluation", file)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    monkeypatch.syspath_prepend(file.parent)  # as when it is run as a script
    spec.loader.exec_module(benchmark)
    # What is expected, once more by hand for n = 4: right are 3 and 0 of 4, the wrong ones each another answer.
    found = benchmark.expected(problem_set(2), 4, (1, 2))
    assert found == {
        "avg@4": Fraction(3, 8),
        "maj@4": Fraction(1, 2),
        "pass@1": Fraction(3, 8),
        "pass@2": Fraction(1, 2),
    }
    arguments = [
        "--n",
        "4",
        "--problems",
        "3",
        "--benchmarks",
        "aime24,math500",
        "telemetry.plots=false",
        "grader.deadline=60",
    ]
    monkeypatch.setattr(sys, "argv", ["evaluation.py", "--data-dir", str(data_dir), *arguments])
    assert benchmark.main() == 0
    assert "avg, pass@k and maj equal their closed forms" in capsys.readouterr().out


async def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def dies(sample: Sample) -> Any:
        if len(first.asked) == 7:
            raise KilledError
        return transcript(sample)

    first = WrittenSampler(dies)
    with pytest.raises(KilledError):
        await play(first, tmp_path, [problem_set()])
    log = tmp_path / "rollouts.jsonl.zst"
    assert len(list(read_rollouts(log))) == 6
    log.write_bytes(log.read_bytes()[:-3])  # as a kill in the middle of a write leaves it
    second = WrittenSampler(transcript)
    await play(second, tmp_path, [problem_set()])
    assert [one.key for one in second.asked] == [one.key for one in first.asked[5:7]] + [
        one.key for one in second.asked[2:]
    ]
    assert len(second.asked) == 16 - 5
    assert len({one.key for one in read_rollouts(log)}) == len(list(read_rollouts(log))) == 16
    third = WrittenSampler(transcript)
    await play(third, tmp_path, [problem_set()])
    assert third.asked == []


async def test_samples_are_played_across_the_problems(tmp_path: Path) -> None:
    engine = WrittenSampler(transcript)
    await play(engine, tmp_path, [problem_set(2), problem_set(1, name="other")])
    assert [one.key for one in engine.asked[:4]] == [
        ("toy", "p0", 0),
        ("toy", "p1", 0),
        ("other", "p0", 0),
        ("toy", "p0", 1),
    ]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("evaluation.temperature=0.6", "sampling.temperature: 1.0 -> 0.6"),
        ("evaluation.top_p=1.0", "sampling.top_p: 0.95 -> 1.0"),
        ("evaluation.samples=8", "sampling.n: 4 -> 8"),
        ("environment.max_turns=5", "protocol.max_turns: 10 -> 5"),
        ("evaluation.max_turns=5", "protocol.max_turns: 10 -> 5"),
        ("evaluation.max_turn_tokens=99", "limits.max_turn_tokens: 8192 -> 99"),
        ("grader.deadline=9", "grader.deadline: 5.0 -> 9.0"),
        ("sandbox.memory_mb=99", "sandbox.memory_mb: 512 -> 99"),
        ("seed=7", "seed: 0 -> 7"),
    ],
)
async def test_other_settings_are_refused_by_name(tmp_path: Path, override: str, named: str) -> None:
    await play(WrittenSampler(transcript), tmp_path, [problem_set()])
    with pytest.raises(SettingsError, match="was started with different settings") as refused:
        await play(WrittenSampler(transcript), tmp_path, [problem_set()], override)
    assert [line.strip() for line in str(refused.value).splitlines()[1:-1]] == [named]


async def test_another_model_or_other_problems_are_refused(tmp_path: Path) -> None:
    await play(WrittenSampler(transcript), tmp_path, [problem_set()])
    with pytest.raises(SettingsError, match=r"model\.fingerprint: 'f1' -> 'f2'"):
        await play(WrittenSampler(transcript, fingerprint="f2"), tmp_path, [problem_set()])
    with pytest.raises(SettingsError, match=r"benchmarks\.toy\.sha256"):
        await play(WrittenSampler(transcript), tmp_path, [problem_set(setup="x = 1")])


async def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(SettingsError, match=r"contains other files \(thesis.tex\): choose another --output"):
        await play(WrittenSampler(transcript), tmp_path, [problem_set()])


async def test_slow_answers_are_wrong_and_stay_in_the_average(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        slow = {"verdict": Verdict.ANSWER_TIMEOUT, "reward": 0.0}
        return transcript(sample, **(slow if sample.number % 2 else {}))

    one = (await finished(tmp_path, WrittenSampler(write), count=3))["benchmarks"]["toy"]
    assert one["avg"]["mean"] == 0.5
    assert one["verdicts"] == {"answer_timeout": 6, "correct": 6}
    assert one["excluded"]["total"] == 0


async def test_failures_outside_the_policy_are_played_again_and_else_no_data(tmp_path: Path) -> None:
    def write(sample: Sample) -> Any:
        if sample.key == ("toy", "p0", 0) and sample.attempt < 1:
            return failed(sample)
        if sample.problem.id == "p1":
            return failed(sample)
        if sample.key == ("toy", "p2", 1):
            return transcript(sample, verdict=Verdict.GRADER_TIMEOUT, reward=0.0)
        return transcript(sample)

    engine = WrittenSampler(write)
    one = (await finished(tmp_path, engine, "rollout.retries=1", count=3))["benchmarks"]["toy"]
    assert one["avg"]["mean"] == 1.0
    assert one["avg"]["problems_without_samples"] == 1
    assert one["per_problem"] == {
        "p0": {"samples": 4, "correct": 4},
        "p1": {"samples": 0, "correct": 0},
        "p2": {"samples": 3, "correct": 3},
    }
    assert one["pass"]["4"] == {"value": 1.0, "problems": 1}
    assert one["excluded"] == {"total": 5, "retried": 1 + 4, "grader_timeout": 1, "infrastructure_failure": 4}
    again = WrittenSampler(transcript)
    await play(again, tmp_path, [problem_set(3)], "rollout.retries=1")
    assert {(sample.problem.id, sample.attempt) for sample in again.asked} == {("p1", 2)}


async def test_nothing_but_failures_ends_with_the_reason(tmp_path: Path) -> None:
    engine = WrittenSampler(failed)
    with pytest.raises(
        WorldError,
        match=r"100 consecutive rollouts failed .* the engine is down. Finished .*; run the same command to continue",
    ):
        await play(engine, tmp_path, [problem_set(60)])
    assert len(engine.asked) == 100
    with pytest.raises(WorldError, match="toy: every rollout failed for reasons outside the policy"):
        await finished(tmp_path / "few", WrittenSampler(failed), "rollout.retries=0")


async def test_falsified_observations_are_a_benchmark_of_their_own(tmp_path: Path) -> None:
    from agentrl.evaluation.benchmarks import load_problem_sets

    rows = [{"id": f"q{n}", "problem": f"What is {n} + {n}?", "answer": 2 * n} for n in range(30)]
    (tmp_path / "aime24.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = settings("evaluation.falsified=true")
    assert [one.name for one in load_problem_sets(chosen, ["aime24"], tmp_path)] == [
        "aime24"
    ]  # nothing reveals a value
    held_out = settings("evaluation.falsified=true", "evaluation.problems=64", "data.eval.0.path=builtin:arithmetic")
    plain, lies = load_problem_sets(held_out, [], None)
    assert (plain.falsified, lies.falsified, lies.name) == (False, True, f"{plain.name} (observations falsified)")
    assert 0 < len(lies.problems) < len(plain.problems)
    assert all(problem.setup for problem in lies.problems)


def test_the_same_command_has_the_same_directory() -> None:
    sets = [problem_set()]
    assert default_output_directory(settings(), sets) == default_output_directory(settings(), sets)
    assert default_output_directory(settings(), sets).parent == Path("evaluations")
    assert default_output_directory(settings(), sets).name.startswith("toy-model-")
    others = {default_output_directory(settings(change), sets) for change in ("seed=1", "evaluation.top_p=0.5")}
    assert (
        len(
            {
                *others,
                default_output_directory(settings(), sets),
                default_output_directory(settings(), [problem_set(3)]),
            }
        )
        == 4
    )


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--k=8 exceeds --n=4, but pass@k needs k samples per problem"):
        evaluate_command(settings(), EvaluationOptions(ks=(2, 8)), write_report=export_evaluation_page)
    with pytest.raises(SettingsError, match="no problems to evaluate on: use --benchmarks"):
        evaluate_command(settings(), EvaluationOptions(), write_report=export_evaluation_page)
    with pytest.raises(SettingsError, match="lists aime24 more than once"):
        evaluate_command(
            settings(), EvaluationOptions(benchmarks=("aime24", "aime24")), write_report=export_evaluation_page
        )
    with pytest.raises(SettingsError, match="is not an evaluation"):
        EvaluationDirectory.open_existing(tmp_path)


async def test_endings_are_counted(tmp_path: Path) -> None:
    endings = [Ended.TURN_LIMIT, Ended.TOKEN_LIMIT, Ended.VOID_TURN, Ended.ANSWERED]

    def write(sample: Sample) -> Any:
        ended = endings[sample.number]
        graded = ended is Ended.ANSWERED
        verdict = Verdict.CORRECT if graded else None
        return transcript(sample, ended=ended, verdict=verdict, answer="0" if graded else None, reward=float(graded))

    one = (await finished(tmp_path, WrittenSampler(write), count=2))["benchmarks"]["toy"]
    assert one["ended"] == {"answered": 2, "token_limit": 2, "turn_limit": 2, "void_turn": 2}
    assert one["truncated"] == {"share": 0.5, "turn_limit": 2, "token_limit": 2, "deadline": 0}
    assert (one["void_share"], one["avg"]["mean"], one["maj"]) == (0.25, 0.25, 1.0)


async def test_gold_answers_that_cannot_be_read_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(sample: Sample) -> Any:
        unreadable = sample.problem.id == "p0"
        return transcript(sample, **({"verdict": Verdict.UNPARSABLE_GOLD, "reward": 0.0} if unreadable else {}))

    sets = [problem_set(2)]
    await play(WrittenSampler(write), tmp_path, sets)
    shown = ("telemetry.console=plain",)
    await asyncio.to_thread(results, tmp_path, sets, *shown)
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: toy: 4 rollouts are excluded because their reference answers cannot be parsed" in said
    assert "report.html, rollouts.jsonl.zst" in said


async def test_a_prompt_without_room_for_a_response_is_wrong_and_truncated(tmp_path: Path) -> None:
    sets = [ProblemSet(name="toy", problems=(problem(0), problem(1, statement="long " * 50)), revision="1")]
    engine = WrittenSampler(transcript)
    engine.longest = 100
    await play(engine, tmp_path, sets)
    await play(engine, tmp_path, sets)  # nothing is written twice
    assert {sample.problem.id for sample in engine.asked} == {"p0"}
    found = (await asyncio.to_thread(results, tmp_path, sets))["benchmarks"]["toy"]
    assert (found["avg"]["mean"], found["kinds"]["truncated"], found["kinds"]["correct"]) == (0.5, 4, 4)


@pytest.mark.parametrize("correct", [False, True])
@pytest.mark.parametrize("problems", [3, 7, 30])
async def test_scores_of_exactly_zero_and_one_are_drawn(tmp_path: Path, problems: int, correct: bool) -> None:
    """Rounding once moved a bound past such a mean by 7e-18, and error bars cannot be negative."""
    sets = [problem_set(problems)]
    overrides = ("evaluation.samples=2", "telemetry.plots=true")
    await play(WrittenSampler(lambda sample: transcript(sample, correct=correct)), tmp_path, sets, *overrides)
    found = await asyncio.to_thread(results, tmp_path, sets, *overrides)
    assert found["benchmarks"]["toy"]["avg"]["mean"] == float(correct)
    assert (tmp_path / "plots" / "scores.png").is_file()
    assert (tmp_path / "report.html").is_file()
