"""Settings that name an algorithm, the dry run, and the learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig, Qwen2Config

from agentrl.algorithms import ESTIMATORS, LOSSES, register_loss
from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.rollout.settings import RolloutSettings, longest_request_tokens
from agentrl.training.engine.groups import reason_ranks_not_groupable
from agentrl.training.run.launch import launch_ranks
from agentrl.training.run.preflight import dry_run
from agentrl.training.run.start import train
from agentrl.training.settings import AlgorithmSettings
from agentrl.training.step.objective_settings import (
    ObjectiveSettings,
    estimator_options,
    estimator_requirements,
    loss_options,
)


def objective(**algorithm: Any) -> ObjectiveSettings:
    return ObjectiveSettings(algorithm=AlgorithmSettings(**algorithm), response_tokens=77)


def test_options_are_those_that_were_changed_and_that_the_estimator_and_the_loss_know() -> None:
    carried = objective(estimator="tir_otb", tail="carry")
    assert estimator_options(carried) == {"tail": "carry", "loss_aggregation": "token_mean"}
    assert loss_options(objective(loss="ppo", clip_high=0.3)) == {"clip_high": 0.3}
    assert loss_options(objective()) == {}
    assert estimator_options(objective(estimator="gae", estimator_options={"normalize": None})) == {"normalize": None}


def test_groups_of_equal_rewards_are_dropped_where_they_have_no_gradient() -> None:
    assert objective().drops_zero_variance
    assert not objective(estimator="ogb_pooled").drops_zero_variance
    assert objective(estimator="ogb_pooled", drop_zero_variance=True).drops_zero_variance
    assert not objective(drop_zero_variance=False).drops_zero_variance


@pytest.mark.parametrize("name", ESTIMATORS.names())
def test_every_estimator_has_its_defaults(name: str) -> None:
    provided = {"token_energy", "values", "greedy_returns", "trajectory_energy"}
    assert estimator_requirements(objective(estimator=name)).inputs <= provided


def test_an_estimator_of_the_laboratory_does_not_train() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.estimator=otb_cross: removed from training; .* variance"):
        estimator_requirements(objective(estimator="otb_cross"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["training.offload=all"], r"training\.offload=all requires training\.zero_stage=3, but it is 2"),
        (
            ["training.offload=optimizer", "training.zero_stage=0"],
            r"requires training\.zero_stage=1, 2 or 3, but it is 0",
        ),
    ],
)
def test_what_cannot_be_offloaded_is_said(given: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(overrides=given)
    load_settings(overrides=["training.offload=all", "training.zero_stage=3"])


@pytest.mark.parametrize("name", LOSSES.names())
def test_every_loss_has_its_defaults(name: str) -> None:
    settings = objective(loss=name, estimator="rloo")
    assert loss_options(settings) == {}
    assert settings.aggregation == LOSSES.traits(name).aggregation


@pytest.mark.parametrize(
    ("algorithm", "aggregation"),
    [
        ({}, "token_mean"),
        ({"estimator": "grpo"}, "seq_mean_token_mean"),
        ({"estimator": "dr_grpo", "loss": "ppo"}, "seq_mean_token_sum_norm"),
        ({"estimator": "tir_otb", "loss": "ppo"}, "token_mean"),
        ({"estimator": "tir_otb", "loss": "gspo"}, "seq_mean_token_mean"),
        ({"estimator": "grpo", "loss": "ppo", "aggregation": "token_mean"}, "token_mean"),
    ],
)
def test_the_aggregation_is_the_one_that_is_set_or_that_of_the_papers(
    algorithm: dict[str, str], aggregation: str
) -> None:
    settings = objective(**algorithm)
    assert settings.aggregation == aggregation
    assert settings.norm_length == 77


def test_an_aggregation_that_the_loss_forbids_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.aggregation=token_mean: .*gspo.*seq_mean_token_mean"):
        _ = objective(loss="gspo", aggregation="token_mean").aggregation


def test_a_changed_option_that_the_estimator_lacks_is_an_error() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.tail=carry: the estimator 'grpo' has no such option; valid"):
        estimator_options(objective(estimator="grpo", tail="carry"))
    with pytest.raises(SettingsError, match=r"algorithm\.clip_low=0\.1: the loss 'reinforce' has no such option"):
        loss_options(objective(clip_low=0.1))
    with pytest.raises(SettingsError, match=r"algorithm\.loss=gmpo: .*clip_hi.*clip_high"):
        loss_options(objective(loss="gmpo", loss_options={"clip_hi": 1.0}))
    with pytest.raises(SettingsError, match=r"algorithm\.clip_low=0\.1 and algorithm\.loss_options\.clip_low=0\.2"):
        loss_options(objective(loss="ppo", clip_low=0.1, loss_options={"clip_low": 0.2}))
    with pytest.raises(SettingsError, match=r"algorithm\.loss=ppo: clip_low=3\.0 must be in \[0, 1\]"):
        loss_options(objective(loss="ppo", clip_low=3.0))


def test_a_loss_that_returns_a_mean_is_refused_before_training(own_registries: None) -> None:
    register_loss("averaged")(lambda inputs, options: inputs.log_probs.mean())
    with pytest.raises(SettingsError, match=r"algorithm\.loss=averaged: loss 'averaged' returned a tensor: return \("):
        loss_options(objective(loss="averaged"))


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r"algorithm\.estimator=tir_ot[^b].*tir_otb"):
        estimator_options(objective(estimator="tir_ot"))
    with pytest.raises(SettingsError, match=r"algorithm\.estimator=tir_ot[^b].*tir_otb"):
        _ = objective(estimator="tir_ot").aggregation


@pytest.mark.parametrize("name", ["simpletir_7b", "otb_paper_7b"])
def test_the_plan_of_a_large_recipe_is_shown_on_a_machine_that_cannot_run_it(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("AGENTRL_DATA_DIR", str(tmp_path))
    problems = tmp_path / "sums.jsonl"
    problems.write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    model = tmp_path / "model"
    Qwen2Config(num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=2).save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    data = f"[{{path: {problems}}}]"
    settings = load_settings(
        config_file=name,
        overrides=[f"model.path={model}", "model.attention=flash", f"data.train={data}", f"data.eval={data}"],
    )
    dry_run(settings)
    said = " ".join(capsys.readouterr().out.split())
    assert "rollouts: vLLM, colocated: 4 servers of 2 GPUs" in said
    assert "this machine cannot run these settings: model.attention=flash needs a GPU" in said
    assert "this machine cannot run these settings: rollout" in said  # no GPUs, or no vLLM
    assert "memory of one rank, estimated:" in said
    assert "on 8 GPUs of 80 GB: fits" in said
    assert "on 8 GPUs of 48 GB: fits" in said
    with pytest.raises(SettingsError, match=r"model\.attention=flash needs a GPU"):
        train(settings, resume=False)
    assert not (tmp_path / "runs").exists()


def test_servers_take_the_longest_sequence_of_rollouts_and_of_evaluations() -> None:
    rollout = RolloutSettings(max_prompt_tokens=100, max_response_tokens=200, max_turn_tokens=200)
    assert longest_request_tokens(rollout, None) == 300
    assert longest_request_tokens(rollout, 150) == 300
    assert longest_request_tokens(rollout, 900) == 1000


def test_dry_run_says_settings_passes_and_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry_run(load_settings(overrides=["algorithm.normalize=whiten", "coldstart.count=16"]))
    said = capsys.readouterr().out
    assert "estimator: tir_otb" in said
    assert "passes: a statistics pass, then the training pass: whitening needs the mean over the whole step" in said
    assert "optimizer" in said
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_exact_energies_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    GptOssConfig(**sizes, num_key_value_heads=2, head_dim=32, num_local_experts=2).save_pretrained("model")
    Path("model/tokenizer.json").write_text("{}")
    settings = load_settings(
        overrides=["model.path=model", "algorithm.estimator=eob", "data.train.0.path=builtin:arithmetic"]
    )
    with pytest.raises(SettingsError, match=r"estimator=eob: exact energies support .*Llama.* not GptOssForCausalLM"):
        dry_run(settings)


def test_the_dry_run_counts_all_branches_of_a_forked_rollout(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["rollout.problems_per_step=1", "rollout.group_size=2", "rollout.max_prompt_tokens=200"]
    caches = []
    for forks, passes in (([], "micro-batches of whole groups"), (["rollout.branching.width=8"], "a second forward")):
        dry_run(load_settings(config_file="tiny", overrides=[*sizes, "rollout.concurrency=64", *forks]))
        said = capsys.readouterr().out
        assert passes in next(line for line in said.splitlines() if line.startswith("passes:"))
        caches += [float(line.split()[2]) for line in said.splitlines() if line.strip().startswith("KV cache")]
    assert caches[1] == pytest.approx(8 * caches[0], rel=0.1)


def test_the_dry_run_counts_what_a_penalty_and_a_critic_need(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dry_run(load_settings())
    assert "passes: one forward for statistics, advantages and backward" in capsys.readouterr().out
    dry_run(load_settings(overrides=["algorithm.estimator=gae", "kl.coefficient=0.1"]))
    parts = dict(line.rsplit(None, 2)[:2] for line in capsys.readouterr().out.splitlines() if line.endswith(" MiB"))
    sizes = {name.strip(): float(size.replace(",", "")) for name, size in parts.items()}
    assert sizes["reference"] == sizes["weights"]
    states = ("weights", "gradients", "master copy", "optimizer")
    assert sizes["critic"] == pytest.approx(sum(sizes[name] for name in states), abs=0.2)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    settings = load_settings(overrides=["training.num_processes=2"])
    with pytest.raises(
        SettingsError, match=r"training\.num_processes=2 requires one GPU per rank, but only 1 GPUs are visible"
    ):
        launch_ranks(settings, tmp_path, resume=False)


def test_ranks_that_the_groups_do_not_divide_are_refused() -> None:
    assert [size for size in range(1, 8) if reason_ranks_not_groupable(size, ranks=6) is None] == [1, 2, 3, 6]
    assert reason_ranks_not_groupable(4, ranks=1) == (
        "training.sequence_parallel=4 does not divide the 1 training rank; valid: 1, or training.num_processes=4"
    )
    assert reason_ranks_not_groupable(4, ranks=6) == (
        "training.sequence_parallel=4 does not divide the 6 training ranks; valid: 1, 2, 3, 6, or "
        "training.num_processes=4 or 8"
    )
