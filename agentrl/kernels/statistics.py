"""Token statistics from a selected backend. All backends compute the same numbers as the reference in this module."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from agentrl.kernels.chunked import chunked_statistics
from agentrl.kernels.records import (
    KernelInputError,
    Support,
    TokenStatistics,
    check_cap,
    check_head_inputs,
    statistics_dtype,
)
from agentrl.kernels.sliced import sliced_statistics


def reference_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    cap: float | None,
    support: Support | None,
) -> TokenStatistics:
    """Compute token statistics with plain autograd (docs/reference/formulas.md, section 2).

    Takes the arguments of `token_statistics`. A token whose logit is -inf has probability 0 and adds 0 to every sum.
    """
    dtype = statistics_dtype(hidden, head_weight)
    logits = functional.linear(hidden.to(dtype), head_weight.to(dtype), None if bias is None else bias.to(dtype))
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    tempered = capped / temperature
    if support is not None:
        tempered = support.mask_logits(tempered.clone(), slice(0, len(targets)))
    log_p = functional.log_softmax(tempered, dim=-1)  # (N, V)
    index = targets.long().unsqueeze(-1)
    log_probs = log_p.gather(-1, index).squeeze(-1)
    possible = log_p != -torch.inf
    log_p_finite = torch.where(possible, log_p, 0.0)
    entropy = -(torch.where(possible, log_p_finite.exp(), 0.0) * log_p_finite).sum(-1)
    with torch.no_grad():
        others = log_p.exp().scatter(-1, index, 0.0)  # without the target
        sum_pi_squared = (2 * log_probs).exp() + others.square().sum(-1)
        gradient = others.scatter(-1, index, -torch.expm1(log_probs).unsqueeze(-1))
        if cap is not None:
            gradient = gradient * (1 - (capped / cap).square())
        energy = gradient.square().sum(-1)
        norms = hidden.to(dtype).square().sum(-1)
    return TokenStatistics(
        log_probs=log_probs, entropy=entropy, sum_pi_squared=sum_pi_squared, energy=energy, hidden_norm_squared=norms
    )


def triton_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    cap: float | None,
    support: Support | None,
) -> TokenStatistics:
    """Compute token statistics with cuBLAS and Triton. Takes the arguments of `token_statistics`.

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


def reason_triton_unavailable(device: torch.device) -> str | None:
    """Return the reason why the triton backend cannot run on this device, or None."""
    if not triton_installed():
        return "requires the package triton, which is not installed"
    if device.type != "cuda" and not _triton_epilogue().INTERPRETED:
        return f"requires tensors on a GPU, not on {device.type} (or, for tests, TRITON_INTERPRET=1 in the environment)"
    return None


@cache
def triton_installed() -> bool:
    """Return True if Triton can be imported. It is part of torch's CUDA builds."""
    return find_spec("triton") is not None


def _triton_epilogue() -> Any:
    return importlib.import_module("agentrl.kernels.triton_epilogue")  # imported on first use, because it needs Triton


def default_backend(device: torch.device) -> str:
    """Return the backend that `auto` selects for tensors on this device."""
    return "triton" if device.type == "cuda" and triton_installed() else "chunked"


Backend = Literal["auto", "reference", "chunked", "triton"]
BACKENDS = {"reference": reference_statistics, "chunked": chunked_statistics, "triton": triton_statistics}


def token_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    backend: str = "auto",
    bias: Tensor | None = None,
    cap: float | None = None,
    support: Support | None = None,
) -> TokenStatistics:
    """Compute statistics of softmax(z / temperature) at the targets.

    z = x = hidden head_weight^T + bias, the head's output, or z = cap tanh(x / cap) with a cap. For a model that scales
    x by s, pass temperature / s and cap / s. With a `support`, z is -inf outside each row's set, which must contain the
    target, and all statistics and gradients use the distribution renormalized over the set.

    hidden [N, D] and head_weight [V, D] of any floating dtype, targets [N] in [0, V), bias [V] or None. Row n of hidden
    is the state that *predicts* targets[n], so the caller must shift. Select the rows before the call: padding and
    observations are not masked here. Sums are in float32, or in float64 if hidden or head_weight is. Autocast is off.

    Gradients through `log_probs` and `entropy` with respect to hidden, head_weight and bias are exact. The other fields
    are detached. The backends `chunked` and `triton` (for GPUs) store at most one block of logits. `reference` stores
    all logits. `auto` selects `triton` on GPUs if it is installed, otherwise `chunked`. `triton` takes no support.

    Raises KernelInputError if the arguments do not fit together.
    """
    check_head_inputs(hidden, head_weight, targets, temperature, bias)
    check_cap(cap)
    automatic = default_backend(hidden.device) if support is None else "chunked"
    name = automatic if backend == "auto" else backend
    if name not in BACKENDS:
        raise KernelInputError(f"unknown backend {backend!r}; valid: {', '.join(['auto', *BACKENDS])}")
    with torch.autocast(hidden.device.type, enabled=False):
        return BACKENDS[name](hidden, head_weight, targets, temperature, bias, cap, support)
