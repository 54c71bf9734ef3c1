"""A small policy made by the real cold start, and the command line in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import made_once
from warm import WarmPopen

from agentrl.telemetry.metrics import find_metric

collect_ignore = [
    "runs_that_are_stopped.py",
    "short_env.py",
    "stopping_env.py",
]
"""Scripts and modules that are run with this folder on their path."""

SMALL = ["--config", "arithmetic", "model.tiny.hidden_size=48", "model.tiny.layers=2", "coldstart.count=1024"]
DEADLINE = 900.0

_SHORT = [
    "rollout.problems_per_step=3",
    "rollout.group_size=4",
    "algorithm.drop_zero_variance=false",
    "algorithm.entropy_coefficient=0.01",
    "optimizer.warmup_steps=1",
    "evaluation.samples=2",
    "evaluation.falsified=false",
    "telemetry.plots=false",
    "training.threads=1",
    "training.steps=4",
    "checkpoint.every=2",
]


class CommandLine:
    """``agentrl`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tally = folder / "tally"
        self._started: list[subprocess.Popen[str]] = []

    def close(self) -> None:
        """Kill what a failed test has left running."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def start(
        self, *arguments: str, environment: dict[str, str] | None = None, fresh: bool = False
    ) -> subprocess.Popen[str]:
        """A command in a process group of its own, with changes to its environment variables.

        ``fresh``: it loads the libraries itself, and says what they say; always so where variables are changed, which
        libraries may read as they load.
        """
        process = (subprocess.Popen if fresh or environment else WarmPopen)(
            [sys.executable, "-m", "agentrl.cli", *arguments],
            cwd=self.folder,
            env=self.environment() | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def environment(self) -> dict[str, str]:
        places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(place for place in places if place)
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    def run(
        self, *arguments: str, code: int = 0, environment: dict[str, str] | None = None, fresh: bool = False
    ) -> str:
        """A command to its end; what it said. Its exit code must be ``code``."""
        process = self.start(*arguments, environment=environment, fresh=fresh)
        said = process.communicate(timeout=DEADLINE)[0]
        assert process.returncode == code, said
        return said

    def simpletir(self, policy: Path, *overrides: str) -> list[str]:
        """The arguments of four steps with the real environment."""
        own = [f"model.path={policy}", "coldstart.demonstrations=null", "data.eval.0.path=builtin:arithmetic"]
        return ["train", *SMALL, *own, *_SHORT, "evaluation.problems=3", *overrides]

    def counting(self, policy: Path, *overrides: str) -> list[str]:
        """The arguments of four steps with an environment that counts its steps and needs no sandbox."""
        environment = ["--env", "counting_env:CountingEnv", f"environment.kwargs.tally={self.tally}"]
        data = ["data.train.0.path=builtin:arithmetic", "data.eval.0.path=builtin:arithmetic"]
        model = [f"model.path={policy}", "model.dtype=float32", "optimizer.learning_rate=1e-3"]
        lengths = ["rollout.max_prompt_tokens=300", "rollout.max_turn_tokens=12", "rollout.max_response_tokens=64"]
        return ["train", *environment, *data, *model, *lengths, *_SHORT, "evaluation.problems=1", *overrides]

    def tallied(self) -> int:
        """Steps of the counting environment so far."""
        return self.tally.stat().st_size if self.tally.exists() else 0

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """The rows so far, a torn last line left out."""
        path = self.folder / "runs" / name / "metrics.jsonl"
        if not path.exists():
            return []
        rows = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        assert {key for row in rows for key in row if find_metric(key) is None} == set(), (
            "not in the catalogue of metrics"
        )
        return rows

    def steps(self, name: str) -> list[int]:
        """The trained steps in the order of their rows."""
        return [row["step"] for row in self.metrics(name) if "policy/updates" in row]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return when ``condition`` holds; the process must not end before."""
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


@pytest.fixture(scope="session")
def cold_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by ``agentrl coldstart`` from demonstrations, in a few seconds; right now and then."""
    steps = ["coldstart.steps=120", "coldstart.batch_size=24"]
    made = made_once(
        tmp_path_factory,
        "cold-policy",
        lambda folder: CommandLine(folder).run("coldstart", "--output", "policy", *SMALL, *steps),
    )
    return made / "policy"


@pytest.fixture(scope="session")
def random_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained tiny policy with its tokenizer."""
    return made_once(tmp_path_factory, "random-policy", write_random_policy) / "policy"


def write_random_policy(folder: Path, *, hidden_size: int = 32) -> None:
    from agentrl.models.loading import build_tiny_model, train_tokenizer, write_model
    from agentrl.models.settings import TinyModelSettings

    settings = TinyModelSettings(vocabulary_size=300, hidden_size=hidden_size, layers=2, heads=2, intermediate_size=48)
    tokenizer = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=settings.vocabulary_size)
    model = build_tiny_model(settings, tokenizer, seed=5)
    write_model(folder / "policy", model=model, tokenizer=tokenizer, title="random", body="Untrained.")


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[CommandLine]:
    """``agentrl`` in an empty folder."""
    made = CommandLine(tmp_path)
    yield made
    made.close()
