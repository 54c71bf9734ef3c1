from __future__ import annotations

import json
import operator
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from config.support import overlay, refused

from agentrl.config import (
    Settings,
    dump_yaml,
    load_settings,
    may_change_on_resume,
    resume_conflicts,
    run_config_for_model,
    shipped_config,
    shipped_configs,
)
from agentrl.config.messages import CONVERTED, REMOVED, RENAMED, known_keys, nearest_key
from agentrl.config.overlays import parse_yaml
from agentrl.config.settings import RESUME_MAY_CHANGE
from agentrl_envs.settings import EnvironmentOptions, ReasoningSettings, SimpleTIRSettings

# Layers


def test_without_a_model_the_tiny_preset_applies() -> None:
    settings = load_settings()
    assert settings.model.path is None
    assert (
        settings.optimizer.learning_rate
        == yaml.safe_load(shipped_configs()["tiny"].read_text())["optimizer"]["learning_rate"]
    )
    assert settings.model.dtype == "float32"
    assert [source.split for source in settings.data.eval] == ["heldout"]


def test_with_a_model_nothing_of_the_tiny_preset_is_inherited() -> None:
    settings = load_settings(overrides=["model.path=Qwen/Qwen2.5-7B", "data.train.0.path=problems.jsonl"])
    defaults = Settings()
    assert settings.optimizer == defaults.optimizer
    assert settings.optimizer.learning_rate == 1e-6
    assert settings.rollout == defaults.rollout
    assert settings.environment == SimpleTIRSettings()
    assert settings.coldstart.demonstrations is None


def test_each_layer_covers_the_one_below(tmp_path: Path) -> None:
    file = overlay(tmp_path / "mine.yaml", "rollout: {group_size: 4, problems_per_step: 6}\n")
    settings = load_settings(config_file=file, overrides=["rollout.group_size=2"])
    assert settings.rollout.group_size == 2  # command line over file
    assert settings.rollout.problems_per_step == 6  # file over preset
    assert settings.rollout.max_turn_tokens == load_settings().rollout.max_turn_tokens  # preset over default
    assert settings.rollout.temperature == 1.0  # default


def test_a_file_with_a_model_keeps_the_preset_out_until_the_command_line_takes_the_model_away(tmp_path: Path) -> None:
    file = overlay(tmp_path / "big.yaml", "model: {path: Qwen/Qwen2.5-7B}\ndata: {train: [{path: p.jsonl}]}\n")
    assert load_settings(config_file=file).optimizer.learning_rate == 1e-6
    tiny = load_settings(config_file=file, overrides=["model.path=null"])
    assert tiny.optimizer == load_settings().optimizer
    assert tiny.data.train[0].path == "p.jsonl"


def test_a_base_is_found_by_name_and_by_path_and_covered(tmp_path: Path) -> None:
    first = overlay(tmp_path / "first.yaml", "base: tiny\nseed: 7\ntraining: {steps: 3}\n")
    second = overlay(tmp_path / "second.yaml", f"base: {first}\ntraining: {{steps: 4}}\n")
    settings = load_settings(config_file=second)
    assert (settings.seed, settings.training.steps) == (7, 4)
    assert settings.rollout == load_settings().rollout


def test_several_files_and_several_bases_lie_over_each_other_in_their_order(tmp_path: Path) -> None:
    first = overlay(tmp_path / "first.yaml", "seed: 7\ntraining: {steps: 3}\n")
    second = overlay(tmp_path / "second.yaml", "training: {steps: 4}\n")
    both = load_settings(config_file=[str(first), str(second)])
    assert (both.seed, both.training.steps, both.name) == (7, 4, "first-second-1")
    assert load_settings(config_file=[str(second), str(first)]).training.steps == 3
    based = load_settings(config_file=overlay(tmp_path / "both.yaml", f"base: [{first}, {second}]\n"))
    assert (based.seed, based.training.steps) == (7, 4)


