"""The head's share: gradient of the logits, energy of the head's parameters, and the tied embedding's cross term."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.kernels.backends.products import head_input_gradient, tempered_logits
from agentrl.kernels.energies.closed_forms import gram_is_cheaper
from agentrl.kernels.softcap import cap_slope

_BLOCK_ELEMENTS = 1 << 25  # logits held at once: 128 MB of float32, and as much again for a temporary


@dataclass(frozen=True, kw_only=True)
class HeadRow:
    """One trajectory at the head, K counted tokens, S input tokens."""

    weight_energy: float  # ||sum_t dx_t h_t^T||^2
    bias_energy: float  # ||sum_t dx_t||^2
    hidden_gradient: Tensor  # [K, D], the gradient of sum_t c_t ln p(y_t) with respect to h
    cross: Tensor | None  # [S, D]: sum_t dx_t[x_s] h_t, the head's gradient at the rows of its own input tokens


def head_row(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    coefficients: Tensor,
    temperature: float,
    cap: float | None,
    inputs: Tensor | None,
) -> HeadRow:
    """dx_t = c_t (onehot(y_t) - p_t) / tau, times dz/dx of a cap z = cap tanh(x / cap), for hidden [K, D], targets [K],
    coefficients c [K]; `inputs` [S] asks for the cross term. coefficients in the accumulation dtype, hidden and weight
    [V, D] in any.

    Logits are held for a block of the vocabulary. If all of them are no more than a block they are computed once,
    otherwise twice: once for the normaliser.
    """
    blocks = _Blocks(hidden, weight, bias, temperature, cap, targets, coefficients.dtype)
    hidden = hidden.to(coefficients.dtype)
    normalizer, rest = blocks.normalizer()
    scale = (coefficients / temperature).unsqueeze(-1)
    gram = gram_is_cheaper(hidden.shape[0], weight.shape[1], weight.shape[0])
    products = hidden.new_zeros(hidden.shape[0], hidden.shape[0]) if gram else None
    gradient = torch.zeros_like(hidden)
    cross = None if inputs is None else hidden.new_zeros(inputs.shape[0], hidden.shape[1])
    weight_energy = torch.zeros((), dtype=torch.float64, device=hidden.device)
    bias_energy = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start, z in blocks:
        slope = 1.0 if cap is None else cap_slope(z, cap, temperature)
        dz = z.sub_(normalizer.unsqueeze(-1)).exp_().neg_()
        at, column = blocks.targets_in(start, z.shape[1])
        dz[at, column] = rest[at]
        dz.mul_(scale).mul_(slope)
        part = weight[start : start + z.shape[1]]
        gradient += head_input_gradient(dz, part)
        bias_energy += dz.sum(0).double().square().sum()
        if products is not None:
            products.addmm_(dz, dz.t())
        else:
            weight_energy += torch.linalg.vector_norm(dz.t() @ hidden).double().square()
        if cross is not None and inputs is not None:
            here = ((inputs >= start) & (inputs < start + z.shape[1])).nonzero().squeeze(-1)
            cross[here] = dz[:, inputs[here] - start].t() @ hidden
    if products is not None:
        weight_energy = products.mul_(hidden @ hidden.t()).sum(dtype=torch.float64)
    return HeadRow(
        weight_energy=float(weight_energy), bias_energy=float(bias_energy), hidden_gradient=gradient, cross=cross
    )


class _Blocks:
    """Tempered logits [K, v] of one block of the vocabulary after another; each may be overwritten."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: float,
        cap: float | None,
        targets: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self._hidden, self._weight, self._bias, self._dtype = hidden, weight, bias, dtype
        self._map = temperature, cap
        self._targets = targets
        self._step = max(1, min(weight.shape[0], _BLOCK_ELEMENTS // max(1, hidden.shape[0])))
        self._kept: Tensor | None = None

    def targets_in(self, start: int, width: int) -> tuple[Tensor, Tensor]:
        """(which tokens have their target in this block, its column)."""
        at = ((self._targets >= start) & (self._targets < start + width)).nonzero().squeeze(-1)
        return at, self._targets[at] - start

    def normalizer(self) -> tuple[Tensor, Tensor]:
        """(ln sum_v e^z_v, 1 - p(y)), each [K]; the second from the other tokens, so it has no cancellation."""
        others = self._hidden.new_full(self._hidden.shape[:1], -torch.inf, dtype=self._dtype)
        own = torch.empty_like(others)
        for start, z in self:
            at, column = self.targets_in(start, z.shape[1])
            own[at] = z[at, column]
            z[at, column] = -torch.inf
            others = torch.logaddexp(others, z.logsumexp(-1))
            z[at, column] = own[at]
        total = torch.logaddexp(others, own)
        return total, (others - total).exp()

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        if self._kept is not None:
            yield 0, self._kept
            return
        buffer = self._hidden.new_empty(self._hidden.shape[0], self._step, dtype=self._dtype)
        for start in range(0, self._weight.shape[0], self._step):
            part = self._weight[start : start + self._step]
            whole = buffer.shape[1] == part.shape[0]
            z = buffer if whole else torch.empty_like(buffer[:, : part.shape[0]])
            bias = None if self._bias is None else self._bias[start : start + self._step]
            tempered_logits(self._hidden, part, bias, z, *self._map)
            if self._step == self._weight.shape[0]:
                self._kept = z
            yield start, z
