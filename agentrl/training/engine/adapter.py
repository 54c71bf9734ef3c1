"""What a run with adapters (``model.lora``) needs beside its engine: its optimizer, its record in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from torch import nn

from agentrl.errors import SettingsError
from agentrl.models.settings import LoRASettings
from agentrl.training.settings import OptimizerSettings


class AdapterRecord(TypedDict):
    """The adapters in a checkpoint, and the model under them, which is not in it."""

    rank: int
    alpha: int
    targets: list[str]
    base: str


def adapter_record(settings: LoRASettings, *, base: str) -> AdapterRecord | None:
    """The record of a run's adapters on the model ``base``; None without adapters."""
    if settings.rank == 0:
        return None
    return {"rank": settings.rank, "alpha": settings.alpha, "targets": sorted(settings.targets), "base": base}


def check_adapter(checkpoint: Path, written: AdapterRecord | None, now: AdapterRecord | None) -> None:
    """Raise SettingsError unless a checkpoint holds the very adapters of the run, or both have none."""
    if written == now:
        return
    if written is None:
        raise SettingsError(
            f"the checkpoint {checkpoint} holds all weights of a model and no adapter: resume with model.lora.rank=0, "
            "or start a new run (another name=...) with model.path=POLICY"
        )
    made = f"the checkpoint {checkpoint} holds adapters with model.lora.rank={written['rank']}"
    if now is None:
        raise SettingsError(f"{made} and no model: resume with model.lora.rank={written['rank']}")
    if written["base"] != now["base"]:
        raise SettingsError(f"{made} on the model {written['base']}, which would now be {now['base']}: set model.path")
    said = f"model.lora.alpha={written['alpha']} and model.lora.targets=[{', '.join(written['targets'])}]"
    raise SettingsError(f"{made}, {said}; resume with the same")


def policy_optimizer(settings: OptimizerSettings, lora: LoRASettings) -> OptimizerSettings:
    """The optimizer's settings for the policy: with adapters at their own learning rate."""
    if lora.rank == 0:
        return settings
    return settings.model_copy(update={"learning_rate": settings.learning_rate * lora.learning_rate_factor})


def describe_size(module: nn.Module) -> str:
    """The number of a module's parameters, and of those that are trained where they differ."""
    sizes = [(getattr(item, "ds_numel", item.numel()), item.requires_grad) for item in module.parameters()]
    total = sum(size for size, _ in sizes)
    trained = sum(size for size, learns in sizes if learns)
    if trained == total:
        return f"{total / 1e6:.2f}M parameters"
    return f"adapters of {trained / 1e6:.2f}M parameters on {(total - trained) / 1e6:.2f}M frozen ones"
