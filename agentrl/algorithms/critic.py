"""The loss of a critic (docs/formulas.md 5)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.errors import MissingInputError
from agentrl.algorithms.validation import as_mask, check_alike, check_finite, check_positive


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """`per_token` [B, T], to be aggregated over the response mask; `metrics`: detached scalars over its tokens.

    `value_mean`, `return_mean`, `squared_error`, `value_clip_fraction` (share of tokens whose gradient the clip
    silences), `return_square_mean`, and `tokens`, by which all of these are to be weighted.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]


def value_loss(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = 0.2,
) -> ValueLoss:
    """max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2) / 2 per token; all tensors [B, T].

    `old_values` are the critic's at rollout, `returns` the targets A + V_old; both detached. clip=None: (V-ret)^2 / 2.
    Values where the mask is False reach nothing. Raises InvalidOptionError (clip <= 0), MissingInputError (a clip
    without old values), InvalidInputError.
    """
    mask = as_mask("response_mask", response_mask)
    if clip is not None:
        check_positive("value clip", clip)
        if old_values is None:
            raise MissingInputError("a clipped value loss needs old_values, the critic's values at rollout")
    check_alike(values=values, returns=returns, response_mask=mask, old_values=old_values)
    for name, tensor in {"values": values, "returns": returns, "old_values": old_values}.items():
        if tensor is not None:
            check_finite(name, tensor, mask)
    own, target = torch.where(mask, values, 0.0), torch.where(mask, returns.detach(), 0.0)
    loss = (own - target).square()
    silenced = torch.zeros_like(mask)
    if clip is not None and old_values is not None:
        old = torch.where(mask, old_values.detach(), 0.0)
        held = (torch.clamp(own, old - clip, old + clip) - target).square()
        silenced = mask & (held > loss)
        loss = torch.maximum(loss, held)
    return ValueLoss(per_token=loss / 2, metrics=_metrics(own.detach(), target, silenced, mask))


def _metrics(values: Tensor, returns: Tensor, silenced: Tensor, mask: Tensor) -> dict[str, Tensor]:
    count = mask.sum()
    tokens = count.clamp(min=1)
    return {
        "value_mean": values.sum() / tokens,
        "return_mean": returns.sum() / tokens,
        "return_square_mean": returns.square().sum() / tokens,
        "squared_error": (values - returns).square().sum() / tokens,
        "value_clip_fraction": silenced.sum() / tokens,
        "tokens": count,
    }
