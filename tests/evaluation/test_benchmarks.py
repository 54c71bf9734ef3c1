"""Loading and checking benchmarks: counts, repeated problems, missing and unreadable answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.config import load_settings
from agentrl.evaluation.benchmarks import (
    BENCHMARKS,
    LoadedBenchmark,
    check_benchmark,
    load_benchmark,
    load_benchmark_with_errors,
    load_problem_sets,
)
from agentrl.problems.rows import ProblemLoadError, problem_from_row
from agentrl_envs.grading import Grader, GraderSettings
from agentrl_envs.types import Verdict

LOCAL = [("aime24", 30), ("aime25", 30), ("amc23", 40), ("math500", 500), ("gsm8k", 1319)]


@pytest.mark.parametrize(("name", "count"), LOCAL)
def test_the_real_files_are_complete(data_dir: Path, name: str, count: int) -> None:
    problems = load_benchmark(name, data_dir=data_dir)
    assert len({problem.id for problem in problems}) == len({problem.statement for problem in problems}) == count
    assert BENCHMARKS[name].problems == count


def test_whole_floats_of_amc_are_integers(data_dir: Path) -> None:
    assert all("." not in problem.answer for problem in load_benchmark("amc23", data_dir=data_dir))


def test_the_registry_knows_the_published_ones() -> None:
    assert {*BENCHMARKS} == {"aime24", "aime25", "amc23", "math500", "hmmt25", "olympiadbench", "gsm8k"}
    assert all(name == benchmark.name and "/" in benchmark.hub_id for name, benchmark in BENCHMARKS.items())


def test_olympiadbench_lists_its_answers() -> None:
    row = {"id": 1606, "question": "What is $1 + 1$?", "final_answer": ["$2$"], "solution": ["It is 2."]}
    fields = BENCHMARKS["olympiadbench"].fields
    problem = problem_from_row(row, "row 0", source="olympiadbench", fields=fields)
    assert problem is not None
    assert (problem.id, problem.statement, problem.answer) == ("1606", "What is $1 + 1$?", "$2$")


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q{i}", "problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(count)]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, content)), encoding="utf-8")
    return path


def test_wrong_counts_and_repeats_are_errors(tmp_path: Path) -> None:
    file = write(tmp_path / "aime24.jsonl", rows(30))
    assert load_benchmark("aime24", data_dir=tmp_path)[3].answer == "6"
    write(file, rows(960))
    with pytest.raises(ProblemLoadError, match=r"aime24\.jsonl: aime24 should have 30 problems, but the data has 960"):
        load_benchmark("aime24", data_dir=tmp_path)
    write(file, [*rows(29), {**rows(1)[0], "id": "again"}])
    first = r"problem 'What is 0 \+ 0\?' occurs 2 times, first in .*aime24\.jsonl:1"
    with pytest.raises(ProblemLoadError, match=r"aime24\.jsonl:30: the " + first):
        load_benchmark("aime24", data_dir=tmp_path)
    write(file, [*rows(29), {**rows(30)[29], "id": "q7"}])
    with pytest.raises(ProblemLoadError, match=r"aime24\.jsonl:30: the id 'q7' occurs 2 times"):
        load_benchmark("aime24", data_dir=tmp_path)
    write(file, [*rows(28), {**rows(29)[28], "answer": ""}, {**rows(30)[29], "answer": None}])
    with pytest.raises(
        ProblemLoadError, match=r"aime24\.jsonl:29: the problem has no answer \(and 1 more: .*--check-data"
    ):
        load_benchmark("aime24", data_dir=tmp_path)


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ProblemLoadError, match=r"unknown benchmark 'aime2024'; valid: .*; did you mean 'aime24'\?"):
        load_benchmark("aime2024", data_dir=tmp_path)
    with pytest.raises(ProblemLoadError, match=r"math500\.jsonl: no such file"):
        load_benchmark("math500", data_dir=tmp_path)
    write(tmp_path / "yours.jsonl", rows(1))
    with pytest.raises(ProblemLoadError, match=r"mine\.jsonl: no such file; files in this folder: yours\.jsonl"):
        load_benchmark(str(tmp_path / "mine.jsonl"))


def test_wrong_fields_show_those_there_are(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", [{"text": "What is 1 + 1?", "result": 2}])
    with pytest.raises(ProblemLoadError, match=r"mine\.jsonl:1: no field for the .*; fields: result, text") as raised:
        load_benchmark(str(file))
    # What it advises works.
    advice = re.search(r"fields\.problem to the right column: use (.*) instead of --benchmarks", str(raised.value))
    assert advice is not None
    given = advice[1].replace("problem=FIELD", "problem=text").replace("answer=FIELD", "answer=result").split()
    settings = load_settings(overrides=["model.path=a/b", *given], command="eval")
    (found,) = load_problem_sets(settings, (), None)
    assert [(problem.statement, problem.answer) for problem in found.problems] == [("What is 1 + 1?", "2")]


def test_a_users_own_benchmark_is_a_file(tmp_path: Path) -> None:
    jsonl = write(tmp_path / "mine.jsonl", rows(3))
    parquet = tmp_path / "mine.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(3)), parquet)
    answers = ["0", "2", "4"]
    assert [problem.answer for problem in load_benchmark(str(jsonl))] == answers
    assert [problem.answer for problem in load_benchmark(str(parquet))] == answers
    write(jsonl, [])
    with pytest.raises(ProblemLoadError, match=r"mine\.jsonl: the file contains no problems"):
        load_benchmark(str(jsonl))


def test_a_data_folder_may_hold_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(30)), tmp_path / "hmmt25.parquet")
    assert len(load_benchmark("hmmt25", data_dir=tmp_path)) == 30


async def checked(name: str, data_dir: Path | None = None) -> LoadedBenchmark:
    grader = Grader(GraderSettings(workers=1, deadline=60))
    check = await check_benchmark(name, grader, data_dir=data_dir)
    await grader.close()
    return check


async def test_a_check_lists_every_error_with_its_place(tmp_path: Path) -> None:
    bad = [
        *rows(3),
        {"problem": "a?", "answer": ""},
        {"problem": "b?", "answer": r"\frac{1"},
        {**rows(1)[0], "id": "z"},
    ]
    check = await checked(str(write(tmp_path / "mine.jsonl", bad)))
    assert len(check.problems) == 5
    assert [error.rpartition("/")[2] if "first" not in error else "" for error in check.errors] == [
        "mine.jsonl:4: the problem has no answer",
        "",
        r"mine.jsonl:5: the answer '\\frac{1' cannot be read (unparsable_gold)",
    ]
    assert "mine.jsonl:6: the problem 'What is 0 + 0?' occurs 2 times, first in " in check.errors[1]
    assert check.describe()[0].endswith("mine.jsonl: 5 problems, 3 data errors")


@pytest.mark.parametrize("name", [name for name, _ in LOCAL])
async def test_the_benchmarks_have_no_data_errors(data_dir: Path, name: str) -> None:
    check = await checked(name, data_dir)
    assert check.errors == ()
    assert check.describe() == [f"{name}: {BENCHMARKS[name].problems} problems, no data errors"]


def test_the_training_problems_have_two_without_an_answer_and_repeat_nine(data_dir: Path) -> None:
    loaded = load_benchmark_with_errors(str(data_dir / "math35_train.jsonl"))
    unanswered = [error for error in loaded.errors if error.endswith(": the problem has no answer")]
    assert (len(loaded.problems), len(unanswered)) == (8521, 2)
    repeated = [error for error in loaded.errors if ": the problem '" in error]
    assert len(repeated) == len(loaded.errors) - 2


async def test_a_timeout_of_the_grader_is_reported(tmp_path: Path) -> None:
    class Slow:
        async def check_reference(self, gold: str) -> Verdict:
            return Verdict.GRADER_TIMEOUT

    check = await check_benchmark(str(write(tmp_path / "mine.jsonl", rows(1))), Slow())
    assert len(check.errors) == 1
    assert check.errors[0].endswith("mine.jsonl:1: grading the answer '0' timed out")
