"""Giving up a try on all ranks together: how they learn of a shortage, and DeepSpeed's state afterwards.

A rank whose memory has run out cannot take part in the collectives that the others expect of it. So the ranks agree
before each collective of a try, over gloo and host memory, that none has run out: whoever has tells the others there,
and all leave the try where none waits for another one. Where ranks meet in every layer, tries are watched
only until their micro-batches have fitted (:class:`.memory.Fitted`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps

import torch
import torch.distributed
from torch import nn
from torch.distributed import ProcessGroup

from agentrl.training.engine.parts import Untyped

_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_object",
    "all_to_all_single",
    "barrier",
)
"""Methods of DeepSpeed's communication backend."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Memory that ran out on one rank at least."""

    rank: int
    tokens: int  # of the smallest micro-batch that failed; 0 if it was none
    alone: bool  # that micro-batch held a single trajectory
    changed: bool = False  # an update of the weights had begun on some rank

    def __str__(self) -> str:
        where = f"in a micro-batch of {self.tokens} tokens" if self.tokens else "outside micro-batches"
        return f"rank {self.rank} ran out of memory {where}"


class ShortageError(Exception):
    """A try is given up. All ranks raise it together, outside collectives."""

    def __init__(self, shortage: Shortage) -> None:
        super().__init__(str(shortage))
        self.shortage = shortage


class Agreement:
    """The ranks of a run, which all make the same sequence of collectives in a try."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """``group``: all ranks; None where there is one."""
        self._group = group
        self.watching = True
        self._trying = self._changed = False

    def begin(self, *, watch: bool) -> None:
        """A try begins: no weight has changed. Ranks agree before its collectives if one wants it. Collective."""
        self._changed = False
        self.watching = True
        if self._group is not None:
            wanted = torch.tensor([watch], dtype=torch.float64)
            torch.distributed.all_reduce(wanted, op=torch.distributed.ReduceOp.MAX, group=self._group)
            self.watching = bool(wanted)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Agree before each collective inside, if this try is watched."""
        self._trying = self.watching
        try:
            yield
        finally:
            self._trying = False

    def weights_change(self) -> None:
        """From here on the try cannot be repeated."""
        self._changed = True

    def before_collective(self) -> None:
        """Raises ShortageError if a rank has run out of memory in this try. Collective inside a try."""
        if self._trying and (found := self.outcome()) is not None:
            raise ShortageError(found)

    def outcome(self, own: Shortage | None = None) -> Shortage | None:
        """The shortages of all ranks as one; None if there is ``own`` on no rank. Collective."""
        if self._group is None:
            return own and replace(own, changed=self._changed)
        rank, tokens, alone = (own.rank, own.tokens, own.alone) if own is not None else (-1, 2**52, False)
        most = torch.tensor([rank, -tokens, alone, self._changed], dtype=torch.float64)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self._group)
        rank, size, any_alone, changed = map(int, most.tolist())
        return None if rank < 0 else Shortage(rank=rank, tokens=-size, alone=bool(any_alone), changed=bool(changed))


def agreement_of_ranks() -> Agreement:
    """That of the ranks of this process group. The first call is collective."""
    every = torch.distributed.group.WORLD
    assert every is not None  # the group is there
    return _made(every)


@cache
def _made(every: ProcessGroup) -> Agreement:
    if every.size() == 1:
        return Agreement(None)
    return Agreement(torch.distributed.new_group(backend="gloo"))


def before_collective() -> None:
    """Raises ShortageError, as in :meth:`Agreement.before_collective`."""
    agreement_of_ranks().before_collective()


def agree_before_collectives(backend: Untyped) -> None:
    """Have DeepSpeed's communication ``backend`` ask :func:`before_collective` first."""
    for name in _COLLECTIVES:
        if name not in vars(backend):
            setattr(backend, name, _after_agreement(getattr(backend, name)))


def _after_agreement(collective: Callable[..., object]) -> Callable[..., object]:
    @wraps(collective)
    def agreed(*args: object, **kwargs: object) -> object:
        before_collective()
        return collective(*args, **kwargs)

    return agreed


def forget_gradients(engine: Untyped) -> None:
    """Put DeepSpeed's ``engine`` where it was after its last step. Not collective."""
    engine._running_engine_step = False
    engine.zero_grad()
    optimizer = engine.optimizer
    if not hasattr(optimizer, "ipg_buckets"):
        return
    optimizer.zero_grad()
    optimizer._backward_hook_state.backward_active_depth = 0
    optimizer._backward_hook_state.reset_for_new_step()
    if hasattr(optimizer, "parameter_offload"):
        _forget_shards(optimizer)
    else:
        _forget_buckets(optimizer)


def _forget_buckets(optimizer: Untyped) -> None:
    """Of ZeRO 1 and 2."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer._release_ipg_buffers()
    optimizer._release_preflattened_grad_buffers()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for kept in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
        kept.update(dict.fromkeys(kept))
    optimizer.micro_step_id = -1  # the next backward overwrites what was added up on the host
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
    else:
        for flat in optimizer.single_partition_of_fp32_groups:
            flat.grad = None


def _forget_shards(optimizer: Untyped) -> None:
    """Of ZeRO 3."""
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    for number in optimizer.params_already_reduced:
        optimizer.params_already_reduced[number] = False
    optimizer._offload_boundary_param_ids = set()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
    else:
        optimizer.averaged_gradients = {}
        for flat in optimizer.fp32_partitioned_groups_flat:
            flat.grad = None
    forget_gathered(optimizer.parameter_offload)


def forget_gathered(offload: Untyped) -> None:
    """Release the weights that ZeRO 3's ``offload`` has gathered, and what it knows of a forward. Not collective."""
    module: Untyped = offload.module
    coordinator, in_flight = offload.get_param_coordinator(), module.ds_inflight_param_registry
    for parameter in module.parameters():
        status = type(parameter.ds_status)
        if parameter.ds_status is status.INFLIGHT and parameter not in in_flight:  # it was about to be gathered
            parameter.data = parameter.data.new_empty(0)
            parameter.ds_status = status.NOT_AVAILABLE
    coordinator.release_backward_leftovers()
    coordinator.release_and_reset_all(module)
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    for part in module.modules():
        part._parameters._in_forward = False
        part.applied_pre_backward_ref_cnt = 0
        part.ds_recompute_parameters.clear()


def open_forwards(offload: Untyped) -> list[nn.Module]:
    """The modules that ZeRO 3 takes to be in their forward, of all engines."""
    stack: list[nn.Module] = sys.modules[type(offload).__module__].FWD_MODULE_STACK
    return stack
