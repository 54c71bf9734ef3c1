"""What is known of trajectories before their loss, as tensors that can be joined, sent to other ranks and cut apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from agentrl.training.deepspeed_engine import TrainingEngine
from agentrl.trajectory import Batch

_Rows = TypeVar("_Rows", bound="Rows")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Tensors with one row a trajectory: [B, T] or [B]; None where a setting does not ask for one."""

    @property
    def count(self) -> int:
        """How many rows there are."""
        first: Tensor = getattr(self, fields(self)[0].name)
        return len(first)

    def map(self: _Rows, change: Callable[[Tensor], Tensor]) -> _Rows:
        """The same record with every tensor changed."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return type(self)(**{name: None if value is None else change(value) for name, value in values.items()})

    def cut(self: _Rows, start: int, rows: int, steps: int) -> _Rows:
        """``rows`` rows from ``start`` on, with ``steps`` response positions."""
        return self.map(lambda value: value[start : start + rows, :steps] if value.dim() > 1 else value[start:][:rows])

    def take(self: _Rows, rows: Tensor) -> _Rows:
        """The rows that an index or a mask [B] names."""
        return self.map(lambda value: value[rows])

    @classmethod
    def joined(cls: type[_Rows], parts: Sequence[_Rows]) -> _Rows:
        """All rows below one another, padded with zeros to the longest; a tensor is in all parts or in none."""
        columns = {item.name: [getattr(part, item.name) for part in parts] for item in fields(cls)}
        return cls(**{name: None if values[0] is None else _stacked(values) for name, values in columns.items()})


@dataclass(frozen=True, kw_only=True)
class Evidence(Rows):
    """Everything that rewards, corrections and advantages are made of; detached."""

    rewards: Tensor  # [B, T] the environment's
    response_mask: Tensor  # [B, T] bool
    loss_mask: Tensor  # [B, T] bool, what the filters left
    groups: Tensor  # [B] int64
    samples: Tensor  # [B] int64
    updates: Tensor  # [B] int64, the number of the step's update that trains the row
    truncated: Tensor  # [B] bool
    rollout_log_probs: Tensor  # [B, T] the engine's
    log_probs: Tensor  # [B, T] those of the weights before the step's updates
    sum_pi_squared: Tensor  # [B, T]
    energy: Tensor  # [B, T]
    hidden_norm_squared: Tensor  # [B, T]
    reference_log_probs: Tensor | None = None  # [B, T]
    full_kl: Tensor | None = None  # [B, T] the exact divergence from the reference
    values: Tensor | None = None  # [B, T] the critic's, before each token
    final_values: Tensor | None = None  # [B] the critic's, after the last token
    greedy_returns: Tensor | None = None  # [B]
    trajectory_energy: Tensor | None = None  # [B]

    @classmethod
    def of(cls, batch: Batch, statistics: dict[str, Tensor], *, update: int, **more: Tensor | None) -> Evidence:
        """From a batch, the statistics of its forward, and the number of the update that it belongs to."""
        return cls(
            rewards=batch.rewards,
            response_mask=batch.response_mask,
            loss_mask=batch.loss_mask,
            groups=batch.groups,
            samples=batch.samples,
            updates=torch.full_like(batch.samples, update),
            truncated=batch.truncated,
            rollout_log_probs=batch.rollout_log_probs,
            log_probs=statistics["log_probs"],
            sum_pi_squared=statistics["sum_pi_squared"],
            energy=statistics["energy"],
            hidden_norm_squared=statistics["hidden_norm_squared"],
            **more,
        )

    @property
    def keys(self) -> Tensor:
        """A number for each trajectory [B] that no other of the step has."""
        return (self.groups << 24) + self.samples


def gathered_over_ranks(own: Sequence[_Rows], engine: TrainingEngine[Any]) -> tuple[_Rows, int]:
    """The rows of all ranks, joined, and where the own ones begin. Collective; some rank must have rows."""
    shared: list[list[_Rows]] = [list(own)]
    if engine.world_size > 1:
        shared *= engine.world_size
        torch.distributed.all_gather_object(shared, [part.map(Tensor.cpu) for part in own])
    everyone = [part for parts in shared for part in parts]
    start = sum(part.count for parts in shared[: engine.rank] for part in parts)
    whole = type(everyone[0]).joined(everyone)
    return whole.map(lambda value: value.to(engine.device)), start


def _stacked(values: Sequence[Tensor]) -> Tensor:
    if values[0].dim() == 1:
        return torch.cat(list(values))
    steps = max(value.shape[1] for value in values)
    return torch.cat([torch.nn.functional.pad(value, (0, steps - value.shape[1])) for value in values])
