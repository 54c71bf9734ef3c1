"""Peak bytes of live tensors on any device, counted as torch counts them on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While active, count the bytes of live storages that operations made on ``device``.

    A storage counts once, however many views it has, from the operation that made it until its last tensor is freed. A
    storage that existed before counts from the first view that is taken of it. Use :meth:`leave_out` for tensors that
    must not count. Memory that a kernel allocates and frees within one operation is not counted.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf, leaf.untyped_storage().nbytes())
        return result

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors and their views."""
        for tensor in tensors:
            self._add(tensor, 0)

    def _add(self, tensor: Tensor, size: int) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if tensor.device.type != self._device or key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak = self.live

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
