"""Collects the statistics of each model token while a step trains on it, for the file of its step."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from agentrl.telemetry.tokens import TrajectoryTokens
from agentrl.training.step.rows import LossRows


class TokenRecorder:
    """The rows of one rank in one step, in the order in which they were trained. Nothing is computed again."""

    def __init__(self, *, hidden_norms: bool = False) -> None:
        """``hidden_norms``: the estimator's energies contain the norms of the hidden states."""
        self._hidden_norms = hidden_norms
        self.rows: list[TrajectoryTokens] = []

    def add(self, rows: LossRows, *, factors: Tensor, update: int, update_log_probs: Tensor | None) -> None:
        """Copy what is known of a micro-batch's model tokens to the CPU.

        ``factors`` [B] weigh the tokens in the loss. ``update_log_probs`` [B, T] are those of the forward that is
        back-propagated, where an update of this step has changed the policy since it was scored.
        """
        mask = rows.response_mask
        ends = mask.sum(-1).cumsum(-1).tolist()
        columns = {
            name: values[mask].cpu().numpy()
            for name, values in self._columns(rows, update_log_probs).items()
            if values is not None
        }
        columns["entropy"] = columns["entropy"].astype(np.float16)
        numbers = {name: values.tolist() for name, values in _numbers(rows, factors).items() if values is not None}
        for place, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            own: dict[str, object] = {name: values[place] for name, values in numbers.items()}
            own |= {name: values[start:end] for name, values in columns.items()}
            self.rows.append(TrajectoryTokens(update=update, **own))  # type: ignore[arg-type]

    def _columns(self, rows: LossRows, update_log_probs: Tensor | None) -> dict[str, Tensor | None]:
        """Values [B, T] by the field that keeps them."""
        statistics, estimate = rows.statistics, rows.estimated
        return {
            "log_probs": statistics.log_probs,
            "entropy": statistics.entropy,
            "energy": statistics.energy,
            "rewards": rows.rewards,
            "returns": estimate.returns,
            "baselines": estimate.baselines,
            "advantages": estimate.advantages,
            "loss_mask": rows.loss_mask,
            "weights": rows.weights,
            "update_log_probs": update_log_probs,
            "hidden_norm_squared": statistics.hidden_norm_squared if self._hidden_norms else None,
            "reference_log_probs": rows.reference_log_probs,
            "values": rows.values,
        }


def _numbers(rows: LossRows, factors: Tensor) -> dict[str, Tensor | None]:
    """Values [B] by the field that keeps them."""
    batch, after = rows.batch, rows.final_values
    return {
        "group": batch.groups,
        "sample": batch.samples,
        "branch": batch.branches,
        "parent": batch.parents,
        "fork": batch.forks,
        "share": batch.weights,
        "loss_weight": factors,
        "bootstrap_value": None if after is None else torch.where(batch.truncated, after, 0.0),
        "greedy_return": batch.greedy_returns,
        "trajectory_energy": rows.trajectory_energy,
    }
