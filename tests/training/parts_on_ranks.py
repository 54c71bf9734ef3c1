"""Trains a small module, saves it and goes on, or goes on from what others saved: ``FOLDER/save`` or ``FOLDER/load``.

Run by test_parts.py in processes of its own, one or two ranks; rank 0 writes what came out.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.training.engine.collectives import gather_from_ranks
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings
from agentrl.weights.sources import full_parameters

OTHER = {"0": "2", "2": "0", "1": "3", "3": "1", "2 bfloat16": "3 bfloat16", "3 bfloat16": "2 bfloat16"}
OTHER |= {"2 offload": "3 offload", "3 offload": "2 offload"}
"""ZeRO stages, each with the other one that goes on from it. At 3 all parameters are small enough to stay whole."""
UPDATES = 3
Results = dict[str, Any]


class Small(nn.Module):
    """Shapes that no number of ranks divides, and a frozen parameter."""

    def __init__(self, dtype: torch.dtype, width: int = 5) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for name, shape in {"first": (7, width), "bias": (7,), "second": (3, 7), "scale": (1,)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=draw).to(dtype)))
        self.frozen = nn.Parameter(torch.randn(3, generator=draw).to(dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x.to(self.first.dtype) @ self.first.T + self.bias)
        return ((hidden @ self.second.T * self.scale + self.frozen) ** 2).float().mean()


def make(kind: str, *, width: int = 5) -> TrainingEngine[Small]:
    stage, bfloat16 = kind[0], kind.endswith("bfloat16")
    offload = "none" if not kind.endswith("offload") else "all" if stage == "3" else "optimizer"
    return TrainingEngine(
        Small(torch.bfloat16 if bfloat16 else torch.float32, width),
        optimizer=OptimizerSettings(learning_rate=0.05, schedule="cosine", warmup_steps=2),
        training=TrainingSettings(
            zero_stage=int(stage), persistence_threshold=0 if " " in kind else 10**6, offload=offload
        ),
        bfloat16=bfloat16,
        updates=2 * UPDATES,
    )


def train(engine: TrainingEngine[Small], first: int) -> list[float]:
    """Updates on two rows each, dealt to the ranks; returns norms, learning rates and what a rank draws at random."""
    norms = []
    for update in range(first, first + UPDATES):
        rows = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(update))
        for row in rows[engine.rank :: engine.world_size]:
            engine.backward(engine(row) / 2 * engine.world_size)
        norms += [engine.step(), engine.learning_rate]
    return norms


def state(engine: TrainingEngine[Small]) -> dict[str, Tensor]:
    """Weights of the module, and all that checkpoints hold, put together again."""
    whole = {name: value.clone() for name, value in full_parameters(engine.module)}
    shapes = engine.copy_rank_state().metadata.shapes
    for part in gather_from_ranks(engine.copy_rank_state()):
        for key, value in part.tensors.items():
            kind, name = key.split("/")
            if kind != "random":
                flat = whole.setdefault(key, torch.full(shapes[name], torch.nan)).view(-1)
                start = part.metadata.starts[name]
                flat[start : start + len(value)] = value
    return whole


def result(engine: TrainingEngine[Small], folder: Path) -> Results:
    loaded = {"state": state(engine), "random": gather_from_ranks(torch.rand(1).item())}
    return {**loaded, "norms": train(engine, UPDATES), "end": state(engine)}


def save(folder: Path, kind: str) -> Results:
    engine = make(kind)
    torch.manual_seed(7 + engine.rank)
    train(engine, 0)
    engine.copy_rank_state().write(folder / f"{engine.world_size} {kind}" / f"part-{engine.rank:05d}.safetensors")
    return result(engine, folder)


def load(folder: Path, saved: str, kind: str) -> Results:
    torch.manual_seed(99)
    engine = make(kind)
    engine.load_checkpoint(folder / saved)
    return result(engine, folder)


def main() -> None:
    rank, world = start_distributed(deadline=600.0)
    torch.set_num_threads(1)
    folder, phase = Path(sys.argv[1]).parent, Path(sys.argv[1]).name
    results: dict[Any, Results] = {}
    for kind in OTHER:
        if phase == "save":
            results[f"{world} {kind}"] = save(folder, kind)
            continue
        for place in sorted(folder.glob("[12] *")):
            if place.name[2:] in (kind, OTHER[kind]):
                results[f"{place.name} -> {world} {kind}"] = load(folder, place.name, kind)
    if rank == 0:
        torch.save(results, folder / f"{phase}-{world}.pt")
    # A rank that is gone while the other still talks to it can abort the other's end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
