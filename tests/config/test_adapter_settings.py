"""Settings of adapters that contradict one another."""

from __future__ import annotations

import pytest
from config.support import refused

from agentrl.config import load_settings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model.lora.alpha=8"], "model.lora.alpha=8 has no effect with model.lora.rank=0, which trains all weights"),
        (["model.lora.targets=[q_proj]"], 'model.lora.targets=["q_proj"] has no effect with model.lora.rank=0'),
        (
            ["rollout.engine=vllm", "rollout.vllm.lora=merged"],
            "rollout.vllm.lora=merged with model.lora.rank=0, which trains without an adapter",
        ),
        (["model.lora.rank=-1"], "model.lora.rank"),
        (
            ["model.lora.rank=4", "rollout.engine=vllm", "rollout.vllm.transfer=nccl"],
            "rollout.vllm.transfer=nccl with rollout.vllm.lora=adapter: servers load adapters from files",
        ),
    ],
)
def test_contradictions(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


def test_the_overlay_trains_adapters_on_the_tiny_policy() -> None:
    settings = load_settings("simpletir", "lora")
    assert (settings.model.path, settings.model.lora.rank, settings.model.lora.alpha) == (None, 16, 32)
    assert settings.model.dtype == "float32"  # of the preset beneath
    assert load_settings("simpletir", "lora", ["model.lora.rank=0"]).model.lora.rank == 0
