"""Communication between ranks: calls on all ranks, row exchange, metric reduction, and a check of the run directory."""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.distributed
from torch import Tensor, nn

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.files import os_errors_as_world_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from agentrl.training.engine.deepspeed_engine import TrainingEngine

_Record = TypeVar("_Record", bound="DataclassInstance")
_Value = TypeVar("_Value")


def gather_from_ranks(value: _Value) -> list[_Value]:
    """Return every rank's ``value``, in the order of ranks. Collective. Values are pickled and should be small."""
    values = [value] * torch.distributed.get_world_size()
    if len(values) > 1:
        torch.distributed.all_gather_object(values, value)
    return values


def run_on_every_rank(work: Callable[[], _Value]) -> list[_Value]:
    """Call ``work`` on this rank and return every rank's value, in the order of ranks. Collective.

    A WorldError on one rank is raised on all ranks, so that no rank waits in the next collective.
    """
    value: _Value | None = None
    problem: str | None = None
    try:
        value = work()
    except WorldError as error:
        problem = str(error)
    outcomes = gather_from_ranks((value, problem))
    problems = [text for _, text in outcomes if text is not None]
    if problems:
        raise WorldError(problems[0])
    return [cast(_Value, found) for found, _ in outcomes]


def run_on_rank_zero(work: Callable[[], _Value]) -> _Value:
    """Call ``work`` on rank 0 only, and return its value on every rank.

    Handles errors as :func:`run_on_every_rank` does. Collective.

    ``work`` must be fast, because the other ranks wait in a collective.
    """
    found = run_on_every_rank(lambda: work() if torch.distributed.get_rank() == 0 else None)[0]
    return cast(_Value, found)


def all_to_all(
    values: Tensor, sent: list[int], received: list[int], group: torch.distributed.ProcessGroup | None = None
) -> Tensor:
    """Send the r-th part of ``values``, of ``sent[r]`` entries, to rank r of ``group`` (None: all ranks). Collective.

    Returns the parts received from all ranks, in the order of ranks, with ``received[r]`` entries from rank r.
    """
    if len(sent) == 1:
        return values
    result = values.new_empty(sum(received), *values.shape[1:])
    torch.distributed.all_to_all_single(result, values.contiguous(), received, sent, group=group)
    return result


