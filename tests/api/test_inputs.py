"""Python objects as files and names that other processes find."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest

import agentrl
from agentrl.api import commands
from agentrl.api.commands import _rewards, _with_plugins, overrides_from
from agentrl.api.inputs import Names, problem_file
from agentrl.errors import SettingsError
from agentrl_envs.registry import import_attribute, load_plugins
from agentrl_envs.tools.toolset import methods_as_tools
from agentrl_envs.types import Problem


def module_reward(problem: object, conversation: object, verdict: object) -> float:
    return 0.25


def test_equal_problems_are_written_once_and_read_back(tmp_path: Path) -> None:
    rows = [{"problem": "2 + 3?", "answer": "5", "level": 1}, {"problem": "Größe?", "answer": "1"}]
    first = problem_file(rows, tmp_path)
    assert first == problem_file(iter(rows), tmp_path)
    assert first.name == "problems.jsonl"
    assert [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()] == rows
    assert problem_file(rows[:1], tmp_path) != first


def test_problem_objects_keep_their_fields(tmp_path: Path) -> None:
    problem = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy")
    (line,) = problem_file([problem], tmp_path).read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["statement"] == "2 + 3?"


@pytest.mark.parametrize("value", [math.nan, {1, 2}, object()])
def test_a_value_that_is_not_json_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(SettingsError, match=r"problems\[1\]\['level'\] is not a JSON value"):
        problem_file([{"problem": "?", "answer": "1"}, {"problem": "?", "answer": "1", "level": value}], tmp_path)


@pytest.mark.parametrize("table", [pd.DataFrame, datasets.Dataset.from_list])
def test_a_table_of_problems_is_its_rows(tmp_path: Path, table: Any) -> None:
    rows = [{"problem": "2 + 3?", "answer": "5", "level": 1}, {"problem": "3 + 3?", "answer": "6", "level": 2}]
    assert problem_file(table(rows), tmp_path) == problem_file(rows, tmp_path)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (5, r"problems=5: valid is a file, or rows such as \{"),
        ({"train": [{"problem": "?"}]}, r"problems\[0\] is 'train': valid is a file, or rows such as \{"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, problems: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        problem_file(problems, tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"problem": [{"problem": "?"}]},
            "agentrl.train has no argument and no setting 'problem'; did you mean 'problems'?",
        ),
        ({"callbacks": [print]}, "agentrl.train has no argument and no setting 'callbacks'; the nearest setting is "),
        (
            {"lr": 1e-3},
            "agentrl.train has no argument and no setting 'lr'; the nearest setting is optimizer.learning_rate",
        ),
        (
            {"environment": {"kwargs": {"hook": print}}},
            "environment.kwargs.hook=<built-in function print> cannot be a setting: Object of type",
        ),
        ({"problems": "gone/rows.jsonl"}, "gone/rows.jsonl: no such file; there is no folder gone"),
        ({"data": {"eval": [{"path": "gone/rows.jsonl"}]}}, "gone/rows.jsonl: no such file; there is no folder gone"),
        ({"training": {"steps": -1}}, "training.steps=-1: valid is a whole number at least 1"),
    ],
)
def test_bad_arguments_end_before_a_process_starts(
    given: Mapping[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "run_command", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(SettingsError) as caught:
        agentrl.train(**{"runs_dir": tmp_path} | given)
    assert str(caught.value).startswith(message)


def test_a_missing_benchmark_ends_before_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "run_command", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(SettingsError, match=r"gone/rows\.jsonl: no such file"):
        agentrl.evaluate("some/model", benchmarks=["gone/rows.jsonl"])
    with pytest.raises(
        SettingsError, match=r"agentrl.evaluate has no argument and no setting 'benchmark'; did you mean"
    ):
        agentrl.evaluate("some/model", benchmark=["gone/rows.jsonl"])


def test_no_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="problems is empty"):
        problem_file([], tmp_path)


def test_what_a_module_holds_goes_by_its_name(tmp_path: Path) -> None:
    names = Names(tmp_path)
    assert names.of(module_reward) == f"{__name__}:module_reward"
    assert names.of("simpletir") == "simpletir"
    assert names.plugins == []
    assert list(tmp_path.iterdir()) == []


def test_a_local_function_is_found_through_a_plugin(tmp_path: Path) -> None:
    bonus = 0.5

    def local_reward(problem: object, conversation: object, verdict: object) -> float:
        return bonus + 1.0

    names = Names(tmp_path)
    name = names.of(local_reward)
    assert name.endswith(":local_reward")  # the name of its metric
    load_plugins(names.plugins)
    found = import_attribute(name, "reward")
    assert callable(found)
    assert found is not local_reward
    assert found(None, None, None) == 1.5


def test_what_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked() -> object:
        return lock

    with pytest.raises(SettingsError, match="define it in a module of its own"):
        Names(tmp_path).of(locked)


def test_settings_become_overrides() -> None:
    given = {"training": {"steps": 5, "deterministic": True}, "data.train": [{"path": "a b.jsonl"}], "name": "it's"}
    assert overrides_from(given) == [
        "training.steps=5",
        "training.deterministic=true",
        'data.train=[{"path": "a b.jsonl"}]',
        'name="it\'s"',
    ]


def test_a_mapping_of_other_names_is_one_value() -> None:
    given = {"reward": {"functions": {"my.rewards:short": 0.5}}, "environment": {"kwargs": {"tries": 2}}}
    assert overrides_from(given) == [
        'reward.functions={"my.rewards:short": 0.5}',
        "environment.kwargs.tries=2",
    ]


def test_a_reward_of_ones_own_is_pickled_once(tmp_path: Path) -> None:
    names = Names(tmp_path)
    rewards = [lambda problem, conversation, verdict: 1.0, module_reward]
    (override,) = _rewards(rewards, names)
    assert json.loads(override.partition("=")[2]) == {names.of(reward): 1.0 for reward in rewards}
    assert len(set(names.plugins)) == 1


def test_a_pickled_class_has_its_tools_in_order_of_definition(tmp_path: Path) -> None:
    class Shop:
        def search(self) -> str:
            """Find items."""
            return ""

        def look(self) -> str:
            """Describe an item."""
            return ""

    class Bookshop(Shop):
        def order(self) -> str:
            """Order an item."""
            return ""

        def cancel(self) -> str:
            """Cancel an order."""
            return ""

    names = Names(tmp_path)
    name = names.of(Bookshop)
    # In another process: in this one cloudpickle returns the class itself.
    code = f"""
from agentrl_envs.registry import load_plugins
from agentrl_envs.registry import import_attribute
from agentrl_envs.tools.toolset import methods_as_tools

load_plugins({names.plugins!r})
print(*(tool.schema.name for tool in methods_as_tools(import_attribute({name!r}, "class"), "Bookshop", frozenset())))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["search", "look", "order", "cancel"]


def test_a_method_from_outside_the_class_body_keeps_its_place() -> None:
    def look(self: object) -> str:
        """Describe an item."""
        return ""

    class Shop:
        def search(self) -> str:
            """Find items."""
            return ""

    setattr(Shop, "look", look)  # noqa: B010  (mypy: no such attribute)
    tools = methods_as_tools(Shop, "Shop", frozenset())
    assert [tool.schema.name for tool in tools] == ["search", "look"]


def test_plugins_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"plugins='mine.py': valid is a list of modules or files"):
        _with_plugins({"plugins": "mine.py"}, Names(tmp_path))
