from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.errors import SettingsError, WorldError
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import (
    TokenFile,
    TokenMetadata,
    TrajectoryTokens,
    compute_cumulative_realized_energies,
    read_step,
    write_tokens,
)

FACTS: dict[str, Any] = {
    "step": 3,
    "version": 2,
    "estimator": "rloo",
    "estimator_options": {"normalize": None},
    "loss": "ppo",
    "aggregation": "token_mean",
}


def facts(rank: int = 0, ranks: int = 1) -> TokenMetadata:
    return TokenMetadata(rank=rank, ranks=ranks, **FACTS)


def row(group: int, sample: int = 0, *, energies: tuple[float, ...] = (0.5, 0.25), **changed: Any) -> TrajectoryTokens:
    count = len(energies)
    ramp = np.arange(count, dtype=np.float32)
    given: dict[str, Any] = {
        "group": group,
        "sample": sample,
        "branch": 0,
        "parent": -1,
        "fork": 0,
        "share": 1.0,
        "update": 0,
        "loss_weight": 1 / 3,
        "log_probs": -ramp / 3,
        "entropy": ramp.astype(np.float16),
        "energy": np.array(energies, dtype=np.float32),
        "rewards": ramp,
        "returns": ramp + 1,
        "baselines": ramp * 0.5,
        "advantages": ramp * 0.5 + 1,
        "loss_mask": np.ones(count, dtype=bool),
    }
    return TrajectoryTokens(**(given | changed))


def record(group: int, sample: int = 0) -> dict[str, Any]:
    """Build a record with an observation of one token between two model tokens."""
    model = {"origin": "model", "text": "a", "reward": 0.0}
    return {
        "group": group,
        "sample": sample,
        "branch": 0,
        "segments": [
            model | {"token_ids": [5], "log_probs": [-0.1], "version_spans": [[2, 1]]},
            {"origin": "observation", "token_ids": [6], "log_probs": [], "version_spans": [], "text": "b", "reward": 0},
            model | {"token_ids": [7], "log_probs": [-0.2], "version_spans": [[2, 1]]},
        ],
    }


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory.create(tmp_path / "x", "name: x\n")
    made.tokens.mkdir()
    made.write_trajectories(3, [record(4), record(9), record(9, 1)])
    return made


def test_rows_come_back_to_the_last_digit(tmp_path: Path) -> None:
    rows = [
        row(1, weights=np.array([0.1, 1.3], dtype=np.float32), trajectory_energy=0.1),
        row(2, energies=(0.1,) * 5, update=1, update_log_probs=np.full(5, -0.7, dtype=np.float32)),
        row(3, log_probs=np.array([-1e-9, -2e-300])),  # float64 stays float64
    ]
    write_tokens(tmp_path / "t", facts(), rows)
    file = TokenFile(tmp_path / "t")
    assert file.facts == facts()
    for one, other in zip(rows, file.rows(), strict=True):
        for name, value in vars(one).items():
            np.testing.assert_array_equal(getattr(other, name), value)
    assert rows[1].update_probability_ratios == pytest.approx(np.exp(-0.7 + np.arange(5) / 3))


def test_a_rank_without_rows_writes_a_file_without_rows(tmp_path: Path) -> None:
    write_tokens(tmp_path / "t", facts(), [])
    assert list(TokenFile(tmp_path / "t").rows()) == []


def test_only_the_blocks_that_are_asked_for_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.telemetry.tokens._MIN_BLOCK_TOKENS", 4)
    write_tokens(tmp_path / "t", facts(), [row(group) for group in range(5)])
    file = TokenFile(tmp_path / "t")
    assert [found.group for found in file.rows()] == [0, 1, 2, 3, 4]
    assert [found.group for found in file.rows({3})] == [3]


def test_a_step_joins_trajectories_with_the_statistics_of_all_ranks(run: RunDirectory) -> None:
    write_tokens(run.token_statistics_file(3, 0), facts(0, 2), [row(9, 1)])
    write_tokens(run.token_statistics_file(3, 1), facts(1, 2), [row(9)])
    step = read_step(run, 3)
    untrained, first, second = step.trajectories
    assert untrained.tokens is None
    assert not step.warnings
    assert first.model_token_positions.tolist() == [0, 2]
    assert first.columns()["engine_log_probs"].tolist() == [-0.1, -0.2]
    assert first.columns()["turn"].tolist() == [0, 1]
    assert second.columns()["advantages"].tolist() == [1.0, 1.5]
    assert [item.number for item in step.trained_group(first)] == [2, 1]  # as trained
    assert step.realized_energies[first.key].tolist() == [0.5, 0.75]
    assert len(read_step(run, 3, groups={4}).trajectories) == 1


def test_torn_and_missing_files_are_named_and_the_rest_is_read(run: RunDirectory) -> None:
    write_tokens(run.token_statistics_file(3, 0), facts(0, 3), [row(9)])
    write_tokens(run.token_statistics_file(3, 1), facts(1, 3), [row(9, 1)])
    torn = run.token_statistics_file(3, 1)
    torn.write_bytes(torn.read_bytes()[:-20])
    step = read_step(run, 3)
    assert [item.tokens is None for item in step.trajectories] == [True, False, True]
    assert len(step.warnings) == 2
    assert f"cannot read the token statistics {torn}" in step.warnings[0]
    assert step.warnings[1] == "the token statistics of 1 of 3 ranks at step 3 are missing"
    with pytest.raises(WorldError, match="cannot read the token statistics"):
        TokenFile(torn)


def test_a_step_without_statistics_and_one_that_is_not_stored(run: RunDirectory) -> None:
    assert read_step(run, 3).facts is None
    with pytest.raises(SettingsError, match="no trajectories of step 7; stored steps: 3 to 3"):
        read_step(run, 7)


def test_a_file_of_a_newer_version_is_refused(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    write_tokens(run.token_statistics_file(3, 0), facts(), [row(9)])
    table = pq.read_table(run.token_statistics_file(3, 0))
    newer = json.loads(table.schema.metadata[b"agentrl"]) | {"format": 2}
    pq.write_table(table.replace_schema_metadata({b"agentrl": json.dumps(newer)}), run.token_statistics_file(3, 0))
    with pytest.raises(SettingsError, match="has format 2, but this version of agentrl reads format 1"):
        read_step(run, 3)


def test_a_resumed_run_drops_what_came_after_its_checkpoint(run: RunDirectory) -> None:
    for step in (2, 3):
        write_tokens(run.token_statistics_file(step, 0), facts(), [row(9)])
    run.truncate_after(2, rows=0)
    assert run.token_statistics_files(2)
    assert not run.token_statistics_files(3)


def test_realized_energies_follow_a_conversation_over_its_branches() -> None:
    root = row(1, energies=(1.0, 2.0, 4.0), loss_mask=np.array([True, False, True]))
    fork = row(1, branch=1, parent=0, fork=1, energies=(8.0, 16.0), weights=np.array([1.0, 0.5], dtype=np.float32))
    energies = compute_cumulative_realized_energies([fork, root])
    assert energies[root.key].tolist() == [1.0, 1.0, 5.0]
    assert energies[fork.key].tolist() == [9.0, 13.0]


def test_the_power_of_a_token_is_that_of_its_factor_in_the_loss() -> None:
    one = row(1, weights=np.array([2.0, 3.0], dtype=np.float32), loss_mask=np.array([True, False]))
    assert one.gradient_power.tolist() == pytest.approx([0.5 * (1 / 3 * 1 * 2) ** 2, 0.0])
