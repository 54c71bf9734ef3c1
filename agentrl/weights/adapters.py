"""Sources of an adapted model's weights: the adapters alone, or the model with its adapters merged into it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from agentrl.models.lora import exported_name, factors_of, is_factor, merged, own_name
from agentrl.models.settings import LoRASettings
from agentrl.weights.checksums import Checksum, checksum, with_head
from agentrl.weights.sources import ParameterShape, ParameterSource, full_parameters


def merged_parameters(module: nn.Module, settings: LoRASettings) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of every parameter of the model, adapters merged into it; the model stays as it is.

    Collective under ZeRO-3, as :func:`full_parameters`; every rank holds a copy of the adapters meanwhile.
    """
    factors = {name: value.clone() for name, value in full_parameters(module, wanted=is_factor)}
    for name, value in full_parameters(module, wanted=lambda name: not is_factor(name)):
        names = factors_of(name)
        if names is not None and names[0] in factors:
            value = merged(value, factors[names[0]], factors[names[1]], settings.alpha / settings.rank)
        yield own_name(name), value


def policy_parameters(module: nn.Module, settings: LoRASettings) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of every parameter of the policy that is exported. Collective under ZeRO-3."""
    return merged_parameters(module, settings) if settings.rank else full_parameters(module)


def adapter_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Exported name and whole value of every parameter of the adapters. Collective under ZeRO-3."""
    for name, value in full_parameters(module, wanted=is_factor):
        yield exported_name(name), value


class MergedSource(ParameterSource):
    """A source of the whole model with its adapters merged into it."""

    def __init__(self, module: nn.Module, settings: LoRASettings, *, summed: bool = True) -> None:
        super().__init__(module, summed=summed)
        self._settings = settings

    def shapes(self) -> list[ParameterShape]:
        return [
            ParameterShape(name=own_name(item.name), dtype=item.dtype, shape=item.shape)
            for item in super().shapes()
            if not is_factor(item.name)
        ]

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return merged_parameters(self._module, self._settings)


class AdapterSource(ParameterSource):
    """A source of the adapters under their exported names; its checksums are of them and of the frozen model."""

    def __init__(self, module: nn.Module, *, summed: bool = True) -> None:
        super().__init__(module, summed=summed)
        self._frozen: dict[str, Checksum] | None = None

    def shapes(self) -> list[ParameterShape]:
        return [
            ParameterShape(name=exported_name(item.name), dtype=item.dtype, shape=item.shape)
            for item in super().shapes()
            if is_factor(item.name)
        ]

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return adapter_parameters(self._module)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._frozen is None:
            frozen = full_parameters(self._module, wanted=lambda name: not is_factor(name))
            self._frozen = with_head({own_name(name): checksum(value) for name, value in frozen if self._summed})
        yield from super().__iter__()
        self.checksums = self._frozen | self.checksums
