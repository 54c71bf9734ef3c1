"""The program for machines with a GPU, at tiny sizes on the CPU: every section says something."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_kernels_and_steps_print_a_result_or_why_there_is_none(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for section in ("kernel", "step", "colocated"):
        gpu.run_section(section, tiny=True)
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "broke" in line]
    for way in ("chunked", "full logits", "triton"):
        assert any(line.startswith(f"kernel: {way}") for line in lines)
    for way in ("packed", "padded"):
        assert any(line.startswith(f"step: {way}, 256 tokens in 8 documents: ") for line in lines)
    assert "colocated: did not run: vLLM cannot sleep on a CPU" in lines


@pytest.mark.slow
def test_the_tiny_job_runs(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.run_section("job", tiny=True)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("job: 2 steps in ")
    assert last.startswith("job: ")


def test_a_section_that_runs_out_of_memory_says_so(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tiny: bool) -> Iterator[str]:
        yield "half"
        raise torch.OutOfMemoryError("all of it")

    monkeypatch.setitem(gpu.SECTIONS, "kernel", full)
    gpu.run_section("kernel", tiny=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["kernel: half", "kernel: broke: OutOfMemoryError: all of it"]


def test_a_command_that_does_not_end_when_asked_is_killed(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_GRACE", 0.1)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    done = gpu._command([sys.executable, "-c", stubborn], limit=1.0)
    assert (done.returncode, done.stderr) == (124, "it took longer than 1 s")


def test_the_limits_add_up_to_less_than_25_minutes(gpu: ModuleType) -> None:
    steps = 2 * len(gpu.gpu_step.WAYS) * gpu._STEP_LIMIT
    assert steps + 2 * gpu._LIMIT + 6 * gpu._GRACE < 25 * 60 - 60  # and a minute for the kernels


def test_without_a_gpu_each_section_says_so(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for section in gpu.SECTIONS:
        gpu.run_section(section, tiny=False)
        assert f"{section}: did not run: torch finds no GPU" in capsys.readouterr().out


def test_what_breaks_and_what_takes_too_long_is_said(
    gpu: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "_LIMIT", 0.0)
    monkeypatch.setattr(gpu, "_STEP_LIMIT", 0.0)
    gpu.run_section("step", tiny=True)
    gpu.run_section("job", tiny=True)
    said = capsys.readouterr().out
    assert "step: tiny, packed: broke: it took longer than 0 s" in said
    assert "job: broke: RuntimeError: it took longer than 0 s" in said
