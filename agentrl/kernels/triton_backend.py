"""The `triton` backend, for a whole vocabulary or one sharded over ranks. Triton is imported on first use."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.kernels import torch_epilogue
from agentrl.kernels.records import KernelInputError, Support, TokenStatistics, check_inputs
from agentrl.kernels.sliced import TileEpilogue, VocabularyShards, sliced_statistics


@cache
def triton_installed() -> bool:
    """Return True if Triton can be imported. It is part of torch's CUDA builds."""
    return find_spec("triton") is not None


def triton_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    cap: float | None,
    support: Support | None,
) -> TokenStatistics:
    """Compute the statistics of docs/reference/formulas.md 2 with cuBLAS and Triton.

    Arguments as in `token_statistics`.

    Raises KernelInputError without Triton, with a support, and for CPU tensors unless Triton runs as an interpreter
    (TRITON_INTERPRET=1).
    """
    obstacle = reason_triton_unavailable(hidden.device)
    if support is not None:
        obstacle = "does not restrict distributions to a support"
    if obstacle is not None:
        raise KernelInputError(f"the triton backend {obstacle}: select the chunked backend")
    epilogue = _triton_epilogue()
    return sliced_statistics(hidden, head_weight, targets, temperature, bias, epilogue=epilogue, cap=cap)


def default_backend(device: torch.device) -> str:
    """Return the backend that `auto` selects for tensors on this device."""
    return "triton" if device.type == "cuda" and triton_installed() else "chunked"


def choose_epilogue(device: torch.device) -> TileEpilogue:
    """Return Triton's epilogue if `auto` selects it, otherwise torch's."""
    return _triton_epilogue() if default_backend(device) == "triton" else torch_epilogue


def reason_triton_unavailable(device: torch.device) -> str | None:
    """Return the reason why the triton backend cannot run on this device, or None."""
    if not triton_installed():
        return "requires the package triton, which is not installed"
    if device.type != "cuda" and not _triton_epilogue().INTERPRETED:
        return f"requires tensors on a GPU, not on {device.type} (or, for tests, TRITON_INTERPRET=1 in the environment)"
    return None


def _triton_epilogue() -> Any:
    return importlib.import_module("agentrl.kernels.triton_epilogue")


def sharded_token_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
) -> TokenStatistics:
    """Compute `token_statistics` of a head whose rows are distributed over the ranks of `group`, in rank order.

    head_weight [V_r, D] and bias [V_r] or None contain this rank's rows; their number may differ between ranks.
    hidden [N, D] and targets [N], which index the complete vocabulary [0, sum V_r), are the same on every rank, and so
    are the results. Forward and backward are collective: every rank must call them, with gradients for the same inputs.

    The gradients of log_probs and entropy must belong to **one** loss that every rank computes identically. The
    gradients of head_weight and bias are this rank's rows of the complete gradient; the gradient of hidden is complete
    on each rank. Raises KernelInputError if the arguments do not fit together on this rank.
    """
    first, vocabulary = _vocabulary_offset_and_size(head_weight, group)
    check_inputs(hidden, head_weight, targets, temperature, bias, vocabulary=vocabulary)
    epilogue, ranks = choose_epilogue(hidden.device), VocabularyShards(first, group)
    with torch.autocast(hidden.device.type, enabled=False):
        return sliced_statistics(hidden, head_weight, targets, temperature, bias, epilogue=epilogue, ranks=ranks)


def _vocabulary_offset_and_size(head_weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (index of this rank's first token, number of tokens on all ranks)."""
    size = head_weight.shape[0] if head_weight.ndim else 0
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=head_weight.device)
    sizes[dist.get_rank(group)] = size
    dist.all_reduce(sizes, group=group)
    counts = sizes.tolist()
    if 0 in counts:  # every rank sees the same counts, so all raise and none waits for the others
        raise KernelInputError(f"rank {counts.index(0)} of the group has no row of the head; rows by rank: {counts}")
    return sum(counts[: dist.get_rank(group)]), sum(counts)
