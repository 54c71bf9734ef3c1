"""Hooks that pair each layer's input with the gradient of its output, and add up the energies of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from agentrl.kernels.energies.closed_forms import bias_energy, linear_energy, scale_energy
from agentrl.kernels.energies.modules import normalized_input
from agentrl.kernels.records import KernelInputError

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
            raise KernelInputError(f"no gradient came through {', '.join(missing)}: the forward does not use them")

    def _before(self, site: _Site) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            if not self._backward:
                site.count_call()
                if site.recomputed:
                    return
            elif site.done or not site.recomputed:
                return
            site.input = arguments[0].detach()
            self._settle(site)

        return hook

    def _after(self, site: _Site) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if self._backward:
                return
            if not output.requires_grad:
                raise KernelInputError(
                    f"{site.name} ran without a graph: gradient checkpointing must be the kind with use_reentrant=False"
                )
            output.register_hook(arrived)

        def arrived(gradient: Tensor) -> None:
            site.gradient = gradient.detach()
            self._settle(site)

        return hook

    @torch.no_grad()
    def _settle(self, site: _Site) -> None:
        """Once both have come: the energy of this layer, and let go of them."""
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
            raise KernelInputError(f"{self.name} runs twice in one forward: exact energies have no cross term there")
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
