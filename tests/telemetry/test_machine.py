from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from agentrl.telemetry.machine import (
    DISK_FREE,
    MEMORY_FREE,
    Machine,
    _quota_cores,
    describe_machine,
    find_compiler,
    free_memory,
    free_resources,
)


def test_what_is_found_here_is_said() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.libraries["torch"].startswith("2.")
    assert machine.python == sys.version.split()[0]
    assert machine.describe()[0].startswith(f"machine: {machine.cores} cores")


def test_what_is_free_is_a_part_of_what_there_is(tmp_path: Path) -> None:
    free = free_resources(tmp_path)
    assert 0 < free[MEMORY_FREE] <= 1
    assert 0 <= free[DISK_FREE] <= shutil.disk_usage(tmp_path).total
    assert list(free_resources(tmp_path / "gone")) == [MEMORY_FREE]


def test_a_control_group_has_what_its_limit_leaves_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "/sys/fs/cgroup/memory."
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:       4000 kB\n",
        f"{group}max": "1000000\n",
        f"{group}current": "900000\n",
        f"{group}stat": "anon 1\ninactive_file 250000\n",
    }
    monkeypatch.setattr("agentrl.telemetry.machine._read", lambda path: files.get(path, ""))
    assert free_memory() == 350_000
    files[f"{group}max"] = "max\n"
    assert free_memory() == 4_096_000


def test_lines() -> None:
    machine = Machine(
        system="Linux",
        python="3.11.7",
        cores=2,
        memory_bytes=3 * 1024**3,
        gpus=("H (8 GiB)",),
        libraries={"torch": "2.13.0"},
        compiler=None,
    )
    assert machine.describe() == [
        "machine: 2 cores, 3.0 GiB memory, GPU: H (8 GiB)",
        "system: Linux, Python 3.11.7",
        "libraries: torch 2.13.0",
        "compiler: not found (not required for training on a CPU)",
    ]


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("", None), ("150000 100000", 2), ("50000 100000", 1), ("200000 100000", 2)],
)
def test_the_quota_of_a_control_group(text: str, cores: int | None) -> None:
    assert _quota_cores(text) == cores


def test_the_compiler_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_compiler() is None
    monkeypatch.setenv("CXX", sys.executable)
    assert find_compiler() == sys.executable
