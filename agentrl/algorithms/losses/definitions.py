"""The input and output of a policy loss, and the registry of losses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from agentrl.algorithms.losses.aggregation import AGGREGATIONS
from agentrl.algorithms.registry import Entry, NoOptions, OptionsRegistry


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """`per_token` [B, T], to be aggregated over the loss mask; `metrics`: detached scalars over its tokens.

    Metrics of every loss: `ratio_mean`, `ratio_max`, `ratio_min`, `approx_kl` (k3 of old || new) and `tokens`, by
    which the means of micro-batches are to be weighted.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The input of a loss function: masked [B, T] tensors, 0 (ratio 1) where the loss mask is False."""

    log_probs: Tensor  # carries the gradient
    old_log_probs: Tensor  # detached
    advantages: Tensor  # detached
    log_ratio: Tensor  # log_probs - old_log_probs, carries the gradient; clamped to +-20
    ratio: Tensor  # exp(log_ratio)
    mask: Tensor  # bool, the loss mask
    sequence_log_ratio: Tensor  # [B, 1] detached: the mean of log_ratio over the response mask, 0 without such a token
    selected: Tensor | None = None  # bool, what the loss's selection chose; None for losses without one

    def fraction(self, where: Tensor) -> Tensor:
        """Share of the loss mask's tokens at which `where` is True."""
        return (where & self.mask).sum() / self.mask.sum().clamp(min=1)


LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
SelectionFunction = Callable[..., Tensor]
F = TypeVar("F", bound=LossFunction)


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """Properties of a loss that the trainer needs beside its formula."""

    aggregation: str = "token_mean"  # the default
    aggregations: tuple[str, ...] = AGGREGATIONS  # those that give the loss its meaning
    selection: SelectionFunction | None = None  # (inputs, options, draws) -> bool [B, T] over a whole optimizer step

    @property
    def step_wide(self) -> bool:
        """Whether tokens are selected over the whole step: a statistics pass has to come first."""
        return self.selection is not None


@dataclass(frozen=True)
class LossEntry(Entry[LossFunction]):
    """A registered loss."""

    traits: LossTraits


class LossRegistry(OptionsRegistry[LossEntry]):
    """Names -> losses."""

    def register(self, name: str, options: type = NoOptions, traits: LossTraits | None = None) -> Callable[[F], F]:
        """Return a decorator that registers a policy loss as `name`, a value of `algorithm.loss`.

        The function is called as `function(inputs, record)`. `inputs` are LossInputs, masked tensors [B, T]. `record`
        holds the options, an instance of the frozen dataclass `options`. The function returns the loss of each token, a
        tensor [B, T] with its gradient, and a dict of metrics, scalar tensors by name (`{}` for none). The trainer
        applies the correction's weights and the mask, and averages. `traits` declares the valid aggregations:

            @register_loss("soft_ratio")
            def soft_ratio(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
                return -inputs.advantages * (inputs.ratio - 0.5 * (inputs.ratio - 1).square()), {}

        docs/losses.md has a worked example. Raises NameTakenError if the name is taken.
        """

        def register(function: F) -> F:
            self.add(name, LossEntry(function, options, LossTraits() if traits is None else traits))
            return function

        return register

    def traits(self, name: str) -> LossTraits:
        """The traits of a loss; UnknownNameError if there is none of that name."""
        return self[name].traits


LOSSES = LossRegistry("loss")
register_loss = LOSSES.register

SEQUENCE_MEAN = ("seq_mean_token_mean",)
