"""Running out of memory while training: one message that names what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentrl.errors import WorldError
from agentrl.training.settings import TrainingSettings

_SHORTAGES = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""What torch's RuntimeError says where the machine's memory is meant."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the machine.

    >>> is_shortage(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")), \\
    ... is_shortage(RuntimeError("shape mismatch"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SHORTAGES)


@contextmanager
def shortages_named(settings: TrainingSettings, *, step: int) -> Iterator[None]:
    """Turn a lack of memory inside into a WorldError with its remedies; the other ranks end with this one."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        why = (str(error) or "MemoryError").splitlines()[0]
        raise WorldError(
            f"step {step} ran out of memory while training ({why}); continue from the last "
            f"checkpoint with --resume training.micro_batch_tokens={max(64, settings.micro_batch_tokens // 2)}. Where "
            "one sequence is too long: model.gradient_checkpointing=true, training.sequence_parallel=2, "
            "training.zero_stage=3 with more ranks, training.offload=optimizer or all"
        ) from error
