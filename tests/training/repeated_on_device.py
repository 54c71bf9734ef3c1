"""Deterministic mode on a device: ``cpu`` or ``cuda``. Prints what two equal computations gave different bits for.

Run by test_determinism.py in a process of its own, because cuBLAS reads its workspace once. An operation without a
deterministic form raises.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages
from agentrl.kernels import full_kl, token_statistics
from agentrl.kernels.attention import AttentionPass, attend, pack_row
from agentrl.training.engine.determinism import set_determinism
from agentrl.training.settings import TrainingSettings

GROUPS, SIZE, TOKENS = 6, 4, 40


def advantages(estimator: str) -> list[Tensor]:
    """Of branched and plain rollouts of several turns."""
    rows = GROUPS * SIZE
    draw = torch.Generator(torch.get_default_device()).manual_seed(3)
    mask = torch.rand(rows, TOKENS, generator=draw) < 0.7
    mask[:, 0] = True

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw) * 0.5 + 0.25

    last = torch.where(mask, torch.arange(TOKENS), -1).amax(-1, keepdim=True)
    branches = torch.arange(rows) % 2
    inputs = AdvantageInputs(
        rewards=torch.zeros(rows, TOKENS).scatter(1, last, noise(rows, 1)),
        response_mask=mask,
        groups=torch.arange(rows) // SIZE,
        log_probs=-noise(rows, TOKENS),
        sum_pi_squared=noise(rows, TOKENS),
        token_energy=noise(rows, TOKENS),
        hidden_norm_squared=noise(rows, TOKENS),
        importance_weights=noise(rows, TOKENS),
        trajectory_energy=noise(rows),
        values=noise(rows, TOKENS),
        greedy_returns=noise(rows),
        samples=torch.arange(rows) % SIZE // 2,
        branches=branches,
        parents=branches - 1,
        forks=branches,
    )
    return list(vars(compute_advantages(estimator, inputs)).values())


def statistics() -> list[Tensor]:
    """Of a head with duplicate targets, and its gradients."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(4)
    hidden = torch.randn(64, 16, generator=draw).requires_grad_()
    weight = torch.randn(96, 16, generator=draw).requires_grad_()
    made = token_statistics(hidden, weight, torch.arange(64) % 5)
    divergence = full_kl(hidden, weight, hidden.detach() * 1.1, weight.detach())
    gradients = torch.autograd.grad((made.log_probs + made.entropy + divergence).sum(), (hidden, weight))
    return [made.log_probs, made.entropy, made.energy, divergence, *gradients]


def attention() -> list[Tensor]:
    """Of documents of several lengths, two of which share a prompt, and its gradients."""
    draw = torch.Generator(torch.get_default_device()).manual_seed(5)
    host = {"dtype": torch.int64, "device": "cpu"}
    prompts = [torch.full((7,), 1, **host), torch.full((7,), 1, **host), torch.full((3,), 2, **host)]  # type: ignore[call-overload]
    documents = [(prompt, torch.arange(9 + 5 * number, device="cpu")) for number, prompt in enumerate(prompts)]
    row = pack_row(documents).to(torch.get_default_device())
    length = row.input_ids.shape[1]
    states = [torch.randn(1, heads, length, 8, generator=draw).requires_grad_() for heads in (4, 2, 2)]
    found = attend(AttentionPass(row=row, backend="sdpa"), *states)
    return [found, *torch.autograd.grad(found.square().sum(), states)]


def main() -> None:
    set_determinism(TrainingSettings(deterministic=True))
    work: dict[str, Callable[[], list[Tensor]]] = {
        "statistics": statistics,
        "attention": attention,
        **{name: lambda name=name: advantages(name) for name in ESTIMATORS.names()},  # type: ignore[misc]
    }
    with torch.device(sys.argv[1]):
        for name, compute in work.items():
            pairs = zip(compute(), compute(), strict=True)
            if not all(torch.equal(one, other) and bool(one.isfinite().all()) for one, other in pairs):
                print(name)


if __name__ == "__main__":
    main()
