"""token_statistics by blocks of rows: the logits [N, V] never exist, forward or backward.

A block holds whole rows of the vocabulary, so its softmax needs no running maximum. The logits of a block come from
one matrix product; what follows runs over it in pieces that stay in the processor's cache. Backward computes the
logits again, unless all of them are no more than a block. Extra memory: one block (`_BLOCK_ELEMENTS`) and, in
backward, the gradients themselves.

Not guaranteed: second derivatives (`once_differentiable` raises).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentrl.kernels.products import add_head_weight_gradient, head_input_gradient, head_logits
from agentrl.kernels.records import TokenStatistics, statistics_dtype

_BLOCK_ELEMENTS = 1 << 23  # logits of one matrix product: 32 MB of float32
_KEEP_ELEMENTS = 1 << 23  # up to here the logits are kept for backward
_PIECE_ELEMENTS = 1 << 21  # logits that one elementwise pass touches: 8 MB, within the last-level cache

_IMPOSSIBLE = -1e4  # stands for ln 0 where 0 * ln 0 must be 0; its exponential is 0 in float64 too


def chunked_statistics(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None
) -> TokenStatistics:
    """The statistics of FORMULAS 2 by row blocks; see `token_statistics` for the arguments."""
    log_probs, entropy, sum_pi_squared, energy = _ChunkedStatistics.apply(
        hidden, head_weight, bias, targets.long(), temperature
    )
    dtype = statistics_dtype(hidden, head_weight)
    return TokenStatistics(
        log_probs=log_probs,
        entropy=entropy,
        sum_pi_squared=sum_pi_squared,
        energy=energy,
        hidden_norm_squared=hidden.detach().to(dtype).square().sum(-1),
    )


class _ChunkedStatistics(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], bias [V] or None, targets [N], temperature) -> four tensors [N]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature = temperature
        dtype = statistics_dtype(hidden, weight)
        kept = _kept_logits(hidden, weight, dtype) if any(ctx.needs_input_grad) else None
        columns = hidden.new_empty((6, hidden.shape[0]), dtype=dtype)
        for rows, z in _logit_blocks(hidden, weight, bias, temperature, dtype, buffer=kept):
            for piece, at in _pieces(z, rows):
                columns[:, at] = _piece_statistics(z[piece], targets[at])
        log_probs, entropy, sum_pi_squared, energy, log_total, maximum = columns.unbind()
        log_normalizer = maximum + log_total if kept is None else log_total  # what is kept has its maximum subtracted
        ctx.save_for_backward(hidden, weight, bias, targets, kept, log_normalizer, log_probs, entropy)
        ctx.mark_non_differentiable(sum_pi_squared, energy)
        return log_probs.clone(), entropy.clone(), sum_pi_squared, energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None, *_: Any) -> Any:
        if log_prob_gradient is None and entropy_gradient is None:
            return None, None, None, None, None
        hidden, weight, bias, targets, kept, log_normalizer, log_probs, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype, temperature = log_probs.dtype, ctx.temperature
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=dtype) if wants_bias else None
        gradients = _RowGradients(log_prob_gradient, entropy_gradient, log_normalizer, log_probs, entropy)
        with torch.autocast(hidden.device.type, enabled=False):
            if kept is None:
                blocks = _logit_blocks(hidden, weight, bias, temperature, dtype)
            else:
                blocks = iter([(slice(0, hidden.shape[0]), kept)])
            for rows, z in blocks:
                dz = z if kept is None else torch.empty_like(z)
                for piece, at in _pieces(z, rows):
                    gradients.write(z[piece], targets[at], at, out=dz[piece])
                if hidden_gradient is not None:
                    hidden_gradient[rows] = head_input_gradient(dz, weight).div_(temperature)
                if weight_gradient is not None:
                    add_head_weight_gradient(dz, hidden[rows].to(dtype).div(temperature), weight_gradient)
                if bias_gradient is not None:
                    bias_gradient += dz.sum(0).div_(temperature)
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None if bias_gradient is None else bias_gradient.to(bias.dtype),
            None,
            None,
        )


class _RowGradients:
    """Turns logits into the gradient with respect to them: p (-g - e (ln p + H)) + g onehot, for rows of a block.

    g and e are the gradients of the loss with respect to log_prob and entropy; e is None where entropy is not used.
    """

    def __init__(
        self, g: Tensor | None, e: Tensor | None, log_normalizer: Tensor, log_probs: Tensor, entropy: Tensor
    ) -> None:
        scale = torch.zeros_like(log_probs) if g is None else g.to(log_probs.dtype)
        at_target = -torch.expm1(log_probs) * scale  # g (1 - p), without cancellation near p = 1
        offset, slope = -scale, None
        if e is not None:
            slope = -e.to(log_probs.dtype)
            offset = offset + slope * entropy
            at_target = at_target + slope * log_probs.exp() * (log_probs.clamp(min=_IMPOSSIBLE) + entropy)
        self._log_normalizer = log_normalizer.unsqueeze(-1)
        self._offset = offset.unsqueeze(-1)
        self._slope = None if slope is None else slope.unsqueeze(-1)
        self._at_target = at_target.unsqueeze(-1)

    def write(self, z: Tensor, targets: Tensor, at: slice, *, out: Tensor) -> None:
        """out [R, V] <- the gradient with respect to z [R, V], the tempered logits of the rows `at`; out may be z."""
        torch.sub(z, self._log_normalizer[at], out=out)  # ln p
        if self._slope is None:
            out.exp_().mul_(self._offset[at])
        else:
            p = out.exp()
            out.clamp_(min=_IMPOSSIBLE)
            torch.addcmul(self._offset[at], out, self._slope[at], out=out)
            out.mul_(p)
        out.scatter_(-1, targets.unsqueeze(-1), self._at_target[at])


def _kept_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Room [N, V] for the logits of a problem so small that keeping them for backward is cheaper than a product."""
    shape = (hidden.shape[0], weight.shape[0])
    return hidden.new_empty(shape, dtype=dtype) if shape[0] * shape[1] <= _KEEP_ELEMENTS else None


