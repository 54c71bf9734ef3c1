"""Problems of an evaluation, and the check of their reference answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation.runs import settings

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.evaluation.benchmarks import check_benchmarks_command, load_held_out_problems, load_problem_sets
from agentrl.evaluation.settings import EvaluationOptions
from agentrl.problems.rows import ProblemFieldError


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(number: int, **changes: object) -> dict[str, object]:
    return {"id": f"q{number}", "problem": f"What is {number} + {number}?", "answer": 2 * number, **changes}


def test_a_file_is_a_benchmark_by_its_name(tmp_path: Path) -> None:
    (one,) = load_problem_sets(settings(), [write(tmp_path / "mine.jsonl", row(1), row(2))], None)
    assert (one.name, [problem.answer for problem in one.problems]) == ("mine", ["2", "4"])
    same, other = (
        load_problem_sets(settings(), [write(tmp_path / "mine.jsonl", row(1), last)], None)[0]
        for last in (row(2), row(2, answer=5))
    )
    assert one.sha256 == same.sha256 != other.sha256


def test_other_columns_are_part_of_the_problems(tmp_path: Path) -> None:
    """Environments may read other columns, so an evaluation with changed columns must not be resumed."""
    digests = [
        load_problem_sets(settings(), [write(tmp_path / "mine.jsonl", row(1, **columns))], None)[0].sha256
        for columns in ({}, {"db": "a"}, {"db": "b"}, {"db": "a"})
    ]
    assert len(set(digests[:3])) == 3
    assert digests[1] == digests[3]


def test_a_file_needs_no_answers_where_none_are_compared(tmp_path: Path) -> None:
    rows = [{"id": "a", "question": "Ship a pen.", "stock": 3}, {"id": "b", "question": "Ship a cup.", "stock": 0}]
    path = write(tmp_path / "mine.jsonl", *rows)
    (one,) = load_problem_sets(load_settings("agent:asyncio:run"), [path], None)
    found = [(problem.id, problem.answer, problem.info) for problem in one.problems]
    assert (one.name, found) == ("mine", [("a", None, {"stock": 3}), ("b", None, {"stock": 0})])
    with pytest.raises(ProblemFieldError, match="no field for the answer"):
        load_problem_sets(settings(), [path], None)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"mine\.jsonl.*the id 'q1' occurs 2 times"):
        load_problem_sets(settings(), [write(tmp_path / "mine.jsonl", row(1), row(2, id="q1"))], None)
    with pytest.raises(ProblemFieldError, match=r"no field for the problem .*fields: answer, query"):
        load_problem_sets(settings(), [write(tmp_path / "mine.jsonl", {"query": "1 + 1?", "answer": 2})], None)
    with pytest.raises(SettingsError, match=r"gone\.jsonl: no such file"):
        load_problem_sets(settings(), [str(tmp_path / "gone.jsonl")], None)


def test_each_held_out_source_is_scored_by_itself(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", row(1), row(2))
    chosen = settings(f"data.eval=[{{path: '{file}'}}, {{path: '{file}'}}, {{path: 'builtin:arithmetic', limit: 3}}]")
    sets = load_problem_sets(chosen, [], None)
    assert [(one.name, len(one.problems)) for one in sets[1:]] == [(f"{sets[0].name} #2", 2), (sets[2].name, 3)]
    assert len(load_held_out_problems(chosen)) == 7


def test_ids_are_unique_in_what_is_held_out(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", row(1), row(2, id="q1"))
    with pytest.raises(SettingsError, match="two different problems have the id 'q1'"):
        load_problem_sets(settings(f"data.eval=[{{path: '{file}'}}]"), [], None)


def test_golds_that_cannot_be_graded_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", row(1), row(2, answer="\\frac{1}{2}"))
    chosen = settings("grader.deadline=60")
    check_benchmarks_command(chosen, EvaluationOptions(benchmarks=(good,)))
    assert "good.jsonl: 2 problems, no data errors" in capsys.readouterr().out
    bad = write(tmp_path / "bad.jsonl", row(1), row(2, answer="(" * 200 + "1" + ")" * 200))
    with pytest.raises(SettingsError, match=r"the data contains errors, as listed above: .*bad\.jsonl \(1\)"):
        check_benchmarks_command(chosen, EvaluationOptions(benchmarks=(good, bad)))
    assert "bad.jsonl:2: the answer '(((" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="--check-data requires --benchmarks"):
        check_benchmarks_command(chosen, EvaluationOptions())
