"""A row's other columns, prompts of several messages, and problems without an answer."""

import copy
import datetime
import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from agentrl.problems.rows import ProblemFieldError
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import load_source
from agentrl_envs.types import Problem


def load(tmp_path: Path, rows: list[dict[str, Any]], *, answered: bool = True, **settings: Any) -> list[Problem]:
    path = tmp_path / "shop.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    source = load_source(ProblemSourceSettings(path=str(path), **settings), answered=answered).source
    return [source.problem(index) for index in range(source.size or 0)]


def test_every_other_column_is_in_info(tmp_path: Path):
    row = {"id": 7, "problem": "How many?", "answer": "3", "db": "shop.sqlite", "tables": {"t": ["a", 1, None, 0.5]}}
    (problem,) = load(tmp_path, [row])
    assert (problem.id, problem.statement, problem.answer) == ("7", "How many?", "3")
    assert problem.info == {"db": "shop.sqlite", "tables": {"t": ["a", 1, None, 0.5]}}
    assert problem.messages == []


def test_fields_give_columns_other_names_and_leave_them_out(tmp_path: Path):
    row = {"problem": "How many?", "answer": "3", "meta": {"db": {"path": "shop.sqlite"}}, "blob": "x", "kept": 1}
    (problem,) = load(tmp_path, [row], fields={"db": "meta.db.path", "meta": None, "blob": None})
    assert problem.info == {"db": "shop.sqlite", "kept": 1}
    with pytest.raises(ProblemFieldError, match=r"shop.jsonl:1: no field 'meta.path' for fields.db; fields:"):
        load(tmp_path, [row], fields={"db": "meta.path"})
    with pytest.raises(ValidationError, match=r"fields.answer must name a column"):
        ProblemSourceSettings(path="x.jsonl", fields={"answer": None})


def test_info_cannot_be_changed_and_its_copy_can():
    problem = Problem(id="0", statement="?", answer=None, source="s", info={"rows": [{"a": 1}]})
    for change in (
        lambda: problem.info.update(b=1),  # type: ignore[attr-defined]
        lambda: problem.info["rows"].append(2),
        lambda: problem.info["rows"][0].pop("a"),
    ):
        with pytest.raises(TypeError, match="is read-only: copy it"):
            change()
    changed = copy.deepcopy(problem.info)
    changed["rows"][0]["a"] = 2  # type: ignore[index]
    assert problem.info == {"rows": [{"a": 1}]}


def test_info_and_messages_survive_files_and_processes():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    problem = Problem(id="0", statement="?", answer=None, source="s", info={"a": [1, {"b": None}]}, messages=messages)
    assert Problem(**json.loads(json.dumps(asdict(problem)))) == problem
    again = pickle.loads(pickle.dumps(problem))
    assert again == problem
    with pytest.raises(TypeError, match="read-only"):
        again.info["a"].append(1)
    assert hash(problem) == hash(again)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"raw", "image contains bytes"),
        (datetime.date(2026, 1, 2), "image contains date"),
        (float("nan"), "image is nan"),
    ],
)
def test_a_column_that_is_not_json_is_one_clear_message(tmp_path: Path, value: object, kind: str):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"problem": ["1?"], "answer": ["1"], "image": [value]}), path)
    with pytest.raises(ProblemFieldError) as caught:
        load_source(ProblemSourceSettings(path=str(path)))
    assert str(caught.value) == (
        f"{path} row 0: column {kind}, which is not JSON (text, numbers, true, false, null, lists and objects): "
        "convert it, or drop the column with fields.image=null"
    )
    assert load_source(ProblemSourceSettings(path=str(path), fields={"image": None})).source.problem(0).info == {}


def test_several_messages_are_kept_and_read_as_one_text(tmp_path: Path):
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    spoken = [*said, {"role": "assistant", "content": "Of what?"}, {"role": "user", "content": "Of apples."}]
    one, two, three = load(
        tmp_path,
        [{"prompt": said, "answer": "3"}, {"prompt": spoken, "answer": "4"}, {"prompt": said[1:], "answer": "5"}],
    )
    assert (one.statement, one.messages) == ("Be brief.\n\nHow many?", said)
    assert two.messages == spoken
    assert two.statement.endswith("User: How many?\n\nAssistant: Of what?\n\nUser: Of apples.")
    assert (three.statement, three.messages) == (
        "How many?",
        [],
    )  # one message says nothing that the statement does not


@pytest.mark.parametrize(
    "prompt", [["How many?"], [{"role": "user"}], [{"role": "user", "content": [{"type": "text"}]}]]
)
def test_a_list_that_is_no_conversation_is_one_clear_message(tmp_path: Path, prompt: list[Any]):
    with pytest.raises(
        ProblemFieldError, match=r'shop.jsonl:1: message 0 of the problem is .*the strings "role" and "content"'
    ):
        load(tmp_path, [{"prompt": prompt, "answer": "3"}])


def test_answers_may_be_missing_where_none_is_graded(tmp_path: Path):
    rows = [{"problem": "Play.", "seed": 1}, {"problem": "Play.", "seed": 2}, {"problem": "Play.", "seed": 1}]
    with pytest.raises(ProblemFieldError, match="no field for the answer"):
        load(tmp_path, rows)
    one, two = load(tmp_path, rows, answered=False)
    assert (one.answer, two.answer) == (None, None)
    assert (one.info, two.info) == ({"seed": 1}, {"seed": 2})
    assert one.id != two.id


def test_graded_problems_that_differ_in_other_columns_alone_are_repeated(tmp_path: Path):
    rows = [{"problem": "1 + 1?", "answer": "2", "row": number} for number in range(3)]
    assert len(load(tmp_path, rows)) == 1
    assert len(load(tmp_path, rows, answered=False)) == 3
