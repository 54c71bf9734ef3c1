"""Steps on recorded trajectories whose rows several ranks share, or on one rank whole: ``OUTPUT``.

Run by test_sequence_parallel.py in processes of its own; rank 0 writes what came out.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from agentrl.training.engine.deepspeed_engine import start_distributed

NAMES = (
    "token_mean",
    "seq_mean_token_sum",
    "checkpointed_tied",
    "zero3",
    "whitened_zero3",
    "two_updates",
    "kl_full",
    "kl_full_two_updates",
    "normalized_weights",
    "masks",
    "clip_cov",
    "eob",
    "critic",
    "critic_zero3",
)
ON_FOUR = ("seq_mean_token_sum", "clip_cov", "critic_zero3")
"""Those for which four ranks share a row, and two pairs have rows of their own."""


def main() -> None:
    from step_on_record import CASES, SINGLE_ROWS, WHOLE_GROUPS, step  # beside this script

    torch.set_num_threads(1)
    rank, world = start_distributed(deadline=600.0)
    results: dict[str, Any] = {}
    for name in ON_FOUR if world == 4 else NAMES:
        case = CASES[name]
        if world == 1:
            results[name] = step(replace(case, zero_stage=0))
            continue
        for size in (2, 4)[: world // 2]:
            shared = replace(case, sequence_parallel=size)
            results[f"{name}/{size}/groups"] = step(replace(shared, budget=WHOLE_GROUPS))
            if not case.settings().algorithm.head_exact_every:
                results[f"{name}/{size}/rows"] = step(replace(shared, budget=SINGLE_ROWS))
    if world == 2:
        results["one group/2"] = step(replace(CASES["zero3"], sequence_parallel=2, budget=WHOLE_GROUPS), groups=1)
    if world == 1:
        results["one group"] = step(CASES["zero3"], groups=1)
    if rank == 0:
        torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
