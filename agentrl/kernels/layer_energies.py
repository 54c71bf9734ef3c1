"""Exact gradient norms of the layers between embedding and head, from their inputs and the gradients of their outputs.

Contains the supported modules, the closed forms, and the hooks that collect inputs and gradients. A closed form takes R
rows (trajectories) of S tokens, in which positions that do not count are zero, and returns [R] in float64. No form
reads a weight, so a sharded weight need not be gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agentrl.kernels.arithmetic import batched_product
from agentrl.kernels.records import KernelInputError

MODELS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    *("GraniteForCausalLM", "Gemma2ForCausalLM"),
)
"""Classes of `transformers`. Others may scale embeddings outside of any module, so each must be looked at."""

_NORMS = {
    **dict.fromkeys(
        ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "GraniteRMSNorm"), "variance_epsilon"
    ),
    "Gemma2RMSNorm": "eps",  # multiplies by 1 + weight: the same gradient
}
"""RMSNorms, and their name of the number that they add to the mean square."""
_SCALED_EMBEDDINGS = {"Gemma2TextScaledWordEmbedding": "embed_scale"}
"""Embeddings that multiply their rows, and their name of the factor."""
_HEADS = ("FusedHead",)  # agentrl.models.FusedHead, a linear layer whose forward gives statistics
_CHECKPOINTED = "GradientCheckpointingLayer"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A causal language model taken apart. `layers` are the modules in the middle with trainable parameters of their
    own: (name, module, whether its forward is computed again in backward)."""

    backbone: Any
    depth: int  # attention layers
    embedding: nn.Embedding
    head: nn.Linear
    layers: tuple[tuple[str, nn.Module, bool], ...]

    @property
    def embedding_scale(self) -> float:
        """The factor by which the embedding multiplies its rows, in its own precision."""
        name = _SCALED_EMBEDDINGS.get(type(self.embedding).__name__)
        return 1.0 if name is None else float(getattr(self.embedding, name).to(self.embedding.weight.dtype))

    @property
    def tied(self) -> bool:
        """True if embedding and head are one parameter."""
        return self.embedding.weight is self.head.weight


def take_apart(model: Any) -> Parts:
    """The parts of a causal language model of `transformers`.

    Raises KernelInputError for a class that is not in MODELS, and names every module with trainable parameters that
    has no closed form here (adapters, quantised layers), and parameters that several modules share.
    """
    if type(model).__name__ not in MODELS:
        raise KernelInputError(
            f"exact energies support {', '.join(MODELS)} of transformers, not {type(model).__name__}"
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    unknown = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if _trainable(module) and not _is_known(module, is_head=module is head)
    ]
    if unknown:
        raise KernelInputError(
            "exact energies have no closed form for the trainable parameters of " + "; ".join(unknown)
        )
    if not any(item.requires_grad for item in model.parameters()):
        raise KernelInputError("the model has no trainable parameter: every energy would be 0")
    _check_shared(model, embedding, head)
    recomputed = _recomputed_modules(model)
    layers = tuple(
        (name, module, module in recomputed)
        for name, module in model.named_modules()
        if module is not embedding and module is not head and _trainable(module)
    )
    depth = model.config.get_text_config().num_hidden_layers
    return Parts(backbone=model.base_model, depth=depth, embedding=embedding, head=head, layers=layers)


def normalized_input(norm: nn.Module, hidden: Tensor) -> Tensor:
    """Compute the input that an RMSNorm of `transformers` multiplies by its weight, as its forward does."""
    epsilon: float = getattr(norm, _NORMS[type(norm).__name__])
    wide = hidden.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)


def _trainable(module: nn.Module) -> bool:
    return any(item.requires_grad for item in module.parameters(recurse=False))


def _is_known(module: nn.Module, *, is_head: bool) -> bool:
    if type(module) is nn.Embedding or type(module).__name__ in _SCALED_EMBEDDINGS:
        return module.max_norm is None and not module.scale_grad_by_freq  # type: ignore[union-attr]
    kind = type(module).__name__
    return type(module) is nn.Linear or kind in _NORMS or (is_head and kind in _HEADS)


