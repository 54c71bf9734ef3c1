"""The counting environment with a loss that runs out of memory on the last rank."""

from __future__ import annotations

import os

import torch
from counting_env import CountingEnv
from torch import Tensor

from agentrl.algorithms import LossInputs, NoOptions, register_loss

_seen: set[float] = set()  # micro-batches


def reinforce(inputs: LossInputs, fit: int) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE's loss. On the last rank, only the first micro-batch of a process may exceed ``fit`` trajectories."""
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)
    if last and len(inputs.mask) > fit:
        _seen.add(float(inputs.log_probs.detach().sum()))
        if len(_seen) > 1:
            torch.empty(1 << 60, dtype=torch.uint8)  # the allocator fails
    return -inputs.advantages * inputs.log_probs, {}


@register_loss("short")
def short(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    return reinforce(inputs, 4)


@register_loss("shortest")
def shortest(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    return reinforce(inputs, 0)


class ShortEnv(CountingEnv):
    """As it is."""
