"""The backend `triton`: slices of the vocabulary with the epilogue in Triton, which is imported when first used."""

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
    """Whether Triton can be imported; it comes with torch's CUDA builds."""
    return find_spec("triton") is not None


def triton_statistics(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, cap: float | None
) -> TokenStatistics:
    """The statistics of docs/formulas.md 2 by cuBLAS and Triton; see `token_statistics` for the arguments.

    Raises KernelInputError without Triton, and on CPU tensors unless Triton interprets (TRITON_INTERPRET=1).
    """
    obstacle = triton_obstacle(hidden.device)
    if obstacle is not None:
        raise KernelInputError(f"the backend triton {obstacle}: take the backend chunked")
    epilogue = _triton_epilogue()
    return sliced_statistics(hidden, head_weight, targets, temperature, bias, epilogue=epilogue, cap=cap)


def automatic_backend(device: torch.device) -> str:
    """The backend that `auto` selects for tensors of this device."""
    return "triton" if device.type == "cuda" and triton_installed() else "chunked"


def epilogue_for(device: torch.device) -> Epilogue:
    """Triton's epilogue where `auto` takes it, elsewhere torch's."""
    return _triton_epilogue() if automatic_backend(device) == "triton" else torch_epilogue


def triton_obstacle(device: torch.device) -> str | None:
    """Why the triton backend cannot run on this device; None if it can."""
    if not triton_installed():
        return "needs the package triton, which is not installed"
    if device.type != "cuda" and not _triton_epilogue().INTERPRETED:
        return f"needs tensors on a GPU, not on {device.type} (or, for tests, TRITON_INTERPRET=1 in the environment)"
    return None


def _triton_epilogue() -> Any:
    return importlib.import_module("agentrl.kernels.backends.triton_epilogue")
