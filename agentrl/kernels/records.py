"""Result of the kernels, and checks of their inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


class KernelInputError(ValueError):
    """The arguments of a kernel are inconsistent. This is a bug in the caller, never caused by data."""


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Per-token statistics of the tempered distribution softmax(z / temperature).

    Each field has shape [N] and dtype float32, or float64 if the hidden states are float64. Gradients flow only through
    ``log_probs``, ``entropy``, ``full_kl`` and ``teacher_divergence``.

    ``log_probs``             ln p(y) of the target y
    ``entropy``               -sum_v p(v) ln p(v), in nats
    ``sum_pi_squared``        sum_v p(v)^2
    ``energy``                ||e_y - p||^2 = 1 - 2 p(y) + sum_v p(v)^2, never negative. With capped logits
                              z = cap tanh(x / cap) it is sum_v ((e_y - p)(v) dz_v/dx_v)^2: a function of the head's
                              output x, so that energy ||h||^2 / temperature^2 is the squared gradient norm of the
                              head's weight for every model
    ``hidden_norm_squared``   ||h||^2
    ``full_kl``               KL(p || p_ref) over the vocabulary, if there is a reference (:func:`.full_kl`)
    ``teacher_divergence``    divergence from a teacher over the vocabulary, if there is a teacher

    Two logits ln 3 and 0, so p = (3/4, 1/4), target 0:

    >>> import torch
    >>> from agentrl.kernels import token_statistics
    >>> s = token_statistics(torch.tensor([[1.0]]), torch.tensor([[3.0], [1.0]]).log(), torch.tensor([0]))
    >>> [round(float(x), 4) for x in (s.log_probs.exp(), s.sum_pi_squared, s.energy, s.hidden_norm_squared)]
    [0.75, 0.625, 0.125, 1.0]
    """

    log_probs: Tensor
    entropy: Tensor
    sum_pi_squared: Tensor
    energy: Tensor
    hidden_norm_squared: Tensor
    full_kl: Tensor | None = None
    teacher_divergence: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenStatistics":
        """Return a copy with ``function`` applied to every field that is not None."""
        return replace(self, **{name: function(values) for name, values in vars(self).items() if values is not None})


@dataclass(frozen=True, kw_only=True, eq=False)
class Support:
    """Token ids to which the distribution of each of N tokens is restricted. An empty set does not restrict it.

    >>> logits = torch.zeros(2, 3)
    >>> Support(ids=torch.tensor([0, 2]), sizes=torch.tensor([0, 2])).mask_logits(logits, slice(0, 2))
    tensor([[0., 0., 0.],
            [0., -inf, 0.]])
    """

    ids: Tensor  # [M] int32, the sets of all tokens, concatenated
    sizes: Tensor  # [N] int64, on the host, so that no block waits for the device

    def mask_logits(self, logits: Tensor, rows: slice, *, start: int = 0) -> Tensor:
        """Set the logits of tokens outside the sets of ``rows`` to -inf, in place.

        ``logits`` [R, W] contain the columns of W consecutive token ids, the first of which is ``start``.
        """
        sizes = self.sizes[rows]
        before = int(self.sizes[: rows.start].sum())
        lines = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes).to(logits.device)
        columns = self.ids[before : before + len(lines)].long() - start
        here = (columns >= 0) & (columns < logits.shape[1])
        outside = (sizes > 0).to(logits.device)[:, None].expand(logits.shape).clone()
        # Ids outside the slice are written to an extra column, which is discarded.
        outside = torch.nn.functional.pad(outside, (0, 1))
        outside[lines, torch.where(here, columns, logits.shape[1])] = False
        return logits.masked_fill_(outside[:, :-1], -torch.inf)

    def select_tokens(self, indices: Tensor) -> "Support":
        """Return the sets of the tokens at ``indices`` [n], in this order."""
        chosen = indices.cpu()
        sizes = self.sizes[chosen]
        first = (self.sizes.cumsum(0) - self.sizes)[chosen] - (sizes.cumsum(0) - sizes)
        places = torch.arange(int(sizes.sum()), device="cpu") + first.repeat_interleave(sizes)
        return Support(ids=self.ids[places.to(self.ids.device)], sizes=sizes)


def check_head_inputs(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    *,
    vocabulary: int | None = None,
) -> None:
    """Raise KernelInputError unless hidden [N, D], head_weight [V, D], targets [N] and bias [V] fit together.

    Targets must lie in [0, V), or in [0, vocabulary) if head_weight is only part of a head. There is no ignore index;
    select the tokens before the call.
    """
    if hidden.ndim != 2 or head_weight.ndim != 2 or hidden.shape[1] != head_weight.shape[1]:
        raise KernelInputError(
            f"hidden must be [N, D] and head_weight [V, D]; got {tuple(hidden.shape)} and {tuple(head_weight.shape)}"
        )
    if head_weight.shape[0] == 0:
        raise KernelInputError("head_weight has no rows: the vocabulary is empty")
    if targets.shape != hidden.shape[:1]:
        raise KernelInputError(f"targets must be [N] = [{hidden.shape[0]}]; got {tuple(targets.shape)}")
    if bias is not None and bias.shape != head_weight.shape[:1]:
        raise KernelInputError(f"bias must be [V] = [{head_weight.shape[0]}]; got {tuple(bias.shape)}")
    if not hidden.is_floating_point() or not head_weight.is_floating_point():
        raise KernelInputError(
            f"hidden and head_weight must be floating-point; got {hidden.dtype} and {head_weight.dtype}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise KernelInputError(f"targets must be int64 or int32; got {targets.dtype}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise KernelInputError(f"temperature must be positive and finite; got {temperature}")
    if targets.numel():
        low, high = (int(x) for x in torch.aminmax(targets))
        size = head_weight.shape[0] if vocabulary is None else vocabulary
        if low < 0 or high >= size:
            raise KernelInputError(f"targets must lie in [0, {size}); got {low} to {high}")


def check_cap(cap: float | None) -> None:
    """Raise KernelInputError unless a cap is a positive number."""
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise KernelInputError(f"cap must be positive and finite; got {cap}")


def statistics_dtype(hidden: Tensor, head_weight: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 if either input is float64, otherwise float32."""
    return torch.float64 if torch.float64 in (hidden.dtype, head_weight.dtype) else torch.float32
