"""Resources of this machine: cores, memory, GPUs, libraries and the compiler."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import agentrl

LIBRARIES = ("agentrl-sandbox", "torch", "deepspeed", "transformers", "gymnasium", "math-verify", "vllm")
_GIB = 1024**3
DISK_FREE = "machine/disk_free_bytes"
MEMORY_FREE = "machine/memory_free_share"


def describe_machine() -> list[str]:
    """Describe this machine in lines for the console. Imports torch, which takes seconds, to list the GPUs."""
    import torch

    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = ", ".join(f"{device.name} ({device.total_memory / _GIB:.0f} GiB)" for device in devices) or "none"
    versions = [f"agentrl {agentrl.__version__}"]
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):  # optional, or not installed under this name
            versions.append(f"{name} {version(name)}")
    return [
        f"machine: {count_usable_cores()} cores, {usable_memory_bytes() / _GIB:.1f} GiB memory, GPU: {gpus}",
        f"system: {platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}",
        f"libraries: {', '.join(versions)}",
        f"compiler: {find_cxx_compiler() or 'not found (not required for training on a CPU)'}",
    ]


def count_usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    return min(cores, _parse_core_quota(_read_text_or_empty("/sys/fs/cgroup/cpu.max")) or cores)


def usable_memory_bytes() -> int:
    """Return the memory of the machine in bytes, limited by this process's control group."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_text_or_empty("/sys/fs/cgroup/memory.max").strip()
    return min(memory, int(limit)) if limit.isdigit() else memory


def measure_free_resources(folder: Path) -> dict[str, float]:
    """Return the free bytes on the disk of ``folder`` and the free fraction of usable memory, for alerts."""
    metrics = {MEMORY_FREE: free_memory_bytes() / usable_memory_bytes()}
    with contextlib.suppress(OSError):  # the metric is omitted if the disk is unavailable
        metrics[DISK_FREE] = float(shutil.disk_usage(folder).free)
    return metrics


def free_memory_bytes() -> int:
    """Return the available memory in bytes, limited by the control group. Its inactive file cache counts as free."""
    machine = re.search(r"^MemAvailable:\s+(\d+) kB", _read_text_or_empty("/proc/meminfo"), re.MULTILINE)
    free = int(machine[1]) * 1024 if machine else usable_memory_bytes()
    limit, used = (
        _read_text_or_empty("/sys/fs/cgroup/memory.max").strip(),
        _read_text_or_empty("/sys/fs/cgroup/memory.current").strip(),
    )
    if not (limit.isdigit() and used.isdigit()):
        return free
    cache = re.search(r"^inactive_file (\d+)", _read_text_or_empty("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    return max(0, min(free, int(limit) - int(used) + (int(cache[1]) if cache else 0)))


def find_cxx_compiler() -> str | None:
    """Return the path of the compiler that PyTorch uses to build extensions (``$CXX`` or ``c++``), or None."""
    return shutil.which(os.environ.get("CXX") or "c++")


def _parse_core_quota(text: str) -> int | None:
    """Parse ``cpu.max`` into a number of cores: ``150000 100000`` is 2, ``max 100000`` is None."""
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None
    return max(1, -(-int(parts[0]) // int(parts[1])))


def _read_text_or_empty(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""  # without control groups there is no limit
