"""Sources: the schemas in use, real files, parts without common masked statements, one clear message for bad input."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.rows import (
    EmptyProblemsError,
    ProblemFieldError,
    ProblemFileError,
    ProblemLoadError,
    problem_from_row,
    remove_dapo_instructions,
)
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import (
    LoadedSource,
    fixed_evaluation_problems,
    load_mixture,
    load_source,
    mask_numbers,
)
from agentrl_envs.types import Problem

DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is $1+1$?\n\nGive it in base 10."
    '\n\nRemember to put your answer on its own line after "Answer:".'
)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path: str, **settings: Any) -> LoadedSource:
    return load_source(ProblemSourceSettings(path=path, **settings))


def problems_of(loaded: LoadedSource) -> list[Problem]:
    return [loaded.source.problem(index) for index in range(loaded.source.size or 0)]


@pytest.mark.parametrize(
    ("row", "statement", "answer"),
    [
        ({"problem": "P?", "answer": "1/2"}, "P?", "1/2"),
        ({"question": "P?", "answer": 27.0}, "P?", "27"),
        ({"question": "P?", "answer": "27.0"}, "P?", "27"),
        ({"question": "P?", "answer": "adding up\n#### 1,234"}, "P?", "1,234"),
        ({"prompt": "P?", "solution": "34"}, "P?", "34"),
        ({"problem": "P?", "solution": "so it is $\\boxed{\\sqrt{2}}$."}, "P?", "\\sqrt{2}"),
        ({"problem": "P?", "answer": "3", "solution": "long"}, "P?", "3"),
        (
            {"prompt": [{"content": DAPO, "role": "user"}], "reward_model": {"ground_truth": "2", "style": "rule"}},
            "What is $1+1$?\n\nGive it in base 10.",
            "2",
        ),
    ],
)
def test_the_schemas_in_use(row: dict[str, Any], statement: str, answer: str):
    problem = problem_from_row(row, "here", source="s", fields={})
    assert problem is not None
    assert (problem.statement, problem.answer) == (statement, answer)


def test_a_statement_without_the_wrapper_is_left_alone():
    assert (
        remove_dapo_instructions("Solve the following math problem step by step.")
        == "Solve the following math problem step by step."
    )


def test_fields_can_be_named_and_nested(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"q": {"text": ["no", "Yes?"]}, "a.b": 5, "key": 9}])
    loaded = load(path, fields={"problem": "q.text.1", "answer": "a.b", "id": "key"})
    info = {"q": {"text": ["no", "Yes?"]}}
    assert problems_of(loaded) == [Problem(id="9", statement="Yes?", answer="5", source="x", info=info)]


def test_ids_of_rows_without_one_depend_on_the_content_alone(tmp_path: Path):
    rows = [{"problem": f"{i}?", "answer": str(i)} for i in range(4)]
    forward = problems_of(load(write(tmp_path / "x.jsonl", rows)))
    backward = problems_of(load(write(tmp_path / "x.jsonl", rows[::-1])))
    assert forward == backward[::-1]
    assert len({problem.id for problem in forward}) == 4


def test_parquet_and_folders_give_what_jsonl_gives(tmp_path: Path):
    rows = [
        {"prompt": [{"content": f"{i}?", "role": "user"}], "reward_model": {"ground_truth": str(i)}} for i in range(5)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "x.parquet")
    from_json = [(p.statement, p.answer) for p in problems_of(load(write(tmp_path / "x.jsonl", rows)))]
    assert [(p.statement, p.answer) for p in problems_of(load(str(tmp_path / "x.parquet")))] == from_json
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder / "test.jsonl", rows)
    through_datasets = load(str(folder), split="test")
    assert [(p.statement, p.answer) for p in problems_of(through_datasets)] == from_json
    with pytest.raises(ProblemLoadError, match=r"set', split 'nope': cannot be loaded \(Unknown split"):
        load(str(folder), split="nope")


def test_repeats_are_counted_and_kept_once(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"problem": f"{i % 3}?", "answer": "1"} for i in range(300)])
    loaded = load(path)
    assert loaded.report is not None
    assert (loaded.report.rows, loaded.report.kept, loaded.report.repeated) == (300, 3, 297)
    assert loaded.report.describe() == "x: 3 of 300 problems, 297 repeated"


def test_unanswered_rows_are_an_error_or_counted(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"problem": "a?", "answer": "1"}, {"problem": "b?", "answer": ""}])
    with pytest.raises(ProblemFieldError, match=r"x\.jsonl:2: the problem has no answer; set skip_unanswered=true"):
        load(path)
    loaded = load(path, skip_unanswered=True)
    assert loaded.report is not None
    assert (loaded.report.kept, loaded.report.unanswered) == (1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"problem": "a?", "answer": "1"}\n{"problem": ', r"x\.jsonl:2: not valid JSON"),
        ('{"problem": "\\ud83d\\ude00 \\ud83d?", "answer": "1"}', r"x\.jsonl:1: contains half a character"),
        ('{"problem": "a?", "answer": "1"}\n\n[1]', r"x\.jsonl:3: each line must be a JSON object; got list"),
        (
            '{"text": "a?", "answer": "1"}',
            r"x\.jsonl:1: no field for the problem .*: answer, text; .*fields\.problem",
        ),
        ('{"problem": "a?", "value": "1"}', r"x\.jsonl:1: no field for the answer .*; fields: problem, value;"),
        ('{"problem": " ", "answer": "1"}', r"x\.jsonl:1: the problem's statement is empty"),
        ('{"problem": "a?", "answer": true}', r"x\.jsonl:1: the answer must be a string or a number; got bool"),
        ('{"problem": "a?", "answer": NaN}', r"x\.jsonl:1: the answer must be a finite number or text; got nan"),
        ("", r"x\.jsonl: the file contains no problems"),
        (
            '{"id": 1, "problem": "a?", "answer": "1"}\n{"id": 1, "problem": "b?", "answer": "1"}',
            r"x: two different problems have the id '1'; map another field with fields\.id",
        ),
    ],
)
def test_bad_files_end_in_one_clear_message(tmp_path: Path, text: str, message: str):
    path = tmp_path / "x.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProblemLoadError, match=message) as raised:
        load(str(path))
    assert "\n" not in str(raised.value)


def test_undecodable_and_mislabelled_files(tmp_path: Path):
    (tmp_path / "x.jsonl").write_bytes(b'{"problem": "\xff"}')
    with pytest.raises(ProblemFileError, match=r"x\.jsonl:1: not valid JSON"):
        load(str(tmp_path / "x.jsonl"))
    (tmp_path / "x.parquet").write_text("not parquet", encoding="utf-8")
    with pytest.raises(ProblemFileError, match=r"x\.parquet: cannot be read as parquet"):
        load(str(tmp_path / "x.parquet"))


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ProblemFileError, match=r"none\.jsonl: no such file"):
        load(str(tmp_path / "none.jsonl"))
    with pytest.raises(
        ProblemFileError, match=r"words: not a source of problems; valid: builtin:arithmetic, builtin:horizon, a file"
    ):
        load("words")
    with pytest.raises(ProblemLoadError, match=r"builtin:arithmetik: .*did you mean 'arithmetic'\?"):
        load("builtin:arithmetik")
    with pytest.raises(ProblemLoadError, match=r"split='test' does not apply to a local file; .* part=heldout"):
        load(write(tmp_path / "x.jsonl", [{"problem": "a?", "answer": "1"}]), split="test")
    monkeypatch.setenv("PROBLEMS_ARE_HERE", str(tmp_path))
    assert load("$PROBLEMS_ARE_HERE/x.jsonl").source.size == 1
    monkeypatch.delenv("PROBLEMS_ARE_HERE")
    with pytest.raises(ProblemFileError, match="environment variable PROBLEMS_ARE_HERE is not set"):
        load("${PROBLEMS_ARE_HERE}/x.jsonl")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "x.jsonl", "weight": 0}, "greater than 0"),
        ({"path": "x.jsonl", "weight": float("inf")}, "finite"),
        ({"path": "x.jsonl", "limit": 0}, "greater than or equal to 1"),
        ({"path": "x.jsonl", "wieght": 1}, "Extra inputs"),
        ({"path": "x.jsonl", "families": ["add"]}, "families applies to builtin:arithmetic"),
        ({"path": "builtin:arithmetic", "part": "heldout"}, "part does not apply; only split=train or heldout"),
        ({"path": "x.jsonl", "fields": {"answer": None}}, "fields.answer must name a column"),
    ],
)
def test_settings_that_cannot_be_meant(given: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        ProblemSourceSettings.model_validate(given)


def test_settings_survive_being_written_and_read():
    for settings in (
        ProblemSourceSettings(path="builtin:arithmetic", families=["add"], seed=3, limit=5),
        ProblemSourceSettings(path="x.jsonl", part="train", exclude=["y.jsonl"], fields={"problem": "q"}),
    ):
        assert ProblemSourceSettings.model_validate(settings.model_dump()) == settings


def test_mawps_parts_share_no_masked_statement_with_each_other_or_with_asdiv(data_dir: Path):
    mawps, asdiv = str(data_dir / "mawps.jsonl"), str(data_dir / "asdiv.jsonl")
    parts = {part: load(mawps, part=part, exclude=[asdiv]) for part in ("train", "heldout")}
    train, heldout = (
        {mask_numbers(problem.statement) for problem in problems_of(parts[part])} for part in ("train", "heldout")
    )
    cold_start = {mask_numbers(problem.statement) for problem in problems_of(load(asdiv))}
    assert not train & heldout
    assert not (train | heldout) & cold_start
    report = parts["train"].report
    assert report is not None
    counted = (report.kept, report.repeated, report.excluded, report.other_part)
    assert (report.rows, sum(counted)) == (2065, 2065)
    assert (report.kept, parts["heldout"].source.size) == (1194, 300)
    assert report.excluded >= 240  # that many stand in both files to the letter


def test_the_real_training_files_load(data_dir: Path):
    counts = {name: load(str(data_dir / f"{name}.jsonl")).source.size for name in ("svamp", "asdiv", "mawps")}
    assert counts == {"svamp": 1000, "asdiv": 2214, "mawps": 1981}
    with pytest.raises(ProblemFieldError, match=r"math35_train\.jsonl:5055: the problem has no answer"):
        load(str(data_dir / "math35_train.jsonl"))
    loaded = load(str(data_dir / "math35_train.jsonl"), skip_unanswered=True, exclude=[str(data_dir / "math500.jsonl")])
    assert loaded.report is not None
    assert (loaded.report.rows, loaded.report.unanswered) == (8523, 2)
    assert loaded.report.excluded >= 1


def test_nothing_left_is_an_error(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"problem": "Is 3 odd?", "answer": "yes"}])
    other = write(tmp_path / "y.jsonl", [{"problem": "is 5 odd", "answer": ""}])
    with pytest.raises(EmptyProblemsError, match=r"no problems remain in x: 0 of 1 problems, 1 excluded by"):
        load(path, exclude=[other])
    with pytest.raises(EmptyProblemsError, match="none of the 1 problems has an answer"):
        load(other, skip_unanswered=True)


def test_mixtures_are_loaded_with_their_weights_and_reports(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"problem": f"{i}?", "answer": "1"} for i in range(9)])
    mixture, reports = load_mixture(
        [
            ProblemSourceSettings(path="builtin:arithmetic", families=["add"]),
            ProblemSourceSettings(path=path, weight=3, limit=4),
        ],
        seed=11,
    )
    assert mixture.weights == (1.0, 3.0)
    assert mixture.sources[0].problem(0) == ArithmeticSource(seed=11, families=["add"]).problem(0)
    assert [report.describe() for report in reports] == ["x: 4 of 9 problems, 5 beyond the limit"]


def test_evaluation_sets_are_fixed_and_spread(tmp_path: Path):
    path = write(tmp_path / "x.jsonl", [{"id": i, "problem": f"{i}?", "answer": "1"} for i in range(10)])
    source = load(path).source
    assert [problem.id for problem in fixed_evaluation_problems(source, 4)] == ["0", "2", "5", "7"]
    assert len(fixed_evaluation_problems(source, 99)) == 10
    endless = load("builtin:arithmetic", split="heldout", seed=1).source
    assert len({problem.statement for problem in fixed_evaluation_problems(endless, 64)}) == 64
