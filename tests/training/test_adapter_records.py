"""Checkpoints of other adapters than the run's: one message each."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.errors import SettingsError
from agentrl.models.settings import LoRASettings
from agentrl.training.engine.checkpoint import adapter_record, check_adapter_matches
from agentrl.training.engine.deepspeed_engine import policy_optimizer_settings
from agentrl.training.settings import OptimizerSettings

WRITTEN = adapter_record(LoRASettings(rank=8, targets=["v_proj", "q_proj"]), base="base")


@pytest.mark.parametrize(
    ("written", "now", "said"),
    [
        (None, WRITTEN, "contains a full model without adapters: set model.lora.rank=0 to resume"),
        (WRITTEN, None, "contains adapters with model.lora.rank=8 and no full model: set model.lora.rank=8 to resume"),
        (WRITTEN, adapter_record(LoRASettings(rank=4), base="base"), "model.lora.rank=8, model.lora.alpha=32 and mod"),
        (
            WRITTEN,
            adapter_record(LoRASettings(rank=8), base="base"),
            r"targets=\[q_proj, v_proj\]: set the same values to resume",
        ),
        (WRITTEN, adapter_record(LoRASettings(rank=8), base="other"), "on the model base, but model.path is now other"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(written: object, now: object, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        check_adapter_matches(Path("step-1"), written, now)  # type: ignore[arg-type]


def test_the_same_adapters_are_taken() -> None:
    check_adapter_matches(
        Path("step-1"), WRITTEN, adapter_record(LoRASettings(rank=8, targets=["q_proj", "v_proj"]), base="base")
    )
    check_adapter_matches(Path("step-1"), None, adapter_record(LoRASettings(), base="base"))


def test_adapters_learn_at_their_own_rate() -> None:
    settings = OptimizerSettings(learning_rate=1e-6)
    assert policy_optimizer_settings(settings, LoRASettings()) is settings
    assert policy_optimizer_settings(settings, LoRASettings(rank=8)).learning_rate == pytest.approx(1e-5)
