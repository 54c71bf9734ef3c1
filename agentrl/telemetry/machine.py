"""What this machine offers: cores, memory, GPUs, libraries and the compiler."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("agentrl", "agentrl-sandbox", "torch", "deepspeed", "transformers", "gymnasium", "math-verify", "vllm")
_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine. ``cores`` and ``memory_bytes`` respect the affinity and the control group of this process."""

    system: str
    python: str
    cores: int
    memory_bytes: int | None
    gpus: tuple[Gpu, ...]
    libraries: dict[str, str]
    compiler: str | None

    def lines(self) -> list[str]:
        """Lines for the console."""
        memory = "unknown" if self.memory_bytes is None else f"{self.memory_bytes / _GIB:.1f} GiB"
        gpus = ", ".join(f"{gpu.name} ({gpu.memory_bytes / _GIB:.0f} GiB)" for gpu in self.gpus) or "none"
        libraries = ", ".join(f"{name} {found}" for name, found in self.libraries.items())
        compiler = self.compiler or "none found (training on a CPU needs none)"
        return [
            f"machine: {self.cores} cores, {memory} memory, GPU: {gpus}",
            f"system: {self.system}, Python {self.python}",
            f"libraries: {libraries}",
            f"compiler: {compiler}",
        ]


def describe_machine() -> Machine:
    """Describe this machine. Imports torch, which takes seconds, for the GPUs."""
    return Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=usable_cores(),
        memory_bytes=usable_memory(),
        gpus=_gpus(),
        libraries=_versions(),
        compiler=find_compiler(),
    )


def usable_cores() -> int:
    """Cores this process may use: its affinity, no more than its control group's quota (rounded up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _quota_cores(_read("/sys/fs/cgroup/cpu.max")) or cores)


def usable_memory() -> int | None:
    """Bytes of memory: the machine's, no more than its control group's limit. None where neither can be read."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(memory, int(limit)) if limit.isdigit() else memory


def find_compiler() -> str | None:
    """The C++ compiler that PyTorch's extension builder would call: ``$CXX``, else ``c++``. None when there is none."""
    return shutil.which(os.environ.get("CXX") or "c++")


def _quota_cores(text: str) -> int | None:
    """Cores in the text of ``cpu.max``, such as ``150000 100000`` (2) or ``max 100000`` (no limit)."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return max(1, -(-int(parts[0]) // int(parts[1])))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""  # no control groups here: nothing limits


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(Gpu(name=one.name, memory_bytes=one.total_memory) for one in found)


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # optional, or not installed under this name: not listed
    return found
