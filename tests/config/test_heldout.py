"""Evaluation without ``data.eval``: a preset's run evaluates the held-out part of ``data.train``."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import Settings, load_settings


def evaluated(settings: Settings) -> list[tuple[str, str, str]]:
    return [(entry.path, entry.split, entry.part) for entry in settings.data.eval]


HORIZON = [("builtin:horizon", "heldout", "all")]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], HORIZON),
        (["data.train.0.limit=5"], HORIZON),
        (["data.train.0.path=mine.jsonl"], []),
        (["data.train.0.path=mine.jsonl", "data.train.0.part=train"], [("mine.jsonl", "train", "heldout")]),
        (["data.train=[{path: mine.jsonl}, {path: 'builtin:seeds'}]"], [("builtin:seeds", "heldout", "all")]),
        (["data.train.0.split=heldout"], []),
        (["data.eval.0.limit=5"], HORIZON),
        (["data.train.0.path=mine.jsonl", "data.eval=[]"], []),
        (["data.train.0.path=mine.jsonl", "data.eval.0.path=other.jsonl"], [("other.jsonl", "train", "all")]),
        (["data.eval.0.split=test", "data.eval.0.path=owner/name"], [("owner/name", "test", "all")]),
        (["data.eval.0.path=builtin:seeds"], [("builtin:seeds", "heldout", "all")]),
        (["data.train.0.path=mine.jsonl", "data.eval=[{path: other.jsonl}]"], [("other.jsonl", "train", "all")]),
    ],
)
def test_the_presets_evaluation_follows_the_problems(overrides: list[str], expected: list[object]) -> None:
    for env in (None, "my_module:MyEnv"):
        assert evaluated(load_settings(env, overrides=overrides)) == expected


def test_a_files_problems_count_as_well_as_the_command_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: tiny\ndata: {train: [{path: mine.jsonl}]}\n")
    assert evaluated(load_settings(config_file=file)) == []
    assert evaluated(load_settings(config_file=file, overrides=["data.train.0.part=train"])) == [
        ("mine.jsonl", "train", "heldout")
    ]
    file.write_text("data: {train: [{path: mine.jsonl}], eval: [{path: other.jsonl}]}\n")
    assert evaluated(load_settings(config_file=file)) == [("other.jsonl", "train", "all")]


@pytest.mark.parametrize("order", [["mine.yaml", "arithmetic"], ["arithmetic", "mine.yaml"]])
def test_a_files_evaluation_counts_before_and_after_a_preset(order: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: {eval: [{path: other.jsonl}]}\n")
    named = [str(tmp_path / name) if name == "mine.yaml" else name for name in order]
    assert evaluated(load_settings(config_file=named)) == [("other.jsonl", "train", "all")]


def test_a_path_of_the_command_line_keeps_what_ones_own_file_says_of_the_source(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: tiny\ndata: {eval: [{path: mine/set, split: test}]}\n")
    assert evaluated(load_settings(config_file=file, overrides=["data.eval.0.path=other/set"])) == [
        ("other/set", "test", "all")
    ]


def test_what_is_held_out_is_of_the_same_kind_and_no_smaller() -> None:
    settings = load_settings(overrides=["data.train.0.families=[price]", "data.train.0.limit=5"])
    assert (settings.data.eval[0].families, settings.data.eval[0].limit) == (["price"], None)


def test_a_data_set_is_evaluated_with_the_options_that_it_is_trained_with() -> None:
    settings = load_settings("reasoning_gym:chain_sum", overrides=["data.train.0.options={max_terms: 2}"])
    assert evaluated(settings) == [("reasoning_gym:chain_sum", "heldout", "all")]
    assert settings.data.eval[0].options == {"max_terms": 2}


def test_a_model_of_ones_own_is_evaluated_on_what_is_named() -> None:
    assert load_settings(overrides=["model.path=owner/name", "data.train.0.path=mine.jsonl"]).data.eval == []
