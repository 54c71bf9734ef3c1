"""Exact gradient norms of the layers between embedding and head, from their inputs and the gradients of their outputs.

Contains the supported modules, the closed forms, and the hooks that collect inputs and gradients. A closed form takes R
rows (trajectories) of S tokens, with zeros at positions that do not count, and returns [R] in float64. No closed form
reads a weight, so sharded weights are not gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agentrl.kernels.arithmetic import batched_matmul
from agentrl.kernels.records import KernelInputError

SUPPORTED_MODELS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GraniteForCausalLM", "Gemma2ForCausalLM"),
)
"""Supported classes of `transformers`. Review a class before adding it: it may scale embeddings outside modules."""

_NORMS = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "GraniteRMSNorm"), "variance_epsilon"
    ),
    "Gemma2RMSNorm": "eps",  # multiplies by 1 + weight, which has the same gradient
}
"""RMSNorm classes, and their attribute for the epsilon that is added to the mean square."""
_SCALED_EMBEDDINGS = {"Gemma2TextScaledWordEmbedding": "embed_scale"}
"""Embedding classes that scale their rows, and their attribute for the factor."""
_HEADS = ("FusedHead",)  # agentrl.models.policy.FusedHead, a linear layer that returns statistics
_CHECKPOINTED = "GradientCheckpointingLayer"


@dataclass(frozen=True, kw_only=True)
class CausalLMParts:
    """The parts of a causal language model.

    `layers` are the modules between embedding and head with trainable parameters: (name, module, True if the
    backward pass recomputes it).
    """

    backbone: Any
    depth: int  # number of attention layers
    embedding: nn.Embedding
    head: nn.Linear
    layers: tuple[tuple[str, nn.Module, bool], ...]

    @property
    def embedding_scale(self) -> float:
        """Factor by which the embedding multiplies its rows, rounded to the dtype of its weight."""
        name = _SCALED_EMBEDDINGS.get(type(self.embedding).__name__)
        return 1.0 if name is None else float(getattr(self.embedding, name).to(self.embedding.weight.dtype))

    @property
    def tied(self) -> bool:
        """True if embedding and head are one parameter."""
        return self.embedding.weight is self.head.weight


def split_causal_lm(model: Any) -> CausalLMParts:
    """Return the parts of a causal language model of `transformers`.

    Raises KernelInputError for a class that is not in SUPPORTED_MODELS, for modules with trainable parameters that have
    no closed form (adapters, quantized layers), and for parameters that several modules share.
    """
    if type(model).__name__ not in SUPPORTED_MODELS:
        raise KernelInputError(
            f"exact energies support {', '.join(SUPPORTED_MODELS)} of transformers, not {type(model).__name__}"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    unknown = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _is_trainable(module) and not _is_known(module, is_head=module is head)
    ]
    if unknown:
        raise KernelInputError(
            "exact energies have no closed form for the trainable parameters of " + "; ".join(unknown)
        )
    if not any(item.requires_grad for item in model.parameters()):
        raise KernelInputError("the model has no trainable parameter: every energy would be 0")
    _check_no_other_shared_parameters(model, embedding, head)
    recomputed = _recomputed_modules(model)
    layers = tuple(
        (name, module, module in recomputed)
        for name, module in model.named_modules()
        if module is not embedding and module is not head and _is_trainable(module)
    )
    depth = model.config.get_text_config().num_hidden_layers
    return CausalLMParts(backbone=model.base_model, depth=depth, embedding=embedding, head=head, layers=layers)


def rms_norm_input(norm: nn.Module, hidden: Tensor) -> Tensor:
    """Compute the normalized input that an RMSNorm of `transformers` multiplies by its weight, as in ``forward``."""
    epsilon: float = getattr(norm, _NORMS[type(norm).__name__])
    wide = hidden.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)


def _is_trainable(module: nn.Module) -> bool:
    return any(item.requires_grad for item in module.parameters(recurse=False))


def _is_known(module: nn.Module, *, is_head: bool) -> bool:
    if type(module) is nn.Embedding or type(module).__name__ in _SCALED_EMBEDDINGS:
        return module.max_norm is None and not module.scale_grad_by_freq  # type: ignore[union-attr]
    kind = type(module).__name__
    return type(module) is nn.Linear or kind in _NORMS or (is_head and kind in _HEADS)


def _check_no_other_shared_parameters(model: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    """Raise KernelInputError if modules other than embedding and head share a parameter, which adds a cross term."""
    owner: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            first, other = owner.setdefault(id(parameter), (name, module))
            if other is not module and parameter.requires_grad and {other, module} != {embedding, head}:
                raise KernelInputError(f"{first} and {name} share a parameter, which exact energies do not support")


def _recomputed_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that the backward pass recomputes (gradient checkpointing, only in training mode)."""
    found: set[nn.Module] = set()
    for module in model.modules():
        classes = {kind.__name__ for kind in type(module).__mro__}
        if _CHECKPOINTED in classes and module.training and getattr(module, "gradient_checkpointing", False):
            found.update(module.modules())
    return found


