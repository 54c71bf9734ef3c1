"""An engine in a package outside agentrl: found by its entry point, it trains, and every transfer to it is verified."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from agentrl.telemetry.run_directory import RunDirectory

from .conftest import CommandLine

TOY = Path(__file__).parents[1] / "rollout" / "toy_engine"
STEPS = 2


def install_toy_engine(site: Path) -> None:
    """What pip makes of the package and its entry point."""
    shutil.copytree(TOY, site / "toy_engine")
    about = site / "toy_engine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[agentrl.engines]\ntoy = toy_engine:ToyPlugin\n")


@pytest.mark.slow
def test_a_policy_trains_on_an_engine_of_another_package(command_line: CommandLine, random_policy: Path) -> None:
    assert sum(len(file.read_text().splitlines()) for file in TOY.glob("*.py")) <= 150  # as docs/how-to/engines.md says
    install_toy_engine(command_line.folder / "site")
    path = os.pathsep.join([str(command_line.folder / "site"), command_line.environment()["PYTHONPATH"]])
    said = command_line.run(
        *command_line.counting(
            random_policy, "name=toy", "rollout.engine=toy", "evaluation.top_p=1", f"training.steps={STEPS}"
        ),
        environment={"PYTHONPATH": path},
    )

    ((compared, parameters),) = re.findall(
        r"the toy server \S+: every transfer is verified by checksums of (\d+) of (\d+) parameters", said
    )
    assert compared == parameters > "0"
    rows = [row for row in command_line.metrics("toy") if "policy/updates" in row]
    assert [row["policy/updates"] for row in rows] == [1] * STEPS
    assert [row["groups/infrastructure_failures"] for row in rows] == [0] * STEPS
    # The server samples from the trained weights of the step before, and its log-probabilities are the trainer's.
    assert max(row["policy/engine_abs_diff"] for row in rows) < 1e-5
    for step in range(1, STEPS + 1):
        records = RunDirectory(command_line.folder / "runs" / "toy").read_trajectories(step)
        segments = [segment for record in records for segment in record["segments"]]
        assert {version for segment in segments for version, _ in segment["version_spans"]} == {step - 1}