def test_a_circle_of_bases_is_named(tmp_path: Path) -> None:
    overlay(tmp_path / "a.yaml", "base: b.yaml\n")
    overlay(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "circular: a.yaml -> b.yaml -> a.yaml" in refused(config_file="a.yaml")


def test_lists_take_yaml_and_single_entries() -> None:
    settings = load_settings(
        overrides=[
            "data.train=[{path: a.jsonl}, {path: b.jsonl, weight: 2}]",
            "data.train.1.weight=3",
            "data.train.2.path=c.jsonl",
            "optimizer.betas.1=0.95",
        ]
    )
    assert [(source.path, source.weight) for source in settings.data.train] == [
        ("a.jsonl", 1.0),
        ("b.jsonl", 3.0),
        ("c.jsonl", 1.0),
    ]
    assert settings.optimizer.betas == (0.9, 0.95)


def test_a_single_entry_of_the_presets_list_can_be_changed() -> None:
    settings = load_settings(overrides=["data.train.0.limit=5"])
    assert (settings.data.train[0].path, settings.data.train[0].limit) == ("builtin:horizon", 5)


def test_env_decides_how_the_environment_is_validated() -> None:
    free = load_settings("my_module:MyEnv", overrides=["environment.level=3"])
    assert isinstance(free.environment, EnvironmentOptions)
    assert free.environment.model_extra == {"level": 3}  # and nothing of SimpleTIR's preset
    assert "environment.level" in refused("environment.level=3")


def test_the_tiny_preset_speaks_of_simpletir_alone() -> None:
    for given in (None, "tiny"):
        reasoning = load_settings("reasoning", given)
        assert reasoning.environment == ReasoningSettings()
        assert reasoning.rollout == load_settings(config_file=given).rollout
        assert load_settings("my_module:MyEnv", given).environment.model_extra == {}
    torl = load_settings(overrides=["environment.protocol=torl"]).environment
    assert isinstance(torl, SimpleTIRSettings)
    assert (torl.protocol, torl.max_turns, torl.effective_instruction) == ("torl", 4, "Solve with Python.")


def test_the_tiny_preset_falsifies_nothing_that_is_not_simpletirs() -> None:
    assert load_settings().evaluation.falsified
    assert not load_settings("my_module:MyEnv").evaluation.falsified
    assert load_settings("my_module:MyEnv", overrides=["evaluation.falsified=true"]).evaluation.falsified


def test_the_tiny_preset_replaces_no_demonstration_of_the_user() -> None:
    def direct(given: str | None, *overrides: str) -> tuple[float, int | None]:
        cold = load_settings(config_file=given, overrides=overrides).coldstart
        return cold.direct_share, cold.direct_steps

    for given in (None, "tiny"):
        assert direct(given) == direct(given, "coldstart.demonstrations=formula:mine.jsonl") == (0.7, 60)
        assert direct(given, "coldstart.demonstrations=mine.jsonl") == (0.0, None)
        assert direct(given, "coldstart.demonstrations=mine.jsonl", "coldstart.direct_share=0.3") == (0.3, None)


@pytest.mark.parametrize(("config", "source"), [("tiny", "builtin:horizon"), ("arithmetic", "builtin:arithmetic")])
def test_the_presets_cold_start_is_for_the_embedded_model(config: str, source: str) -> None:
    def shown(*overrides: str) -> str | None:
        return load_settings(config_file=config, overrides=overrides).coldstart.demonstrations

    assert shown() == source
    assert shown("model.path=OWNER/NAME") is None
    assert shown("model.path=OWNER/NAME", "coldstart.demonstrations=builtin:arithmetic") == "builtin:arithmetic"


def test_variables_are_replaced_and_a_missing_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(config_file="word_problems")
    assert settings.data.train[0].path == f"{tmp_path}/data/mawps.jsonl"
    assert settings.coldstart.demonstrations == f"formula:{tmp_path}/data/asdiv.jsonl"
    monkeypatch.delenv("AGENTRL_DATA_DIR")
    message = refused(config_file="word_problems")
    assert "data.train.0.path='${AGENTRL_DATA_DIR}/mawps.jsonl'" in message
    assert "environment variable AGENTRL_DATA_DIR, which is not set" in message


def test_names_count_up_and_do_not_touch_existing_runs(tmp_path: Path) -> None:
    assert load_settings().name == "tiny-1"
    (tmp_path / "runs" / "tiny-1").mkdir(parents=True)
    assert load_settings().name == "tiny-2"
    assert load_settings(config_file="math_tiny").name == "math_tiny-1"
    assert load_settings(overrides=["name=mine"]).name == "mine"


# Shipped configs

OTB_PAPER = {
    "otb_paper_7b": ("Qwen/Qwen2.5-7B", True),
    "otb_paper_8b": ("Qwen/Qwen3-8B-Base", False),
    "otb_paper_8b_tir": ("Qwen/Qwen3-8B-Base", True),
    "otb_paper_14b": ("Qwen/Qwen3-14B-Base", False),
}
"""Model of each recipe, and whether it has tools."""


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_every_shipped_config_loads(name: str) -> None:
    assert load_settings(config_file=name).data.train


def test_the_named_configs_are_shipped_under_every_spelling() -> None:
    assert {"tiny", "word_problems", "simpletir_7b", *OTB_PAPER} <= set(shipped_configs())
    file = shipped_configs()["tiny"]
    assert shipped_config("tiny") == shipped_config("tiny.yaml") == shipped_config("configs/tiny.yaml") == file
    assert shipped_config("huge") is None


def test_simpletir_7b_has_the_published_values() -> None:
    settings = load_settings(config_file="simpletir_7b")
    rollout, algorithm, optimizer = settings.rollout, settings.algorithm, settings.optimizer
    assert (rollout.problems_per_step, rollout.group_size, rollout.oversampling) == (512, 16, 3.0)
    assert (rollout.max_turn_tokens, rollout.max_response_tokens, rollout.temperature) == (8000, 16000, 1.0)
    assert (algorithm.updates_per_step, algorithm.accuracy_range) == (4, (0.1, 0.9))
    assert (algorithm.loss, algorithm.dual_clip) == ("dual_clip", 3.0)
    assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
    assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (1e-6, (0.9, 0.99), 0.01)
    assert isinstance(settings.environment, SimpleTIRSettings)
    assert settings.environment.max_turns == 5


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_a_recipe_for_a_large_model_says_where_everything_runs(name: str) -> None:
    """The laptop's engine is for the embedded policy alone."""
    settings = load_settings(config_file=name)
    rollout, training = settings.rollout, settings.training
    if settings.model.path is None:
        assert (rollout.engine, training.num_processes) == ("transformers", 1)
        return
    assert (rollout.engine, rollout.vllm.placement) == ("vllm", "colocated")
    assert rollout.vllm.replicas * rollout.vllm.tensor_parallel_size == training.num_processes == 8
    assert (settings.model.attention, settings.model.gradient_checkpointing) == ("auto", True)
    assert (training.zero_stage, settings.checkpoint.every) == (2, 20)


@pytest.mark.parametrize(("name", "recipe"), OTB_PAPER.items())
def test_the_recipes_of_the_otb_paper_have_the_published_values(name: str, recipe: tuple[str, bool]) -> None:
    """Section 6 and appendices F.1 and F.4; the estimators are those of its documentation."""
    settings = load_settings(config_file=name)
    rollout, algorithm, evaluation = settings.rollout, settings.algorithm, settings.evaluation
    model, tools = recipe
    assert settings.model.path == model
    assert (rollout.problems_per_step, rollout.group_size, rollout.max_response_tokens) == (128, 16, 8192)
    assert (rollout.temperature, settings.optimizer.learning_rate) == (1.0, 1e-6)
    assert (algorithm.updates_per_step, algorithm.loss, algorithm.entropy_coefficient) == (1, "reinforce", 0.0)
    assert settings.kl.coefficient == 0
    assert (evaluation.samples, evaluation.temperature, evaluation.top_p) == (32, 1.0, 0.95)
    assert len(settings.data.eval) == 4
    if tools:
        assert isinstance(settings.environment, SimpleTIRSettings)
        assert (settings.environment.max_turns, algorithm.estimator) == (5, "tir_otb")
    else:
        assert isinstance(settings.environment, ReasoningSettings)
        assert algorithm.estimator == "otb"


# Bad input: each message names the key, the value, what is valid, and the nearest key


def test_an_unknown_key_is_answered_with_the_nearest_and_the_valid_ones() -> None:
    message = refused("rollout.grup_size=8")
    assert message.startswith("unknown key rollout.grup_size (value 8) (command line)")
    assert "nearest valid key: rollout.group_size;" in message
    assert "valid keys in rollout: engine, problems_per_step, group_size" in message


def test_an_unknown_key_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = overlay(tmp_path / "mine.yaml", "rolout: {group_size: 4}\n")
    message = refused(config_file=file)
    assert f'unknown key rolout (value {{"group_size": 4}}) ({file})' in message
    assert "nearest valid key: rollout;" in message


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_key_is_refused_with_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    assert refused(f"{old}=1") == f"{old} (value 1) (command line) was renamed to {new}"
    sections = old.split(".")
    file = overlay(tmp_path / "mine.yaml", ": {".join(sections) + ": 1" + "}" * (len(sections) - 1) + "\n")
    assert refused(config_file=file) == f"{old} (value 1) ({file}) was renamed to {new}"
    assert new in known_keys("simpletir")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("group_size", "rollout.group_size"),
        ("learning_rate", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("rollout.temprature", "rollout.temperature"),
        ("data.train.0.pth", "data.train.0.path"),
        ("enviroment.max_turns", "environment.max_turns"),
        ("trainig.steps", "training.steps"),
    ],
)
def test_nearest_key(key: str, nearest: str) -> None:
    assert nearest_key(key, "simpletir") == nearest