def _check_shared(model: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    """Only embedding and head may be one parameter: every other pair would need a cross term of its own."""
    owner: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            first, other = owner.setdefault(id(parameter), (name, module))
            if other is not module and parameter.requires_grad and {other, module} != {embedding, head}:
                raise KernelInputError(
                    f"{first} and {name} share a parameter, for which exact energies have no cross term"
                )


def _recomputed_modules(model: nn.Module) -> set[nn.Module]:
    """Modules inside layers whose forward runs again in backward (gradient checkpointing, in training mode alone)."""
    found: set[nn.Module] = set()
    for module in model.modules():
        classes = {kind.__name__ for kind in type(module).__mro__}
        if _CHECKPOINTED in classes and module.training and getattr(module, "gradient_checkpointing", False):
            found.update(module.modules())
    return found


def gram_is_cheaper(tokens: int, inputs: int, outputs: int) -> bool:
    """Return True if two Gram matrices of the tokens cost less than the product [inputs, outputs].

    2 S^2 (D_in + D_out) against 2 S D_in D_out operations, so S < D_in D_out / (D_in + D_out). A Gram matrix is then
    never larger than a quarter of the weight.

    >>> gram_is_cheaper(200, 512, 512), gram_is_cheaper(300, 512, 512)
    (True, False)
    """
    return tokens * (inputs + outputs) < inputs * outputs


def linear_energy(inputs: Tensor, gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """||sum_s g_s a_s^T||_F^2 = sum_{s,s'} (a_s . a_s') (g_s . g_s') from a [R, S, D_in] and g [R, S, D_out].

    Products are accumulated in `dtype`.
    """
    if gram_is_cheaper(inputs.shape[1], inputs.shape[2], gradients.shape[2]):
        product = batched_product(inputs, inputs.mT, dtype).mul_(batched_product(gradients, gradients.mT, dtype))
        return product.sum((1, 2), dtype=torch.float64)
    return squared_norm(batched_product(gradients.mT, inputs, dtype))


def bias_energy(gradients: Tensor) -> Tensor:
    """||sum_s g_s||^2 from g [R, S, D]."""
    return squared_norm(gradients.sum(1))


def scale_energy(normalized: Tensor, gradients: Tensor) -> Tensor:
    """||sum_s g_s * n_s||^2, both [R, S, ..., D]: of a scale that multiplies n elementwise, shared by the dimensions
    between S and D (the heads of a q or k norm)."""
    return squared_norm((normalized * gradients).flatten(1, -2).sum(1))


def embedding_energy(ids: Tensor, rows: Tensor, gradients: Tensor, count: int) -> Tensor:
    """sum_v ||sum_{s: x_s = v} e_s||^2 of each of `count` rows, from N tokens: ids [N], rows [N], gradients [N, D]."""
    _, entry, owner = _distinct(ids, rows)
    sums = gradients.new_zeros(owner.shape[0], gradients.shape[1]).index_add_(0, entry, gradients)
    result = torch.zeros(count, dtype=torch.float64, device=gradients.device)
    return result.index_add_(0, owner, squared_norm(sums))


def squared_norm(values: Tensor) -> Tensor:
    """The sum of squares over all dimensions but the first, in float64."""
    return torch.linalg.vector_norm(values.flatten(1), dim=1).double().square()


def _distinct(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct pairs (row, id): their keys [U], which of them a token is [N], and their rows [U]."""
    width = int(ids.max()) + 1 if ids.numel() else 1
    keys, entry = torch.unique(rows * width + ids, return_inverse=True)
    return keys, entry, keys // width


_CHUNK_ELEMENTS = 1 << 24  # of the inputs, gradients and products of the rows treated at once: 64 MB of float32


class LayerEnergies:
    """Energies of the layers between embedding and head, added up row by row while the backward pass runs.

    A layer's input is seen by a hook before its forward. Under gradient checkpointing that of the first forward is let
    go and that of the recomputation taken: it comes before or after the gradient of the output, and before the
    recomputation stops, which it does in the middle of a block's last layer. The gradient is always that of the first
    forward's output, which is what the graph holds.
    """

    def __init__(
        self, layers: tuple[tuple[str, nn.Module, bool], ...], active: Tensor, places: Tensor, dtype: torch.dtype
    ) -> None:
        """`active` [B, S]: the positions whose state reaches a counted log-probability; `places` [B, S] of theirs among
        all positions that the layers see. dtype: of the products.
        """
        self._sites = [_Site(name=name, module=module, recomputed=recomputed) for name, module, recomputed in layers]
        self._active = active
        self._places = places
        self._dtype = dtype
        self._backward = False
        self.totals = torch.zeros(active.shape[0], dtype=torch.float64, device=active.device)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Listen to the layers."""
        handles: list[RemovableHandle] = []
        try:
            for site in self._sites:
                handles.append(site.module.register_forward_pre_hook(self._before(site)))
                handles.append(site.module.register_forward_hook(self._after(site)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self) -> None:
        """The forward pass is over: any further forward of a layer is a recomputation."""
        self._backward = True

    def check_complete(self) -> None:
        """Raise KernelInputError if a layer was not heard of in backward."""
        missing = [site.name for site in self._sites if not site.done]
        if missing:
            raise KernelInputError(f"no gradient reached {', '.join(missing)}: the forward does not use these modules")

    def _before(self, site: _Site) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if not self._backward:
                site.count_call()
                if site.recomputed:
                    return
            elif site.done or not site.recomputed:
                return
            site.input = arguments[0].detach()
            self._add_energy(site)

        return hook

    def _after(self, site: _Site) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if self._backward:
                return
            if not output.requires_grad:
                raise KernelInputError(
                    f"{site.name} ran without an autograd graph: set use_reentrant=False for gradient checkpointing"
                )
            output.register_hook(arrived)

        def arrived(gradient: Tensor) -> None:
            site.gradient = gradient.detach()
            self._add_energy(site)

        return hook

    @torch.no_grad()
    def _add_energy(self, site: _Site) -> None:
        """Add the energy of a layer once its input and its gradient are known, and release both."""
        if site.input is None or site.gradient is None:
            return
        inputs, gradients = site.input.flatten(0, 1), site.gradient.flatten(0, 1)
        site.input = site.gradient = None
        site.done = True
        with torch.autocast(inputs.device.type, enabled=False):
            for rows, columns in self._chunks(site, inputs, gradients):
                active = self._active[rows, columns]
                active = active.reshape(*active.shape, *[1] * (inputs.ndim - 1))
                places = self._places[rows, columns]
                part = torch.where(active, inputs[places], 0.0)
                gradient = torch.where(active, gradients[places], 0.0)
                self.totals[rows] += site.energy(part, gradient, self._dtype)

    def _chunks(self, site: _Site, inputs: Tensor, gradients: Tensor) -> Iterator[tuple[slice, slice]]:
        """Rows that are treated at once, and the columns where one of them is active."""
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
class _Site:
    """One layer and the tensors collected for it so far."""

    name: str
    module: nn.Module
    recomputed: bool
    input: Tensor | None = None
    gradient: Tensor | None = None
    done: bool = False
    called: bool = False

    def count_call(self) -> None:
        """Raise KernelInputError at a second call: its gradients would have to be added to the first one's."""
        if self.called:
            raise KernelInputError(
                f"{self.name} is called twice in one forward, for which exact energies have no cross term"
            )
        self.called = True

    def energy(self, inputs: Tensor, gradients: Tensor, dtype: torch.dtype) -> Tensor:
        """Squared norm [R] of the gradient of the layer's trainable parameters."""
        bias = getattr(self.module, "bias", None)
        total = torch.zeros(inputs.shape[0], dtype=torch.float64, device=inputs.device)
        wide = gradients.to(dtype)
        if isinstance(self.module, nn.Linear):
            if self.module.weight.requires_grad:
                total += linear_energy(inputs, gradients, dtype)
            if bias is not None and bias.requires_grad:
                total += bias_energy(wide)
        else:
            total += scale_energy(normalized_input(self.module, inputs).to(dtype), wide)
        return total
