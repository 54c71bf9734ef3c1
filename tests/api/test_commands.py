"""`agentrl.train`, `agentrl.evaluate` and `agentrl.load_run`, called as a notebook calls them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from shared import made_once

import agentrl
from agentrl.api.run import Run
from agentrl.errors import SettingsError, WorldError

pytestmark = pytest.mark.slow

ROWS = [{"problem": f"What is {a} + {a + 3}?", "answer": str(2 * a + 3)} for a in range(2, 10)]
SMALL: dict[str, Any] = {
    "model": {"tiny": {"hidden_size": 32, "layers": 2}},
    "coldstart": {"count": 256, "steps": 40},
    "rollout": {"problems_per_step": 2, "group_size": 2, "max_response_tokens": 48, "max_turn_tokens": 24},
    "algorithm": {"drop_zero_variance": False},
    "training": {"steps": 2, "threads": 1},
    "telemetry": {"plots": False},
}


def reward(problem: object, conversation: object, verdict: object) -> float:
    return 0.75


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    def make(folder: Path) -> None:
        async def in_an_event_loop() -> None:
            agentrl.train(problems=ROWS, reward=reward, name="first", runs_dir=folder, **SMALL)

        asyncio.run(in_an_event_loop())

    return agentrl.load_run(made_once(tmp_path_factory, "api-runs", make) / "first")


def test_metrics_are_a_frame_of_steps(run: Run) -> None:
    assert list(run.metrics.index) == [1, 2]
    assert run.metrics["reward/mean"].tolist() == [0.75, 0.75]
    assert run.evaluations.empty  # none were asked for
    assert run.summary["steps"] == 2
    assert run.settings["training"]["steps"] == 2  # type: ignore[index]
    assert repr(run) == f"<Run {run.path}: finished, reward/mean 0.75 at step 2>"
    assert repr(Run(run.path / "none")) == f"<Run {run.path / 'none'}: no run directory>"


def test_trajectories_come_one_by_one(run: Run) -> None:
    found = list(run.trajectories())
    assert {one.step for one in found} == {1, 2}
    assert len(list(run.trajectories(2))) == 4
    assert {one.problem.statement for one in found} <= {row["problem"] for row in ROWS}
    assert {one.reward for one in found} == {0.75}
    with pytest.raises(SettingsError, match="no trajectories of step 9; stored: steps 1 to 2"):
        next(run.trajectories(9))


def test_a_run_is_evaluated(run: Run, tmp_path: Path) -> None:
    evaluation = agentrl.evaluate(run, problems=ROWS[:3], n=2, output=tmp_path / "scores", progress=False)
    assert evaluation.scores.loc["problems", "rollouts"] == 6
    assert len(list(evaluation.transcripts())) == 6
    assert evaluation.results["benchmarks"]["problems"]["avg"]["problems"] == 3


def test_settings_are_checked_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"unknown key training\.stepz \(value 1\); nearest"):
        agentrl.train(problems=ROWS, runs_dir=tmp_path, training={"stepz": 1})
    assert not list(tmp_path.glob("*/config.yaml"))


def test_a_failed_command_raises_with_its_message(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match=r"the run directory .*first is not empty"):
        agentrl.train(problems=ROWS, name="first", runs_dir=run.path.parent, **SMALL)
    assert "error:" not in capsys.readouterr().out


def test_an_interrupt_saves_and_resume_continues(run: Run, tmp_path: Path) -> None:
    many = SMALL | {"training": {"steps": 500, "threads": 1}}
    main = threading.main_thread().ident
    assert main is not None

    def interrupt_after_a_step() -> None:
        metrics = tmp_path / "long" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=interrupt_after_a_step, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        agentrl.train(problems=ROWS, name="long", runs_dir=tmp_path, **many)
    stopped = agentrl.load_run(tmp_path / "long")
    done = int(stopped.metrics.index[-1])
    assert 1 <= done < 500
    resumed = agentrl.train(name="long", runs_dir=tmp_path, resume=True, training={"steps": done + 1})
    assert resumed.metrics.index[-1] == done + 1


def test_a_missing_model_is_an_error_of_the_command(tmp_path: Path) -> None:
    with pytest.raises((SettingsError, WorldError), match="no-such-model"):
        agentrl.evaluate(tmp_path / "no-such-model", problems=ROWS[:1], n=1, output=tmp_path / "scores")
