"""The registry of policy losses, their input and output, and the aggregation of per-token losses to one number."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from agentrl.algorithms.options import (
    InvalidOptionError,
    NoOptions,
    OptionsRegistry,
    RegistryEntry,
    check_choice,
    check_same_shape,
    to_bool_mask,
)

AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")


def aggregate(
    per_token: Tensor,
    loss_mask: Tensor,
    mode: str,
    *,
    normalizer: Tensor | float | None = None,
    length: float | None = None,
    weights: Tensor | None = None,
    problem_weights: Tensor | None = None,
    path_weights: Tensor | None = None,
) -> Tensor:
    """Aggregate per-token losses to a micro-batch's scalar loss, with gradient. Returns 0 if no token remains.

    `token_mean`               sum / tokens
    `token_sum`                sum
    `seq_mean_token_mean`      sum over sequences of (mean over their tokens) / sequences
    `seq_mean_token_sum`       sum / sequences
    `seq_mean_token_sum_norm`  sum / (sequences * length), `length` a constant of the settings

    `weights` [B]: the fraction of a sequence that each row represents, if a sequence (an agent's rollout) is split into
    rows. Rows then count as this fraction of a sequence, and their means have this weight. Without `weights`, every row
    is a sequence. `path_weights` [B]: the weight of each row's tokens in a forked rollout, in sums and counts of
    tokens. `weights` already contain it.

    `problem_weights` [B]: the weight of each row's tokens and sequence, in sums and counts. If it is inversely
    proportional to the number of sequences of the row's problem, all problems have the same weight in the sum.

    Only tokens in the mask count, and sequences with at least one such token. Other values affect neither result nor
    gradient. `normalizer`, the sum of `loss_normalizer` over all micro-batches and ranks, replaces the count, so that
    the values of micro-batches *sum* to the value of the optimizer step.
    """
    check_choice("aggregation", mode, AGGREGATIONS)
    check_same_shape(per_token=per_token, loss_mask=loss_mask)
    _check_length(mode, length)
    mask = to_bool_mask("loss_mask", loss_mask)
    sums = torch.where(mask, per_token, 0.0).sum(-1)  # (B,)
    sums = sums if problem_weights is None else sums * problem_weights
    if mode == "seq_mean_token_mean":
        sums = sums / mask.sum(-1).clamp(min=1)
        sums = sums if weights is None else sums * weights
    elif path_weights is not None:
        sums = sums * path_weights
    if mode == "token_sum":
        return sums.sum()
    count = loss_normalizer(mask, mode, weights, problem_weights, path_weights) if normalizer is None else normalizer
    count = torch.as_tensor(count, dtype=sums.dtype, device=sums.device)
    total = sums.sum() / torch.where(count > 0, count, 1.0)
    return total if length is None else total / length


def token_factors(
    loss_mask: Tensor,
    mode: str,
    *,
    normalizer: Tensor | float | None = None,
    length: float | None = None,
    weights: Tensor | None = None,
    problem_weights: Tensor | None = None,
    path_weights: Tensor | None = None,
) -> Tensor:
    """Return the factor [B] (float64) that `aggregate`, with the same arguments, applies to a row's tokens in the mask.

    >>> token_factors(torch.tensor([[True, True], [True, False]]), "seq_mean_token_mean").tolist()
    [0.25, 0.5]
    """
    check_choice("aggregation", mode, AGGREGATIONS)
    _check_length(mode, length)
    mask = to_bool_mask("loss_mask", loss_mask)
    factors = torch.ones(mask.shape[0], dtype=torch.float64, device=mask.device)
    if mode == "seq_mean_token_mean":
        factors = factors / mask.sum(-1).clamp(min=1)
        factors = factors if weights is None else factors * weights
    elif path_weights is not None:
        factors = factors * path_weights
    factors = factors if problem_weights is None else factors * problem_weights
    if mode == "token_sum":
        return factors
    made = loss_normalizer(mask, mode, weights, problem_weights, path_weights) if normalizer is None else normalizer
    count = float(made)
    return factors / (count or 1.0) / (length or 1.0)


def loss_normalizer(
    loss_mask: Tensor,
    mode: str,
    weights: Tensor | None = None,
    problem_weights: Tensor | None = None,
    path_weights: Tensor | None = None,
) -> Tensor:
    """Return this call's contribution to the normalizer of `aggregate`: a token or sequence count, or 0 (token_sum).

    Sequences are counted with the `weights` of `aggregate`, tokens with its `path_weights`, and both with its
    `problem_weights`.
    """
    check_choice("aggregation", mode, AGGREGATIONS)
    mask = to_bool_mask("loss_mask", loss_mask)
    if mode == "token_sum":
        return mask.new_zeros((), dtype=torch.int64)
    counts = mask.sum(-1) if mode == "token_mean" else mask.any(-1).long()
    factors = path_weights if mode == "token_mean" else weights
    counts = counts if factors is None else counts * factors.double()
    return (counts if problem_weights is None else counts * problem_weights.double()).sum()


def _check_length(mode: str, length: float | None) -> None:
    if mode != "seq_mean_token_sum_norm":
        if length is not None:
            raise InvalidOptionError(f"length applies to seq_mean_token_sum_norm only, not to {mode}")
        return
    if length is None or not (math.isfinite(length) and length > 0):
        raise InvalidOptionError(f"seq_mean_token_sum_norm needs a positive, finite length; got {length}")


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The input of a loss function: masked [B, T] tensors, 0 (ratio 1) where the loss mask is False."""

    log_probs: Tensor  # with gradient
    old_log_probs: Tensor  # detached
    advantages: Tensor  # detached
    log_ratio: Tensor  # log_probs - old_log_probs with gradient; clamped to +-20
    ratio: Tensor  # exp(log_ratio)
    mask: Tensor  # bool, the loss mask
    sequence_log_ratio: Tensor  # [B, 1] detached: the mean of log_ratio over the response mask, 0 without such a token
    selected: Tensor | None = None  # bool, tokens selected by the loss; None for losses without a selection

    def fraction(self, where: Tensor) -> Tensor:
        """Return the fraction of the loss mask's tokens for which `where` is True."""
        return (where & self.mask).sum() / self.mask.sum().clamp(min=1)


LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
SelectionFunction = Callable[..., Tensor]
F = TypeVar("F", bound=LossFunction)


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Properties of a loss that the trainer needs in addition to its formula."""

    aggregation: str = "token_mean"  # the default
    aggregations: tuple[str, ...] = AGGREGATIONS  # supported aggregations
    selection: SelectionFunction | None = None  # (inputs, options, draws) -> bool [B, T] over a whole optimizer step

    @property
    def step_wide(self) -> bool:
        """True if tokens are selected over the whole step, which requires a statistics pass first."""
        return self.selection is not None


@dataclass(frozen=True)
class LossEntry(RegistryEntry[LossFunction]):
    """A registered loss."""

    traits: LossTraits


class LossRegistry(OptionsRegistry[LossEntry]):
    """Registry of losses by name."""

    def register(self, name: str, options: type = NoOptions, traits: LossTraits | None = None) -> Callable[[F], F]:
        """Return a decorator that registers a policy loss as `name`, a value of `algorithm.loss`.

        The function is called as `function(inputs, record)`. `inputs` are LossInputs, masked tensors [B, T]. `record`
        holds the options, an instance of the frozen dataclass `options`. The function returns the loss of each token, a
        tensor [B, T] with its gradient, and a dict of metrics, scalar tensors by name (`{}` for none). The trainer
        applies the correction's weights and the mask, and averages. `traits` declares the valid aggregations:

            @register_loss("soft_ratio")
            def soft_ratio(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
                return -inputs.advantages * (inputs.ratio - 0.5 * (inputs.ratio - 1).square()), {}

        docs/reference/losses.md has a worked example. Raises NameTakenError if the name is taken.
        """

        def register(function: F) -> F:
            self.add(name, LossEntry(function, options, LossTraits() if traits is None else traits))
            return function

        return register

    def traits(self, name: str) -> LossTraits:
        """Return the traits of a loss. Raises UnknownNameError for an unknown name."""
        return self[name].traits


LOSSES = LossRegistry("loss")
register_loss = LOSSES.register
