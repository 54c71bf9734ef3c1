"""policy_loss and value_loss: per-token losses from log-probabilities or values (docs/reference/formulas.md 5)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algorithms.estimators.registry import ESTIMATORS
from agentrl.algorithms.losses.registry import LOSSES, LossInputs
from agentrl.algorithms.options import (
    AlgorithmError,
    InvalidInputError,
    MissingInputError,
    check_choice,
    check_finite,
    check_positive,
    check_same_shape,
    loss_mask_or_response_mask,
    to_bool_mask,
)

LOG_RATIO_LIMIT = 20.0


def policy_loss(
    name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    response_mask: Tensor | None = None,
    weights: Tensor | None = None,
    selected: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the named policy loss per token, to be aggregated over the loss mask, and metrics. All tensors are [B, T].

    The metrics are detached scalars over the mask: the loss's own, and `ratio_mean`, `ratio_max`, `ratio_min`,
    `approx_kl` (k3 of old || new) and `tokens`, the weight of the means of micro-batches.

    `old_log_probs`, the ratio's denominator, are detached. None means the policy of `log_probs`, so every ratio is 1.
    `response_mask` (default: the loss mask) marks all model tokens; the ratio of a sequence includes rejected tokens.
    `weights` (rollout correction) are detached and multiply the result. `selected` is the result of `step_selection`
    for these rows; without it, a step-wide loss treats this call as the whole step. Values where the mask is False have
    no effect on the result or the gradient. Options: the fields of the loss's options record.

    Raises UnknownNameError, InvalidOptionError or InvalidInputError, and AlgorithmError if the loss function returns
    anything but the loss per token and a dict of metrics.
    """
    entry, traits = LOSSES[name], LOSSES.traits(name)
    record = entry.make_options(f"loss {name!r}", options)
    inputs = _loss_inputs(log_probs, old_log_probs, advantages, loss_mask, response_mask)
    if traits.selection is None:
        if selected is not None:
            raise InvalidInputError(f"loss {name!r} selects no tokens: do not pass `selected`")
    else:
        if selected is None:
            selected = traits.selection(inputs, record, _draw_for_trajectories(inputs.mask, None, 0))
        check_same_shape(log_probs=log_probs, selected=selected)
        inputs = replace(inputs, selected=to_bool_mask("selected", selected) & inputs.mask)
    per_token, metrics = _check_loss_result(name, entry.function(inputs, record), inputs.mask)
    if weights is not None:
        check_same_shape(log_probs=log_probs, weights=weights)
        check_finite("weights", weights, inputs.mask)
        per_token = per_token * torch.where(inputs.mask, weights.detach(), 0.0)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    every = {**_ratio_metrics(inputs), **metrics}
    return per_token, {key: value.detach() for key, value in every.items()}


@torch.no_grad()
def step_selection(
    name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    trajectory_ids: Tensor | None = None,
    seed: int = 0,
    **options: object,
) -> Tensor:
    """Select the tokens of a step-wide loss from the rows of one *whole* optimizer step. Returns [B, T] bool.

    A statistics pass computes `log_probs` with the weights at the start of the step. Each micro-batch passes its rows
    of the result to `policy_loss(selected=...)`. `trajectory_ids` [B] int64 default to the row index. A token's random
    number is a function of (seed, trajectory id, position), independent of the order of rows and of padding.

    Raises AlgorithmError for a loss without a selection, and the errors of `policy_loss`.
    """
    entry, traits = LOSSES[name], LOSSES.traits(name)
    if traits.selection is None:
        raise AlgorithmError(f"loss {name!r} selects no tokens: call policy_loss without `selected`")
    record = entry.make_options(f"loss {name!r}", options)
    inputs = _loss_inputs(log_probs, old_log_probs, advantages, loss_mask, None)
    return traits.selection(inputs, record, _draw_for_trajectories(inputs.mask, trajectory_ids, seed))


def default_aggregation(loss: str, estimator: str) -> str:
    """Return the default aggregation of a loss and an estimator, as in their papers.

    Returns the estimator's trait `aggregation` if the loss supports it, otherwise the loss's default. Raises
    UnknownNameError for an unknown loss or estimator.
    """
    traits = LOSSES.traits(loss)
    wanted = ESTIMATORS[estimator].aggregation or traits.aggregation
    return wanted if wanted in traits.aggregations else traits.aggregation


def check_aggregation(loss: str, mode: str) -> None:
    """Raise InvalidOptionError if the loss does not support this aggregation (gspo and gmpo support only one)."""
    check_choice(f"aggregation of loss {loss!r}", mode, LOSSES.traits(loss).aggregations)


