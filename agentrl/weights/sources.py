"""Where weights come from: the parameters of a training module, whole, whatever ZeRO stage shards them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

# Parameters gathered at once under ZeRO-3, in elements.
_GROUP_ELEMENTS = 64 * 1024 * 1024


def full_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of every parameter, in one order on all ranks; tied ones once.

    Under ZeRO-3 this is collective: every rank must run it to the end. A value is valid until the next is asked for.
    """
    parameters = list(module.named_parameters())
    if not any(hasattr(parameter, "ds_id") for _, parameter in parameters):
        yield from ((name, parameter.detach()) for name, parameter in parameters)
        return
    import deepspeed

    for group in _grouped(parameters):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in group]):
            yield from ((name, parameter.detach()) for name, parameter in group)


@contextmanager
def gathered(head: nn.Linear) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Copies of a linear layer's whole weight and bias. Collective under ZeRO-3."""
    parameters = [item for item in (head.weight, head.bias) if item is not None]
    if not any(hasattr(item, "ds_id") for item in parameters):
        yield head.weight.detach(), None if head.bias is None else head.bias.detach()
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        whole = [item.detach().clone() for item in parameters]
    yield whole[0], whole[1] if len(whole) > 1 else None


def _grouped(parameters: list[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    group: list[tuple[str, Any]] = []
    elements = 0
    for name, parameter in parameters:
        size = parameter.ds_numel
        if group and elements + size > _GROUP_ELEMENTS:
            yield group
            group, elements = [], 0
        group.append((name, parameter))
        elements += size
    if group:
        yield group
