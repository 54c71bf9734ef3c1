"""The plan of a run on given GPUs, its overlay, and the message about a lack of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from planning.support import tiny_shape
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config import Settings, load_settings, shipped_configs
from agentrl.errors import SettingsError
from agentrl.models.settings import ModelSettings
from agentrl.models.shape import read_model_shape
from agentrl.planning.plan import memory_estimate_lines, plan_command
from agentrl.training.run.preflight import dry_run

CONFIG: dict[str, object] = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 99}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def seven(*overrides: str) -> Settings:
    return load_settings(overrides=["model.path=Qwen/Qwen2.5-7B", *overrides], command="plan")


def planned(settings: Settings, **options: int) -> dict[str, Any]:
    lines = plan_command(settings, critic=False, **options)
    overlay: dict[str, Any] = yaml.safe_load("\n".join(lines))
    return overlay


def test_a_plan_uses_the_settings_and_the_largest_micro_batch_that_fits() -> None:
    plan = planned(seven("model.gradient_checkpointing=true"), gpus=8, memory=80, context=16384)
    assert plan["training"] == {
        "zero_stage": 2, "offload": "none", "micro_batch_tokens": 65536, "num_processes": 8, "sequence_parallel": 1,
    }  # fmt: skip
    assert plan["rollout"] == {
        "max_prompt_tokens": 2048, "max_turn_tokens": 8192, "max_response_tokens": 14336, "engine": "vllm",
        "vllm": {
            "placement": "colocated", "tensor_parallel_size": 1, "replicas": 8, "gpu_memory_utilization": 0.7
        },
    }  # fmt: skip


def test_servers_beside_zero_3_are_dedicated_and_get_half_of_the_gpus() -> None:
    settings = seven("model.gradient_checkpointing=true", "training.zero_stage=3")
    plan = planned(settings, gpus=8, memory=80, context=4096)
    assert plan["training"]["num_processes"] == 4
    assert (plan["rollout"]["vllm"]["placement"], plan["rollout"]["vllm"]["replicas"]) == ("dedicated", 4)
    with pytest.raises(SettingsError, match=r"--gpus 1 is too few: .* servers get half of the GPUs unless"):
        plan_command(settings, critic=False, gpus=1, memory=80)


def test_a_shortage_names_the_largest_parts_and_the_settings_that_lower_them() -> None:
    with pytest.raises(SettingsError) as failure:
        plan_command(seven(), critic=False, gpus=8, memory=80, context=8192)
    first, *largest = str(failure.value).splitlines()
    assert first == (
        "Qwen/Qwen2.5-7B with trajectories of 8192 tokens on 8 GPUs of 80 GB: does not fit: a rank needs 89.4 GB at "
        "the backward, but may use 76.0 GB; its largest parts, and settings that lower them:"
    )
    assert largest[0].startswith("    activations, 51.9 GB: model.gradient_checkpointing, then")
    assert largest[1:] == [
        "    weights, 15.2 GB: training.zero_stage=3, then training.offload=all",
        "    optimizer, 7.6 GB: training.offload=optimizer, model.lora.rank, more GPUs",
        "    master copy, 3.8 GB: training.offload=optimizer, model.lora.rank, more GPUs",
    ]


def test_parts_that_no_setting_lowers_are_not_listed() -> None:
    settings = seven("model.gradient_checkpointing=true", "model.lora.rank=8", "training.zero_stage=3")
    with pytest.raises(SettingsError, match="does not fit") as failure:  # gathered weights and the context are large
        plan_command(settings, critic=False, gpus=8, memory=4, context=1024)
    _, *largest = str(failure.value).splitlines()
    assert [line.split(",")[0].strip() for line in largest] == ["weights", "backward", "activations", "gradient bucket"]


def test_a_server_needs_memory_for_its_longest_request() -> None:
    adapters = ["model.gradient_checkpointing=true", "model.lora.rank=8"]
    with pytest.raises(
        SettingsError,
        match=r"a server holds [\d,]+ tokens in 0\.1 of a GPU, .* up to 8,192: raise rollout\.vllm\.gpu_m",
    ):
        plan_command(
            seven(*adapters, "rollout.vllm.gpu_memory_utilization=0.1"), critic=False, gpus=8, memory=80, context=8192
        )
    with pytest.raises(SettingsError, match=r"takes 0\.95 of a GPU, but a rank's weights leave only 0\.\d+: lower"):
        plan_command(
            seven(*adapters, "rollout.vllm.gpu_memory_utilization=0.95"), critic=False, gpus=8, memory=80, context=8192
        )


def test_dedicated_servers_may_take_more_of_a_gpu_than_the_largest_colocated_share() -> None:
    dedicated = ["rollout.engine=vllm", "rollout.vllm.placement=dedicated", "rollout.vllm.gpu_memory_utilization=0.95"]
    plan = planned(seven("model.gradient_checkpointing=true", *dedicated), gpus=8, memory=80, context=8192)
    assert plan["rollout"]["vllm"]["placement"] == "dedicated"
    assert plan["rollout"]["vllm"]["gpu_memory_utilization"] == 0.95


@pytest.mark.parametrize(
    ("gpus", "setting", "message"),
    [
        (6, "training.sequence_parallel=4", r"training\.sequence_parallel=4 does not divide the 6 training ranks"),
        (
            3,
            "training.sequence_parallel=3",
            r"training\.sequence_parallel=3 does not divide the model's 28 query heads",
        ),
        (
            6,
            "rollout.vllm.tensor_parallel_size=3",
            r"rollout\.vllm\.tensor_parallel_size=3 does not divide .* 28 query",
        ),
    ],
)
def test_ranks_and_servers_that_cannot_be_formed_have_no_plan(gpus: int, setting: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_command(
            seven("model.gradient_checkpointing=true", setting), critic=False, gpus=gpus, memory=80, context=8192
        )


def test_the_overlay_loads(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_shape().config.save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    settings = load_settings(overrides=[f"model.path={model}"], command="plan")
    lines = plan_command(settings, gpus=4, memory=24, context=4096, write=tmp_path / "plan.yaml", critic=False)
    assert any("total, at the" in line for line in lines)
    loaded = load_settings(config_file=tmp_path / "plan.yaml", overrides=["data.train=[{path: builtin:arithmetic}]"])
    assert loaded.rollout.max_prompt_tokens + loaded.rollout.max_response_tokens == 4096
    assert (loaded.training.num_processes, loaded.rollout.vllm.placement) == (4, "colocated")
    assert loaded.training.micro_batch_tokens == 65536


@pytest.mark.parametrize(("memory", "overrides"), [(80, []), (48, ["model.checkpoint_offload=true"])])
def test_a_recipe_has_a_plan_that_loads(
    memory: int, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_DATA_DIR", str(tmp_path))
    settings = load_settings(config_file="simpletir_7b", overrides=overrides, command="plan")
    write = tmp_path / "plan.yaml"
    plan_command(settings, gpus=8, memory=memory, base=["simpletir_7b"], write=write, critic=False)
    loaded = load_settings(config_file=write)
    assert loaded.algorithm == settings.algorithm
    assert loaded.model == settings.model


@pytest.mark.parametrize(
    ("recipe", "overlays", "memory"),
    [
        *((recipe, [], 80) for recipe in shipped_configs() if recipe.startswith(("simpletir", "otb_paper"))),
        ("simpletir_7b", ["lora"], 48),
        ("otb_paper_7b", ["lora"], 48),
    ],
)
def test_the_dry_run_of_a_recipe_shows_that_eight_gpus_hold_it(
    recipe: str, overlays: list[str], memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_DATA_DIR", str(tmp_path))
    settings = load_settings(config_file=[recipe, *overlays])
    assert (settings.name or "").startswith("-".join([recipe, *overlays]))
    said = list(memory_estimate_lines(settings, read_model_shape(settings.model), critic=False))
    verdict = next(line for line in said if f"8 GPUs of {memory} GB" in line)
    assert f"on 8 GPUs of {memory} GB: fits," in verdict


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"gpus": 8}, "Qwen/Qwen2.5-7B", r"this machine has no GPU: set the number and memory"),
        ({"gpus": 8, "memory": 80}, None, r"no model to plan for: set --model"),
        ({"gpus": 8, "memory": 80}, "none.json", r"the configuration cannot be read; valid: a model directory"),
    ],
)
def test_bad_input_is_one_message_that_says_what_works(options: dict[str, int], path: str | None, message: str) -> None:
    assert not torch.cuda.is_available()
    settings = load_settings(overrides=[] if path is None else [f"model.path={path}"], command="plan")
    with pytest.raises(SettingsError, match=message) as failure:
        plan_command(settings, critic=False, **options)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("option", ["--gpus=0", "--memory=-5", "--context=3"])
def test_numbers_out_of_range_are_rejected(option: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--model=Qwen/Qwen2.5-7B", option])
    assert result.exit_code == 2
    assert f"Invalid value for '{option.partition('=')[0]}'" in result.output


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            ["model.rows=packed"],
            r"has layers of type linear_attention, .*: set model\.rows=auto or padded",
        ),
        (
            {},
            ["model.lora.rank=4", "model.lora.targets=[nothing]"],
            r"model\.lora\.targets: no linear layer of \w+ has a name that ends in nothing; valid: q_proj, .* or an",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_so_ends_the_dry_run_and_the_plan(
    config: dict[str, object], settings: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG | config))
    resolved = load_settings(overrides=[f"model.path={file}", *settings], command="plan")
    with pytest.raises(SettingsError, match=message):
        read_model_shape(resolved.model)
    with pytest.raises(SettingsError, match=message):
        plan_command(resolved, gpus=1, memory=80, critic=False)
    with pytest.raises(SettingsError, match=message):
        dry_run(resolved.model_copy(update={"data": load_settings().data}))


def test_an_unknown_model_comes_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.models.loading.read_model_config_if_available", lambda model: None)
    with pytest.raises(SettingsError, match=r"Qwen/Qwen2\.5-7b.*did you mean.*Qwen/Qwen2\.5-7B"):
        read_model_shape(ModelSettings(path="Qwen/Qwen2.5-7b"))
