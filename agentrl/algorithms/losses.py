"""Policy losses: one pure function each, per token (FORMULAS 5)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.errors import InvalidInputError, InvalidOptionError
from agentrl.algorithms.registry import NoOptions, Registry
from agentrl.algorithms.validation import as_mask

_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """The interval [1 - clip_low, 1 + clip_high] outside which a ratio earns nothing more."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise InvalidOptionError(f"clip_low={self.clip_low} lies outside [0, 1]")
        if not 0.0 <= self.clip_high < float("inf"):
            raise InvalidOptionError(f"clip_high={self.clip_high} must be non-negative and finite")


@dataclass(frozen=True, kw_only=True)
class DualClipOptions(ClipOptions):
    """ClipOptions, and the bound on the ratio of tokens with a negative advantage."""

    dual_clip: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1.0 < self.dual_clip < float("inf"):
            raise InvalidOptionError(f"dual_clip={self.dual_clip} must be greater than 1 and finite")


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """`per_token` [B, T], to be aggregated over the loss mask; `metrics`: detached scalars over its tokens.

    Metrics of every loss: `ratio_mean`, `ratio_max`, `ratio_min`, `approx_kl` (k3 of old || new) and `tokens`, by
    which the means of micro-batches are to be weighed.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss function sees: masked [B, T] tensors, 0 (ratio 1) where the loss mask is False."""

    log_probs: Tensor  # carries the gradient
    advantages: Tensor  # detached
    ratio: Tensor  # exp(log_probs - old), carries the gradient; the exponent is clamped to +-20
    mask: Tensor  # bool

    def fraction(self, where: Tensor) -> Tensor:
        """Share of the loss mask's tokens at which `where` is True."""
        return (where & self.mask).sum() / self.mask.sum().clamp(min=1)


LossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
LOSSES: Registry[LossFunction] = Registry("loss")
register_loss = LOSSES.register


def policy_loss(
    name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    **options: object,
) -> PolicyLoss:
    """The named loss per token; all tensors [B, T].

    `old_log_probs` are those of the policy that the ratio is taken against, detached here; None says that it is the
    very policy of `log_probs`, so every ratio is 1. Values where the mask is False reach no result and no gradient.
    Options: the fields of the loss's options record (`LOSSES.option_names(name)`).

    Raises UnknownNameError, InvalidOptionError, InvalidInputError.
    """
    entry = LOSSES[name]
    record = entry.make_options(f"loss {name!r}", options)
    tensors = {"old_log_probs": old_log_probs, "advantages": advantages, "loss_mask": loss_mask}
    for label, tensor in tensors.items():
        if tensor is not None and (tensor.shape != log_probs.shape or tensor.ndim != 2):
            raise InvalidInputError(
                f"{label} must be [B, T] as log_probs; got {tuple(tensor.shape)} and {tuple(log_probs.shape)}"
            )
    inputs = _loss_inputs(log_probs, old_log_probs, advantages, as_mask("loss_mask", loss_mask))
    per_token, metrics = entry.function(inputs, record)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    every = {**_ratio_metrics(inputs), **metrics}
    return PolicyLoss(per_token=per_token, metrics={key: value.detach() for key, value in every.items()})


@register_loss("reinforce")
def reinforce(inputs: LossInputs, options: NoOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """-A ln p (Williams 1992); on fresh data its gradient is that of `ppo`."""
    return -inputs.advantages * inputs.log_probs, {}


@register_loss("ppo", options=ClipOptions)
def ppo(inputs: LossInputs, options: ClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A ratio, -A clip(ratio, 1 - low, 1 + high)) (Schulman et al., arXiv 1707.06347)."""
    return _clipped(inputs, options), _clip_fractions(inputs, options)


@register_loss("dual_clip", options=DualClipOptions)
def dual_clip(inputs: LossInputs, options: DualClipOptions) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo`, and for A < 0 never more than -A c, so a large ratio cannot push without bound (arXiv 1912.09729)."""
    negative = inputs.advantages < 0
    bound = -inputs.advantages * options.dual_clip
    clipped = _clipped(inputs, options)
    metrics = _clip_fractions(inputs, options)
    metrics["dual_clip_fraction"] = inputs.fraction(negative & (clipped > bound))
    return torch.where(negative, torch.minimum(clipped, bound), clipped), metrics


def _clipped(inputs: LossInputs, options: ClipOptions) -> Tensor:
    clipped = inputs.ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return torch.maximum(-inputs.advantages * inputs.ratio, -inputs.advantages * clipped)


def _clip_fractions(inputs: LossInputs, options: ClipOptions) -> dict[str, Tensor]:
    ratio = inputs.ratio.detach()
    return {
        "clip_fraction_low": inputs.fraction((inputs.advantages < 0) & (ratio < 1 - options.clip_low)),
        "clip_fraction_high": inputs.fraction((inputs.advantages > 0) & (ratio > 1 + options.clip_high)),
    }


def _loss_inputs(log_probs: Tensor, old: Tensor | None, advantages: Tensor, mask: Tensor) -> LossInputs:
    own = torch.where(mask, log_probs, 0.0)
    reference = own.detach() if old is None else torch.where(mask, old.detach(), 0.0)
    ratio = (own - reference).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    return LossInputs(log_probs=own, advantages=torch.where(mask, advantages.detach(), 0.0), ratio=ratio, mask=mask)


def _ratio_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Over an empty mask: means 0, extremes 1."""
    ratio = inputs.ratio.detach()
    count = inputs.mask.sum()
    excess = torch.where(inputs.mask, ratio - 1 - ratio.log(), 0.0)
    inside = ratio[inputs.mask] if bool(count) else ratio.new_ones(1)
    return {
        "ratio_mean": torch.where(inputs.mask, ratio, 0.0).sum() / count.clamp(min=1),
        "ratio_max": inside.max(),
        "ratio_min": inside.min(),
        "approx_kl": excess.sum() / count.clamp(min=1),
        "tokens": count,
    }
