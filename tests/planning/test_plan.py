"""The plan that is chosen, its overlay, and what is said where none fits."""

from __future__ import annotations

import json
import operator
from pathlib import Path

import pytest
import torch
from planning.support import target, tiny_shape

from agentrl.config import load_settings, shipped_configs
from agentrl.errors import SettingsError
from agentrl.models.settings import ModelSettings
from agentrl.planning.memory import ModelShape, read_shape
from agentrl.planning.plan import (
    dry_run_lines,
    find_plan,
    find_plan_or_raise,
    plan_command,
)
from agentrl.training.run.preflight import dry_run

CONFIG: dict[str, object] = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "vocab_size": 99}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture(scope="module")
def seven() -> ModelShape:
    return read_shape(ModelSettings(path="Qwen/Qwen2.5-7B"))


def test_the_cheapest_settings_that_fit_are_chosen(seven: ModelShape) -> None:
    large = find_plan(seven, target(8, 80, 4096))
    small = find_plan(seven, target(8, 48, 16384))
    tiny = find_plan(seven, target(8, 32, lora_ranks=(0, 32)))
    assert large is not None
    assert small is not None
    assert tiny is not None
    assert (large.setup.checkpointing, large.setup.offload, large.colocated) == (False, "none", True)
    assert (small.setup.checkpointing, small.setup.offload, small.colocated) == (True, "none", True)
    assert tiny.setup.lora_rank == 0  # adapters train something else: the last resort
    assert tiny.setup.offload == "optimizer"
    for plan, memory in ((large, 80), (small, 48), (tiny, 32)):
        assert plan.rank.total <= 0.95 * memory * 10**9
        assert plan.setup.tokens >= 4096
        assert plan.server[1] >= 4096


def test_ranks_share_rows_where_a_context_does_not_fit_one(seven: ModelShape) -> None:
    short, long = find_plan(seven, target(8, 80, 65536)), find_plan(seven, target(8, 80, 131072))
    assert short is not None
    assert long is not None
    assert (short.setup.sequence_parallel, long.setup.sequence_parallel) == (1, 2)
    assert long.values()["training.sequence_parallel"] == 2
    odd = tiny_shape(num_attention_heads=3, num_key_value_heads=3, hidden_size=48)  # no number of ranks divides them
    plan = find_plan(odd, target(8, 24, 4096))
    assert plan is not None
    assert plan.setup.sequence_parallel == 1


def test_a_plan_that_cannot_fit_says_what_would(seven: ModelShape) -> None:
    with pytest.raises(SettingsError) as failure:
        find_plan_or_raise(seven, target(1, 40, 8192))
    said = str(failure.value)
    assert "no settings train Qwen/Qwen2.5-7B (7.62B parameters) with 8192 tokens on 1 GPU of 40 GB" in said
    assert "would fit: 4 GPUs with this memory, or 80 GB per GPU" in said


def test_the_overlay_holds_settings_that_exist_and_loads(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_shape().config.save_pretrained(model)
    (model / "tokenizer.json").write_text("{}")
    settings = load_settings(overrides=[f"model.path={model}"], command="plan")
    lines = plan_command(settings, gpus=4, memory=24, context=4096, write=tmp_path / "plan.yaml", critic=False)
    assert any("total, at the" in line for line in lines)
    loaded = load_settings(config_file=tmp_path / "plan.yaml", overrides=["data.train=[{path: builtin:arithmetic}]"])
    assert loaded.rollout.max_prompt_tokens + loaded.rollout.max_response_tokens == 4096
    assert (loaded.training.num_processes, loaded.rollout.vllm.placement) == (4, "colocated")
    found = find_plan(tiny_shape(), target(4, 24, 4096))
    assert found is not None
    assert {key: operator.attrgetter(key)(loaded) for key in found.values()} == found.values()


@pytest.mark.parametrize("memory", [80, 48])
def test_a_recipe_has_a_plan_that_loads(memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_DATA_DIR", str(tmp_path))
    settings = load_settings(config_file="simpletir_7b", command="plan")
    write = tmp_path / "plan.yaml"
    plan_command(settings, gpus=8, memory=memory, base=["simpletir_7b"], write=write, critic=False)
    loaded = load_settings(config_file=tmp_path / "plan.yaml")
    assert loaded.algorithm == settings.algorithm
    assert loaded.model.gradient_checkpointing


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
    said = list(dry_run_lines(settings, read_shape(settings.model), critic=False))
    verdict = next(line for line in said if f"8 GPUs of {memory} GB" in line)
    assert f"on 8 GPUs of {memory} GB: fits," in verdict


@pytest.mark.parametrize(
    ("request_", "path", "message"),
    [
        ({"gpus": 8, "memory": -5}, "Qwen/Qwen2.5-7B", r"--memory must be between 0 and 10000 GB for each GPU"),
        ({"gpus": 0, "memory": 80}, "Qwen/Qwen2.5-7B", r"--gpus must be at least 1, for example 8; got 0"),
        ({"gpus": 8}, "Qwen/Qwen2.5-7B", r"this machine has no GPU: set the number and memory"),
        (
            {"gpus": 8, "memory": 80, "context": 3},
            "Qwen/Qwen2.5-7B",
            r"--context 3 is too short .*: set at least 64 tokens",
        ),
        ({"gpus": 8, "memory": 80}, None, r"no model to plan for: set --model"),
        ({"gpus": 8, "memory": 80}, "none.json", r"the configuration cannot be read; valid: a model directory"),
    ],
)
def test_bad_input_is_one_message_that_says_what_works(
    request_: dict[str, int], path: str | None, message: str
) -> None:
    assert not torch.cuda.is_available()
    settings = load_settings(overrides=[] if path is None else [f"model.path={path}"], command="plan")
    with pytest.raises(SettingsError, match=message) as failure:
        plan_command(settings, critic=False, **request_)
    assert "\n" not in str(failure.value)


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
        read_shape(resolved.model)
    with pytest.raises(SettingsError, match=message):
        plan_command(resolved, gpus=1, memory=80, critic=False)
    with pytest.raises(SettingsError, match=message):
        dry_run(resolved.model_copy(update={"data": load_settings().data}))


def test_an_unknown_model_comes_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.planning.memory.read_config", lambda model: None)
    with pytest.raises(SettingsError, match=r"Qwen/Qwen2\.5-7b.*did you mean.*Qwen/Qwen2\.5-7B"):
        read_shape(ModelSettings(path="Qwen/Qwen2.5-7b"))