def _check_loss_result(name: str, made: object, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Check and return a loss function's result. Raises AlgorithmError unless it is (loss [B, T], metrics)."""
    match made:
        case (Tensor() as per_token, dict() as metrics) if per_token.shape == mask.shape:
            if all(isinstance(value, Tensor) for value in metrics.values()):
                return per_token, metrics
            found = "metrics that are not all tensors"
        case (Tensor() as per_token, dict()):
            found = f"a loss of shape {list(per_token.shape)}"
        case Tensor():
            found = "a tensor"
        case _:
            found = f"a {type(made).__name__}"
    raise AlgorithmError(
        f"loss {name!r} returned {found}: return (per_token, metrics), a tensor of shape {list(mask.shape)} with the "
        "loss of each token (not averaged) and a dict of scalar tensors, which may be empty"
    )


def _draw_for_trajectories(mask: Tensor, trajectory_ids: Tensor | None, seed: int) -> Tensor:
    rows, width = mask.shape
    if trajectory_ids is None:
        trajectory_ids = torch.arange(rows, device=mask.device)
    if trajectory_ids.shape != (rows,) or trajectory_ids.dtype != torch.int64:
        raise InvalidInputError(
            f"trajectory_ids must be [{rows}] int64; got {tuple(trajectory_ids.shape)} {trajectory_ids.dtype}"
        )
    if trajectory_ids.unique().numel() != rows:
        raise InvalidInputError("trajectory_ids must be unique, because they identify the trajectories of the step")
    return random_integers_by_token(trajectory_ids, width, seed)


def _loss_inputs(
    log_probs: Tensor, old: Tensor | None, advantages: Tensor, loss_mask: Tensor, response_mask: Tensor | None
) -> LossInputs:
    if log_probs.ndim != 2 or not log_probs.is_floating_point():
        raise InvalidInputError(
            f"log_probs must be [B, T] floating-point; got {tuple(log_probs.shape)} {log_probs.dtype}"
        )
    check_same_shape(
        log_probs=log_probs, old_log_probs=old, advantages=advantages, loss_mask=loss_mask, response_mask=response_mask
    )
    mask = to_bool_mask("loss_mask", loss_mask)
    model = mask if response_mask is None else to_bool_mask("response_mask", response_mask)
    mask = loss_mask_or_response_mask(mask, model)
    check_finite("log_probs", log_probs, model)
    if old is not None:
        check_finite("old_log_probs", old, model)
    check_finite("advantages", advantages, mask)
    whole = torch.where(model, log_probs, 0.0)
    reference = whole.detach() if old is None else torch.where(model, old.detach(), 0.0)
    log_ratio = (whole - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    lengths = model.sum(-1, keepdim=True).clamp(min=1)
    sequence_log_ratio = log_ratio.detach().sum(-1, keepdim=True) / lengths
    log_ratio = torch.where(mask, log_ratio, 0.0)
    return LossInputs(
        log_probs=torch.where(mask, whole, 0.0),
        old_log_probs=torch.where(mask, reference, 0.0),
        advantages=torch.where(mask, advantages.detach(), 0.0),
        log_ratio=log_ratio,
        ratio=log_ratio.exp(),
        mask=mask,
        sequence_log_ratio=sequence_log_ratio,
    )


def _ratio_metrics(inputs: LossInputs) -> dict[str, Tensor]:
    """Compute metrics of the ratio. Over an empty mask, means are 0 and extremes 1."""
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


def value_loss(
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return max((V - ret)^2, (clip(V, V_old - c, V_old + c) - ret)^2) / 2 per token, and metrics; all tensors [B, T].

    The metrics are detached scalars over the mask: `value_mean`, `return_mean`, `squared_error`, `value_clip_fraction`
    (fraction of tokens whose gradient is clipped to 0), `return_square_mean`, and `tokens`, the weight of all means.

    `old_values` are the critic's values at rollout, `returns` the targets A + V_old; both are detached. clip=None:
    (V-ret)^2 / 2. Values where the mask is False have no effect. Raises InvalidOptionError for clip <= 0,
    MissingInputError for a clip without old values, and InvalidInputError for invalid tensors.
    """
    mask = to_bool_mask("response_mask", response_mask)
    if clip is not None:
        check_positive("value clip", clip)
        if old_values is None:
            raise MissingInputError("a clipped value loss needs old_values, the critic's values at rollout")
    check_same_shape(values=values, returns=returns, response_mask=mask, old_values=old_values)
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
    count = mask.sum()
    tokens, detached = count.clamp(min=1), own.detach()
    metrics = {
        "value_mean": detached.sum() / tokens,
        "return_mean": target.sum() / tokens,
        "return_square_mean": target.square().sum() / tokens,
        "squared_error": (detached - target).square().sum() / tokens,
        "value_clip_fraction": silenced.sum() / tokens,
        "tokens": count,
    }
    return loss / 2, metrics


# Constants of splitmix64 (Steele, Lea, Flood 2014) as signed numbers; int64 products wrap like unsigned products.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def random_integers_by_token(trajectory_ids: Tensor, width: int, seed: int) -> Tensor:
    """Draw uniform int64 values [B, width] that depend only on (seed, trajectory id [B] int64, position)."""
    positions = torch.arange(width, dtype=torch.int64, device=trajectory_ids.device)
    start = torch.full_like(trajectory_ids, seed)
    return _splitmix(_splitmix(_splitmix(start) ^ trajectory_ids).unsqueeze(-1) ^ positions)


def _splitmix(x: Tensor) -> Tensor:
    x = x + _STEP
    x = (x ^ _shift_bits_right(x, 30)) * _FIRST
    x = (x ^ _shift_bits_right(x, 27)) * _SECOND
    return x ^ _shift_bits_right(x, 31)


def _shift_bits_right(x: Tensor, bits: int) -> Tensor:
    """Compute the logical right shift of x by `bits` bits, without sign extension."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
