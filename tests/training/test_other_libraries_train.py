"""Environments of other libraries train from the command line, with the real packages, as their pages show."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import python_with

from agentrl.models.tokenizer import read_tokenizer
from agentrl.telemetry.run_directory import RunDirectory

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
SHORT = [
    "--config=tiny",
    "data.train.0.path=builtin:seeds",
    "coldstart.demonstrations=null",
    "algorithm.drop_zero_variance=false",
    "rollout.problems_per_step=2",
    "rollout.group_size=2",
    "rollout.max_turn_tokens=6",
    "evaluation.problems=2",
    "evaluation.samples=1",
    "evaluation.falsified=false",
    "telemetry.plots=false",
    "training.threads=1",
    "training.steps=2",
    "name=short",
]


def example(page: str, named: str) -> str:
    """The program on ``page`` that holds ``named``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (found,) = (block for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if named in block)
    return str(found)


def trained(command_line: Any) -> list[dict[str, Any]]:
    """The trajectories of the second step, once two steps have changed the policy."""
    rows = command_line.metrics("short")
    assert [row["policy/updates"] for row in rows if "policy/updates" in row] == [1, 1]
    assert [row["step"] for row in rows if "eval/avg_at_k" in row] == [0, 2]
    return list(RunDirectory(command_line.folder / "runs" / "short").read_trajectories(2))


SERVE = """
import socket

import uvicorn
from guess import app

listener = socket.create_server(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])
"""


@pytest.fixture
def openenv_server(tmp_path: Path) -> Iterator[str]:
    """The page's environment behind OpenEnv's own server."""
    (tmp_path / "guess.py").write_text(example("how-to/libraries.md", "openenv.core"))
    command = [python_with("openenv"), "-c", SERVE]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def test_an_environment_of_openenv(command_line: Any, random_policy: Path, openenv_server: str) -> None:
    own = ["--env", f"openenv:{openenv_server}", f"model.path={random_policy}", "environment.max_turns=3"]
    command_line.run("train", *own, *SHORT)
    rows = trained(command_line)
    assert len(rows) == 4
    for row in rows:
        said = [segment["text"] for segment in row["segments"] if segment["origin"] == "observation"]
        assert said, row
        assert {text.strip() for text in said} <= {"That is no digit.", "No.", "Yes."}


def test_a_task_set_of_verifiers(command_line: Any, random_policy: Path) -> None:
    python = python_with("verifiers")
    (command_line.folder / "adding.py").write_text(example("how-to/agents.md", "import verifiers"))
    own = ["--env", "verifiers:adding", f"model.path={random_policy}", f"environment.python={python}"]
    command_line.run("train", *own, *SHORT, environment={"PYTHONPATH": str(command_line.folder)})
    rows = trained(command_line)
    assert len(rows) == 4
    tokenizer = read_tokenizer(random_policy)
    assert all(re.search(r"\d \+ 3\?", tokenizer.decode(row["prompt_ids"])) for row in rows)
    assert {row["ended"] for row in rows} == {"answered"}
