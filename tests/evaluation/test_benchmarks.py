"""Benchmarks: the right number of problems, each once, or an error."""

import json
from pathlib import Path

import pytest

from agentrl.evaluation.benchmarks import BENCHMARKS, load_benchmark
from agentrl.problems.errors import ProblemError


@pytest.mark.parametrize(
    ("name", "count"), [("aime24", 30), ("aime25", 30), ("amc23", 40), ("math500", 500), ("gsm8k", 1319)]
)
def test_the_real_files_are_complete(data_dir: Path, name: str, count: int):
    problems = load_benchmark(name, data_dir=data_dir)
    assert len({problem.id for problem in problems}) == len({problem.statement for problem in problems}) == count
    assert BENCHMARKS[name].problems == count


def test_whole_floats_of_amc_are_integers(data_dir: Path):
    assert all("." not in problem.answer for problem in load_benchmark("amc23", data_dir=data_dir))


def write(folder: Path, count: int, *, repeated: bool = False) -> Path:
    rows = [{"id": f"q{i}", "problem": f"What is {i} + {i}?", "answer": 2 * i} for i in range(count)]
    if repeated:
        rows[-1] = {**rows[0], "id": "again"}
    (folder / "aime24.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def test_wrong_counts_and_repeats_are_errors(tmp_path: Path):
    assert load_benchmark("aime24", data_dir=write(tmp_path, 30))[3].answer == "6"
    with pytest.raises(ProblemError, match=r"aime24\.jsonl: aime24 has 30 problems, found 960"):
        load_benchmark("aime24", data_dir=write(tmp_path, 960))
    with pytest.raises(ProblemError, match=r"holds a problem 2 times: 'What is 0 \+ 0\?'"):
        load_benchmark("aime24", data_dir=write(tmp_path, 30, repeated=True))


def test_unknown_names_and_missing_files(tmp_path: Path):
    with pytest.raises(ProblemError, match=r"unknown benchmark 'aime2024'; valid: .*; did you mean 'aime24'\?"):
        load_benchmark("aime2024", data_dir=tmp_path)
    with pytest.raises(ProblemError, match=r"math500\.jsonl: no such file"):
        load_benchmark("math500", data_dir=tmp_path)
