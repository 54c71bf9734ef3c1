"""policy_loss: from log-probabilities, advantages and a mask to one number a token."""

from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algorithms.errors import AlgorithmError, InvalidInputError, check_choice
from agentrl.algorithms.estimators.registry import ESTIMATORS
from agentrl.algorithms.losses.definitions import LOSSES, LossInputs, PolicyLoss
from agentrl.algorithms.losses.draws import token_draws
from agentrl.algorithms.validation import as_loss_mask, as_mask, check_alike, check_finite

_LOG_RATIO_LIMIT = 20.0


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
) -> PolicyLoss:
    """The named loss per token; all tensors [B, T].

    `old_log_probs` are those of the policy that the ratio is taken against, detached here; None: the very policy of
    `log_probs`, every ratio 1. `response_mask` (default: the loss mask) marks all model tokens: the ratio of a sequence
    is over them, whatever was rejected. `weights` (rollout correction) are detached and multiply the result. `selected`
    is what `step_selection` gave for these rows; without it a step-wide loss takes this call for the whole step. Values
    where the mask is False reach no result and no gradient. Options: the fields of the loss's options record.

    Raises UnknownNameError, InvalidOptionError or InvalidInputError, and AlgorithmError if the loss function returns
    anything but the loss per token and a dict of metrics.
    """
    entry, traits = LOSSES[name], LOSSES.traits(name)
    record = entry.make_options(f"loss {name!r}", options)
    inputs = _loss_inputs(log_probs, old_log_probs, advantages, loss_mask, response_mask)
    if traits.selection is None:
        if selected is not None:
            raise InvalidInputError(f"loss {name!r} selects no tokens: it takes no `selected`")
    else:
        if selected is None:
            selected = traits.selection(inputs, record, _draws(inputs.mask, None, 0))
        check_alike(log_probs=log_probs, selected=selected)
        inputs = replace(inputs, selected=as_mask("selected", selected) & inputs.mask)
    per_token, metrics = _checked(name, entry.function(inputs, record), inputs.mask)
    if weights is not None:
        check_alike(log_probs=log_probs, weights=weights)
        check_finite("weights", weights, inputs.mask)
        per_token = per_token * torch.where(inputs.mask, weights.detach(), 0.0)
    per_token = torch.where(inputs.mask, per_token, 0.0)
    every = {**_ratio_metrics(inputs), **metrics}
    return PolicyLoss(per_token=per_token, metrics={key: value.detach() for key, value in every.items()})


@torch.no_grad()
def step_selection(
    name: str,
    *,
    log_probs: Tensor,
    old_log_probs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    keys: Tensor | None = None,
    seed: int = 0,
    **options: object,
) -> Tensor:
    """Which tokens a step-wide loss selects, [B, T] bool, from the rows of one *whole* optimizer step.

    A statistics pass computes `log_probs` with the weights that the step starts from; each micro-batch gives its rows
    of the result to `policy_loss(selected=...)`. `keys` [B] int64 (default: the row number) name the trajectories: a
    token's random number is a function of (seed, key, position), whatever the order of rows or the padding.

    Raises AlgorithmError for a loss that selects nothing, and what `policy_loss` raises.
    """
    entry, traits = LOSSES[name], LOSSES.traits(name)
    if traits.selection is None:
        raise AlgorithmError(f"loss {name!r} selects no tokens over the step")
    record = entry.make_options(f"loss {name!r}", options)
    inputs = _loss_inputs(log_probs, old_log_probs, advantages, loss_mask, None)
    return traits.selection(inputs, record, _draws(inputs.mask, keys, seed))


def default_aggregation(loss: str, estimator: str) -> str:
    """The aggregation that goes with a loss and an estimator, as their papers have it.

    A loss that admits one alone decides; else the estimator, where its derivation asks for one (the trait
    `aggregation`); else the loss. Raises UnknownNameError.
    """
    traits = LOSSES.traits(loss)
    wanted = ESTIMATORS[estimator].aggregation or traits.aggregation
    return wanted if wanted in traits.aggregations else traits.aggregation


def check_aggregation(loss: str, mode: str) -> None:
    """Raise InvalidOptionError if the loss has no meaning under this aggregation (gspo and gmpo admit one only)."""
    check_choice(f"aggregation of loss {loss!r}", mode, LOSSES.traits(loss).aggregations)


def _checked(name: str, made: object, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of a loss function. Raises AlgorithmError if it is not (loss per token [B, T], metrics)."""
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


def _draws(mask: Tensor, keys: Tensor | None, seed: int) -> Tensor:
    rows, width = mask.shape
    if keys is None:
        keys = torch.arange(rows, device=mask.device)
    if keys.shape != (rows,) or keys.dtype != torch.int64:
        raise InvalidInputError(f"keys must be [{rows}] int64; got {tuple(keys.shape)} {keys.dtype}")
    if keys.unique().numel() != rows:
        raise InvalidInputError("keys must differ: they name the trajectories of the step")
    return token_draws(keys, width, seed)


def _loss_inputs(
    log_probs: Tensor, old: Tensor | None, advantages: Tensor, loss_mask: Tensor, response_mask: Tensor | None
) -> LossInputs:
    if log_probs.ndim != 2 or not log_probs.is_floating_point():
        raise InvalidInputError(f"log_probs must be [B, T] floating; got {tuple(log_probs.shape)} {log_probs.dtype}")
    check_alike(
        log_probs=log_probs, old_log_probs=old, advantages=advantages, loss_mask=loss_mask, response_mask=response_mask
    )
    mask = as_mask("loss_mask", loss_mask)
    model = mask if response_mask is None else as_mask("response_mask", response_mask)
    mask = as_loss_mask(mask, model)
    check_finite("log_probs", log_probs, model)
    if old is not None:
        check_finite("old_log_probs", old, model)
    check_finite("advantages", advantages, mask)
    whole = torch.where(model, log_probs, 0.0)
    reference = whole.detach() if old is None else torch.where(model, old.detach(), 0.0)
    log_ratio = (whole - reference).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
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
