"""The two distributions: their licenses, and their names wherever the project tells how to install them."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest

from agentrl_envs.registry import DISTRIBUTION, install_extra

ROOT = Path(__file__).parent.parent
PLACES = ("agentrl", "benchmarks", "configs", "docs", "envs", "examples", "sandbox", "tests", ".ci")
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
    assert {"README.md", "Makefile", "docs/cluster.md", ".ci/run", "configs/cluster/kuberay.yaml"} <= set(found)
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
        install_extra("mcp"),
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
