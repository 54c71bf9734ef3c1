"""Sandboxes of other packages, selected by the scheme of their URL."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from shared import python_with

from agentrl_sandbox.client import (
    PROPERTIES,
    Execution,
    Isolation,
    Outcome,
    Sandbox,
    SandboxSettings,
    StartError,
    UnisolatedError,
    open_sandbox,
)


class ToySandbox:
    """A sandbox that runs nothing."""

    def __init__(self, settings: SandboxSettings) -> None:
        place = settings.url.removeprefix("toy://")
        self.isolation = Isolation(
            layers={} if place == "silent" else dict.fromkeys(PROPERTIES, None if place == "open" else "toy"),
            mode="none",
        )
        self.closed = False
        opened.append(self)

    async def execute(self, program: str, **options: object) -> Execution:
        return Execution(outcome=Outcome.OK, stdout=program, stderr="", exit_code=0, seconds=0.0, truncated=False)

    async def close(self) -> None:
        self.closed = True


opened: list[ToySandbox] = []


async def open_toy(settings: SandboxSettings) -> ToySandbox:
    """Open a sandbox, as the function of the entry point."""
    return ToySandbox(settings)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with the entry point ``toy``."""
    folder = tmp_path / "toy-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text(f"[agentrl.sandboxes]\ntoy = {__name__}:open_toy\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    opened.clear()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("url", ["toy://here", "toy://here?images=one,two"])
async def test_the_scheme_of_a_url_selects_the_sandbox_of_a_package(url: str) -> None:
    sandbox: Sandbox = await open_sandbox(SandboxSettings(url=url))
    assert (await sandbox.execute("1")).stdout == "1"


@pytest.mark.usefixtures("installed")
async def test_a_package_cannot_replace_a_built_in_sandbox(tmp_path: Path) -> None:
    with (tmp_path / "toy-1.0.dist-info" / "entry_points.txt").open("a", encoding="utf-8") as entries:
        entries.write(f"ray = {__name__}:open_toy\n")
    with pytest.raises(StartError, match="url=ray:// is supported only by"):
        await open_sandbox(SandboxSettings(url="ray://"))


@pytest.mark.usefixtures("installed")
async def test_a_package_that_does_not_isolate_programs_needs_permission() -> None:
    with pytest.raises(UnisolatedError, match="toy://open: missing no_network"):
        await open_sandbox(SandboxSettings(url="toy://open"))
    with pytest.raises(UnisolatedError, match="toy://silent: missing no_network"):
        await open_sandbox(SandboxSettings(url="toy://silent"))
    assert [one.closed for one in opened] == [True, True]
    await open_sandbox(SandboxSettings(url="toy://open", allow_unisolated=True))
    assert [one.closed for one in opened] == [True, True, False]


@pytest.mark.usefixtures("installed")
def test_an_unknown_scheme_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown sandbox 'tor://x'; valid: local://, .*, ray://, toy://"):
        SandboxSettings(url="tor://x")


@pytest.mark.slow
def test_the_example_package_passes_its_test() -> None:
    example = Path(__file__).parents[2] / "examples" / "daytona"
    words = [python_with("daytona"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(example)]
    made = subprocess.run(words, check=False, capture_output=True, text=True)
    assert "1 passed" in made.stdout, made.stdout + made.stderr
