"""The backend `triton`: slices of the vocabulary with an epilogue in Triton, which is imported at its first use."""

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from agentrl.kernels.backends import torch_epilogue
from agentrl.kernels.backends.sliced import Epilogue, sliced_statistics
from agentrl.kernels.records import KernelInputError, TokenStatistics


@cache
def triton_installed() -> bool:
    """Return True if Triton can be imported. It is part of torch's CUDA builds."""
    return find_spec("triton") is not None


def triton_statistics(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, cap: float | None
) -> TokenStatistics:
    """Compute the statistics of docs/formulas.md 2 with cuBLAS and Triton. Arguments as in `token_statistics`.

    Raises KernelInputError without Triton, and for CPU tensors unless Triton runs as an interpreter
    (TRITON_INTERPRET=1).
    """
    obstacle = triton_obstacle(hidden.device)
    if obstacle is not None:
        raise KernelInputError(f"the backend triton {obstacle}: use the backend chunked")
    epilogue = _triton_epilogue()
    return sliced_statistics(hidden, head_weight, targets, temperature, bias, epilogue=epilogue, cap=cap)


def automatic_backend(device: torch.device) -> str:
    """Return the backend that `auto` selects for tensors on this device."""
    return "triton" if device.type == "cuda" and triton_installed() else "chunked"


def epilogue_for(device: torch.device) -> Epilogue:
    """Return Triton's epilogue if `auto` selects it, otherwise torch's."""
    return _triton_epilogue() if automatic_backend(device) == "triton" else torch_epilogue


def triton_obstacle(device: torch.device) -> str | None:
    """Return the reason why the triton backend cannot run on this device, or None."""
    if not triton_installed():
        return "requires the package triton, which is not installed"
    if device.type != "cuda" and not _triton_epilogue().INTERPRETED:
        return f"requires tensors on a GPU, not on {device.type} (or, for tests, TRITON_INTERPRET=1 in the environment)"
    return None


def _triton_epilogue() -> Any:
    return importlib.import_module("agentrl.kernels.backends.triton_epilogue")