def test_every_known_key_is_its_own_nearest() -> None:
    keys = known_keys("simpletir")
    assert len(keys) > 80
    assert all(nearest_key(key, "simpletir") == key for key in keys[::7])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.group_size=many", 'rollout.group_size="many" (command line): expected a whole number at least 1'),
        ("rollout.group_size=-1", "rollout.group_size=-1 (command line): expected a whole number at least 1"),
        ("rollout.group_size=8.0", "rollout.group_size=8.0 (command line): expected a whole number at least 1"),
        ("rollout.group_size=true", "rollout.group_size=true (command line): expected a whole number at least 1"),
        ("rollout.group_size='8'", 'rollout.group_size="8" (command line): expected a whole number at least 1'),
        ("rollout.temperature=0", "rollout.temperature=0 (command line): expected a number above 0"),
        ("training.steps=", 'training.steps="" (command line): expected a whole number at least 1'),
        ("model.dtype=fp8", 'model.dtype="fp8" (command line): expected one of float32, bfloat16'),
        ("training.deterministic=1", "training.deterministic=1 (command line): expected true or false"),
        ("optimizer.betas=[1]", "optimizer.betas=[1] (command line): expected a list of 2 values"),
        ("optimizer.betas=[0.9, x]", 'optimizer.betas=[0.9, "x"] (command line): expected a list of 2 values'),
        ("rollout=3", "rollout=3 (command line): expected a section with the keys engine, problems_per_step"),
        ("data.train.0.weight=heavy", 'data.train.0.weight="heavy" (command line): expected a number above 0'),
        ("data.train=[{split: train}]", "data.train.0.path is missing (command line) and has no default; valid: text"),
        ("data.train.9.path=x", 'data.train.9.path="x": data.train has 1 entries; valid indices: 0 to 1'),
        ("name=a/b", 'name="a/b" (command line): expected text matching'),
        ("seed.x=3", "unknown key seed.x (value 3) (command line); nearest valid key: seed;"),
        ("rollout", "'rollout' is not a setting: use key=value, for example rollout.group_size=8"),
        ("=3", "'=3' is not a setting: use key=value"),
        ("rollout..x=3", "'rollout..x=3' is not a setting: use key=value"),
        ("rollout.temperature=[1", "rollout.temperature='[1', line 1, column 3: not valid YAML"),
        ("env=textarena:Wordle", "env=\"textarena:Wordle\": environment 'textarena:Wordle' was removed: make the"),
        ("env=simpletr", "env=\"simpletr\": unknown environment 'simpletr'; did you mean 'simpletir'? (valid: "),
        (
            "environment.protocol=retol",
            "environment.protocol (command line): unknown protocol 'retol'; did you mean 'retool'? "
            "(valid: hermes, retool, simpletir, torl, module:attribute)",
        ),
    ],
)
def test_bad_values(override: str, expected: str) -> None:
    assert expected in refused(override)


