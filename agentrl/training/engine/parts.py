"""A trained module's state in files that any number of ranks at any ZeRO stage can read.

Each rank writes its flat float32 shards of the trained parameters and of their moments, with the offset of each shard
in its parameter. A rank that reads the files copies the entries of its shards exactly, whichever rank wrote them::

    engine/part-00000.safetensors   shards of rank 0: weight/NAME, exp_avg/NAME, exp_avg_sq/NAME, and random/DEVICE
    engine/part-00001.safetensors   shards of rank 1

Frozen parameters are not written, because ``model.path`` contains them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from agentrl.errors import SettingsError
from agentrl.telemetry.files import os_errors_as_world_errors
from agentrl.training.engine.determinism import get_random_state, set_random_state

MOMENTS = ("exp_avg", "exp_avg_sq")
_WEIGHT = "weight"
Untyped: TypeAlias = Any  # DeepSpeed's optimizers, and parameters to which DeepSpeed adds attributes
_FACTS = "agentrl"  # the only key of a file's metadata, because safetensors writes several keys in arbitrary order


@dataclass(frozen=True, kw_only=True)
class RankStateMetadata:
    """Metadata of a part and of the whole checkpoint."""

    starts: dict[str, int]  # offset of each shard in its flat parameter
    shapes: dict[str, list[int]]  # complete shapes of all parameters, including frozen ones
    adam_steps: float | None  # None before the first update, when there are no moments
    updates: int  # number of completed updates (position in the learning rate schedule)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank's part of a checkpoint, in memory."""

    metadata: RankStateMetadata
    tensors: dict[str, Tensor]

    @property
    def size_in_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, path: Path) -> None:
        """Write one file, with reproducible bytes. Raises OSError or SafetensorError if writing fails."""
        path.parent.mkdir(exist_ok=True)
        save_file(self.tensors, path, metadata={_FACTS: json.dumps(asdict(self.metadata))})


@dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """This rank's part of one trained parameter, in the optimizer's layout."""

    name: str
    start: int  # in the flat parameter
    length: int
    flat: nn.Parameter  # weights in float32; the optimizer's state has tensors of the same shape
    offset: int  # in ``flat``

    def view_shard(self, whole: Tensor) -> Tensor:
        """Return a view of this shard in a tensor with the shape of ``flat``."""
        return whole.detach().view(-1).narrow(0, self.offset, self.length)


def local_parameter_shards(module: nn.Module, optimizer: Untyped) -> Iterator[ParameterShard]:
    """Yield this rank's parameter shards under DeepSpeed's ``optimizer``. Without ZeRO, every rank has all of them."""
    item: Untyped
    for name, item in module.named_parameters():
        if not item.requires_grad:
            continue
        if hasattr(item, "ds_id"):
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(item)]
            start = torch.distributed.get_rank(item.ds_process_group) * size
            length = min(size, item.ds_numel - start)  # the last shard is padded
            flat = optimizer.fp32_partitioned_groups_flat[group]
        elif hasattr(item, "_hp_mapping"):
            if item._hp_mapping is None:
                continue
            in_optimizer, in_parameter = item._hp_mapping.hp_fragment_address, item._hp_mapping.lp_fragment_address
            start, length, offset = in_parameter.start, in_parameter.numel, in_optimizer.start
            flat = optimizer.single_partition_of_fp32_groups[item._hp_mapping.param_group_index]
        else:
            start, length, offset, flat = 0, item.numel(), 0, item
        if length > 0:
            yield ParameterShard(name=name, start=start, length=length, flat=flat, offset=offset)


def copy_rank_state(module: nn.Module, optimizer: Untyped, *, updates: int, rank: int) -> RankState:
    """Copy this rank's parameter and optimizer shards and its random state to the CPU."""
    adam: Untyped = getattr(optimizer, "optimizer", optimizer)
    whole_everywhere = adam is optimizer
    shards = [] if whole_everywhere and rank else list(local_parameter_shards(module, optimizer))
    tensors = {f"random/{device}": state for device, state in get_random_state().items()}
    steps = None
    for shard in shards:
        tensors[f"{_WEIGHT}/{shard.name}"] = _copied(shard.view_shard(shard.flat))
        if state := adam.state.get(shard.flat):
            steps = float(state["step"])
            tensors |= {f"{moment}/{shard.name}": _copied(shard.view_shard(state[moment])) for moment in MOMENTS}
    starts = {shard.name: shard.start for shard in shards}
    facts = RankStateMetadata(starts=starts, shapes=_shapes(module), adam_steps=steps, updates=updates)
    return RankState(metadata=facts, tensors=tensors)


