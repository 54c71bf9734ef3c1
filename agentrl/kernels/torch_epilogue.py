"""Operations after the matrix product of a tile, in torch. Mirrors `triton_epilogue`."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.kernels.arithmetic import IMPOSSIBLE, cap_derivative
from agentrl.kernels.sliced import LOWER, MOMENT, SQUARES, STEEP, TARGET, TIES, TOP, rescale_sums


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
    """Add the raw logits [R, W] of the tokens start..start+W to the state [R, 6] of their rows, in place.

    With a cap, the logits are capped and the state is [R, 7]. bias [W] belongs to the same tokens. targets [R] index
    the complete vocabulary and may be outside this slice. The logits are overwritten.
    """
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
    """Write p (offset + slope ln p), but at_target at the target, to out [R, W] from the raw logits of a tile at start.

    With a cap the logits are capped, and the gradient is with respect to the logits before the cap. normalisers [R, 2]
    come from `statistics_from_sums`, coefficients [R, 3] are offset, slope and at_target. The logits are overwritten;
    out may be the same tensor.
    """
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
