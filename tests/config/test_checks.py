"""Settings that contradict one another are refused, and those that surprise are said."""

from __future__ import annotations

from pathlib import Path

import pytest
from config.support import refused

from agentrl.config import (
    load_settings,
    settings_warnings,
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.max_turn_tokens=99999"],
            "rollout.max_turn_tokens=99999 exceeds rollout.max_response_tokens=160: a turn cannot be longer",
        ),
        (
            ["algorithm.updates_per_step=33"],
            "algorithm.updates_per_step=33 exceeds rollout.problems_per_step=32, but every update needs",
        ),
        (
            ["rollout.max_prompt_tokens=1000"],
            "rollout.max_prompt_tokens=1000 and rollout.max_response_tokens=160 together exceed "
            "model.tiny.max_positions=1024",
        ),
        (["rollout.kv_cache_tokens=64"], "exceed rollout.kv_cache_tokens=64: the KV cache must hold at least one"),
        (
            ["training.micro_batch_tokens=64"],
            "exceed training.micro_batch_tokens=64: a micro-batch must hold a complete",
        ),
        (["data.train=[]"], "data.train is empty, so there is no data to train on"),
        (["model.path=/no/such/folder"], "model.path='/no/such/folder' does not exist"),
        (
            ["kl.placement=reward", "kl.estimator=k1+"],
            "kl (command line): estimator=k1+ differs from k1 only in its gradient, which placement=reward",
        ),
        (["kl.controller=adaptive"], "kl (command line): controller=adaptive scales the coefficient, which is 0"),
        (["algorithm.estimator=none"], "algorithm.estimator=none trains only with a teacher: set teacher.path"),
        (["correction.self_normalize=true"], "self_normalize=true has no weights to normalize: set weights"),
        (
            ["training.deterministic=true", "rollout.schedule=overlapped"],
            "training.deterministic=true conflicts with rollout.schedule=overlapped, because with concurrent sampling",
        ),
        (
            ["rollout.schedule=asynchronous", "rollout.engine=vllm", "rollout.vllm.placement=colocated"],
            "rollout.schedule=asynchronous conflicts with rollout.vllm.placement=colocated, because the engine sleeps",
        ),
        (
            ["algorithm.void_turns=loss_only"],
            "algorithm.void_turns (command line): loss_only was renamed: write mask instead",
        ),
        (
            ["algorithm.void_turns=remove"],
            "algorithm.void_turns (command line): remove was renamed: write exclude instead",
        ),
        (
            ["algorithm.truncated=drop"],
            'algorithm.truncated="drop" (command line): expected one of train, mask, exclude',
        ),
        (["correction.ratio_low=3"], "correction (command line): ratio_low=3.0 is above ratio_high=2.0"),
        (
            ["correction.weight_bound=icepop", "correction.weight_low=2.5"],
            "correction (command line): weight_low=2.5 is above weight_high=2.0",
        ),
        (["reward.overlong_limit=8", "reward.overlong_buffer=9"], "overlong_buffer=9 is above overlong_limit=8"),
        (["reward.overlong_buffer=200"], "reward.overlong_buffer=200 exceeds rollout.max_response_tokens=160"),
        (
            ["kl.coefficient=0.1", "kl.controller=adaptive", "kl.horizon=10"],
            "kl.horizon=10 must exceed one fifth of the 256 trajectories of a step",
        ),
        (
            ["correction.weights=tokn"],
            'correction.weights="tokn" (command line): expected one of token, sequence, geom',
        ),
    ],
)
def test_contradictions(overrides: list[str], expected: str) -> None:
    settings = ["rollout.max_response_tokens=160", "rollout.problems_per_step=32", *overrides]
    assert expected in refused(*settings)


def test_a_curriculum_needs_problems_that_repeat() -> None:
    given = ["data.train.0.path=builtin:horizon", "data.curriculum=thompson"]
    assert "data.curriculum=thompson needs problems that repeat, but builtin:horizon" in refused(*given)
    assert load_settings(overrides=[*given, "data.train.0.limit=64"]).data.curriculum == "thompson"


def test_a_model_directory_needs_a_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    given = [f"model.path={model}", "data.train.0.path=p.jsonl"]
    assert f"model.path='{model}' has no config.json" in refused(*given)
    (model / "config.json").write_text("{}")
    assert f"model.path='{model}' has a model but no tokenizer" in refused(*given)
    (model / "tokenizer.json").write_text("{}")
    assert load_settings(overrides=given).name == "model-1"


def test_commands_ask_only_for_what_they_need() -> None:
    model = "model.path=Qwen/Qwen2.5-7B"
    assert load_settings(overrides=[model], command="eval").data.train == []
    assert "coldstart.demonstrations is not set" in refused(model, command="coldstart")
    assert load_settings(overrides=[model, "coldstart.demonstrations=d.jsonl"], command="coldstart").data.train == []


