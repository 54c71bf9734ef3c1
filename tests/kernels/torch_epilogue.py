"""The operations of `agentrl.kernels.triton_epilogue` in torch, for tests of the tiles in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.kernels.arithmetic import IMPOSSIBLE, cap_derivative
from agentrl.kernels.sliced import LOWER, MOMENT, SQUARES, STEEP, TARGET, TIES, TOP


def accumulate_sums(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    sums: Tensor,
    temperature: Tensor,
    *,
    start: int,
    cap: float | None = None,
) -> None:
    """Overwrites the logits."""
    if bias is not None:
        logits += bias
    here, index = _targets_here(targets, start, logits.shape[1])
    own = logits.gather(-1, index)
    sums[:, TARGET] += torch.where(here, own, 0.0).squeeze(-1)
    logits.scatter_(-1, index, torch.where(here, -torch.inf, own))
    slope = None if cap is None else cap_derivative(logits, cap)  # 0 at the target
    top = torch.maximum(sums[:, TOP], logits.amax(-1))
    sums.copy_(rescale_sums(sums, top, temperature))
    at_top = (logits == torch.where(top == -torch.inf, torch.inf, top).unsqueeze(-1)).to(logits.dtype)
    shifts = logits.sub_(torch.where(top == -torch.inf, 0.0, top).unsqueeze(-1)).div_(temperature)
    shifts.clamp_(min=IMPOSSIBLE)
    masses = shifts.exp()
    sums[:, MOMENT] += (masses * shifts).sum(-1)
    sums[:, SQUARES] += masses.square().sum(-1)
    if slope is not None:
        sums[:, STEEP] += slope.mul_(masses).square().sum(-1)
    sums[:, TIES] += at_top.sum(-1)
    sums[:, LOWER] += masses.sub_(at_top).sum(-1)  # 1 at the top becomes 0; NaN from an infinite top is kept


def write_logit_gradient(
    logits: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normalisers: Tensor,
    coefficients: Tensor,
    temperature: Tensor,
    out: Tensor,
    *,
    start: int,
    cap: float | None = None,
) -> None:
    """Overwrites the logits."""
    if bias is not None:
        logits += bias
    here, index = _targets_here(targets, start, logits.shape[1])
    outer = None if cap is None else cap_derivative(logits, cap)
    best, log_total = normalisers.split(1, dim=-1)
    offset, slope, at_target = coefficients.split(1, dim=-1)
    log_p = logits.sub_(best).div_(temperature).sub_(log_total).clamp_(min=IMPOSSIBLE)
    gradient = torch.addcmul(offset, log_p, slope).mul_(log_p.exp())
    gradient.scatter_(-1, index, torch.where(here, at_target, gradient.gather(-1, index)))
    out.copy_(gradient if outer is None else gradient.mul_(outer))


def _targets_here(targets: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    """Return (True if the row's target is in this tile, its column, arbitrary if not), both [R, 1]."""
    columns = (targets.long() - start).unsqueeze(-1)
    return (columns >= 0) & (columns < width), columns.clamp(0, width - 1)


def rescale_sums(sums: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
    """Convert the state [N, 6 or 7] to another maximum `top` [N] >= M: Z3 <- c (Z3 + s Z1), Z2 <- c^2 Z2, ...

    s = (M - top) / T and c = e^s. If the maximum rises, the former ties become lower logits.
    """
    old, ties, lower, squares, moment, target, *steep = sums.unbind(-1)
    stays = old == top
    shift = torch.where(stays, 0.0, (old - top) / temperature).clamp(min=IMPOSSIBLE)
    factor = shift.exp()
    return torch.stack(
        [
            top,
            torch.where(stays, ties, 0.0),
            torch.where(stays, lower, factor * (ties + lower)),
            factor.square() * squares,
            factor * (moment + shift * (ties + lower)),
            target,
            *(factor.square() * own for own in steep),
        ],
        dim=-1,
    )
