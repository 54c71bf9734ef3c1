"""Python objects as files and inputs that other processes find."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import datasets
import pandas as pd
import pytest

import agentrl
from agentrl.api.inputs import Inputs, to_overrides, write_problem_file
from agentrl.errors import SettingsError
from agentrl_envs.registry import import_attribute, load_plugins
from agentrl_envs.tools.toolset import methods_as_tools
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def module_reward(problem: object, conversation: object, verdict: object) -> float:
    return 0.25


def test_equal_problems_are_written_once_and_read_back(tmp_path: Path) -> None:
    rows = [{"problem": "2 + 3?", "answer": "5", "level": 1}, {"problem": "Größe?", "answer": "1"}]
    first = write_problem_file(rows, tmp_path)
    assert first == write_problem_file(iter(rows), tmp_path)
    assert first.name == "problems.jsonl"
    assert [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()] == rows
    assert write_problem_file(rows[:1], tmp_path) != first


def test_problem_objects_keep_their_fields(tmp_path: Path) -> None:
    problem = Problem(id="toy-0", statement="2 + 3?", answer="5", source="toy")
    (line,) = write_problem_file([problem], tmp_path).read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["statement"] == "2 + 3?"


@pytest.mark.parametrize("value", [math.nan, {1, 2}, object()])
def test_a_value_that_is_not_json_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(SettingsError, match=r"problems\[1\]\['level'\] is not a JSON value"):
        write_problem_file([{"problem": "?", "answer": "1"}, {"problem": "?", "answer": "1", "level": value}], tmp_path)


@pytest.mark.parametrize("table", [pd.DataFrame, datasets.Dataset.from_list])
def test_a_table_of_problems_is_its_rows(tmp_path: Path, table: Any) -> None:
    rows = [{"problem": "2 + 3?", "answer": "5", "level": 1}, {"problem": "3 + 3?", "answer": "6", "level": 2}]
    assert write_problem_file(table(rows), tmp_path) == write_problem_file(rows, tmp_path)


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (5, r"problems=5 must be a file, or rows such as \{"),
        ({"train": [{"problem": "?"}]}, r"problems\[0\] is 'train', but problems must be a file, or rows such as \{"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, problems: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        write_problem_file(problems, tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"problem": [{"problem": "?"}]},
            "agentrl.train has no argument or setting 'problem'; did you mean 'problems'?",
        ),
        ({"callbacks": [print]}, "agentrl.train has no argument or setting 'callbacks'; the nearest setting is "),
        (
            {"lr": 1e-3},
            "agentrl.train has no argument or setting 'lr'; the nearest setting is optimizer.learning_rate",
        ),
        (
            {"environment": {"kwargs": {"hook": print}}},
            "environment.kwargs.hook=<built-in function print> cannot be a setting: Object of type",
        ),
        ({"problems": "gone/rows.jsonl"}, "gone/rows.jsonl: no such file; there is no folder gone"),
        ({"data": {"eval": [{"path": "gone/rows.jsonl"}]}}, "gone/rows.jsonl: no such file; there is no folder gone"),
        ({"training": {"steps": -1}}, "training.steps=-1: expected a whole number at least 1"),
    ],
)
def test_bad_arguments_end_before_a_run_starts(given: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as caught:
        agentrl.train(**{"runs_dir": tmp_path} | given)
    assert str(caught.value).startswith(message)
    assert not list(tmp_path.glob("*/config.yaml"))


def test_a_missing_benchmark_ends_before_anything_is_loaded() -> None:
    with pytest.raises(SettingsError, match=r"gone/rows\.jsonl: no such file"):
        agentrl.evaluate("some/model", benchmarks=["gone/rows.jsonl"])
    with pytest.raises(SettingsError, match=r"agentrl.evaluate has no argument or setting 'benchmark'; did you mean"):
        agentrl.evaluate("some/model", benchmark=["gone/rows.jsonl"])


def test_no_problems_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="problems is empty"):
        write_problem_file([], tmp_path)


def test_what_a_module_holds_goes_by_its_name(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    assert inputs.importable_name(module_reward) == f"{__name__}:module_reward"
    assert inputs.importable_name("simpletir") == "simpletir"
    assert inputs.plugins == []
    assert list(tmp_path.iterdir()) == []


def test_a_local_function_is_found_through_a_plugin(tmp_path: Path) -> None:
    bonus = 0.5

    def local_reward(problem: object, conversation: object, verdict: object) -> float:
        return bonus + 1.0

    inputs = Inputs(tmp_path)
    name = inputs.importable_name(local_reward)
    assert name.endswith(":local_reward")  # the name of its metric
    load_plugins(inputs.plugins)
    assert import_attribute(name, "reward") is local_reward  # here; elsewhere a copy
    inputs.require_picklable()


def test_what_cannot_be_pickled_is_used_in_this_process_only(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked() -> object:
        return lock

    inputs = Inputs(tmp_path)
    assert import_attribute(inputs.importable_name(locked), "reward") is locked
    assert inputs.plugins == []
    with pytest.raises(SettingsError, match=r"locked cannot be passed .* \(cannot pickle .* Define it in a module"):
        inputs.require_picklable()


def test_a_loaded_model_is_saved_once_with_its_tokenizer(tmp_path: Path) -> None:
    class Saves:
        def __init__(self, name: str) -> None:
            self.name = name

        def save_pretrained(self, folder: Path) -> None:
            folder.mkdir(exist_ok=True)
            (folder / self.name).write_text(self.name)

    inputs = Inputs(tmp_path)
    model, tokenizer = Saves("weights"), cast("PreTrainedTokenizerBase", Saves("words"))
    (path,) = inputs.model_settings(model, tokenizer).values()
    assert inputs.model_settings(model, tokenizer) == {"model.path": path}
    assert sorted(file.name for file in Path(str(path)).iterdir()) == ["weights", "words"]
    assert [entry.name for entry in tmp_path.iterdir()] == [Path(str(path)).name]
    assert inputs.model_settings("some/model", None) == {"model.path": "some/model"}
    assert inputs.model_settings({"path": "some/model"}, None) == {"model": {"path": "some/model"}}
    with pytest.raises(SettingsError, match="a loaded model needs its tokenizer"):
        inputs.model_settings(model, None)
    with pytest.raises(
        SettingsError, match="model must be a directory, a Hugging Face id or a transformers model; got 5"
    ):
        inputs.model_settings(5, None)


def test_settings_become_overrides() -> None:
    given = {"training": {"steps": 5, "deterministic": True}, "data.train": [{"path": "a b.jsonl"}], "name": "it's"}
    assert to_overrides(given) == [
        "training.steps=5",
        "training.deterministic=true",
        'data.train=[{"path": "a b.jsonl"}]',
        'name="it\'s"',
    ]


def test_a_mapping_of_other_inputs_is_one_value() -> None:
    given = {"reward": {"functions": {"my.rewards:short": 0.5}}, "environment": {"kwargs": {"tries": 2}}}
    assert to_overrides(given) == [
        'reward.functions={"my.rewards:short": 0.5}',
        "environment.kwargs.tries=2",
    ]


def test_a_reward_of_ones_own_is_pickled_once(tmp_path: Path) -> None:
    inputs = Inputs(tmp_path)
    rewards = [lambda problem, conversation, verdict: 1.0, module_reward]
    override = inputs.reward_override(rewards)
    assert json.loads(override.partition("=")[2]) == {inputs.importable_name(reward): 1.0 for reward in rewards}
    assert len(set(inputs.plugins)) == 1


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

    inputs = Inputs(tmp_path)
    name = inputs.importable_name(Bookshop)
    # In another process: in this one cloudpickle returns the class itself.
    code = f"""
from agentrl_envs.registry import load_plugins
from agentrl_envs.registry import import_attribute
from agentrl_envs.tools.toolset import methods_as_tools

load_plugins({inputs.plugins!r})
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
    with pytest.raises(SettingsError, match=r"plugins must be a list of modules or files; got 'mine.py'"):
        Inputs(tmp_path).add_plugins({"plugins": "mine.py"})
