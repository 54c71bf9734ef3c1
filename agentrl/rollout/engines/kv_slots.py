"""A key-value cache with one row per trajectory, for continuous batching over a model of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

_ROUND = 64


class SlotCache(Cache):
    """Keys and values ``[rows, heads, length, head_dim]`` a layer; grows on demand.

    Before a forward the caller says which rows take part and at which positions their tokens stand
    (:meth:`select`); each layer's ``update`` writes there and returns what the rows may attend to. The last column is
    a bin for padding and is never read. Stale entries behind a row's length need no clearing: the mask hides them
    until they are overwritten.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self.rows = 0
        self.length = 0

    def reserve(self, rows: int, length: int) -> None:
        """Room for ``rows`` rows of ``length`` tokens; what is stored stays."""
        if rows <= self.rows and length <= self.length:
            return
        self.rows = max(rows, self.rows)
        self.length = max(-(-length // _ROUND) * _ROUND, self.length)
        self._keys = [self._grown(item) for item in self._keys]
        self._values = [self._grown(item) for item in self._values]

    def select(self, rows: Tensor | int, positions: Tensor, width: int) -> Tensor:
        """Choose rows (an index tensor [m], or the first ``rows``) and token positions [m, q]; -1 is padding.

        Returns the attention mask [m, 1, q, width], True where a query may look.
        """
        count = rows if isinstance(rows, int) else len(rows)
        self._selected = rows
        self._width = width
        self._index = torch.arange(count, device=positions.device) if isinstance(rows, int) else rows
        self._positions = torch.where(positions < 0, self.length, positions)
        columns = torch.arange(width, device=positions.device)
        return (columns <= positions.clamp(min=0)[..., None])[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store this forward's keys and values [m, heads, q, head_dim]; return all that the rows hold."""
        return self._write(self._keys, layer_idx, key_states), self._write(self._values, layer_idx, value_states)

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first ``length`` entries of rows ``source`` onto rows ``target``."""
        for store in (*self._keys, *self._values):
            if store is not None:
                store[target, :, :length] = store[source, :, :length]

    def swap(self, first: Tensor, second: Tensor, length: int) -> None:
        """Exchange the first ``length`` entries of rows pairwise."""
        both, other = torch.cat([first, second]), torch.cat([second, first])
        for store in (*self._keys, *self._values):
            if store is not None:
                store[both, :, :length] = store[other, :, :length]

    def _write(self, stores: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        store = stores[layer]
        if store is None:
            store = new.new_zeros(self.rows, new.shape[1], self.length + 1, new.shape[3])
            stores[layer] = store
        store[self._index[:, None], :, self._positions] = new.transpose(1, 2)
        if isinstance(self._selected, int):
            return store[: self._selected, :, : self._width]
        return store[self._selected, :, : self._width]

    def _grown(self, store: Tensor | None) -> Tensor | None:
        if store is None:
            return None
        grown = store.new_zeros(self.rows, store.shape[1], self.length + 1, store.shape[3])
        grown[: store.shape[0], :, : store.shape[2] - 1] = store[:, :, :-1]
        return grown
