"""The demonstration file: its rows are read, and what is wrong is said with its line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.demonstrations import DemonstrationTurn, read_demonstrations
from agentrl.problems.rows import EmptyProblemsError, ProblemFileError, ProblemLoadError
from agentrl.problems.sources import load_demonstrations
from agentrl_envs.types import Problem


def test_the_documented_schema_is_read(tmp_path: Path):
    row = {"id": "a-0", "problem": "Box 7?", "answer": "43", "family": "box", "setup": "def open_box(n): ..."}
    turns = [{"model": "```py\nopen_box(7)\n```", "observation": "\nCode execution result: 48\n"}, {"model": "43"}]
    path = tmp_path / "shown.jsonl"
    path.write_text(json.dumps({**row, "turns": turns}) + "\n", encoding="utf-8")
    (read,) = read_demonstrations(path)
    assert read.problem == Problem(
        id="a-0", statement="Box 7?", answer="43", source="shown", family="box", setup="def open_box(n): ..."
    )
    assert read.turns == (
        DemonstrationTurn(model="```py\nopen_box(7)\n```", observation="\nCode execution result: 48\n"),
        DemonstrationTurn(model="43"),
    )


def test_other_columns_are_kept_and_an_answer_is_optional(tmp_path: Path):
    path = tmp_path / "shown.jsonl"
    row = {"problem": "How many?", "db": {"name": "shop"}, "turns": [{"model": "look"}, {"model": "3"}]}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (read,) = read_demonstrations(path)
    assert (read.problem.answer, read.problem.info) == (None, {"db": {"name": "shop"}})
    assert read.needs_observations
    seen = (DemonstrationTurn(model="look", observation="3 apples"), DemonstrationTurn(model="3"))
    assert not replace(read, turns=seen).needs_observations
    assert not replace(read, turns=seen[1:]).needs_observations


GOOD = {"id": "a", "problem": "1+1?", "answer": "2", "turns": [{"model": "\\boxed{2}"}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": True}, r"d\.jsonl:2: the answer must be a string or a number"),
        ({"problem": 3}, r"d\.jsonl:2: the problem's statement must be a string"),
        ({"turns": []}, r"d\.jsonl:2: .*non-empty list 'turns'"),
        ({"turns": [{"observation": "x"}]}, r"d\.jsonl:2: turn 1 needs a non-empty string 'model'"),
        ({"turns": [{"model": "a", "observation": 1}]}, r"d\.jsonl:2: turn 1: 'observation' must be a string"),
        ({"setup": 1}, r"d\.jsonl:2: 'setup' must be a string"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, change: dict[str, object], message: str):
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **change}), encoding="utf-8")
    with pytest.raises(ProblemLoadError, match=message):
        read_demonstrations(path)


def test_a_row_without_a_statement_lists_the_names_of_the_field(tmp_path: Path):
    """The setting ``fields`` does not apply, so it is not recommended."""
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "1+1?", "turns": [{"model": "2"}]}', encoding="utf-8")
    message = r"d\.jsonl:1: no field for the problem \(expected problem, .*statement\); fields: text, turns$"
    with pytest.raises(ProblemLoadError, match=message):
        read_demonstrations(path)


def test_bad_files_are_named(tmp_path: Path):
    (tmp_path / "torn.jsonl").write_text(json.dumps(GOOD) + '\n{"id": "b", "prob', encoding="utf-8")
    with pytest.raises(ProblemFileError, match=r"torn\.jsonl:2: not valid JSON"):
        read_demonstrations(tmp_path / "torn.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n", encoding="utf-8")
    with pytest.raises(EmptyProblemsError, match=r"empty\.jsonl: the file contains no demonstrations"):
        read_demonstrations(tmp_path / "empty.jsonl")
    with pytest.raises(ProblemFileError, match=r"none\.jsonl: no such file; files in this folder: empty\.jsonl, torn"):
        read_demonstrations(tmp_path / "none.jsonl")


def test_demonstrations_by_one_string(tmp_path: Path):
    built = load_demonstrations("builtin:arithmetic", count=5, variants=1, seed=3)
    assert list(built.demonstrations) == ArithmeticSource(split="train", seed=3).demonstrations(5)
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(GOOD), encoding="utf-8")
    assert load_demonstrations(str(path), count=5, variants=1, seed=3).description == f"1 demonstrations of {path}"
    rows = tmp_path / "f.jsonl"
    rows.write_text('{"problem": "2 and 3 pens?", "answer": "5", "formula": "2+3=5"}', encoding="utf-8")
    assert len(load_demonstrations(f"formula:{rows}", count=5, variants=3, seed=3).demonstrations) == 3
    with pytest.raises(ProblemLoadError, match=r"no such built-in demonstrations; valid: builtin:arithmetic"):
        load_demonstrations("builtin:algebra", count=5, variants=1, seed=3)
    with pytest.raises(ProblemLoadError, match=r"coldstart\.families applies to generated demonstrations"):
        load_demonstrations("shown.jsonl", count=1, variants=1, seed=0, families=["chain_8"])
    with pytest.raises(
        ProblemFileError, match=r"shown\.csv: not a source of demonstrations; valid: builtin:arithmetic"
    ):
        load_demonstrations("shown.csv", count=5, variants=1, seed=3)
