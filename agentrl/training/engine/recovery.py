"""Giving up a backward under DeepSpeed half-way: forget its gradients, and meet the ranks that did not give up.

Up to ZeRO 2 a forward has no collectives, and a backward those of ZeRO 2 alone: reductions of full buckets, the same
number and sizes on all ranks. A rank that ran out of memory meets the others by another, small backward, whose first
reductions it leaves out: they are done already.
"""

from __future__ import annotations

from agentrl.training.engine.parts import Untyped


class Reductions:
    """Counts the reductions of gradients inside a backward of DeepSpeed's ``optimizer``."""

    def __init__(self, optimizer: Untyped) -> None:
        self._done = self._left_out = 0
        self.under_way = False
        if hasattr(optimizer, "average_tensor"):
            self._reduce = optimizer.average_tensor
            optimizer.average_tensor = self._counted

    def begin(self) -> None:
        """Count from the start of a micro-batch."""
        self._done = self._left_out = 0

    def rejoin(self) -> None:
        """Leave out as many reductions of the next backward as were done since :meth:`begin`."""
        self._done, self._left_out = 0, self._done

    def _counted(self, *args: object, **kwargs: object) -> None:
        self.under_way = True
        if self._done >= self._left_out:
            self._reduce(*args, **kwargs)
        self._done += 1
        self.under_way = False


def forget_gradients(engine: Untyped) -> None:
    """Put DeepSpeed's ``engine``, at ZeRO 0 to 2, where it was after its last step. Not collective."""
    engine.zero_grad()
    optimizer = engine.optimizer
    if not hasattr(optimizer, "ipg_buckets"):
        return
    optimizer.zero_grad()
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer._release_ipg_buffers()
    optimizer._release_preflattened_grad_buffers()
    optimizer.params_already_reduced = [False] * len(optimizer.params_already_reduced)
    for kept in (optimizer.all_grad_tensors, optimizer.averaged_gradients):
        kept.update(dict.fromkeys(kept))
    optimizer._backward_hook_state.backward_active_depth = 0
    optimizer._backward_hook_state.reset_for_new_step()
    optimizer.micro_step_id = -1  # the next backward overwrites what was added up on the host
    if optimizer.cpu_offload:
        optimizer._offload_accumulated_param_ids = set()
        optimizer.reset_cpu_buffers()
