"""Exact energies ||grad_theta sum_t rho_t ln p(y_t)||^2 of every trajectory, in one forward and one backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.kernels.arithmetic import cap_derivative, head_input_gradient, write_tempered_logits
from agentrl.kernels.attention import AttentionBackend, PackedRow, compute_packed_states, pack_row
from agentrl.kernels.layer_energies import (
    CausalLMParts,
    LayerEnergies,
    embedding_energy,
    gram_matrices_are_cheaper,
    split_causal_lm,
)
from agentrl.kernels.records import KernelInputError, check_cap


@dataclass(frozen=True, kw_only=True)
class _EnergyInputs:
    """Input of the passes: trajectories with attended positions first, then padding. All tensors are [B, S]."""

    input_ids: Tensor
    mask: Tensor  # bool, the counted tokens y_t
    active: Tensor  # bool, the positions whose state affects the log-probability of a counted token
    coefficients: Tensor  # factors of the log-probabilities, 0 outside the mask, in the accumulation dtype
    packed: tuple[PackedRow, AttentionBackend] | None  # the row that the model reads instead of input_ids
    input_positions: Tensor  # int64, index of each active position in the model's input


def trajectory_energies(
    model: Any,
    input_ids: Tensor,
    token_mask: Tensor,
    *,
    attention_mask: Tensor | None = None,
    importance_weights: Tensor | None = None,
    temperature: float = 1.0,
    cap: float | None = None,
    packed: AttentionBackend | None = None,
) -> Tensor:
    """Compute E_b = ||grad_theta sum_t rho_t ln p(y_t)||^2 of each row [B], over the trainable parameters theta.

    model: a causal language model of a class in `layer_energies.SUPPORTED_MODELS`, sharded by ZeRO-3 or not, whose
    head may be a `FusedHead`. input_ids [B, S]: prompt and response, one trajectory per row. With `packed`, the model
    reads all trajectories as one row without padding. The model must then use the attention of `agentrl.models`.
    token_mask [B, S] bool: the *tokens* y_t whose log-probability counts. The state at position t - 1 predicts token t.
    attention_mask [B, S] bool: False at padding in any position. Without the mask, every column is attended to. This is
    correct for right padding. importance_weights [B, S]: rho_t, a constant, read only where token_mask is True.
    Temperature and cap as in `token_statistics`.

    Runs one forward pass and one backward pass to the embedding's output (docs/reference/formulas.md 4, arXiv
    1510.01799). No `.grad` is touched. A row without a counted token has energy 0. The mode (train or eval) is not
    changed; with dropout, the energy refers to the sampled mask. Sums and result are in float32, or float64 for float64
    models, and detached.

    Memory in addition to the two passes: the gradients of one layer's output, products of one layer (64 MB at once, or
    one row's), and at the head the logits of a block of the vocabulary for one row (128 MB), never [B, S, V]. Under
    ZeRO-3, the call is collective, with any number of rows on each rank; the head runs once.

    Raises KernelInputError for a model with trainable parameters that have no closed form here (the message names the
    module), reentrant gradient checkpointing, and inputs that do not fit together.
    """
    parts = split_causal_lm(model)
    _check_energy_inputs(input_ids, token_mask.bool(), attention_mask, importance_weights, temperature)
    check_cap(cap)
    dtype = torch.float64 if parts.embedding.weight.dtype == torch.float64 else torch.float32
    rows = _prepare_inputs(input_ids, token_mask.bool(), attention_mask, importance_weights, dtype, packed)
    layers = LayerEnergies(parts.layers, rows.active, rows.input_positions, dtype)
    with torch.enable_grad(), layers.attached_hooks():
        embedded, hidden = _embeddings_and_final_states(parts, rows)
        shares = _head_energies_by_row(parts, hidden.detach(), rows, temperature, cap)
        layers.mark_forward_finished()
        (gradient,) = torch.autograd.grad(hidden, embedded, _weighted_log_prob_gradient(hidden, shares, rows))
    layers.check_all_layers_done()
    # The embedding multiplies its rows by a scale, so the gradient of its weight contains the same factor.
    at_weight = gradient.detach().flatten(0, 1).to(dtype) * parts.embedding_scale
    totals = layers.totals + _head_and_embedding_energies(parts, shares, rows, at_weight)
    return totals.to(dtype)


def _prepare_inputs(
    input_ids: Tensor,
    mask: Tensor,
    attention_mask: Tensor | None,
    weights: Tensor | None,
    dtype: torch.dtype,
    packed: AttentionBackend | None,
) -> _EnergyInputs:
    """Return the rows with attended positions first, and their counted tokens."""
    if attention_mask is not None:
        # Move attended positions to the front, in order. A causal model then needs no mask, because padding comes last.
        order = attention_mask.bool().long().argsort(dim=1, descending=True, stable=True)
        input_ids, mask = input_ids.gather(1, order), mask.gather(1, order)
        weights = None if weights is None else weights.gather(1, order)
    coefficients = mask.to(dtype) if weights is None else torch.where(mask, weights.detach(), 0.0).to(dtype)
    counted = mask.long()
    active = counted.flip(-1).cumsum(-1).flip(-1) > counted  # a counted token comes later in the row
    read, places = None, torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
    if packed is not None:
        # A shared prefix has different gradients in each trajectory, so each trajectory has a copy.
        lengths = active.sum(-1).clamp(min=1)
        lines = zip(input_ids.cpu(), lengths.tolist(), strict=True)
        row = pack_row([(line[:0], line[:count]) for line, count in lines], share_prefixes=False)
        row = row.to(input_ids.device)
        read = (row, packed)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        places = row.response_starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
    return _EnergyInputs(
        input_ids=input_ids, mask=mask, active=active, coefficients=coefficients, packed=read, input_positions=places
    )


def _embeddings_and_final_states(parts: CausalLMParts, rows: _EnergyInputs) -> tuple[Tensor, Tensor]:
    """Return (embedding output as the graph's leaf, states after the last norm), both [B, S, D] or [1, L, D]."""
    leaves: list[Tensor] = []

    def cut(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = parts.embedding.register_forward_hook(cut)
    try:
        if rows.packed is None:
            hidden = parts.backbone(input_ids=rows.input_ids, use_cache=False).last_hidden_state
        else:
            row, backend = rows.packed
            hidden = compute_packed_states(row, parts.backbone, layers=parts.depth, backend=backend)[None]
    finally:
        handle.remove()
    if len(leaves) != 1:
        raise KernelInputError(f"the embedding must be called once per forward pass; it was called {len(leaves)} times")
    return leaves[0], hidden


def _weighted_log_prob_gradient(hidden: Tensor, shares: list[HeadEnergies], rows: _EnergyInputs) -> Tensor:
    """Return the gradient of sum_t rho_t ln p(y_t) with respect to ``hidden``, the states after the last norm."""
    gradient = torch.zeros_like(hidden, dtype=rows.coefficients.dtype).flatten(0, 1)
    predicting = torch.cat([rows.mask[:, 1:], torch.zeros_like(rows.mask[:, :1])], dim=1)  # t - 1 for each token t
    gradient[rows.input_positions[predicting]] = torch.cat([share.hidden_gradient for share in shares])
    return gradient.view(hidden.shape).to(hidden.dtype)


def _head_energies_by_row(
    parts: CausalLMParts, hidden: Tensor, rows: _EnergyInputs, temperature: float, cap: float | None
) -> list[HeadEnergies]:
    """Compute the head's part of every row's energy in one call to the head, whose hooks gather the weight."""
    shares: list[HeadEnergies] = []
    states = hidden.flatten(0, 1)
    wants_cross = parts.tied and parts.embedding.weight.requires_grad

    def inside(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        for row in range(rows.mask.shape[0]):
            tokens = rows.mask[row].nonzero().squeeze(-1)
            shares.append(
                head_energies(
                    states[rows.input_positions[row, tokens - 1]],
                    parts.head.weight.detach(),
                    None if parts.head.bias is None else parts.head.bias.detach(),
                    rows.input_ids[row, tokens],
                    rows.coefficients[row, tokens],
                    temperature,
                    cap,
                    rows.input_ids[row, rows.active[row]] if wants_cross else None,
                )
            )

    handle = parts.head.register_forward_pre_hook(inside)
    try:
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            parts.head(hidden[:1, :1].to(parts.head.weight.dtype))  # runs the hook; the result is not used
    finally:
        handle.remove()
    return shares


def _head_and_embedding_energies(
    parts: CausalLMParts, shares: list[HeadEnergies], rows: _EnergyInputs, gradient: Tensor
) -> Tensor:
    """Return the summed energies [B] of the head and the embedding, including the cross term if they are tied."""
    weights = torch.tensor([share.weight_energy for share in shares], dtype=torch.float64, device=gradient.device)
    biases = torch.tensor([share.bias_energy for share in shares], dtype=torch.float64, device=gradient.device)
    total = torch.zeros_like(weights)
    if parts.head.weight.requires_grad:
        total += weights
    if parts.head.bias is not None and parts.head.bias.requires_grad:
        total += biases
    if not parts.embedding.weight.requires_grad:
        return total
    # The padding token of the embedding has no gradient.
    padding = parts.embedding.padding_idx
    learns = rows.active if padding is None else rows.active & (rows.input_ids != padding)
    owner = learns.nonzero()[:, 0]
    total += embedding_energy(rows.input_ids[learns], owner, gradient[rows.input_positions[learns]], len(shares))
    if parts.tied:
        for row, share in enumerate(shares):
            assert share.cross is not None  # requested above
            active = rows.active[row]
            kept = learns[row, active].unsqueeze(-1)
            products = torch.where(kept, share.cross * gradient[rows.input_positions[row, active]], 0.0)
            total[row] += 2 * products.sum(dtype=torch.float64)
    return total


@dataclass(frozen=True, kw_only=True)
class HeadEnergies:
    """Energies and gradients of one trajectory at the head, with K counted tokens and S input tokens."""

    weight_energy: float  # ||sum_t dx_t h_t^T||^2
    bias_energy: float  # ||sum_t dx_t||^2
    hidden_gradient: Tensor  # [K, D], the gradient of sum_t c_t ln p(y_t) with respect to h
    cross: Tensor | None  # [S, D]: sum_t dx_t[x_s] h_t, the head's gradient at the rows of the input tokens


def head_energies(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    coefficients: Tensor,
    temperature: float,
    cap: float | None,
    inputs: Tensor | None,
) -> HeadEnergies:
    """Compute the head's energies and gradients of one trajectory.

    dx_t = c_t (onehot(y_t) - p_t) / tau, times dz/dx of a cap z = cap tanh(x / cap), for hidden [K, D], targets [K] and
    coefficients c [K]. `inputs` [S] requests the cross term. Coefficients are in the accumulation dtype, hidden and
    weight [V, D] in any dtype.

    Logits are materialized for one block of the vocabulary at a time. They are computed once if all fit into a block,
    otherwise twice, because the normalizer needs a first pass.
    """
    blocks = _VocabularyBlocks(hidden, weight, bias, temperature, cap, targets, coefficients.dtype)
    hidden = hidden.to(coefficients.dtype)
    normalizer, rest = blocks.log_normalizer_and_nontarget_probability()
    scale = (coefficients / temperature).unsqueeze(-1)
    gram = gram_matrices_are_cheaper(hidden.shape[0], weight.shape[1], weight.shape[0])
    products = hidden.new_zeros(hidden.shape[0], hidden.shape[0]) if gram else None
    gradient = torch.zeros_like(hidden)
    cross = None if inputs is None else hidden.new_zeros(inputs.shape[0], hidden.shape[1])
    weight_energy = torch.zeros((), dtype=torch.float64, device=hidden.device)
    bias_energy = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for start, z in blocks:
        slope = 1.0 if cap is None else cap_derivative(z, cap, temperature)
        dz = z.sub_(normalizer.unsqueeze(-1)).exp_().neg_()
        at, column = blocks.tokens_and_columns_in(start, z.shape[1])
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
    return HeadEnergies(
        weight_energy=float(weight_energy), bias_energy=float(bias_energy), hidden_gradient=gradient, cross=cross
    )


class _VocabularyBlocks:
    """Iterates over blocks of the vocabulary with tempered logits [K, v], which the caller may overwrite."""

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

    def tokens_and_columns_in(self, start: int, width: int) -> tuple[Tensor, Tensor]:
        """Return (tokens that have their target in this block, columns of the targets)."""
        at = ((self._targets >= start) & (self._targets < start + width)).nonzero().squeeze(-1)
        return at, self._targets[at] - start

    def log_normalizer_and_nontarget_probability(self) -> tuple[Tensor, Tensor]:
        """Return (ln sum_v e^z_v, 1 - p(y)), each [K]. The second is a sum over other tokens, to avoid cancellation."""
        others = self._hidden.new_full(self._hidden.shape[:1], -torch.inf, dtype=self._dtype)
        own = torch.empty_like(others)
        for start, z in self:
            at, column = self.tokens_and_columns_in(start, z.shape[1])
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
            write_tempered_logits(self._hidden, part, bias, z, *self._map)
            if self._step == self._weight.shape[0]:
                self._kept = z
            yield start, z


_BLOCK_ELEMENTS = 1 << 25  # maximum number of logits in memory: 128 MB of float32, and as much for a temporary tensor


def _check_energy_inputs(
    input_ids: Tensor, mask: Tensor, attention_mask: Tensor | None, weights: Tensor | None, temperature: float
) -> None:
    if input_ids.ndim != 2 or not input_ids.numel():
        raise KernelInputError(f"input_ids must be [B, S] and not empty; got {tuple(input_ids.shape)}")
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
            f"token_mask is True in row {row} at position {position}, but no state predicts this token: it is "
            "padding, is in the first column, or follows padding"
        )
    if weights is not None and not bool(torch.isfinite(torch.where(mask, weights, 0.0)).all()):
        row, position = (mask & ~torch.isfinite(weights)).nonzero()[0].tolist()
        raise KernelInputError(
            f"importance_weights is {float(weights[row, position])} in row {row} at position {position}; it must be "
            "finite"
        )
