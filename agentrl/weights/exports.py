"""Policy directories in which the head is a separate parameter, also where it is tied to the embedding.

vLLM on CPU packs the head's weight when it starts, and silently keeps that copy unless new weights contain the head.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentrl.weights.checksums import EMBEDDING, HEAD

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 256 * 1024 * 1024
"""Bytes of one file; writing holds as much in memory."""


def untied(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors; if they include no head, the embedding is repeated as the head's weight.

    >>> import torch
    >>> tied = {"model.embed_tokens.weight": torch.zeros(2, 1), "model.norm.weight": torch.ones(1)}
    >>> [name for name, _ in untied(tied.items())]
    ['model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight']
    """
    embedding: Tensor | None = None
    headed = False
    for name, tensor in tensors:
        headed |= name == HEAD
        if name == EMBEDDING:
            embedding = held(tensor)
        yield name, tensor
    if not headed and embedding is not None:
        yield HEAD, embedding


def write_untied_copy(model: Path, target: Path) -> Path:
    """Copy the policy in ``model`` to ``target`` with a separate head, and return ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    write_shards(target, untied(read_export(model)))
    for file in model.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json", ".bin")):
            shutil.copy(file, target / file.name)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def write_export(folder: Path, tensors: Iterable[tuple[str, Tensor]], version: int) -> Path:
    """Write one version's weights to a directory of its own. The one before is kept: an engine may be reading it."""
    return write_version(folder, version, lambda partial: write_shards(partial, untied(tensors)))


def write_version(folder: Path, version: int, write: Callable[[Path], None], *, kept: int = 1) -> Path:
    """Have ``write`` fill a directory for ``version``. ``kept`` older ones stay: engines may be reading them."""
    target = folder / f"version-{version:09d}"
    partial = folder / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write(partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in sorted(item for item in folder.glob("version-*") if item.name < target.name)[:-kept]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def write_shards(target: Path, tensors: Iterable[tuple[str, Tensor]], *, most: int = SHARD_BYTES) -> None:
    """Write tensors to files of at most ``most`` bytes, which also bounds memory; a larger tensor gets its own file."""
    shard: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    numbers = itertools.count(1)

    def flush() -> None:
        file = f"model-{next(numbers):05d}.safetensors"
        write_weights(target / file, shard)
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        if shard and sum(item.nbytes for item in shard.values()) + tensor.nbytes > most:
            flush()
        shard[name] = held(tensor)
    if shard:
        flush()
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read_export(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a directory, one at a time."""
    for shard in sorted(folder.glob("*.safetensors")):
        yield from read_weights(shard)


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