def test_everything_wrong_is_said_at_once() -> None:
    lines = refused("rollout.group_size=0", "seed=-1", "typo=1").splitlines()
    assert len(lines) == 3


def test_forms_and_sizes_are_told_in_words() -> None:
    assert 'reward.functions={"a b": 1}' in refused("reward.functions={a b: 1}")
    assert "reward.functions" in refused("reward.function=a:b")
    assert refused("environment.tools=[]").endswith("expected a list of at least 1 value")
    assert "accuracy_range=[0.9, 0.1] must satisfy 0 <= low < high <= 1" in refused(
        "algorithm.accuracy_range=[0.9,0.1]"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout: {a: 1\n", "mine.yaml, line 2, column 1: not valid YAML"),
        ("seed: 1\nseed: 2\n", "mine.yaml, line 2, column 1: not valid YAML: duplicate key 'seed'"),
        ("- 1\n", "a config file must be a mapping of sections, not a list"),
        ("1: 2\n", "key 1 is not a string"),
        ("base: 3\n", "base=3 must be the name of a shipped config, a path, or a list of these"),
        ("base: nothing\n", "no config file 'nothing'"),
        ("seed: !!python/object:os.system x\n", "not valid YAML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refused(config_file=overlay(tmp_path / "mine.yaml", text))


def test_a_missing_config_is_answered_with_the_shipped_ones(tmp_path: Path) -> None:
    message = refused(config_file="word_problem.yaml")
    assert "no config file 'word_problem.yaml'; did you mean 'word_problems'?" in message
    assert "simpletir_7b" in message
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    assert "cannot read the config file" in refused(config_file="latin.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("-2.5E3", -2500.0),
        (".5", 0.5),
        ("3", 3),
        ("0", 0),
        ("1_000", 1000),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("2026-01-02", "2026-01-02"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("[1, 2e0]", [1, 2.0]),
        ("builtin:arithmetic", "builtin:arithmetic"),
    ],
)
def test_yaml_scalars_are_read_as_they_look(text: str, value: object) -> None:
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


# Written out, compared, resumed


@pytest.mark.parametrize("name", sorted(shipped_configs()))
def test_dump_reads_back_to_equal_settings(tmp_path: Path, name: str) -> None:
    settings = load_settings(config_file=name, overrides=["name=x"])
    file = overlay(tmp_path / "config.yaml", dump_yaml(settings))
    assert load_settings(config_file=file) == settings


def test_a_conflict_names_key_and_both_values() -> None:
    old = load_settings(overrides=["name=x"])
    new = load_settings(overrides=["name=x", "seed=5", "training.steps=9", "data.train.0.limit=4"])
    assert resume_conflicts(old, old) == []
    assert resume_conflicts(old, new) == ["seed: 0 -> 5", "data.train.0.limit: None -> 4"]


OPERATIONAL: dict[str, Any] = {
    "training.micro_batch_tokens": 512,
    "training.worker_timeout": 60.0,
    "model.gradient_checkpointing": True,
    "model.checkpoint_offload": True,
    "rollout.concurrency": 7,
    "rollout.vllm.placement": "external",
    "rollout.vllm.addresses": ["http://127.0.0.1:9"],
    "rollout.vllm.stall_deadline": 60.0,
    "sandbox.url": "http://127.0.0.1:9",
}


def test_what_may_change_on_resume() -> None:
    assert all(map(may_change_on_resume, ["training.steps", "telemetry.plots", "checkpoint.keep", "evaluation.every"]))
    assert all(map(may_change_on_resume, OPERATIONAL))
    assert not any(map(may_change_on_resume, ["seed", "rollout.group_size", "optimizer.betas"]))
    assert not any(map(may_change_on_resume, ["sandbox.timeout", "rollout.max_turn_tokens", "model.dtype"]))


@pytest.mark.parametrize("allowed", RESUME_MAY_CHANGE)
def test_what_may_change_on_resume_is_a_setting(allowed: str) -> None:
    assert any(key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for key in known_keys("simpletir"))


def test_operational_settings_of_a_resumed_run_change() -> None:
    saved_run(name="first")
    asked = [f"{key}={json.dumps(value)}" for key, value in OPERATIONAL.items()]
    changed = load_settings(overrides=["name=first", *asked], resume=True)
    assert {key: operator.attrgetter(key)(changed) for key in OPERATIONAL} == OPERATIONAL


def saved_run(*overrides: str, name: str) -> Settings:
    settings = load_settings(overrides=[f"name={name}", *overrides])
    folder = Path(settings.runs_dir) / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(settings))
    (folder / "metrics.jsonl").touch()
    return settings


def test_a_bare_resume_continues_the_named_run_as_it_was() -> None:
    saved = saved_run("rollout.group_size=4", "optimizer.learning_rate=1e-4", name="first")
    assert load_settings(overrides=["name=first"], resume=True) == saved


def test_resume_without_a_name_takes_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    saved_run(name="old")
    new = saved_run("seed=3", name="new")
    os.utime("runs/old/config.yaml", ns=(1, 1))
    assert load_settings(resume=True) == new


def test_resume_lets_the_allowed_keys_change_and_names_the_others() -> None:
    saved_run(name="first")
    assert load_settings(overrides=["name=first", "training.steps=999"], resume=True).training.steps == 999
    message = refused("name=first", "seed=8", "rollout.group_size=3", "training.steps=999", resume=True)
    assert "  seed: 0 -> 8" in message
    assert "  rollout.group_size: 8 -> 3" in message
    assert "training.steps: " not in message
    assert "--resume may change: name, runs_dir, model.gradient_checkpointing, " in message


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_but_dropped_from_an_old_run(key: str, caplog: pytest.LogCaptureFixture) -> None:
    message = f"was removed: {REMOVED[key]}; delete it"
    assert refused(f"{key}=1") == f"{key} (value 1) (command line) {message}"
    saved = saved_run(name="old")
    file = Path("runs/old/config.yaml")
    values = yaml.safe_load(file.read_text())
    *sections, last = key.split(".")
    inner = values
    for section in sections:
        inner = inner[section]
    inner[last] = True
    file.write_text(yaml.safe_dump(values))
    assert load_settings(overrides=["name=old"], resume=True) == saved
    assert load_settings(config_file=file, overrides=["name=old"]) == saved
    assert [record.getMessage().count(f"{key} ({REMOVED[key]})") for record in caplog.records] == [1, 1]
    elsewhere = overlay(Path("mine.yaml"), file.read_text())
    assert message in refused(config_file=elsewhere)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_key_of_an_old_run_is_read_under_its_new_name(old: str, new: str) -> None:
    values = {"rollout.kv_high_watermark": 0.5, "training.worker_timeout": 99.0, "sandbox.retry_deadline": 7.0}
    saved = saved_run(*(f"{key}={value}" for key, value in values.items()), name="old")
    file = Path("runs/old/config.yaml")
    tree = yaml.safe_load(file.read_text())
    section, _, name = new.rpartition(".")
    value = reduce(dict.__getitem__, section.split("."), tree).pop(name)
    section, _, name = old.rpartition(".")
    reduce(dict.__getitem__, section.split("."), tree)[name] = None if old in CONVERTED else value
    file.write_text(yaml.safe_dump(tree))
    assert load_settings(overrides=["name=old"], resume=True) == saved
    assert load_settings(config_file=file, overrides=["name=old"]) == saved


def test_old_values_of_renamed_keys_are_converted() -> None:
    saved_run(name="old")
    file = Path("runs/old/config.yaml")
    tree = yaml.safe_load(file.read_text())
    del tree["reward"]["functions"], tree["environment"]["chat"]
    tree["reward"]["function"], tree["evaluation"]["chat_template"] = "environment", False
    file.write_text(yaml.safe_dump(tree))
    loaded = load_settings(overrides=["name=old"], resume=True)
    assert (loaded.reward.functions, loaded.environment.chat) == ({"environment": 1.0}, "auto")


def test_resume_of_nothing() -> None:
    assert "no run in runs" in refused(resume=True)
    saved_run(name="first")
    assert "name='frist' is not a run in runs; did you mean 'first'?" in refused("name=frist", resume=True)


def test_a_model_inside_a_run_knows_the_runs_config() -> None:
    saved_run(name="first")
    assert run_config_for_model("runs/first/model") == str(Path("runs/first/config.yaml").absolute())
    assert run_config_for_model("elsewhere/model") is None


def test_settings_are_light_to_import() -> None:
    code = (
        "import sys, agentrl.config; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'deepspeed', 'sympy', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
