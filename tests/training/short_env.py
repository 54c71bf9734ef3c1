"""The counting environment with a loss for which the memory of the second rank is short."""

from __future__ import annotations

import os

import torch
from counting_env import CountingEnv
from torch import Tensor

from agentrl.algorithms import LossInputs, NoOptions, register_loss

ROWS = 4
"""Trajectories that fit a micro-batch."""


@register_loss("short")
def short(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE's loss."""
    if os.environ.get("RANK") == "1" and len(inputs.mask) > ROWS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")
    return -inputs.advantages * inputs.log_probs, {}


class ShortEnv(CountingEnv):
    """As it is."""
