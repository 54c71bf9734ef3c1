"""What this machine offers: cores, memory, GPUs, libraries and the compiler."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import agentrl

LIBRARIES = ("agentrl-sandbox", "torch", "deepspeed", "transformers", "gymnasium", "math-verify", "vllm")
_GIB = 1024**3
DISK_FREE = "machine/disk_free_bytes"
MEMORY_FREE = "machine/memory_free_share"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine. ``cores`` and ``memory_bytes`` respect the affinity and the control group of this process."""

    system: str
    python: str
    cores: int
    memory_bytes: int
    gpus: tuple[str, ...]
    libraries: dict[str, str]
    compiler: str | None

    def lines(self) -> list[str]:
        """Lines for the console."""
        memory = f"{self.memory_bytes / _GIB:.1f} GiB"
        return [
            f"machine: {self.cores} cores, {memory} memory, GPU: {', '.join(self.gpus) or 'none'}",
            f"system: {self.system}, Python {self.python}",
            "libraries: " + ", ".join(f"{name} {found}" for name, found in self.libraries.items()),
            f"compiler: {self.compiler or 'none found (training on a CPU needs none)'}",
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
    cores = len(os.sched_getaffinity(0))
    return min(cores, _quota_cores(_read("/sys/fs/cgroup/cpu.max")) or cores)


def usable_memory() -> int:
    """Bytes of memory: the machine's, no more than its control group's limit."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return min(memory, int(limit)) if limit.isdigit() else memory


def free_room(folder: Path) -> dict[str, float]:
    """Return the free bytes on the disk of ``folder`` and the free share of usable memory, for alerts."""
    found = {MEMORY_FREE: free_memory() / usable_memory()}
    with contextlib.suppress(OSError):  # a disk that does not answer has no number
        found[DISK_FREE] = float(shutil.disk_usage(folder).free)
    return found


def free_memory() -> int:
    """Bytes of memory that are available: the machine's, no more than its control group has left without its cache."""
    machine = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    free = int(machine[1]) * 1024 if machine else usable_memory()
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if not (limit.isdigit() and used.isdigit()):
        return free
    cache = re.search(r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    return max(0, min(free, int(limit) - int(used) + (int(cache[1]) if cache else 0)))


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


def _gpus() -> tuple[str, ...]:
    import torch

    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return tuple(f"{one.name} ({one.total_memory / _GIB:.0f} GiB)" for one in found)


def _versions() -> dict[str, str]:
    found = {"agentrl": agentrl.__version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # optional, or not installed under this name: not listed
    return found
