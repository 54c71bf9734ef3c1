"""The trainer's errors.

AgentRLError
├── SettingsError             the user's settings or files: one message, exit code 2
│   ├── UnplaceableError      the cluster has too little for the run (agentrl.cluster.plan)
│   └── ProblemError          problems that cannot be had as asked (agentrl.problems.rows)
│       ├── ProblemFileError
│       ├── ProblemFieldError
│       ├── EmptyProblemsError
│       └── SamplerStateError
├── WorldError                sandbox, engine, disk or network failed after its retries: one message, exit code 1
│   ├── OutOfMemoryError      memory ran out in training; smaller micro-batches may fit: exit code 5
│   ├── NodeLostError         a machine of the cluster is gone or does not answer (agentrl.cluster.processes)
│   └── WorkerLostError       the rollout worker, or a rank, is gone or does not answer (agentrl.training.worker)
├── FidelityError             trainer and engine disagree on sampled tokens (agentrl.training.step.diagnostics)
└── WeightMismatchError       an engine does not hold the weights it was sent (agentrl.training.worker.transfer)

Everything else is a bug and raises as it is.
"""

from __future__ import annotations

import importlib.util
import re
from typing import ClassVar

from agentrl_envs.registry import install_extra

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory"  # torch, CUDA, Triton, and NCCL's "Cuda failure 2 'out of memory'"
    r"|can(?:no|')t allocate memory|DefaultCPUAllocator: not enough memory|bad_alloc"  # host memory
    r"|Failed to CUDA (?:host )?[cm]alloc"  # NCCL's last error, below "unhandled cuda error"
    r"|STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED",  # cuBLAS and cuDNN
    re.IGNORECASE,
)


class AgentRLError(Exception):
    """An error that the command line reports as one message without a traceback."""

    exit_code: ClassVar[int] = 1


class SettingsError(AgentRLError):
    """What the user asked for cannot be done as asked; the message names the value, what is valid and the fix."""

    exit_code: ClassVar[int] = 2


def require_package(package: str, *, extra: str, purpose: str) -> None:
    """Raise SettingsError, with the command that installs ``extra``, if an optional package is missing."""
    if importlib.util.find_spec(package) is None:
        raise SettingsError(f"{purpose} needs the package {package}: {install_extra(extra)}")


class WorldError(AgentRLError):
    """Something outside the program failed: the message says what, and what it was waiting for."""

    exit_code: ClassVar[int] = 1


class OutOfMemoryError(WorldError):
    """Memory ran out in training. The run can continue from its last checkpoint with smaller micro-batches."""

    exit_code: ClassVar[int] = 5


def says_out_of_memory(text: str) -> bool:
    """Return whether an error's text reports that memory ran out, on a GPU or on the host.

    >>> says_out_of_memory("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    True
    >>> says_out_of_memory("NCCL error ..., unhandled cuda error\\nLast error:\\nFailed to CUDA calloc async 608 bytes")
    True
    >>> says_out_of_memory("no memory of it")
    False
    """
    return _OUT_OF_MEMORY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch, or of a library that it calls, reports that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(f"{type(error).__name__}: {error}")
