"""The benchmark for machines with a GPU and its pack, tried with tiny shapes on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# What a part can do, as a module that gpu.py imports by name.
PARTS = """
from gpu import Figure, Skip

def breaks(device):
    yield Figure(name="share", value=0.5, low=0.4, high=0.6)
    yield "a remark"
    raise ValueError("no such thing")

def is_skipped(device):
    raise Skip("no room")

def lacks_a_package(device):
    import nothing_of_this_name
    yield ""
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


def recorded(gpu: ModuleType, function: str, folder: Path) -> list[dict[str, object]]:
    record = folder / "record"
    record.unlink(missing_ok=True)
    gpu.measure(function, "cpu", record)
    return [json.loads(line) for line in record.read_text().splitlines()][1:]  # the first names the device


def test_the_record_holds_figures_with_verdicts_and_how_the_part_ended(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    figure, remark, end = recorded(gpu, "some_parts:breaks", tmp_path)
    assert figure["line"] == "share: 0.5, expected 0.4 to 0.6: ok"
    assert figure["figure"] == {
        "name": "share", "value": 0.5, "unit": "", "low": 0.4, "high": 0.6, "why": "", "judged": True, "verdict": "ok",
    }  # fmt: skip
    assert remark == {"line": "a remark"}
    assert end["state"] == "failed"
    assert "ValueError: no such thing" in str(end["reason"])
    assert recorded(gpu, "some_parts:is_skipped", tmp_path) == [{"state": "skipped", "reason": "no room"}]
    [end] = recorded(gpu, "some_parts:lacks_a_package", tmp_path)
    assert end == {"state": "skipped", "reason": "nothing_of_this_name is not installed"}


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        ({"value": 0.4, "low": 0.4}, "ok"),
        ({"value": 0.39, "low": 0.4}, "NOT AS EXPECTED"),
        ({"value": float("nan"), "high": 1.0}, "NOT AS EXPECTED"),
        ({"value": 2.0, "high": 1.0, "judged": False}, "not judged"),
        ({"value": 2.0}, "not judged"),
    ],
)
def test_verdicts(gpu: ModuleType, figure: dict[str, object], verdict: str) -> None:
    assert gpu.Figure(name="a", **figure).verdict == verdict


def test_a_part_that_takes_too_long_is_cut_off(gpu: ModuleType) -> None:
    found = gpu.run_part("gpu_kernels:head", "cpu", 0.2)
    assert (found["state"], found["reason"]) == ("cut off", "it took longer than 0 s")
    assert not gpu.good(found)


def test_every_part_can_be_imported(gpu: ModuleType) -> None:
    for name, part in gpu.PARTS.items():
        assert callable(getattr(importlib.import_module(part.module), name))


def test_the_shares_of_the_parts_fill_ten_minutes(gpu: ModuleType) -> None:
    assert sum(part.seconds for name, part in gpu.PARTS.items() if name != "colocated") == gpu.TOTAL == 600


@pytest.mark.parametrize("part", ["head", "attention", "energies"])
def test_parts_of_the_kernels_find_what_they_expect(gpu: ModuleType, part: str) -> None:
    figures = list(getattr(importlib.import_module("gpu_kernels"), part)(torch.device("cpu")))
    judged = [one.verdict for one in figures if isinstance(one, gpu.Figure) and one.judged]
    assert judged
    assert set(judged) == {"ok"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        "gpu_kernels:accumulation",
        "gpu_step:step_1_5b",
        "gpu_step:shortage",
        "gpu_train:kernel_tests",
        "gpu_train:train_tiny",
    ],
)
def test_parts_that_train_find_what_they_expect(gpu: ModuleType, function: str) -> None:
    found = gpu.run_part(function, "cpu", 300.0)
    assert found["state"] == "ran", found["reason"]
    assert gpu.good(found), found["lines"]
    assert found["figures"]


def test_the_pack_holds_what_the_parts_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pack = importlib.import_module("gpu_pack")
    pack.copy_source(tmp_path)
    for name in ("agentrl/cli.py", "envs/agentrl_envs/registry.py", "benchmarks/gpu.py", "tests/kernels/cases.py"):
        assert (tmp_path / name).read_bytes() == (BENCHMARKS.parent / name).read_bytes()
    assert not (tmp_path / "tests" / "planning").exists()


@pytest.mark.slow
def test_the_packed_kernel_tests_can_be_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module("gpu_pack").copy_source(tmp_path)
    own = os.pathsep.join(str(tmp_path / name) for name in ("", "envs", "sandbox"))
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests/kernels"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": own}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_every_requirement_of_the_project_is_packed_or_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pack = importlib.import_module("gpu_pack")
    project = tomllib.loads((BENCHMARKS.parent / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[\[<>=]", one)[0] for one in project["dependencies"]}
    packed = {re.split("[<=]", one)[0] for one in [*pack.PACKAGES, pack.DEEPSPEED]}
    assert required <= packed | set(pack.PRESENT) | set(pack.UNUSED)


def test_run_sh_unpacks_missing_packages_alone_and_passes_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pack = importlib.import_module("gpu_pack")
    (tmp_path / "run.sh").write_text(pack.RUN)
    (tmp_path / "wheels").mkdir()
    for name in ("not_installed_here-1.0-py3-none-any.whl", "PyYAML-0.0-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / "wheels" / name, "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}.py", "here = True")
    (tmp_path / "source" / "benchmarks").mkdir(parents=True)
    program = "import sys, not_installed_here; print(sys.argv[1:])"
    (tmp_path / "source" / "benchmarks" / "gpu.py").write_text(program)
    for _ in range(2):  # the second finds everything unpacked
        done = subprocess.run(
            ["sh", str(tmp_path / "run.sh"), "--only", "head"],
            env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout == "['--only', 'head']\n"
    assert [path.name for path in (tmp_path / "packages").glob("*.py")] == ["not_installed_here.py"]
