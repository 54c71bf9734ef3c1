"""trajectory_energies: ||grad_theta sum_t rho_t ln p(y_t)||^2 of every row of a batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.kernels.energies.closed_forms import embedding_energy
from agentrl.kernels.energies.collector import LayerEnergies
from agentrl.kernels.energies.head import HeadRow, head_row
from agentrl.kernels.energies.modules import Parts, take_apart
from agentrl.kernels.records import KernelInputError


def trajectory_energies(
    model: Any,
    input_ids: Tensor,
    token_mask: Tensor,
    *,
    attention_mask: Tensor | None = None,
    importance_weights: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """E_b = ||grad_theta sum_t rho_t ln p(y_t)||^2 of each row [B], over the model's trainable parameters theta.

    model: a causal language model of `transformers` (Llama, Qwen2 or Qwen3; its head may be a `FusedHead`), sharded by
    ZeRO-3 or not. input_ids [B, S]: prompt and response, one trajectory a row, no packing. token_mask [B, S] bool: the
    *tokens* y_t whose log-probability counts (the model's own, not observations); the distribution of token t comes
    from the state at t - 1. attention_mask [B, S] bool: False at padding, which is taken out wherever it stands;
    without it every column is attended to, which is right for right padding. importance_weights [B, S]: rho_t, a
    constant, read only where token_mask is True. The distribution is softmax(z / temperature).

    One forward, one backward to the embedding's output, without the parameters' own gradients: no weight gradient is
    formed and no `.grad` is touched. Rows do not mix: FORMULAS section 4, arXiv 1510.01799 (Goodfellow). A row without
    a counted token has energy 0. The mode (train or eval) stays as it is: with dropout it is the energy of what was
    drawn. Sums are in float32 for models in half precision and float32, in float64 for float64. The result is float32
    or float64, detached.

    Memory beside that of a forward and backward: the gradients of one layer's output, products of one layer (at most
    64 MB at once, or one row's: a weight's size or, for short rows, two Gram matrices of at most a quarter of it), and
    at the head the logits of a block of the vocabulary for one row (128 MB), never [B, S, V]. Under gradient
    checkpointing layer inputs are kept no longer than their recomputation.

    Under ZeRO-3 this is collective: every rank calls it, with as many rows as it likes. The head runs once.

    Opacus (ghost clipping) adds up one norm a parameter, without the cross term of a head tied to the embedding, and
    its hooks need a head that has formed all logits; so it is not used.

    Raises KernelInputError for a model with trainable parameters that have no closed form here (the message names the
    module), reentrant gradient checkpointing, and inputs that do not fit together.
    """
    parts = take_apart(model)
    mask = token_mask.bool()
    _check(input_ids, mask, attention_mask, importance_weights, temperature)
    if attention_mask is not None:
        order = _left_aligned(attention_mask.bool())
        input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
        importance_weights = None if importance_weights is None else importance_weights.gather(1, order)
    # A state matters if a counted token comes after it. What a row is padded with on the right never does.
    active = mask.long().flip(-1).cumsum(-1).flip(-1) - mask.long() > 0
    dtype = torch.float64 if parts.embedding.weight.dtype == torch.float64 else torch.float32
    coefficients = mask.to(dtype)
    if importance_weights is not None:
        coefficients = torch.where(mask, importance_weights.detach(), 0.0).to(dtype)
    layers = LayerEnergies(parts.layers, active, dtype)
    with torch.enable_grad(), layers.attached():
        embedded, hidden = _forward(parts, input_ids)
        rows = _head_rows(parts, hidden.detach(), input_ids, mask, coefficients, temperature, active)
        counted, gradient = _before(mask), torch.zeros_like(hidden, dtype=dtype)
        gradient[counted] = torch.cat([row.hidden_gradient for row in rows])
        layers.begin_backward()
        (gradient,) = torch.autograd.grad(hidden, embedded, gradient.to(hidden.dtype))
    layers.check_complete()
    totals = layers.totals + _outer_energies(parts, rows, input_ids, gradient.detach().to(dtype), active)
    return totals.to(dtype)


def _left_aligned(attended: Tensor) -> Tensor:
    """[B, S]: the columns of every row that are attended to, in order, then the others.

    A causal model then needs no mask, and a row is computed as it is on its own, whatever it was padded with.
    """
    return attended.long().argsort(dim=1, descending=True, stable=True)


def _before(mask: Tensor) -> Tensor:
    """The positions t - 1 of the tokens t in a mask [B, S]; False in the last column. Row-major order is kept."""
    return torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)


def _forward(parts: Parts, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(the embedding's output as the graph's leaf, the states after the last norm), both [B, S, D]."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = parts.embedding.register_forward_hook(cut)
    try:
        hidden = parts.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    if len(leaves) != 1:
        raise KernelInputError(f"the embedding ran {len(leaves)} times in one forward")
    return leaves[0], hidden


def _head_rows(
    parts: Parts,
    hidden: Tensor,
    input_ids: Tensor,
    mask: Tensor,
    coefficients: Tensor,
    temperature: float,
    active: Tensor,
) -> list[HeadRow]:
    """The head's share of every row, computed inside one call of the head, whose hooks have gathered its weight."""
    rows: list[HeadRow] = []
    wants_cross = parts.tied and parts.embedding.weight.requires_grad

    def inside(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        for row in range(mask.shape[0]):
            tokens = mask[row].nonzero().squeeze(-1)
            rows.append(
                head_row(
                    hidden[row, tokens - 1].to(coefficients.dtype),
                    parts.head.weight.detach(),
                    None if parts.head.bias is None else parts.head.bias.detach(),
                    input_ids[row, tokens],
                    coefficients[row, tokens],
                    temperature,
                    input_ids[row, active[row]] if wants_cross else None,
                )
            )

    handle = parts.head.register_forward_pre_hook(inside)
    try:
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            parts.head(hidden[:1, :1].to(parts.head.weight.dtype))  # what it gives is of no use
    finally:
        handle.remove()
    return rows


def _outer_energies(parts: Parts, rows: list[HeadRow], input_ids: Tensor, gradient: Tensor, active: Tensor) -> Tensor:
    """[B]: head and embedding, with the cross term if they are one parameter. gradient [B, S, D]: the embedding's."""
    weights = torch.tensor([row.weight_energy for row in rows], dtype=torch.float64, device=gradient.device)
    biases = torch.tensor([row.bias_energy for row in rows], dtype=torch.float64, device=gradient.device)
    total = torch.zeros_like(weights)
    if parts.head.weight.requires_grad:
        total += weights
    if parts.head.bias is not None and parts.head.bias.requires_grad:
        total += biases
    if not parts.embedding.weight.requires_grad:
        return total
    # The embedding gives its padding token no gradient.
    learns = active if parts.embedding.padding_idx is None else active & (input_ids != parts.embedding.padding_idx)
    owner = learns.nonzero()[:, 0]
    total += embedding_energy(input_ids[learns], owner, gradient[learns], len(rows))
    if parts.tied:
        for row, share in enumerate(rows):
            assert share.cross is not None  # asked for above
            kept = learns[row, active[row]].unsqueeze(-1)
            products = torch.where(kept, share.cross * gradient[row, active[row]], 0.0)
            total[row] += 2 * products.sum(dtype=torch.float64)
    return total


def _check(
    input_ids: Tensor, mask: Tensor, attention_mask: Tensor | None, weights: Tensor | None, temperature: float
) -> None:
    if input_ids.ndim != 2 or not input_ids.numel():
        raise KernelInputError(f"input_ids must be [B, S], not empty; got {tuple(input_ids.shape)}")
    for name, tensor in (("token_mask", mask), ("attention_mask", attention_mask), ("importance_weights", weights)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise KernelInputError(f"{name} must be [B, S] = {tuple(input_ids.shape)}; got {tuple(tensor.shape)}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise KernelInputError(f"temperature must be positive and finite; got {temperature}")
    bad = mask.clone()
    bad[:, 1:] = False
    if attention_mask is not None:
        padding = ~attention_mask.bool()
        bad |= mask & padding
        bad[:, 1:] |= mask[:, 1:] & padding[:, :-1]
    if bool(bad.any()):
        row, position = bad.nonzero()[0].tolist()
        raise KernelInputError(
            f"token_mask is True in row {row} at position {position}, which no state predicts: it is padding, the "
            "first column, or follows padding"
        )
    if weights is not None and not bool(torch.isfinite(torch.where(mask, weights, 0.0)).all()):
        row, position = (mask & ~torch.isfinite(weights)).nonzero()[0].tolist()
        raise KernelInputError(f"importance_weights is {float(weights[row, position])} in row {row} at {position}")
