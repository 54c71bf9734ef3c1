"""Gradient-variance diagnostics with groups as units (docs/reference/formulas.md 7).

g_j is the mean policy gradient of group j's trajectories, J the number of groups:
P = mean_j ||g_j||^2 (power), S = ||mean_j g_j||^2 (signal), Var = (P - S) / (J - 1).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.options import InvalidInputError, check_same_shape
from agentrl.kernels import Support
from agentrl.kernels.arithmetic import apply_cap_and_temperature, cap_derivative

_BLOCK_ELEMENTS = 1 << 23


@torch.no_grad()
def diagonal_proxy(token_energy: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Compute sum_t w_t A_t^2 of every trajectory, [B] float64, from [B, T] tensors.

    This is exactly the squared norm of the policy gradient with respect to the trajectory's (tempered) logits. It is
    not ||g||^2 of the parameters, because it omits the cross terms between tokens, and has no corresponding S.
    """
    mask = response_mask.bool()
    check_same_shape(token_energy=token_energy, advantages=advantages, response_mask=mask)
    energy = torch.where(mask, token_energy.double(), 0.0)
    return (energy * torch.where(mask, advantages.double(), 0.0).square()).sum(-1)


@dataclass(frozen=True, kw_only=True)
class HeadVariance:
    """P, S and Var of the gradient of the head's weight; `variance` is None for fewer than two groups."""

    power: float
    signal: float
    variance: float | None
    groups: int


class HeadVarianceAccumulator:
    """Accumulates P and S of g = sum_t A_t delta_t h_t^T / tau over groups. Pass each group in one call.

    With capped logits z = cap tanh(x / cap), delta is (e_y - p) dz/dx, the gradient at the head's output x. One product
    per group yields both: 4 S V D operations for S tokens. Memory: one float32 [V, D] sum, and blocks of the
    vocabulary. Over several ranks, sum `gradient_sum`, `power_sum` and `groups`.
    """

    def __init__(
        self, head_weight: Tensor, *, temperature: float, bias: Tensor | None = None, cap: float | None = None
    ) -> None:
        """Use `head_weight` [V, D], `bias` [V], `temperature` and `cap` as in the forward pass.

        `cap` is in units of the head's output. The policy must not change between calls.
        """
        if head_weight.ndim != 2 or not temperature > 0:
            raise InvalidInputError(
                f"head_weight must be [V, D] and temperature positive; got temperature {temperature}"
            )
        self._weight = head_weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._temperature = temperature
        self._cap = cap
        self._dtype = torch.float64 if head_weight.dtype == torch.float64 else torch.float32
        self.gradient_sum = torch.zeros_like(self._weight, dtype=self._dtype)
        self.power_sum = torch.zeros((), dtype=torch.float64, device=head_weight.device)
        self.groups = 0

    @torch.no_grad()
    def update(
        self,
        *,
        hidden: Tensor,
        targets: Tensor,
        advantages: Tensor,
        rows: Tensor,
        groups: Tensor,
        token_indices: Tensor | None = None,
        support: Support | None = None,
        over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Add the groups of a micro-batch: B trajectories with N model tokens in total.

        hidden [N, D], targets [N], advantages [N]; rows [N] is the trajectory 0 .. B-1 of each token, groups [B] the
        group of each trajectory. The size of a group includes trajectories without a token here. `support` contains the
        sets to which the distributions of the N tokens are restricted.

        Ranks that share the trajectories pass only the states of their own tokens, hidden [n, D], and the indices of
        these tokens, `token_indices` [n]. `over_ranks` all-reduces a tensor over these ranks, so that all ranks have
        the complete sums.
        """
        count = len(targets)
        own = torch.arange(count, device=hidden.device) if token_indices is None else token_indices
        if not (targets.shape == advantages.shape == rows.shape == (count,) and len(own) == len(hidden)):
            raise InvalidInputError(
                "targets, advantages and rows must be [N]; "
                "hidden must have N rows, or one row per entry of token_indices"
            )
        _, labels, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
        token_labels = labels[rows]
        scale = advantages.to(self._dtype) / (sizes[token_labels].to(self._dtype) * self._temperature)
        for group in range(len(sizes)):
            tokens = int((token_labels == group).sum())  # counted over all ranks, so that all use the same blocks
            if not tokens:
                continue
            places = (token_labels[own] == group).nonzero().squeeze(-1)
            chosen, states = own[places], hidden[places].to(self._dtype)
            sets = None if support is None else support.select_tokens(chosen)
            for block, product in self._gradient_by_vocabulary_block(
                states, targets[chosen], scale[chosen], tokens, sets
            ):
                whole = product if over_ranks is None else over_ranks(product)
                self.power_sum += whole.double().square().sum()
                self.gradient_sum[block] += whole
        self.groups += len(sizes)

    def result(self) -> HeadVariance:
        """Return P, S and Var of the groups added so far. Raises InvalidInputError if no group was added."""
        if self.groups == 0:
            raise InvalidInputError("no group was added: call update before result")
        power = float(self.power_sum) / self.groups
        signal = float(self.gradient_sum.double().square().sum()) / self.groups**2
        variance = (power - signal) / (self.groups - 1) if self.groups > 1 else None
        return HeadVariance(power=power, signal=signal, variance=variance, groups=self.groups)

    def _gradient_by_vocabulary_block(
        self, hidden: Tensor, targets: Tensor, scale: Tensor, tokens: int, support: Support | None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield sum_t scale_t delta_t h_t^T of a group of `tokens` tokens for each block of the vocabulary."""
        step = max(1, _BLOCK_ELEMENTS // max(tokens, hidden.shape[1]))
        normalizer = self._log_normalizer(hidden, step, support)
        for start in range(0, self._weight.shape[0], step):
            block = slice(start, min(start + step, self._weight.shape[0]))
            inside = ((targets >= block.start) & (targets < block.stop)).nonzero().squeeze(-1)
            logits = self._logits(hidden, block, support)
            delta = -(logits - normalizer.unsqueeze(-1)).exp_()
            delta[inside, targets[inside] - block.start] += 1
            if self._cap is not None:
                delta *= cap_derivative(logits, self._cap, self._temperature)
            yield block, (delta * scale.unsqueeze(-1)).t() @ hidden

    def _log_normalizer(self, hidden: Tensor, step: int, support: Support | None) -> Tensor:
        result = hidden.new_full(hidden.shape[:1], -torch.inf)
        for start in range(0, self._weight.shape[0], step):
            part = self._logits(hidden, slice(start, start + step), support).logsumexp(-1)
            result = torch.logaddexp(result, part)
        return result

    def _logits(self, hidden: Tensor, block: slice, support: Support | None) -> Tensor:
        logits = hidden @ self._weight[block].to(self._dtype).t()
        if self._bias is not None:
            logits = logits + self._bias[block].to(self._dtype)
        logits = (
            logits / self._temperature
            if self._cap is None
            else apply_cap_and_temperature(logits, self._cap, self._temperature)
        )
        return logits if support is None else support.mask_logits(logits, slice(0, len(logits)), start=block.start)
