"""Training on vLLM servers that the run starts itself: one of two and the only one are killed, and weights change."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from shared import command_of
from warm import LIBRARIES

from agentrl.models.loading import build_tiny_model, train_tokenizer, write_model
from agentrl.models.settings import TinyModelSettings
from agentrl.telemetry.run_directory import RunDirectory

from .conftest import DEADLINE, CommandLine, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here"), pytest.mark.xdist_group("vllm")]

STEPS = 3
SERVED = ["rollout.engine=vllm", "rollout.vllm.replicas=2", f"training.steps={STEPS}", "rollout.concurrency=3"]


def write_served_policy(folder: Path) -> Path:
    """An untrained policy with heads of 32, which vLLM serves."""
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=64, layers=2, heads=2, intermediate_size=48)
    tokenizer = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
    model = build_tiny_model(settings, tokenizer, seed=5)
    write_model(folder, model=model, tokenizer=tokenizer, title="random", body="Untrained.")
    return folder


@pytest.fixture(autouse=True)
def warm_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs start their servers from processes that have loaded vLLM."""
    monkeypatch.setenv(LIBRARIES, "vllm")


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_served_policy(tmp_path / "policy")


def servers(pid: int) -> list[psutil.Process]:
    """The processes under ``pid`` that answer for vLLM; those that compute are their children."""
    below = psutil.Process(pid).children(recursive=True)
    return [one for one in below if command_of(one)[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]]


def test_a_run_loses_no_trajectory_with_one_of_two_servers(command_line: CommandLine, policy: Path) -> None:
    forks = ["rollout.branching.width=2", "rollout.concurrency=6"]
    arguments = command_line.counting(policy, "name=two", "environment.kwargs.seconds=0.2", *SERVED, *forks)
    process = command_line.start(*arguments)
    # 2 steps of the environment a trajectory: the evaluation's 2 trajectories and some of step 1 are over.
    wait_until(lambda: command_line.tallied() >= 2 * 2 + 7, process)
    both = servers(process.pid)
    assert len(both) == 2
    family = [one for server in both for one in (server, *server.children(recursive=True))]
    both[0].send_signal(signal.SIGKILL)
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, said

    assert "is removed from rotation" in said
    assert "exited; restarting it" in said
    rows = [row for row in command_line.metrics("two") if "policy/updates" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["policy/updates"] for row in rows] == [1] * STEPS
    assert [row["groups/infrastructure_failures"] for row in rows] == [0] * STEPS
    assert [row["rollout/forked"] for row in rows] == [12] * STEPS
    assert [row["reward/count"] for row in rows] == [24] * STEPS
    # What was sampled in step n was sampled with the weights of n - 1 updates, and those were the trained ones.
    assert max(row["policy/engine_abs_diff"] for row in rows) < 1e-5
    run = command_line.folder / "runs" / "two"
    for step in range(1, STEPS + 1):
        versions = {
            version
            for record in RunDirectory(run).read_trajectories(step)
            for segment in record["segments"]
            for version, _ in segment["version_spans"]
        }
        assert versions == {step - 1}
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
    assert not (run / ".weights").exists()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_weights_change_under_running_requests_though_the_only_server_is_lost(
    command_line: CommandLine, policy: Path
) -> None:
    ahead = ["rollout.schedule=asynchronous", "rollout.max_staleness=2", "correction.weights=token"]
    own = ["rollout.engine=vllm", "rollout.concurrency=3", "training.steps=6", "telemetry.trajectories_every=1"]
    arguments = command_line.counting(policy, "name=ahead", "environment.kwargs.seconds=0.1", *ahead, *own)
    process = command_line.start(*arguments)
    wait_until(lambda: command_line.steps("ahead") != [], process)
    (server,) = servers(process.pid)
    server.kill()  # during step 2
    said = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, said
    assert re.search(r"the vLLM server \S+ exited; restarting it(?s:.*)the vLLM server \S+ is available again", said), (
        said
    )
    rows = [row for row in command_line.metrics("ahead") if "policy/updates" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["policy/updates"] for row in rows] == [1] * 6
    assert [row["groups/infrastructure_failures"] for row in rows] == [0] * 6
    assert 1 <= max(row["staleness/max"] for row in rows) <= 2
    assert max(row["staleness/mixed_share"] for row in rows) > 0
    assert max(row.get("policy/engine_abs_diff", 0.0) for row in rows) < 1e-5
    run = RunDirectory(command_line.folder / "runs" / "ahead")
    trained = [record["group"] for step in range(1, 7) for record in run.read_trajectories(step)]
    assert sorted(trained) == [group for group in range(18) for _ in range(4)]