def restore_rank_state(folder: Path, module: nn.Module, optimizer: Untyped, *, rank: int) -> int:
    """Restore a checkpoint to optimizer and module, and return its number of updates. Collective.

    Raises SettingsError if the checkpoint belongs to a different model.
    """
    with os_errors_as_world_errors(folder, "read the checkpoint"), ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("part-*.safetensors"))
        ]
        if not files:
            raise SettingsError(
                f"the checkpoint {folder} has an unsupported format: resume with the version of agentrl that wrote it"
            )
        facts = [RankStateMetadata(**json.loads(file.metadata()[_FACTS])) for file in files]
        _check_shapes(folder, facts[0].shapes, _shapes(module))
        _restore_shards(_SavedShardReader(files, facts), module, optimizer)
        _restore_random_state(files, rank)
    return facts[0].updates


class _SavedShardReader:
    """Reads parameter shards from the saved files of all ranks."""

    def __init__(self, files: Sequence[safe_open], facts: Sequence[RankStateMetadata]) -> None:
        self._locations: dict[str, list[tuple[int, safe_open]]] = {}
        for file, metadata in zip(files, facts, strict=True):
            for name, start in metadata.starts.items():
                self._locations.setdefault(name, []).append((start, file))
        self.steps = max((item.adam_steps for item in facts if item.adam_steps is not None), default=None)

    def read(self, kind: str, shard: ParameterShard, into: Tensor) -> None:
        """Fill ``into`` with the entries of ``shard``."""
        copied = 0
        for start, file in self._locations[shard.name]:
            written = file.get_slice(f"{kind}/{shard.name}")
            low = max(shard.start, start)
            high = min(shard.start + shard.length, start + written.get_shape()[0])
            if low < high:
                into[low - shard.start : high - shard.start].copy_(written[low - start : high - start])
                copied += high - low
        if copied != shard.length:
            raise RuntimeError(f"the parts contain {copied} of the {shard.length} entries of {kind}/{shard.name}")


def _restore_shards(saved: _SavedShardReader, module: nn.Module, optimizer: Untyped) -> None:
    adam: Untyped = getattr(optimizer, "optimizer", optimizer)
    sharded = hasattr(optimizer, "fp32_partitioned_groups_flat")
    parameters: dict[str, Untyped] = dict(module.named_parameters())
    if sharded:
        optimizer.checkpoint_event_prologue()  # required for small parameters, which every rank holds completely
    for shard in local_parameter_shards(module, optimizer):
        weight = shard.view_shard(shard.flat)
        saved.read(_WEIGHT, shard, weight)
        if saved.steps is not None:
            state = _optimizer_state(adam, shard.flat, saved.steps)
            for moment in MOMENTS:
                saved.read(moment, shard, shard.view_shard(state[moment]))
        if sharded:
            parameters[shard.name].ds_tensor.data.view(-1)[: shard.length].copy_(weight)
    if sharded:
        optimizer.checkpoint_event_epilogue()
    elif adam is not optimizer:
        optimizer.update_lp_params()


def _optimizer_state(adam: torch.optim.Optimizer, flat: nn.Parameter, steps: float) -> dict[str, Tensor]:
    """Return the optimizer's state of ``flat`` after ``steps`` updates. Creates the state if it does not exist."""
    state: dict[str, Tensor] = adam.state[flat]
    for moment in MOMENTS:
        if moment not in state:
            state[moment] = torch.zeros_like(flat, memory_format=torch.preserve_format, requires_grad=False)
    state["step"] = torch.tensor(steps, dtype=torch.float32, device=flat.device)
    return state


def _check_shapes(folder: Path, written: Mapping[str, list[int]], current: Mapping[str, list[int]]) -> None:
    for name in [*written, *current]:
        if written.get(name) == current.get(name):
            continue
        before, now = (f"the shape {shapes[name]}" if name in shapes else "no entry" for shapes in (written, current))
        raise SettingsError(
            f"the checkpoint {folder} belongs to a different model: {name} has {before} in the checkpoint and "
            f"{now} in this model; set model.path to the model that the run started from"
        )


def _shapes(module: nn.Module) -> dict[str, list[int]]:
    return {name: list(getattr(item, "ds_shape", item.shape)) for name, item in module.named_parameters()}


def _copied(values: Tensor) -> Tensor:
    return values.to("cpu", copy=True)


def _restore_random_state(files: Sequence[safe_open], rank: int) -> None:
    """Restore this rank's random state. An additional rank derives a seed from its index and another rank's state."""
    file = files[rank % len(files)]
    names = [key for key in file.keys() if key.startswith("random/")]  # noqa: SIM118
    states = {key.removeprefix("random/"): file.get_tensor(key) for key in names}
    if rank >= len(files):
        digest = hashlib.sha256(states["cpu"].numpy().tobytes() + str(rank).encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        return
    set_random_state(states)
