"""How weights travel to an engine that holds a copy; files are written whole and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TransferTarget:
    """Where weights go and how. ``file``: a directory that the engine reads; else servers and their GPU workers."""

    backend: Literal["file", "nccl", "ipc"]
    addresses: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors that :func:`held` gave to ``path`` (safetensors) under a temporary name, then rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def held(tensor: Tensor) -> Tensor:
    """A copy in memory that shares nothing, as safetensors wants it."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)
