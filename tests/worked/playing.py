"""What the tests of both worked examples do: make the data in a folder of their own, and play single episodes."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import agentrl
from agentrl.config import load_settings
from agentrl_envs.types import Step

EXAMPLES = Path(__file__).parents[2] / "examples"

Row = dict[str, object]


def make_data(name: str) -> dict[str, bytes]:
    """Run the example's script in the working directory; the rows that it writes, by file."""
    runpy.run_path(str(EXAMPLES / name / "make_data.py"), run_name="__main__")
    return {path.name: path.read_bytes() for path in Path("data").glob("*.jsonl")}


def in_folder(folder: Path, name: str) -> Path:
    """The folder, with the example's data in it."""
    here = Path.cwd()
    os.chdir(folder)
    try:
        make_data(name)
    finally:
        os.chdir(here)
    return folder


def rows(name: str) -> list[Row]:
    """The rows of one of the files."""
    return [json.loads(line) for line in Path(f"data/{name}.jsonl").read_text().splitlines()]


def call(name: str, **arguments: str) -> str:
    """A turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def play(name: str, row: Row, turns: Sequence[str] | None = None) -> Sequence[Step]:
    """What the example's environment, with the settings of its config, answers to the turns of a model."""
    config = EXAMPLES / name / "config.yaml"
    return agentrl.play(str(load_settings(None, config).env), row, turns, config=config).steps


def follow_page(name: str, tmp_path: Path) -> dict[str, object]:
    """Run the commands of the example's page, the training with few demonstrations and one step; its summary."""
    folder = tmp_path / "copy"
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("data", "runs", "__pycache__"))
    enter, make, train = re.findall(r"^\$ (.*)$", (folder / "README.md").read_text(), re.MULTILINE)[:3]
    assert enter == f"cd examples/{name}"
    own = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(command: str) -> None:
        done = subprocess.run(
            command.split(), cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run(make)
    shown = folder / "data" / "demonstrations.jsonl"
    shown.write_text("".join(shown.read_text().splitlines(keepends=True)[:64]))
    short = "coldstart.steps=3 coldstart.direct_steps=1 training.steps=1 name=short"
    few = "rollout.problems_per_step=2 rollout.group_size=2 evaluation.problems=2 evaluation.samples=2"
    run(f"{train} {short} {few} algorithm.drop_zero_variance=false")
    summary: dict[str, object] = json.loads((folder / "runs" / "short" / "summary.json").read_text())
    return summary
