from __future__ import annotations

import sys

import pytest

from agentrl.telemetry.machine import Machine, _quota_cores, describe_machine, find_compiler


def test_what_is_found_here_is_said() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.libraries["torch"].startswith("2.")
    assert machine.python == sys.version.split()[0]
    assert machine.lines()[0].startswith(f"machine: {machine.cores} cores")


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
    assert machine.lines() == [
        "machine: 2 cores, 3.0 GiB memory, GPU: H (8 GiB)",
        "system: Linux, Python 3.11.7",
        "libraries: torch 2.13.0",
        "compiler: none found (training on a CPU needs none)",
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
