"""An extension of vLLM's worker (``--worker-extension-cls``): checksums of the weights in use.

This module does not import vLLM. It recognizes vLLM's modules by their attributes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.weights.verify import checksums

# Number of columns of a packed matrix to read at a time.
_COLUMNS = 256


class WorkerExtension:
    """A mixin of vLLM's worker, called through ``/collective_rpc``. Uses the worker's ``get_model``."""

    get_model: Any

    @torch.inference_mode()
    def agentrl_checksums(self) -> dict[str, list[int]]:
        """Return the checksum (values, total) of this worker's shard of every parameter, by checkpoint name."""
        found = checksums(served_parameters(self.get_model()))
        return {name: [one.values, one.total] for name, one in found.items()}


def served_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in use under their checkpoint names, in parts. Unused parameters are skipped.

    ``packed_modules_mapping`` lists the parts of a fused layer, and ``output_partition_sizes`` their sizes.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    for prefix, module in model.named_modules():
        path = prefix.removesuffix(".base_layer")  # layers that support adapters have this suffix
        parent, _, own = path.rpartition(".")
        parts = fused.get(own, [own])
        sizes = list(getattr(module, "output_partition_sizes", ())) if len(parts) > 1 else [-1]
        if len(sizes) != len(parts):
            continue
        names = [f"{parent}.{part}" if parent else part for part in parts]
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point() or parameter.element_size() < 2:
                continue  # quantized: its values differ from the checkpoint's
            for piece in _yield_unpacked_parts(module, name, parameter):
                rows = piece.split(sizes) if len(parts) > 1 else (piece,)
                yield from ((f"{part}.{name}", values) for part, values in zip(names, rows, strict=True))


def _yield_unpacked_parts(module: nn.Module, name: str, parameter: Tensor) -> Iterator[Tensor]:
    """Yield the parameter or, if vLLM packed it for a CPU, the contents of the packed copy, some columns at a time."""
    heads = any(kind.__name__ == "ParallelLMHead" for kind in type(module).__mro__)
    linear = getattr(module, "cpu_linear", None)
    if name != "weight" or linear is None or (parameter.numel() and not heads):
        yield parameter
        return
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    width = next(getattr(module, size) for size in sizes if hasattr(module, size))
    for first in range(0, width, _COLUMNS):
        # Rows of the identity matrix select columns of the packed matrix. Products with 1 and 0 are exact.
        rows = torch.zeros(min(_COLUMNS, width - first), width, dtype=parameter.dtype)
        rows[:, first:].fill_diagonal_(1)
        yield linear(rows, parameter, None).T