class RowExchange:
    """Sends unpadded rows of micro-batches to their home ranks, and results back. Collective."""

    def __init__(
        self, masks: Sequence[Tensor], home_ranks: Tensor, *, group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        """``masks`` are the micro-batches' bool masks [b, T]; b may be 0.

        ``home_ranks`` [B] is the home rank of each row.

        Positions after a row's last True are not sent. Ranks are numbered within ``group``, or within all processes if
        ``group`` is None.
        """
        ranks = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
        self._group = group
        self._shapes = [mask.shape for mask in masks]
        lengths = torch.cat([_row_lengths(mask) for mask in masks])
        self._order = home_ranks.argsort(stable=True)
        self._row_lengths = lengths[self._order]
        rows = torch.bincount(home_ranks, minlength=ranks)
        tokens = torch.zeros_like(rows).index_add_(0, home_ranks, lengths)
        sent = torch.stack([rows, tokens], dim=-1)
        received = self._exchange(sent, [1] * ranks, [1] * ranks)
        self._rows_out, self._tokens_out = sent.t().tolist()
        self._rows_in, self._tokens_in = received.t().tolist()
        self._home_lengths = self._exchange(self._row_lengths, self._rows_out, self._rows_in)

    def send_records_to_home_ranks(self, parts: Sequence[_Record]) -> _Record:
        """Apply :meth:`send_rows_to_home_ranks` to each tensor. A field must be None on all ranks or on none."""
        names = [item.name for item in fields(parts[0]) if getattr(parts[0], item.name) is not None]
        return replace(
            parts[0], **{name: self.send_rows_to_home_ranks([getattr(part, name) for part in parts]) for name in names}
        )

    def send_rows_to_home_ranks(self, parts: Sequence[Tensor]) -> Tensor:
        """Send a tensor [b, T] or [b] of each micro-batch. Returns this rank's home rows, [R, longest] or [R]."""
        rows = concatenate_rows(parts)[self._order]
        if rows.dim() == 1:
            return self._exchange(rows, self._rows_out, self._rows_in)
        flat = _flatten_rows(rows, self._row_lengths)
        return _pad_rows(self._exchange(flat, self._tokens_out, self._tokens_in), self._home_lengths)

    def return_results_to_senders(self, values: Tensor) -> list[Tensor]:
        """Send results [R, longest] of home rows back to the rows' senders. Returns a tensor [b, T] per micro-batch."""
        flat = self._exchange(_flatten_rows(values, self._home_lengths), self._tokens_in, self._tokens_out)
        sorted_by_home = _pad_rows(flat, self._row_lengths)
        rows = torch.empty_like(sorted_by_home)
        rows[self._order] = sorted_by_home
        parts = rows.split([count for count, _ in self._shapes])
        # Padding copies each part. A view would keep the memory of all micro-batches alive.
        return [_pad_to_width(part, width) for part, (_, width) in zip(parts, self._shapes, strict=True)]

    def _exchange(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return all_to_all(values, sent, received, self._group)


def _row_lengths(mask: Tensor) -> Tensor:
    """Return the number of positions up to the last True of each row [b, T], as [b]."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return torch.where(mask, positions, 0).amax(-1)


def _length_mask(lengths: Tensor, width: int) -> Tensor:
    """Return a mask [B, width] of the first ``lengths`` positions of each row."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def _flatten_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Concatenate the first ``lengths`` positions of each row [B, T]."""
    return values[_length_mask(lengths, values.shape[1])]


def _pad_rows(flat: Tensor, lengths: Tensor) -> Tensor:
    """Invert :func:`_flatten_rows`: return rows as wide as the longest row, padded with zeros."""
    width = max(1, int(lengths.max())) if lengths.numel() else 1
    padded = flat.new_zeros(len(lengths), width)
    padded[_length_mask(lengths, width)] = flat
    return padded


def concatenate_rows(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows [b] or [b, T] of all parts. Rows [b, T] are padded to the width of the widest part."""
    if parts[0].dim() == 1:
        return torch.cat(list(parts))
    width = max(part.shape[1] for part in parts)
    return torch.cat([_pad_to_width(part, width) for part in parts])


def _pad_to_width(values: Tensor, width: int) -> Tensor:
    """Return a new tensor [b, width]: ``values`` [b, any], padded or cut. Only padding is cut off."""
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


Number = Tensor | float


class MetricAccumulator:
    """Accumulates metrics of one rank; :meth:`reduce_over_ranks` combines them over ranks.

    Every rank must add the same names in a step. A dummy micro-batch adds them with weight 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._negated: set[str] = set()  # names whose smallest value is kept, as the largest negated value

    def add_mean(self, name: str, value: Number, weight: Number) -> None:
        """Add ``value``, a mean over ``weight`` tokens, trajectories or updates, to the mean ``name``."""
        weight = self._number(weight)
        self._add(self._sums, name, torch.where(weight > 0, self._number(value), 0.0) * weight)
        self._add(self._weights, name, weight)

    def add_total(self, name: str, value: Number) -> None:
        """Add ``value`` to the sum ``name``."""
        self._add(self._sums, name, self._number(value))

    def add_largest(self, name: str, value: Number, weight: Number = 1.0) -> None:
        """Keep the largest value of ``name`` among values with a weight above 0."""
        lowest = self._number(-math.inf)
        value = torch.where(self._number(weight) > 0, self._number(value), lowest)
        self._largest[name] = torch.maximum(self._largest.get(name, lowest), value)

    def add_smallest(self, name: str, value: Number, weight: Number = 1.0) -> None:
        """Keep the smallest value of ``name`` among values with a weight above 0."""
        self._negated.add(name)
        self.add_largest(name, -value, weight)

    def mean_over_ranks(self, name: str, engine: TrainingEngine[nn.Module]) -> float:
        """Return the current mean of ``name`` over all ranks, or 0 if its total weight is 0. Collective."""
        pair = torch.stack([self._sums[name], self._weights[name]])
        total, weight = engine.sum_over_replicas(pair).tolist()
        return float(total / weight) if weight else 0.0

    def weight_over_ranks(self, name: str, engine: TrainingEngine[nn.Module]) -> float:
        """Return the current total weight of the mean ``name`` over all ranks. Collective."""
        return float(engine.sum_over_replicas(self._weights[name].clone()))

    def largest_over_ranks(self, name: str, engine: TrainingEngine[nn.Module]) -> float:
        """Return the current maximum of ``name`` over all ranks, or 0 if no value has a positive weight. Collective."""
        value = float(engine.all_reduce_max(self._largest[name].clone()))
        return 0.0 if value == -math.inf else value

    def reduce_over_ranks(self, engine: TrainingEngine[nn.Module]) -> dict[str, float]:
        """Reduce all metrics over all ranks. Means and extremes without weight are omitted. Collective."""
        sums = self._reduced(self._sums, engine.sum_over_replicas)
        weights = self._reduced(self._weights, engine.sum_over_replicas)
        largest = self._reduced(self._largest, engine.all_reduce_max)
        means = {name: sums[name] / weight for name, weight in weights.items() if weight}
        totals = {name: value for name, value in sums.items() if name not in weights}
        names = sorted((name for name in largest if math.isfinite(largest[name])), key=self._negated.__contains__)
        return totals | means | {name: -largest[name] if name in self._negated else largest[name] for name in names}

    def _reduced(self, values: dict[str, Tensor], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
        if not (names := sorted(values)):
            return {}
        return dict(zip(names, reduce(torch.stack([values[name] for name in names])).tolist(), strict=True))

    def _add(self, into: dict[str, Tensor], name: str, value: Tensor) -> None:
        into[name] = into[name] + value if name in into else value

    def _number(self, value: Number) -> Tensor:
        return torch.as_tensor(value, dtype=torch.float64, device=self._device)


def check_shared_folder(folder: Path, *, rank: int, visible_seconds: float = 10.0) -> None:
    """Raise SettingsError on every rank if any rank cannot access the files of rank 0. Collective.

    A file on a network file system may become visible on other machines ``visible_seconds`` after it is written.
    """

    def write() -> str:
        probe = folder / f".probe-{secrets.token_hex(8)}"
        with os_errors_as_world_errors(folder, "write to"):
            probe.touch()
        return probe.name

    name = run_on_rank_zero(write)
    seen = gather_from_ranks((socket.gethostname(), _wait_until_exists(folder / name, visible_seconds)))
    if rank == 0:
        (folder / name).unlink()
    without_access = [f"rank {rank} on {host}" for rank, (host, found) in enumerate(seen) if not found]
    if without_access:
        raise SettingsError(
            f"runs_dir: {', '.join(without_access)} cannot access the files that rank 0 on {seen[0][0]} writes to "
            f"{folder}: set a folder that all machines share"
        )


def _wait_until_exists(path: Path, seconds: float) -> bool:
    """Return True as soon as the path exists, or False after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
