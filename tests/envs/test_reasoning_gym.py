"""Problems and scores of reasoning-gym's data sets."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from shared import needed

from agentrl.config import load_settings
from agentrl.problems.demonstrations import read_demonstrations
from agentrl.problems.settings import ProblemSourceSettings
from agentrl.problems.sources import load_source
from agentrl_envs.adapters.reasoning_gym import ReasoningGymSource, score
from agentrl_envs.registry import PluginError

needed("reasoning_gym", "reasoning-gym")

SMALL = {"max_terms": 2, "max_digits": 1}


def test_a_problem_is_the_same_each_time_and_its_answer_scores_one() -> None:
    first, again = (ReasoningGymSource("chain_sum", seed=3, options=SMALL) for _ in range(2))
    assert [first.problem(index) for index in range(5)] == [again.problem(index) for index in range(5)]
    problem = first.problem(2)
    assert problem.answer is not None
    assert score(problem.answer, problem) == 1.0
    assert score("no number", problem) < 1.0


def test_splits_and_seeds_share_no_problem_ids() -> None:
    sources = [
        ReasoningGymSource("chain_sum", split=split, seed=seed, options={})
        for split in ("train", "heldout")
        for seed in (0, 1)
    ]
    ids = [source.problem(index).id for source in sources for index in (0, 1, source.size - 1)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", ["countdown", "word_sorting", "family_relationships", "rearc", "n_queens"])
def test_answers_are_scored_by_the_rules_of_their_data_set(name: str) -> None:
    problem = ReasoningGymSource(name, options={}).problem(1)
    stored = replace(problem, info=json.loads(json.dumps(problem.info)))  # as a trajectory file gives it back
    assert problem.answer is not None
    assert score(problem.answer, stored) == 1.0


def test_the_pages_demonstrations_earn_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/libraries.md").read_text(encoding="utf-8")
    (script,) = (one for one in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "ReasoningGymSource" in one)
    monkeypatch.chdir(tmp_path)
    exec(compile(script.replace("range(6144)", "range(8)"), "libraries.md", "exec"), {})
    source = ReasoningGymSource("chain_sum", seed=1, options={"max_terms": 2, "max_digits": 2})
    demonstrations = read_demonstrations(tmp_path / "chain_sum.jsonl")
    assert len(demonstrations) == 8
    for index, shown in enumerate(demonstrations):
        (turn,) = shown.turns
        program = turn.model.removeprefix("```py\nfinal_answer(").removesuffix(")\n```")
        assert score(str(eval(program)), source.problem(index)) == 1.0


def test_the_environment_stands_for_settings() -> None:
    settings = load_settings("reasoning_gym:chain_sum", overrides=["data.train.0.limit=10", "name=x"])
    assert settings.env == "simpletir"
    assert settings.grader.function == "agentrl_envs.adapters.reasoning_gym:score"
    assert [entry.split for entry in (*settings.data.train, *settings.data.eval)] == ["train", "heldout"]
    loaded = load_source(settings.data.train[0])
    assert loaded.source.size == 10


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "reasoning_gym:chain_sun"}, r"no data set of this name; did you mean 'chain_sum'\?"),
        ({"path": "reasoning_gym:chain_sum", "split": "test"}, "unknown split 'test'; valid: train, heldout"),
        ({"path": "reasoning_gym:chain_sum", "options": {"max_term": 2}}, "invalid options"),
    ],
)
def test_a_wrong_name_split_or_option_is_one_message(entry: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_source(ProblemSourceSettings.model_validate(entry))
