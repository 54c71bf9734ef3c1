"""Exceptions raised by agentrl.

AgentRLError
├── SettingsError             the user's settings or files: one message, exit code 2
│   ├── UnplaceableError      the cluster has too few resources for the run (agentrl.cluster.plan)
│   └── ProblemLoadError      the requested problems cannot be loaded (agentrl.problems.rows)
│       ├── ProblemFileError
│       ├── ProblemFieldError
│       ├── EmptyProblemsError
│       └── SamplerStateError
├── WorldError                sandbox, engine, disk or network failed after its retries: one message, exit code 1
│   ├── OutOfMemoryError      memory ran out in training; smaller micro-batches may fit: exit code 5
│   ├── NodeLostError         a machine of the cluster disconnected or does not respond (agentrl.cluster.processes)
│   └── WorkerLostError       the rollout worker or a rank exited or does not respond (agentrl.training.worker)
├── FidelityError             trainer and engine disagree on sampled tokens (agentrl.training.step.diagnostics)
└── WeightMismatchError       an engine's weights differ from the weights sent to it (agentrl.training.worker.transfer)

Some errors of agentrl_envs and agentrl_sandbox are reported in the same way (:func:`reported_exit_code`). Any other
exception is a bug and propagates unchanged.
"""

from __future__ import annotations

import importlib.util
import re
from importlib import resources
from pathlib import Path
from typing import ClassVar

from agentrl_envs.registry import PluginError, install_command

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory"  # torch, CUDA, Triton, and NCCL's "Cuda failure 2 'out of memory'"
    r"|can(?:no|')t allocate memory|DefaultCPUAllocator: not enough memory|bad_alloc"  # host memory
    r"|Failed to CUDA (?:host )?[cm]alloc"  # NCCL's last error, below "unhandled cuda error"
    r"|STATUS_ALLOC_FAILED|DEVICE_ALLOCATION_FAILED",  # cuBLAS and cuDNN
    re.IGNORECASE,
)


EXIT_CRASHED = 1
"""Exit code of a rank that failed with an error that is not reported, for example because of a broken GPU."""
EXIT_PEER_LOST = 3
"""Exit code of a rank that exited because the rollout worker or another rank exited or is stuck."""
EXIT_REPORTED_ERROR = 4
"""Exit code of a rank that reported an error whose exit code equals :data:`EXIT_CRASHED`."""
EXIT_STUCK = 6
"""Exit code of a rank whose main thread was stuck."""
EXIT_INTERRUPTED = 130
"""Exit code of a run that stopped on request."""


class AgentRLError(Exception):
    """An error that the command line reports as one message without a traceback."""

    exit_code: ClassVar[int] = 1


class SettingsError(AgentRLError):
    """The user's settings or files are invalid. The message contains the value, the valid values and the fix."""

    exit_code: ClassVar[int] = 2


def require_package(package: str, *, extra: str, purpose: str) -> None:
    """Raise SettingsError if an optional package is missing, with the command that installs ``extra``."""
    if importlib.util.find_spec(package) is None:
        raise SettingsError(f"{purpose} needs the package {package}: {install_command(extra)}")


class WorldError(AgentRLError):
    """Something outside the program failed. The message names the failure and the operation that it interrupted."""

    exit_code: ClassVar[int] = 1


class OutOfMemoryError(WorldError):
    """Memory ran out in training. The run can continue from its last checkpoint with smaller micro-batches."""

    exit_code: ClassVar[int] = 5


def reported_exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is reported as one message without a traceback, or None for a bug."""
    if isinstance(error, AgentRLError):
        return error.exit_code
    # Imported only after a failure, so that `agentrl --help` starts quickly.
    from agentrl_envs.episode import EnvironmentContractError, UnavailableError
    from agentrl_sandbox.client import SandboxError

    if isinstance(error, UnavailableError):
        return WorldError.exit_code
    return SettingsError.exit_code if isinstance(error, EnvironmentContractError | PluginError | SandboxError) else None


def append_help_link(message: str) -> str:
    """Append a line with the address of the message's entry in docs/how-to/troubleshooting.md, if there is one.

    The heading of an entry is the message that it explains, with `...` for values. If several entries match, the entry
    with the longest heading is used.

    >>> append_help_link("the run directory runs/first is not empty")
    'the run directory runs/first is not empty\\nhelp: docs/how-to/troubleshooting.md#the-run-directory-is-not-empty'
    >>> append_help_link("the run has ended")
    'the run has ended'
    """
    package = Path(str(resources.files("agentrl")))
    pages = (package / "troubleshooting.md", package.parent / "docs/how-to/troubleshooting.md")  # wheel, checkout
    text = next((page.read_text(encoding="utf-8") for page in pages if page.exists()), "")
    entries = [
        heading
        for heading in re.findall(r"^### `(.*)`$", text, re.MULTILINE)
        if re.search(".*".join(map(re.escape, heading.split("..."))), message, re.DOTALL)
    ]
    if not entries:
        return message
    words = re.sub(r"[^\w\s-]", "", max(entries, key=len).lower()).strip()  # the anchor, as Markdown derives it
    anchor = re.sub(r"[-\s]+", "-", words)
    return f"{message}\nhelp: docs/how-to/troubleshooting.md#{anchor}"


def mentions_out_of_memory(text: str) -> bool:
    """Return True if an error message reports that memory ran out, on a GPU or on the host.

    >>> mentions_out_of_memory("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    True
    >>> mentions_out_of_memory("NCCL error ..., unhandled cuda error\\nFailed to CUDA calloc async 608 bytes")
    True
    >>> mentions_out_of_memory("no memory of it")
    False
    """
    return _OUT_OF_MEMORY.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error, raised by torch or a library below it, reports that memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and mentions_out_of_memory(f"{type(error).__name__}: {error}")
