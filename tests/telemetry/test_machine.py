from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from agentrl.telemetry.machine import (
    DISK_FREE,
    MEMORY_FREE,
    _parse_core_quota,
    count_usable_cores,
    describe_machine,
    find_cxx_compiler,
    free_memory_bytes,
    measure_free_resources,
)


def test_machine_system_libraries_and_compiler_are_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    machine, system, libraries, compiler = describe_machine()
    assert re.fullmatch(rf"machine: {count_usable_cores()} cores, [\d.]+ GiB memory, GPU: .+", machine)
    assert system.endswith(f"Python {sys.version.split()[0]}")
    assert re.search(r"libraries: agentrl \S+, .*\btorch 2\.", libraries)
    assert compiler == "compiler: not found (not required for training on a CPU)"


def test_what_is_free_is_a_part_of_what_there_is(tmp_path: Path) -> None:
    free = measure_free_resources(tmp_path)
    assert 0 < free[MEMORY_FREE] <= 1
    assert 0 <= free[DISK_FREE] <= shutil.disk_usage(tmp_path).total
    assert list(measure_free_resources(tmp_path / "gone")) == [MEMORY_FREE]


def test_a_control_group_has_what_its_limit_leaves_with_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "/sys/fs/cgroup/memory."
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:       4000 kB\n",
        f"{group}max": "1000000\n",
        f"{group}current": "900000\n",
        f"{group}stat": "anon 1\ninactive_file 250000\n",
    }
    monkeypatch.setattr("agentrl.telemetry.machine._read_text_or_empty", lambda path: files.get(path, ""))
    assert free_memory_bytes() == 350_000
    files[f"{group}max"] = "max\n"
    assert free_memory_bytes() == 4_096_000


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("", None), ("150000 100000", 2), ("50000 100000", 1), ("200000 100000", 2)],
)
def test_the_quota_of_a_control_group(text: str, cores: int | None) -> None:
    assert _parse_core_quota(text) == cores


def test_the_compiler_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert find_cxx_compiler() is None
    monkeypatch.setenv("CXX", sys.executable)
    assert find_cxx_compiler() == sys.executable
