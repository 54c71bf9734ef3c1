"""Sends rows to the rank that receives their whole group, and the results back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed
from torch import Tensor

from agentrl.training.engine.deepspeed_engine import swap_between_ranks

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Record = TypeVar("_Record", bound="DataclassInstance")


class Exchange:
    """Sends rows of micro-batches, without their padding, to the ranks ``homes`` and results back. Collective."""

    def __init__(
        self, masks: Sequence[Tensor], homes: Tensor, *, group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        """``masks`` [b, T] bool of each micro-batch, perhaps without rows; ``homes`` [B] a rank for each of their rows.

        Positions after a row's last True do not travel. Ranks are those of the ``group``; None: all.
        """
        ranks = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
        self._group = group
        self._shapes = [mask.shape for mask in masks]
        lengths = torch.cat([_lengths(mask) for mask in masks])
        self._order = homes.argsort(stable=True)
        self._lengths = lengths[self._order]
        rows = torch.bincount(homes, minlength=ranks)
        tokens = torch.zeros_like(rows).index_add_(0, homes, lengths)
        own = torch.stack([rows, tokens], dim=-1)
        theirs = self._swap(own, [1] * ranks, [1] * ranks)
        (self._rows_out, self._tokens_out), (self._rows_in, self._tokens_in) = own.t().tolist(), theirs.t().tolist()
        self._their_lengths = self._swap(self._lengths, self._rows_out, self._rows_in)

    def there(self, parts: Sequence[_Record]) -> _Record:
        """As :meth:`column` for every field of a dataclass of tensors; a field is None on all ranks or on none."""
        given = [item.name for item in fields(parts[0]) if getattr(parts[0], item.name) is not None]
        return replace(parts[0], **{name: self.column([getattr(part, name) for part in parts]) for name in given})

    def column(self, parts: Sequence[Tensor]) -> Tensor:
        """From a tensor [b, T] or [b] of each micro-batch: the rows at home here, [R, longest] or [R]."""
        if parts[0].dim() == 1:
            return self._swap(torch.cat(list(parts))[self._order], self._rows_out, self._rows_in)
        flat = _flat(_stacked(parts)[self._order], self._lengths)
        return _padded(self._swap(flat, self._tokens_out, self._tokens_in), self._their_lengths)

    def back(self, values: Tensor) -> list[Tensor]:
        """From results for the rows at home here [R, longest]: those of this rank's own micro-batches, each [b, T]."""
        flat = self._swap(_flat(values, self._their_lengths), self._tokens_in, self._tokens_out)
        sent = _padded(flat, self._lengths)
        own = torch.empty_like(sent)
        own[self._order] = sent
        parts = own.split([rows for rows, _ in self._shapes])
        # Padding copies: a view would keep every micro-batch's memory alive.
        return [_widened(part, width) for part, (_, width) in zip(parts, self._shapes, strict=True)]

    def _swap(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return swap_between_ranks(values, sent, received, self._group)


def _lengths(mask: Tensor) -> Tensor:
    """Positions up to the last True of each row [b, T], [b]."""
    places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask, places, 0).amax(-1)


def _inside(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def _flat(values: Tensor, lengths: Tensor) -> Tensor:
    """[B, T] -> the positions inside, row after row."""
    return values[_inside(lengths, values.shape[1])]


def _padded(flat: Tensor, lengths: Tensor) -> Tensor:
    """The inverse of :func:`_flat`, as wide as the longest row, padded with zeros."""
    width = max(1, int(lengths.max())) if lengths.numel() else 1
    padded = flat.new_zeros(len(lengths), width)
    padded[_inside(lengths, width)] = flat
    return padded


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """Below one another, as wide as the widest."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([_widened(part, width) for part in parts])


def _widened(values: Tensor, width: int) -> Tensor:
    """[b, any] -> [b, width], a new tensor; only padding is cut off."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
