"""Sources and targets of weight transfers: complete parameters of a training module at any ZeRO stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from agentrl.models.loading import create_model_without_weights, prepare_model, read_model
from agentrl.models.settings import ModelSettings
from agentrl.weights.verify import Checksum, add_tied_head, checksum

GROUP_ELEMENTS = 64 * 1024 * 1024
"""The largest group of parameters gathered at once under ZeRO-3, in elements; a larger parameter is gathered alone."""


@dataclass(frozen=True, kw_only=True)
class TransferTarget:
    """The destination of weights and the transfer method.

    >>> TransferTarget().opener  # a directory with safetensors files, which the engine reads
    ''
    """

    opener: str = ""
    """``module:function`` that opens a :class:`DirectTransfer`, called on every rank. If empty, files are used."""
    backend: str = "file"
    """The name of the transfer method, for messages."""
    form: Literal["full", "merged", "adapter"] = "full"
    """Parameters that the engine loads: all or, for a policy with adapters, the merged model or only the adapters."""
    older_versions: int = 1
    """Number of older versions whose files are kept in addition to the newest version."""
    addresses: tuple[str, ...] = ()
    world_sizes: tuple[int, ...] = ()
    """Number of GPU processes of each server."""
    server_starts: tuple[int, ...] = ()
    """Number of starts of each server. A restarted server has left the group of a direct transfer."""
    deadline: float = 300.0
    """Maximum seconds between two parameters of a direct transfer."""


class DirectTransfer(Protocol):
    """An open transfer to the engine's memory.

    Opened by ``opener(target, source, rank=, host=)``, where ``host`` is the address at which servers reach rank 0.
    """

    def send(self) -> None:
        """Send the source's parameters. Collective. Raises WorldError if the transfer fails."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    """Name, dtype and complete shape of a parameter that a source yields."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class ParameterSource:
    """The complete parameters of a module at ZeRO 0 to 3. Can be iterated repeatedly.

    ``shapes`` describes the values of an iteration (:func:`full_parameters`) without communication. ``checksums`` are
    the checksums of the last iteration's values.
    """

    def __init__(self, module: nn.Module, *, group_elements: int = GROUP_ELEMENTS, with_checksums: bool = True) -> None:
        """Create a source. ``with_checksums`` enables checksums, which only one rank needs."""
        self._module = module
        self._group_elements = group_elements
        self._with_checksums = with_checksums
        self.checksums: dict[str, Checksum] = {}

    def shapes(self) -> list[ParameterShape]:
        """Return the exported name, dtype and full shape of every parameter, including parameters sharded by ZeRO-3."""
        return [
            ParameterShape(name=exported, dtype=item.dtype, shape=tuple(getattr(item, "ds_shape", item.shape)))
            for name, item in self._module.named_parameters()
            if (exported := self._exported_name(name))
        ]

    def _exported_name(self, name: str) -> str | None:
        """Return the name under which a parameter is yielded, or None if it is not yielded."""
        return name

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        found: dict[str, Checksum] = {}
        for name, tensor in self._values():
            if self._with_checksums:
                found[name] = checksum(tensor)
            yield name, tensor
        self.checksums = add_tied_head(found)

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        return full_parameters(self._module, group_elements=self._group_elements)


def full_parameters(
    module: nn.Module, *, group_elements: int = GROUP_ELEMENTS, wanted: Callable[[str], bool] = bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and complete value of every parameter, in the same order on all ranks.

    Tied parameters are yielded once. ``wanted`` selects parameters by name, by default all.

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
    """Yield groups of sharded parameters with their names, gathered until the next group. Collective.

    Afterwards, every rank's shard has the values that ``modifier_rank`` wrote.
    """
    import deepspeed

    for group in _group_by_size(parameters, group_elements):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in group], modifier_rank=modifier_rank):
            yield group


@contextmanager
def gathered_linear(head: nn.Linear) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Provide the complete weight and bias of a linear layer. Collective under ZeRO-3."""
    parameters = [item for item in (head.weight, head.bias) if item is not None]
    if not any(hasattr(item, "ds_id") for item in parameters):
        yield head.weight.detach(), None if head.bias is None else head.bias.detach()
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        whole = [item.detach().clone() for item in parameters]
    yield whole[0], whole[1] if len(whole) > 1 else None


def _group_by_size(parameters: list[tuple[str, Any]], most: int) -> Iterator[list[tuple[str, Any]]]:
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


def load_sharded_model(path: str | Path, settings: ModelSettings, config: dict[str, Any]) -> Any:
    """Load a model whose parameters are sharded over all ranks according to DeepSpeed's ``config``. Collective.

    Only rank 0 reads the weights, into host memory; the other ranks hold at most a group and their shard.
    """
    import deepspeed
    from transformers.initialization import no_init_weights

    # Disable DeepSpeed's linear function, because it would replace torch's permanently.
    with no_init_weights(), deepspeed.zero.Init(config_dict_or_path=config, mem_efficient_linear=False):
        model = create_model_without_weights(path, settings)
    model.tie_weights()
    whole = read_model(path, settings) if torch.distributed.get_rank() == 0 else None
    _broadcast_from_rank_zero(model, whole)
    return prepare_model(model, settings)


@torch.no_grad()
def _broadcast_from_rank_zero(model: Any, whole: Any | None) -> None:
    """Broadcast the parameters and buffers of ``whole`` on rank 0 to ``model`` on every rank. Collective."""
    values = {} if whole is None else dict(whole.named_parameters())
    for group in gathered_groups(list(model.named_parameters()), group_elements=GROUP_ELEMENTS, modifier_rank=0):
        for name, parameter in group:
            if whole is not None:
                parameter.copy_(values[name])
    # Copy the buffers too: ``model`` computed its buffers while it was built, in a dtype that DeepSpeed had set.
    box = [None if whole is None else (dict(whole.named_buffers()), whole.generation_config)]
    torch.distributed.broadcast_object_list(box)
    assert box[0] is not None
    buffers, model.generation_config = box[0]
    for name, value in buffers.items():
        buffer = model.get_buffer(name)
        buffer.data = value.to(buffer.device)
