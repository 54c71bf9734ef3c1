"""Weights as files: policy directories, exports of each version, and the parameters of policies with adapters.

Exported directories store the head as a separate parameter, even if it is tied to the embedding. vLLM on CPU packs the
head's weight at startup and silently keeps this copy unless new weights contain the head.
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
from torch import Tensor, nn

from agentrl.models.lora import (
    adapter_factor_names,
    is_adapter_factor,
    merge_adapter,
    name_without_adapter,
    peft_parameter_name,
)
from agentrl.models.settings import LoRASettings
from agentrl.weights.sources import ParameterSource, full_parameters
from agentrl.weights.verify import EMBEDDING_NAME, HEAD_NAME, Checksum, add_tied_head, checksum

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 256 * 1024 * 1024
"""Size of one file, and of the memory needed to write it, in bytes."""


def add_untied_head(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and, if they include no head, the embedding again as the head's weight.

    >>> import torch
    >>> tied = {"model.embed_tokens.weight": torch.zeros(2, 1), "model.norm.weight": torch.ones(1)}
    >>> [name for name, _ in add_untied_head(tied.items())]
    ['model.embed_tokens.weight', 'model.norm.weight', 'lm_head.weight']
    """
    embedding: Tensor | None = None
    has_head = False
    for name, tensor in tensors:
        has_head |= name == HEAD_NAME
        if name == EMBEDDING_NAME:
            embedding = copy_to_host(tensor)
        yield name, tensor
    if not has_head and embedding is not None:
        yield HEAD_NAME, embedding


def write_untied_copy(model: Path, target: Path) -> Path:
    """Copy the policy in ``model`` to ``target`` with a separate head, and return ``target``."""
    shutil.rmtree(target, ignore_errors=True)
    write_shards(target, add_untied_head(read_export(model)))
    for file in model.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", ".index.json", ".bin")):
            shutil.copy(file, target / file.name)
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def write_export(folder: Path, tensors: Iterable[tuple[str, Tensor]], version: int) -> Path:
    """Write one version's weights to a new directory. Keeps the previous version, which an engine may be reading."""
    return write_version(folder, version, lambda partial: write_shards(partial, add_untied_head(tensors)))


def write_version(folder: Path, version: int, write: Callable[[Path], None], *, older_versions: int = 1) -> Path:
    """Create a directory for ``version`` with ``write``, and return it.

    Keeps the last ``older_versions`` previous versions, which engines may be reading.
    """
    target = folder / f"version-{version:09d}"
    partial = folder / f"{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write(partial)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(partial, target)
    for old in sorted(item for item in folder.glob("version-*") if item.name < target.name)[:-older_versions]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def write_shards(target: Path, tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int = SHARD_BYTES) -> None:
    """Write tensors to files of at most ``max_bytes``, to bound memory. A larger tensor gets a separate file."""
    shard: dict[str, Tensor] = {}
    file_of: dict[str, str] = {}
    numbers = itertools.count(1)

    def flush() -> None:
        file = f"model-{next(numbers):05d}.safetensors"
        save_file(shard, target / file)
        file_of.update(dict.fromkeys(shard, file))
        shard.clear()

    target.mkdir(parents=True, exist_ok=True)
    for name, tensor in tensors:
        if shard and sum(item.nbytes for item in shard.values()) + tensor.nbytes > max_bytes:
            flush()
        shard[name] = copy_to_host(tensor)
    if shard:
        flush()
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": file_of}))


def read_export(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a directory one at a time."""
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory that shares no storage, as safetensors requires."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def merged_parameters(module: nn.Module, settings: LoRASettings) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and complete value of every parameter with adapters merged. The model is not changed.

    Collective under ZeRO-3, like :func:`full_parameters`. Every rank holds a copy of the adapters during the iteration.
    """
    factors = {name: value.clone() for name, value in full_parameters(module, wanted=is_adapter_factor)}
    for name, value in full_parameters(module, wanted=lambda name: not is_adapter_factor(name)):
        names = adapter_factor_names(name)
        if names is not None and names[0] in factors:
            value = merge_adapter(value, factors[names[0]], factors[names[1]], settings.alpha / settings.rank)
        yield name_without_adapter(name), value


def policy_parameters(module: nn.Module, settings: LoRASettings) -> Iterator[tuple[str, Tensor]]:
    """Return the name and complete value of every parameter of the exported policy. Collective under ZeRO-3."""
    return merged_parameters(module, settings) if settings.rank else full_parameters(module)


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the exported name and complete value of every adapter parameter. Collective under ZeRO-3."""
    for name, value in full_parameters(module, wanted=is_adapter_factor):
        yield peft_parameter_name(name), value


class MergedSource(ParameterSource):
    """Source of the model's parameters with adapters merged."""

    def __init__(self, module: nn.Module, settings: LoRASettings, *, with_checksums: bool = True) -> None:
        super().__init__(module, with_checksums=with_checksums)
        self._settings = settings

    def _exported_name(self, name: str) -> str | None:
        return None if is_adapter_factor(name) else name_without_adapter(name)

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return merged_parameters(self._module, self._settings)


class AdapterSource(ParameterSource):
    """Source of the adapters under their exported names. Its checksums also cover the frozen model."""

    def __init__(self, module: nn.Module, *, with_checksums: bool = True) -> None:
        super().__init__(module, with_checksums=with_checksums)
        self._frozen: dict[str, Checksum] | None = None

    def _exported_name(self, name: str) -> str | None:
        return peft_parameter_name(name) if is_adapter_factor(name) else None

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return adapter_parameters(self._module)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._frozen is None:
            frozen = full_parameters(self._module, wanted=lambda name: not is_adapter_factor(name))
            self._frozen = add_tied_head(
                {name_without_adapter(name): checksum(value) for name, value in frozen if self._with_checksums}
            )
        yield from super().__iter__()
        self.checksums = self._frozen | self.checksums