def gram_matrices_are_cheaper(tokens: int, inputs: int, outputs: int) -> bool:
    """Return True if two Gram matrices of the tokens cost less than the product [inputs, outputs].

    The Gram matrices take 2 S^2 (D_in + D_out) operations and the product 2 S D_in D_out, so the condition is
    S < D_in D_out / (D_in + D_out). A Gram matrix is then never larger than a quarter of the weight.

    >>> gram_matrices_are_cheaper(200, 512, 512), gram_matrices_are_cheaper(300, 512, 512)
    (True, False)
    """
    return tokens * (inputs + outputs) < inputs * outputs


def linear_energy(inputs: Tensor, gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute ||sum_s g_s a_s^T||_F^2 = sum_{s,s'} (a_s . a_s') (g_s . g_s') from a [R, S, D_in] and g [R, S, D_out].

    Products are accumulated in `dtype`.
    """
    if gram_matrices_are_cheaper(inputs.shape[1], inputs.shape[2], gradients.shape[2]):
        product = batched_matmul(inputs, inputs.mT, dtype).mul_(batched_matmul(gradients, gradients.mT, dtype))
        return product.sum((1, 2), dtype=torch.float64)
    return squared_norm_by_row(batched_matmul(gradients.mT, inputs, dtype))


def bias_energy(gradients: Tensor) -> Tensor:
    """Compute ||sum_s g_s||^2 from g [R, S, D]."""
    return squared_norm_by_row(gradients.sum(1))


def norm_scale_energy(normalized: Tensor, gradients: Tensor) -> Tensor:
    """Compute ||sum_s g_s * n_s||^2 from g and n [R, S, ..., D], for a scale that multiplies n elementwise.

    The scale is shared by the dimensions between S and D (the heads of a q or k norm).
    """
    return squared_norm_by_row((normalized * gradients).flatten(1, -2).sum(1))


def embedding_energy(ids: Tensor, rows: Tensor, gradients: Tensor, count: int) -> Tensor:
    """Compute sum_v ||sum_{s: x_s = v} e_s||^2 of `count` rows, from N tokens: ids [N], rows [N], gradients [N, D]."""
    width = int(ids.max()) + 1 if ids.numel() else 1
    pairs, pair_of_token = torch.unique(rows * width + ids, return_inverse=True)  # distinct (row, id)
    sums = gradients.new_zeros(pairs.shape[0], gradients.shape[1]).index_add_(0, pair_of_token, gradients)
    result = torch.zeros(count, dtype=torch.float64, device=gradients.device)
    return result.index_add_(0, pairs // width, squared_norm_by_row(sums))


def squared_norm_by_row(values: Tensor) -> Tensor:
    """Compute the sum of squares over all dimensions but the first, in float64."""
    return torch.linalg.vector_norm(values.flatten(1), dim=1).double().square()


_CHUNK_ELEMENTS = 1 << 24  # maximum number of elements of inputs, gradients and products at a time: 64 MB of float32


class LayerEnergies:
    """Energies of the layers between embedding and head, summed by row during the backward pass.

    A hook reads a layer's input before each call. Under gradient checkpointing, the input of the first call is
    ignored, and the input of the recomputation is used. The recomputation may run before or after the gradient of the
    output is known. It stops inside a block's last layer, but after the hook of this layer. The gradient always belongs
    to the output of the first call, which is part of the graph.
    """

    def __init__(
        self, layers: tuple[tuple[str, nn.Module, bool], ...], active: Tensor, positions: Tensor, dtype: torch.dtype
    ) -> None:
        """Initialize the energies of ``layers`` to 0.

        `active` [B, S]: positions whose state affects a counted log-probability. `positions` [B, S]: their indices in
        the layers' input. `dtype`: dtype of the products.
        """
        self._sites = [
            _TrackedLayer(name=name, module=module, recomputed=recomputed) for name, module, recomputed in layers
        ]
        self._active = active
        self._positions = positions
        self._dtype = dtype
        self._backward = False
        self.totals = torch.zeros(active.shape[0], dtype=torch.float64, device=active.device)

    @contextmanager
    def attached_hooks(self) -> Iterator[None]:
        """Register the hooks of the layers, and remove them on exit."""
        handles: list[RemovableHandle] = []
        try:
            for site in self._sites:
                handles.append(site.module.register_forward_pre_hook(partial(self._before_call, site)))
                handles.append(site.module.register_forward_hook(partial(self._after_call, site)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mark_forward_finished(self) -> None:
        """Mark the end of the forward pass. Further calls of a layer are recomputations."""
        self._backward = True

    def check_all_layers_done(self) -> None:
        """Raise KernelInputError if a layer received no gradient in the backward pass."""
        missing = [site.name for site in self._sites if not site.done]
        if missing:
            raise KernelInputError(f"no gradient reached {', '.join(missing)}: the forward pass does not use them")

    def _before_call(self, site: _TrackedLayer, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if not self._backward:
            if site.called:  # the energy of two calls would have cross terms
                raise KernelInputError(
                    f"{site.name} is called twice in one forward pass, which exact energies do not support"
                )
            site.called = True
            if site.recomputed:
                return
        elif site.done or not site.recomputed:
            return
        site.input = arguments[0].detach()
        self._add_energy(site)

    def _after_call(
        self, site: _TrackedLayer, module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor
    ) -> None:
        if self._backward:
            return
        if not output.requires_grad:
            raise KernelInputError(
                f"{site.name} ran without an autograd graph: set use_reentrant=False for gradient checkpointing"
            )
        output.register_hook(partial(self._take_gradient, site))

    def _take_gradient(self, site: _TrackedLayer, gradient: Tensor) -> None:
        site.gradient = gradient.detach()
        self._add_energy(site)

    @torch.no_grad()
    def _add_energy(self, site: _TrackedLayer) -> None:
        """Add the energy of a layer once its input and its gradient are known, and release both."""
        if site.input is None or site.gradient is None:
            return
        inputs, gradients = site.input.flatten(0, 1), site.gradient.flatten(0, 1)
        site.input = site.gradient = None
        site.done = True
        with torch.autocast(inputs.device.type, enabled=False):
            for rows, columns in self._row_and_column_blocks(site, inputs, gradients):
                active = self._active[rows, columns]
                active = active.reshape(*active.shape, *[1] * (inputs.ndim - 1))
                places = self._positions[rows, columns]
                part = torch.where(active, inputs[places], 0.0)
                gradient = torch.where(active, gradients[places], 0.0)
                self.totals[rows] += site.gradient_energy(part, gradient, self._dtype)

    def _row_and_column_blocks(
        self, site: _TrackedLayer, inputs: Tensor, gradients: Tensor
    ) -> Iterator[tuple[slice, slice]]:
        """Yield rows to process at once, and the columns in which any of these rows is active."""
        width = max(1, self._active.shape[1])
        product = min(width, inputs.shape[-1]) * gradients.shape[-1] if isinstance(site.module, nn.Linear) else 0
        size = width * (inputs[0].numel() + gradients[0].numel()) + product
        step = max(1, _CHUNK_ELEMENTS // max(1, size))
        for start in range(0, self._active.shape[0], step):
            rows = slice(start, start + step)
            used = self._active[rows].any(0).nonzero()
            if used.numel():
                yield rows, slice(int(used[0]), int(used[-1]) + 1)


@dataclass(kw_only=True, eq=False)
class _TrackedLayer:
    """One layer and the tensors collected for it so far."""

    name: str
    module: nn.Module
    recomputed: bool
    input: Tensor | None = None
    gradient: Tensor | None = None
    done: bool = False
    called: bool = False

    def gradient_energy(self, inputs: Tensor, gradients: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the squared norm [R] of the gradient of the layer's trainable parameters."""
        bias = getattr(self.module, "bias", None)
        total = torch.zeros(inputs.shape[0], dtype=torch.float64, device=inputs.device)
        wide = gradients.to(dtype)
        if isinstance(self.module, nn.Linear):
            if self.module.weight.requires_grad:
                total += linear_energy(inputs, gradients, dtype)
            if bias is not None and bias.requires_grad:
                total += bias_energy(wide)
        else:
            total += norm_scale_energy(rms_norm_input(self.module, inputs).to(dtype), wide)
        return total
