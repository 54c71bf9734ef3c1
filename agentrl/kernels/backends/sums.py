"""Running sums of one pass over the vocabulary by slices, and the statistics computed from them (docs/formulas.md 2).

The state of a row consists of six numbers computed from its raw logits z. The first five exclude the target:

``TOP``      M, the largest logit so far
``TIES``     number of logits equal to M
``LOWER``    sum of e^((z - M) / T) over the others: Z1 = TIES + LOWER, so that ln Z1 is accurate near Z1 = 1
``SQUARES``  Z2 = sum of e^(2 (z - M) / T)
``MOMENT``   Z3 = sum of (z - M) / T e^((z - M) / T)
``TARGET``   the target's logit, 0 before its slice is processed

Capped logits z = cap tanh(x / cap) have a seventh number, which only the energy uses:

``STEEP``    sum of (e^((z - M) / T) dz/dx)^2

Excluding the target keeps the relative accuracy of 1 - p if it has nearly all the mass. The temperature T divides
differences of logits and never the logits themselves, which would be rounded at their own, larger scale.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.kernels.backends.gradients import IMPOSSIBLE
from agentrl.kernels.softcap import cap_slope

TOP, TIES, LOWER, SQUARES, MOMENT, TARGET, STEEP = range(7)


def start_sums(like: Tensor, rows: int, dtype: torch.dtype, *, capped: bool = False) -> Tensor:
    """Return the initial state [rows, 6], or [rows, 7] if `capped`, on the device of `like`."""
    sums = like.new_zeros((rows, 7 if capped else 6), dtype=dtype)
    sums[:, TOP] = -torch.inf
    return sums


def rescale(sums: Tensor, top: Tensor, temperature: Tensor) -> Tensor:
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


class Ranks:
    """Ranks of a group, each with a part of the vocabulary."""

    def __init__(self, first: int, group: dist.ProcessGroup | None) -> None:
        """`first` is the index of this rank's first token in the complete vocabulary."""
        self.first = first
        self._group = group

    def merge_sums(self, sums: Tensor, temperature: Tensor) -> Tensor:
        """Merge the states of all parts to the state [N, 6] of the vocabulary. A target is in one part only."""
        top = sums[:, TOP].contiguous()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self._group)
        rest = rescale(sums, top, temperature)[:, TIES:].contiguous()
        self.add_up(rest)
        return torch.cat([top.unsqueeze(-1), rest], dim=-1)

    def add_up(self, part: Tensor) -> None:
        """Replace `part` by its sum over all ranks."""
        dist.all_reduce(part, group=self._group)


def finish_sums(sums: Tensor, temperature: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """Return (statistics [4, N], normalisers [N, 2]) from the final state [N, 6], or [N, 7] with a cap.

    The statistics are log_prob, entropy, sum_pi_squared and energy. The normalisers b and L satisfy
    ln p(v) = (z_v - b) / T - L.
    """
    top, ties, lower, squares, moment, target, *steep = sums.unbind(-1)
    best = torch.maximum(top, target)
    shift = ((top - best) / temperature).clamp(min=IMPOSSIBLE)  # of the other tokens
    own_shift = ((target - best) / temperature).clamp(min=IMPOSSIBLE)
    factor, own = shift.exp(), own_shift.exp()
    rest = factor * (ties + lower)
    excess = torch.where(
        target >= top, rest, ties - 1 + lower + own
    )  # mass in addition to one largest logit, which is 1
    log_total, total = excess.log1p(), excess + 1
    log_probs = (target - best) / temperature - log_total
    # If the target has much of the mass, ln p = -log1p(rest / own) keeps the relative accuracy of 1 - p.
    log_probs = torch.where(log_probs > -1.0, -torch.log1p(rest / own), log_probs)
    entropy = log_total - (factor * (moment + shift * (ties + lower)) + own * own_shift) / total
    share = (factor / total).square()
    slope = 1.0 if cap is None else cap_slope(target, cap)
    energy = (log_probs.expm1() * slope).square() + share * (squares if cap is None else steep[0])
    statistics = [log_probs, entropy, (2 * log_probs).exp() + share * squares, energy]
    return torch.stack(statistics), torch.stack([best, log_total], dim=-1)
