"""Transports of weights to an engine that holds a copy. A file is written completely, then renamed."""

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
    """The destination of weights and the way there: a directory that the engine reads (``file``), or servers and
    their GPU workers."""

    backend: Literal["file", "nccl", "ipc"]
    addresses: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors from :func:`held` to ``path`` (safetensors): under a temporary name first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def held(tensor: Tensor) -> Tensor:
    """A copy in host memory that shares no storage, as safetensors requires."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def read_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, one at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            yield name, file.get_tensor(name)