def _logit_blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float,
    dtype: torch.dtype,
    buffer: Tensor | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, tempered logits [R, V]) block by block; the next block overwrites the memory of the last.

    With a buffer [N, V] there is one block: the buffer.
    """
    total, vocabulary = hidden.shape[0], weight.shape[0]
    size = max(1, min(total, _BLOCK_ELEMENTS // vocabulary) if buffer is None else total)
    if buffer is None:
        buffer = hidden.new_empty((size, vocabulary), dtype=dtype)
    shift = None if bias is None else bias.to(dtype) / temperature
    for start in range(0, total, size):
        rows = slice(start, min(start + size, total))
        z = buffer[: rows.stop - start]
        head_logits(hidden[rows].to(dtype) / temperature, weight, z)
        if shift is not None:
            z += shift
        yield rows, z


def _pieces(z: Tensor, rows: slice) -> Iterator[tuple[slice, slice]]:
    """(rows of the block z [R, V], the same as rows of the whole), few enough to stay in cache."""
    step = max(1, _PIECE_ELEMENTS // z.shape[1])
    for start in range(0, z.shape[0], step):
        stop = min(start + step, z.shape[0])
        yield slice(start, stop), slice(rows.start + start, rows.start + stop)


def _piece_statistics(z: Tensor, targets: Tensor) -> Tensor:
    """[6, R]: log_prob, entropy, sum_pi_squared, energy, ln Z1 and M of tempered logits z [R, V]; z becomes z - M.

    The target is kept out of the sums and added last: where it has nearly all the mass, ln p = -log1p(rest / own) and
    1 - p = rest / (rest + own) keep their relative accuracy.
    """
    index = targets.unsqueeze(-1)
    maximum = z.amax(-1, keepdim=True)
    z.sub_(maximum)
    own_z = z.gather(-1, index).squeeze(-1)
    own = own_z.exp()
    e = z.exp()
    e.scatter_(-1, index, 0.0)
    rest = e.sum(-1)
    squares = torch.linalg.vector_norm(e, dim=-1).square()
    weighted = e.mul_(z).sum(-1)
    if not bool(torch.isfinite(weighted).all()):
        weighted = z.exp().scatter_(-1, index, 0.0).mul_(z.clamp(min=_IMPOSSIBLE)).sum(-1)
    total = rest + own
    log_total = torch.where(own_z > -1.0, own_z + torch.log1p(rest / own), total.log())
    log_probs = own_z - log_total
    entropy = log_total - (weighted + own * own_z.clamp(min=_IMPOSSIBLE)) / total
    squares = squares / total.square()
    sum_pi_squared = (2 * log_probs).exp() + squares
    energy = torch.expm1(log_probs).square() + squares
    return torch.stack([log_probs, entropy, sum_pi_squared, energy, log_total, maximum.squeeze(-1)])
