"""The program for machines with a GPU, at tiny sizes on the CPU: every section says something."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def test_every_section_prints_a_result_or_why_there_is_none(
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
    gpu.run_section("step", tiny=True)
    gpu.run_section("job", tiny=True)
    said = capsys.readouterr().out
    assert "step: tiny: broke: it took longer than 0 s" in said
    assert "job: broke: RuntimeError: it took longer than 0 s" in said