# Warnings


def test_a_group_of_one_is_a_warning_that_says_what_happens() -> None:
    (dropped,) = settings_warnings(load_settings(overrides=["rollout.group_size=1"]))
    assert "rollout.group_size=1 with the group estimator algorithm.estimator=tir_otb" in dropped
    assert "drops all groups and nothing is trained" in dropped
    kept = load_settings(overrides=["rollout.group_size=1", "algorithm.drop_zero_variance=false"])
    assert "so the baseline is 0 and the advantages are the plain rewards" in settings_warnings(kept)[0]
    assert settings_warnings(load_settings()) == []


def test_a_group_of_one_with_a_baseline_of_the_other_groups_is_nothing_special() -> None:
    pooled = ["rollout.group_size=1", "algorithm.estimator=ogb_pooled"]
    assert settings_warnings(load_settings(overrides=pooled)) == []
    (said,) = settings_warnings(load_settings(overrides=[*pooled, "algorithm.drop_zero_variance=true"]))
    assert "drops all groups and nothing is trained" in said


def test_a_group_of_one_without_a_baseline_of_its_group() -> None:
    one = ["rollout.group_size=1", "algorithm.estimator=gae"]
    (said,) = settings_warnings(load_settings(overrides=one))
    assert said.startswith("rollout.group_size=1: every group is a single trajectory, which has no variance")
    assert settings_warnings(load_settings(overrides=[*one, "algorithm.drop_zero_variance=false"])) == []
    assert settings_warnings(load_settings(overrides=["rollout.group_size=1", "algorithm.estimator=remax"])) == []


DEPLOYED = [
    "environment.protocol=hermes",
    "environment.history=template",
    "evaluation.falsified=false",
    "model.path=some/model",
    "data.train.0.path=builtin:toy",
]


@pytest.mark.parametrize("env", [["env=agent:true", "gateway.agent_rewards=true"], DEPLOYED])
def test_a_baseline_that_branches_do_not_have_is_said(env: list[str]) -> None:
    (said,) = settings_warnings(load_settings(overrides=[*env, "algorithm.estimator=otb"]))
    assert "algorithm.estimator=otb does not define baselines across the branches" in said
    assert settings_warnings(load_settings(overrides=[*env, "algorithm.estimator=tir_otb"])) == []
    assert settings_warnings(load_settings(overrides=["algorithm.estimator=otb"])) == []


@pytest.mark.parametrize("env", ["agent:true", "worker:python work.py"])
def test_a_program_outside_the_trainer_needs_a_reward(env: str) -> None:
    assert f"env='{env}' has no reward: set a reward function" in refused(f"env={env}")
    load_settings(overrides=[f"env={env}", "gateway.agent_rewards=true"])
    load_settings(overrides=[f"env={env}", "reward.functions={rewards:shorter: 1.0}"])


def test_an_inexact_penalty_in_the_reward_is_said() -> None:
    given = ["kl.coefficient=0.1", "kl.placement=reward"]
    assert settings_warnings(load_settings(overrides=given)) == []
    (said,) = settings_warnings(load_settings(overrides=[*given, "kl.estimator=k3"]))
    assert said.startswith("kl.placement=reward with kl.estimator=k3: as part of the reward, only k1")


def test_stale_tokens_without_correction_are_said() -> None:
    given = ["rollout.schedule=asynchronous", "rollout.max_staleness=3"]
    (said,) = settings_warnings(load_settings(overrides=given))
    assert said.startswith("rollout.schedule=asynchronous trains on tokens of policies up to 3 steps old")
    assert settings_warnings(load_settings(overrides=[*given, "correction.weights=token"])) == []
    assert (
        settings_warnings(load_settings(overrides=["rollout.schedule=asynchronous", "rollout.max_staleness=0"])) == []
    )


def test_a_bound_on_staleness_without_effect_is_said() -> None:
    (said,) = settings_warnings(load_settings(overrides=["rollout.max_staleness=3"]))
    assert said.startswith("rollout.max_staleness=3 has no effect with rollout.schedule=synchronous")


def test_other_surprises() -> None:
    surprising = load_settings(
        overrides=["training.deterministic=true", "training.num_processes=2", "optimizer.warmup_steps=999"]
    )
    ranks, warmup = settings_warnings(surprising)
    assert "bitwise equality is guaranteed for one process only" in ranks
    assert "the learning rate never reaches optimizer.learning_rate" in warmup


def test_every_trajectory_may_hold_a_session() -> None:
    session = ["environment.interpreter=session", "rollout.concurrency=65"]
    assert "rollout.concurrency=65 and sandbox.max_sessions=64: active" in refused(*session)
    assert load_settings(overrides=[*session, "sandbox.max_sessions=65"]).sandbox.max_sessions == 65
