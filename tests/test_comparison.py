"""docs/research/comparison.md: the counts are those of the code, and its examples behave as the page says."""

from __future__ import annotations

import ast
import json
import re
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from shared import python_with

from agentrl.config import load_settings
from agentrl.rollout.environment import build_environment
from agentrl_envs.types import Problem, Step

PAGE = (Path(__file__).parents[1] / "docs/research/comparison.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
COUNTS = {name: int(count) for name, count in re.findall(r"^\| (\S+) \| (\d+) \|", PAGE, re.MULTILINE)}


def code(name: str, languages: str = "python") -> str:
    return "".join(re.findall(rf"^```(?:{languages})\n(.*?)^```", SECTIONS[name], re.MULTILINE | re.DOTALL))


def environment_class(name: str) -> str:
    """The class of a program that does more, such as to start a trainer that is not installed."""
    source = code(name)
    (made,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return "import sqlite3\n\n\n" + "".join(source.splitlines(keepends=True)[made.lineno - 1 : made.end_lineno])


async def play(env: str, turns: list[str]) -> list[Step]:
    environment = build_environment(load_settings(env))
    await environment.open()
    row = {"db": "shop.sqlite"}
    episode = environment.episode(Problem(id="0", statement="How many?", answer="3", source="shop", info=row))
    try:
        await episode.start()
        return [await episode.step(turn) for turn in turns]
    finally:
        await episode.close()
        await environment.close()


@pytest.fixture(autouse=True)
def _shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with closing(sqlite3.connect("shop.sqlite")) as database, database:
        database.execute("create table stock (number integer)")
        database.execute("insert into stock values (3)")


def call(sql: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'query', 'arguments': {'sql': sql}})}</tool_call>"


def test_lines_are_counted_and_ours_are_fewest() -> None:
    counted = {name: sum(bool(line.strip()) for line in code(name, "python|console").splitlines()) for name in SECTIONS}
    assert counted == COUNTS
    assert min(COUNTS, key=lambda name: COUNTS[name]) == "agentrl"


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_every_program_is_python(name: str) -> None:
    compile(code(name), name, "exec")


async def test_ours_is_played() -> None:
    Path("our_sql.py").write_text(code("agentrl"))
    shown, refused, last = await play("our_sql:Sql", [call("select number from stock"), call("delete from stock"), "3"])
    assert "[[3]]" in shown.observation
    assert "readonly" in refused.observation
    assert last.reward == 1.0


async def test_the_class_for_trl_runs_unchanged() -> None:
    Path("their_sql.py").write_text(environment_class("TRL"))
    shown, refused = await play("trl:their_sql:Sql", [call("select number from stock"), call("delete from stock")])
    assert "[[3]]" in shown.observation
    assert "readonly" in refused.observation


VERIFIERS = """
import my_sql
import verifiers.v1 as vf

(task,) = my_sql.SqlTaskset(vf.TasksetConfig())
print(task.data.prompt, task.data.db, task.data.answer, *(type(one).__name__ for one in task.toolsets(None)))
"""


@pytest.mark.slow
def test_the_task_set_of_verifiers_is_one() -> None:
    Path("my_sql.py").write_text(code("verifiers"))
    Path("questions.jsonl").write_text(json.dumps({"question": "How many?", "answer": "3", "db": "shop.sqlite"}))
    said = subprocess.run([python_with("verifiers"), "-c", VERIFIERS], capture_output=True, text=True, check=True)
    assert said.stdout == "How many? shop.sqlite 3 SqlTools\n"
