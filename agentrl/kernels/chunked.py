"""token_statistics by blocks of rows: the logits [N, V] never exist, forward or backward.

A block holds whole rows of the vocabulary, so its softmax needs no running maximum. The logits of a block come from
one matrix product; what follows runs over it in pieces that stay in the processor's cache. Backward computes the
logits again. Extra memory: one block (`_BLOCK_ELEMENTS`) and, in backward, the gradients themselves.

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
_PIECE_ELEMENTS = 1 << 18  # logits that one elementwise pass touches: 1 MB, about a core's second-level cache

_IMPOSSIBLE = -1e4  # its exponential is 0 in float64 too


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
        columns = hidden.new_empty((5, hidden.shape[0]), dtype=dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, z in _logit_blocks(hidden, weight, bias, temperature, dtype):
                for piece in _pieces(z):
                    at = slice(rows.start + piece.start, min(rows.start + piece.stop, rows.stop))
                    columns[:, at] = _piece_statistics(z[piece], targets[at])
        log_probs, entropy, sum_pi_squared, energy, log_normalizer = columns.unbind()
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, log_probs, entropy)
        ctx.mark_non_differentiable(sum_pi_squared, energy)
        return log_probs.clone(), entropy.clone(), sum_pi_squared.clone(), energy.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, log_prob_gradient: Tensor | None, entropy_gradient: Tensor | None, *_: Any) -> Any:
        if log_prob_gradient is None and entropy_gradient is None:
            return None, None, None, None, None
        hidden, weight, bias, targets, log_normalizer, log_probs, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dtype = log_probs.dtype
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient = torch.zeros_like(weight, dtype=dtype) if wants_weight else None
        bias_gradient = torch.zeros_like(bias, dtype=dtype) if wants_bias else None
        rows_of = _RowGradients(log_prob_gradient, entropy_gradient, log_normalizer, log_probs, entropy)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, z in _logit_blocks(hidden, weight, bias, ctx.temperature, dtype):
                for piece in _pieces(z):
                    at = slice(rows.start + piece.start, min(rows.start + piece.stop, rows.stop))
                    rows_of.overwrite(z[piece], targets[at], at)
                if hidden_gradient is not None:
                    hidden_gradient[rows] = head_input_gradient(z, weight).div_(ctx.temperature)
                if weight_gradient is not None:
                    add_head_weight_gradient(z, hidden[rows].to(dtype).div(ctx.temperature), weight_gradient)
                if bias_gradient is not None:
                    bias_gradient += z.sum(0).div_(ctx.temperature)
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
        self.scale = torch.zeros_like(log_probs) if g is None else g.to(log_probs.dtype)
        at_target = -torch.expm1(log_probs) * self.scale  # g (1 - p), without cancellation near p = 1
        self.slope = None
        self.offset = -self.scale
        if e is not None:
            self.slope = -e.to(log_probs.dtype)
            self.offset = self.offset + self.slope * entropy
            surprise = torch.where(log_probs == -torch.inf, 0.0, log_probs) + entropy
            at_target = at_target + self.slope * log_probs.exp() * surprise
        self.at_target = at_target
        self.log_normalizer = log_normalizer

    def overwrite(self, z: Tensor, targets: Tensor, at: slice) -> None:
        """z [R, V], tempered logits of the rows `at` -> the gradient with respect to them, in place."""
        z.sub_(self.log_normalizer[at].unsqueeze(-1))  # ln p
        if self.slope is None:
            z.exp_().mul_(self.offset[at].unsqueeze(-1))
        else:
            p = z.exp()
            _replace_impossible(z)
            torch.addcmul(self.offset[at].unsqueeze(-1), z, self.slope[at].unsqueeze(-1), out=z)
            z.mul_(p)
        z.scatter_(-1, targets.unsqueeze(-1), self.at_target[at].unsqueeze(-1))


def _logit_blocks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, tempered logits [R, V]) block by block; the next block overwrites the memory of the last."""
    total, vocabulary = hidden.shape[0], weight.shape[0]
    size = min(total, max(1, _BLOCK_ELEMENTS // vocabulary))
    buffer = hidden.new_empty((size, vocabulary), dtype=dtype)
    shift = None if bias is None else bias.to(dtype) / temperature
    for start in range(0, total, max(1, size)):
        rows = slice(start, min(start + size, total))
        z = buffer[: rows.stop - start]
        head_logits(hidden[rows].to(dtype) / temperature, weight, z)
        if shift is not None:
            z += shift
        yield rows, z


def _pieces(z: Tensor) -> Iterator[slice]:
    step = max(1, _PIECE_ELEMENTS // z.shape[1])
    for start in range(0, z.shape[0], step):
        yield slice(start, start + step)


def _piece_statistics(z: Tensor, targets: Tensor) -> Tensor:
    """[5, R]: log_prob, entropy, sum_pi_squared, energy, ln normalizer of tempered logits z [R, V], which are
    destroyed.

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
        _replace_impossible(z)
        weighted = z.exp().scatter_(-1, index, 0.0).mul_(z).sum(-1)
    total = rest + own
    log_total = torch.where(own_z > -1.0, own_z + torch.log1p(rest / own), total.log())
    log_probs = own_z - log_total
    entropy = log_total - (weighted + own * own_z.clamp(min=_IMPOSSIBLE)) / total
    squares = squares / total.square()
    sum_pi_squared = (2 * log_probs).exp() + squares
    energy = torch.expm1(log_probs).square() + squares
    return torch.stack([log_probs, entropy, sum_pi_squared, energy, maximum.squeeze(-1) + log_total])


def _replace_impossible(z: Tensor) -> Tensor:
    """Make -inf finite in place, so that 0 * z is 0; whatever is this far below the maximum has probability 0."""
    return z.clamp_(min=_IMPOSSIBLE)
