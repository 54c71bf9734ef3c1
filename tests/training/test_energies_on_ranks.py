"""Exact energies under every ZeRO stage, on one rank and on two: right, and without a trace in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import finish, start_ranks

from .energies_on_ranks import CASES, batch, make_model

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("energies_on_ranks.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What one rank and two ranks found, run side by side."""
    folder = tmp_path_factory.mktemp("energies")
    started = {ranks: start_ranks(SCRIPT, [folder / f"{ranks}.pt"] * ranks, gpus=True) for ranks in (1, 2)}
    for processes in started.values():
        finish(processes, seconds=600)
    return {ranks: torch.load(folder / f"{ranks}.pt", map_location="cpu") for ranks in (1, 2)}


def one_by_one(*, tied: bool = True, kind: str = "qwen3") -> torch.Tensor:
    """Energies [5] of the untrained model by a backward pass a row."""
    model = make_model(tied=tied, kind=kind)
    ids, lengths, mask = batch()
    energies = []
    for row, length in enumerate(lengths.tolist()):
        log_p = torch.log_softmax(model(input_ids=ids[row : row + 1]).logits[0] / 0.8, dim=-1)
        places = mask[row].nonzero().squeeze(-1)
        total = log_p[length + places - 1, ids[row, length + places]].sum()
        gradients = torch.autograd.grad(total, list(model.parameters()))
        energies.append(sum(item.double().square().sum() for item in gradients))
    return torch.stack(energies).float()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_energies_are_exact_and_leave_training_alone(results: dict[int, dict[str, Any]], name: str, ranks: int) -> None:
    found = results[ranks][name]
    case = {key: CASES[name][key] for key in ("tied", "kind") if key in CASES[name]}
    torch.testing.assert_close(found["energies"][0], one_by_one(**case), rtol=1e-4, atol=0.0)  # type: ignore[arg-type]
    assert not torch.allclose(found["energies"][1], found["energies"][0], rtol=1e-2)  # the step moved the policy
    torch.testing.assert_close(found["asked"], found["not_asked"], rtol=0.0, atol=0.0)
    torch.testing.assert_close(found["energies"], results[1][name]["energies"], rtol=1e-3, atol=0.0)
