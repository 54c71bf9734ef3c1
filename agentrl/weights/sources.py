"""Whole parameters of a training module under any ZeRO stage: where weights come from, and where they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from agentrl.models.loading import empty_model, prepare_model, read_model
from agentrl.models.settings import ModelSettings
from agentrl.weights.verify import Checksum, checksum, with_head

GROUP_ELEMENTS = 64 * 1024 * 1024
"""The largest group of parameters gathered at once under ZeRO-3, in elements; a larger parameter is gathered alone."""


@dataclass(frozen=True, kw_only=True)
class TransferTarget:
    """The destination of weights, and the way there.

    >>> TransferTarget().opener  # a directory with safetensors files, which the engine reads
    ''
    """

    opener: str = ""
    """``module:function`` that opens a :class:`DirectTransfer`, called on every rank; empty: files."""
    backend: str = "file"
    """The name of the way, for messages."""
    form: Literal["full", "merged", "adapter"] = "full"
    """Whether the engine takes all parameters, or of a policy with adapters the merged model or the adapters alone."""
    kept: int = 1
    """How many versions before the newest one keep their files."""
    addresses: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    """Number of GPU processes of each server."""
    starts: tuple[int, ...] = ()
    """How often each server was started; a restarted one has left the group of a direct transfer."""
    deadline: float = 300.0
    """Seconds in which a direct transfer must send another parameter."""


class DirectTransfer(Protocol):
    """An open way to the engine's memory. Opened by ``opener(target, source, rank=, host=)``, where ``host`` is the
    address at which servers reach rank 0."""

    def send(self) -> None:
        """Send the source's parameters. Collective. Raises WorldError."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """The parameter that a source yields at one position of its iteration."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class ParameterSource:
    """The whole parameters of a module that trains under ZeRO 0 to 3; can be iterated any number of times.

    ``shapes`` describes, without communication, what an iteration (:func:`full_parameters`) yields; ``checksums`` are
    those of the values that the last one yielded.
    """

    def __init__(self, module: nn.Module, *, group_elements: int = GROUP_ELEMENTS, summed: bool = True) -> None:
        """``summed``: compute checksums, which only one rank needs."""
        self._module = module
        self._group_elements = group_elements
        self._summed = summed
        self.checksums: dict[str, Checksum] = {}

    def shapes(self) -> list[ParameterShape]:
        """Name, dtype and whole shape of every parameter; a shard's own shape is empty under ZeRO-3."""
        return [
            ParameterShape(name=name, dtype=item.dtype, shape=tuple(getattr(item, "ds_shape", item.shape)))
            for name, item in self._module.named_parameters()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        found: dict[str, Checksum] = {}
        for name, tensor in self._values():
            if self._summed:
                found[name] = checksum(tensor)
            yield name, tensor
        self.checksums = with_head(found)

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return full_parameters(self._module, group_elements=self._group_elements)


def full_parameters(
    module: nn.Module, *, group_elements: int = GROUP_ELEMENTS, wanted: Callable[[str], bool] = bool
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole value of every parameter, in the same order on all ranks; tied parameters once.

    ``wanted`` tells by name which ones; by default all.

    Collective under ZeRO-3, where every rank must run it to the end: parameters are gathered in groups of at most
    ``group_elements``. A value is valid until the next one is requested.
    """
    parameters = [(name, parameter) for name, parameter in module.named_parameters() if wanted(name)]
    if not any(hasattr(parameter, "ds_id") for _, parameter in parameters):
        yield from ((name, parameter.detach()) for name, parameter in parameters)
        return
    for group in gathered_groups(parameters, group_elements=group_elements):
        yield from ((name, parameter.detach()) for name, parameter in group)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the receiver of a value may still be copying it on another stream


def gathered_groups(
    parameters: list[tuple[str, nn.Parameter]], *, group_elements: int, modifier_rank: int | None = None
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Groups of sharded parameters with their names, gathered until the next group. Collective.

    Every rank's shard then takes the values that ``modifier_rank`` wrote.
    """
    import deepspeed

    for group in _grouped(parameters, group_elements):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in group], modifier_rank=modifier_rank):
            yield group


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


def _grouped(parameters: list[tuple[str, Any]], most: int) -> Iterator[list[tuple[str, Any]]]:
    group: list[tuple[str, Any]] = []
    elements = 0
    for name, parameter in parameters:
        size = parameter.ds_numel
        if group and elements + size > most:
            yield group
            group, elements = [], 0
        group.append((name, parameter))
        elements += size
    if group:
        yield group


def read_sharded(path: str | Path, settings: ModelSettings, config: dict[str, Any]) -> Any:
    """Read a model with parameters sharded over all ranks by DeepSpeed's ``config``. Collective.

    Only rank 0 reads the weights, into host memory; the others never hold more than a group beside their shard.
    """
    import deepspeed
    from transformers.initialization import no_init_weights

    # Keep DeepSpeed's own linear function off: it would replace torch's permanently.
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=config, mem_efficient_linear=False):
        model = empty_model(path, settings)
    model.tie_weights()
    whole = read_model(path, settings) if torch.distributed.get_rank() == 0 else None
    _fill(model, whole)
    return prepare_model(model, settings)


@torch.no_grad()
def _fill(model: Any, whole: Any | None) -> None:
    """Fill ``model`` with the parameters and buffers of ``whole``, which only rank 0 has."""
    values = {} if whole is None else dict(whole.named_parameters())
    for group in gathered_groups(list(model.named_parameters()), group_elements=GROUP_ELEMENTS, modifier_rank=0):
        for name, parameter in group:
            if whole is not None:
                parameter.copy_(values[name])
    # Buffers are not parameters; they are computed while a model is built, when DeepSpeed sets the dtype.
    box = [None if whole is None else (dict(whole.named_buffers()), whole.generation_config)]
    torch.distributed.broadcast_object_list(box)
    assert box[0] is not None
    buffers, model.generation_config = box[0]
    for name, value in buffers.items():
        buffer = model.get_buffer(name)
        buffer.data = value.to(buffer.device)
