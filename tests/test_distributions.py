"""The two distributions: licenses, wheels, and their names wherever the project tells how to install them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest

from agentrl_envs.registry import DISTRIBUTION, install_command

ROOT = Path(__file__).parent.parent
PLACES = ("agentrl", "benchmarks", "configs", "docs", "envs", "examples", "sandbox", "tests", ".ci", ".github")
SUFFIXES = {"", ".html", ".ipynb", ".js", ".md", ".py", ".sh", ".template", ".toml", ".yaml", ".yml"}
# `agentrl` on PyPI is another project: an extra of it, an installation of it, or a dependency on it.
STRANGER = re.compile(
    r"""(?<![\w./-])agentrl\[[a-z]
    | ["']agentrl\s*(?:[<>=~!]=|@)
    | \b(?:pip|pipx|uv)\s.*\b(?:install|add)\b[^`;&|]*[\s"']agentrl(?=["'\s`=<>]|$)
    | dependencies.*["']agentrl["']""",
    re.VERBOSE,
)


def texts() -> dict[str, str]:
    files = [path for place in PLACES for path in (ROOT / place).rglob("*")] + list(ROOT.iterdir())
    files = [path for path in files if path.is_file() and path.suffix in SUFFIXES and path != Path(__file__)]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8", errors="replace") for path in files}


def test_nothing_installs_the_other_project_that_is_named_agentrl() -> None:
    found = texts()
    assert {"README.md", "Makefile", "docs/how-to/cluster.md", ".ci/run", "configs/cluster/kuberay.yaml"} <= set(found)
    lines = [f"{name}: {line}" for name, text in found.items() for line in text.splitlines() if STRANGER.search(line)]
    assert lines == []


@pytest.mark.parametrize(
    "line",
    [
        "pip install 'agentrl[mcp]'",
        "an image with agentrl[vllm,ray]",
        "uv pip install agentrl",
        "`pip install agentrl`",
        'dependencies = ["agentrl"]',
        'dependencies = ["torch", "agentrl==0.0.18"]',
    ],
)
def test_the_search_finds(line: str) -> None:
    assert STRANGER.search(line)


@pytest.mark.parametrize(
    "line",
    [
        install_command("mcp"),
        "pip install ./sandbox '.[mcp]'",
        "pip install -e . && agentrl train",
        'names["agentrl"]',
        "agentrl[1:]",
    ],
)
def test_the_search_leaves_alone(line: str) -> None:
    assert not STRANGER.search(line)


@pytest.mark.parametrize("name", [DISTRIBUTION, "agentrl-sandbox"])
def test_the_license_is_installed(name: str) -> None:
    """An editable installation has the metadata of the wheel."""
    installed = distribution(name)
    assert installed.metadata.get_all("License-File") == ["LICENSE"]
    (path,) = (file for file in installed.files or () if file.name == "LICENSE")
    assert "Apache License" in path.read_text()
    assert (ROOT / "LICENSE").read_text() == (ROOT / "sandbox" / "LICENSE").read_text()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Both wheels, built without a network by the build backend that is installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, ROOT / "sandbox", ROOT], check=True, timeout=300)
    return sorted(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheels_contain_every_file_of_the_packages(wheels: list[Path]) -> None:
    contained = {name for wheel in wheels for name in ZipFile(wheel).namelist()}
    places = {
        ROOT / "agentrl": "agentrl",
        ROOT / "configs": "agentrl/configs",
        ROOT / "envs" / "agentrl_envs": "agentrl_envs",
        ROOT / "sandbox" / "agentrl_sandbox": "agentrl_sandbox",
    }
    expected = {
        f"{name}/{path.relative_to(folder)}"
        for folder, name in places.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert len(expected) > 200
    assert (expected | {"agentrl/troubleshooting.md"}) - contained == set()


@pytest.mark.slow
def test_the_wheels_train_outside_of_a_checkout(wheels: list[Path], tmp_path: Path) -> None:
    fresh, empty = tmp_path / "fresh", tmp_path / "empty"
    empty.mkdir()
    venv.create(fresh)
    python = fresh / "bin" / "python"
    options = ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels], check=True)
    # A path in a .pth file gives the dependencies, but not the editable installation, whose .pth is not read there.
    (packages,) = fresh.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    command = (
        "agentrl train --env simpletir training.steps=3 coldstart.steps=5 coldstart.count=64 coldstart.variants=1 "
        "evaluation.problems=2 evaluation.samples=2 rollout.problems_per_step=2 rollout.group_size=2"
    )
    done = subprocess.run(
        [fresh / "bin" / "agentrl", *command.split()[1:]],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (empty / "runs" / "tiny-1" / "summary.json").is_file()
    where = "import agentrl, agentrl_envs, agentrl_sandbox; print(agentrl, agentrl_envs, agentrl_sandbox)"
    shown = subprocess.check_output([python, "-c", where], cwd=empty, env=environment, text=True)
    assert shown.count(str(packages)) == 3
