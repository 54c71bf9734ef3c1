"""A recorded step: its trajectories, each joined with its token statistics. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from agentrl.errors import WorldError
from agentrl.telemetry.files import contained, wrong_shape
from agentrl.telemetry.records import JsonRecord
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens.token_file import TokenFacts, TokenFile
from agentrl.telemetry.tokens.trajectory_tokens import RowKey, TrajectoryTokens, realized_energies

TokenColumns = dict[str, np.ndarray]
"""Values of the model tokens of one or more trajectories, by column."""


@dataclass(frozen=True, kw_only=True)
class StoredTrajectory:
    """A trajectory of a step. ``tokens`` is None if the step did not train on it or its statistics are not stored."""

    number: int  # index in the step's file
    record: JsonRecord  # as returned by Trajectory.to_record()
    tokens: TrajectoryTokens | None

    @property
    def key(self) -> RowKey:
        return key_of(self.record)

    @cached_property
    def positions(self) -> np.ndarray:
        """Positions [K] of the model tokens in the response."""
        return np.flatnonzero(self.model_mask)

    @cached_property
    def model_mask(self) -> np.ndarray:
        """Mask [T] of the response tokens that the model sampled."""
        segments = self.record["segments"]
        lengths = [len(segment["token_ids"]) for segment in segments]
        return np.repeat([segment["origin"] == "model" for segment in segments], lengths)

    def columns(self) -> TokenColumns:
        """Return one value per model token: what the engine sampled and, with :attr:`tokens`, values of training.

        Columns: ``position`` in the response, ``index`` among the model tokens, ``turn``, ``token_id``,
        ``engine_log_probs``, ``policy_version``, and the fields of :class:`TrajectoryTokens`.
        ``policy_version``; then the fields of :class:`TrajectoryTokens`, by their names.
        """
        segments = [item for item in self.record["segments"] if item["origin"] == "model"]
        lengths = [len(item["token_ids"]) for item in segments]
        spans = [span for item in segments for span in item["version_spans"]]
        columns: TokenColumns = {
            "position": self.positions,
            "index": np.arange(len(self.positions)),
            "turn": np.repeat(np.arange(len(segments)), lengths),
            "token_id": np.array([token for item in segments for token in item["token_ids"]], dtype=np.int64),
            "engine_log_probs": np.array([value for item in segments for value in item["log_probs"]], dtype=np.float64),
            "policy_version": np.repeat([version for version, _ in spans], [count for _, count in spans]),
        }
        if self.tokens is not None:
            columns |= self.tokens.columns()
        return columns


@dataclass(frozen=True, kw_only=True)
class StoredStep:
    """The trajectories of a step in the order of their file. ``facts`` is None without token statistics.

    ``rows`` are the statistics of all trajectories that the step trained on, in the order of training. ``problems`` are
    messages about files of token statistics that could not be read; their trajectories have no statistics.
    """

    step: int
    trajectories: tuple[StoredTrajectory, ...]
    facts: TokenFacts | None
    rows: dict[RowKey, TrajectoryTokens]
    problems: tuple[str, ...] = ()

    def siblings(self, trajectory: StoredTrajectory) -> list[StoredTrajectory]:
        """Return the group's trajectories that the step trained on, including this one, in the order of training."""
        by_key = {item.key: item for item in self.trajectories}
        return [by_key[key] for key in self.rows if key.group == trajectory.key.group and key in by_key]

    @cached_property
    def realized_energies(self) -> dict[RowKey, np.ndarray]:
        """Realized energies W_k [K] float64 of every trajectory that the step trained on."""
        return dict(realized_energies(self.rows.values()))

    @cached_property
    def gradient_power(self) -> float:
        """Sum of :attr:`TrajectoryTokens.gradient_power` over the step's tokens."""
        return float(sum(row.gradient_power.sum() for row in self.rows.values()))


def read_step(run: RunDirectory, step: int, *, groups: Collection[int] | None = None) -> StoredStep:
    """Read a step from its files, or only the trajectories of ``groups``.

    Damaged and missing files of token statistics are listed in ``problems``. Raises SettingsError if the trajectories
    of the step are not stored or a newer version wrote them, WorldError if they cannot be read.
    """
    run.check_stored(step)
    facts, rows, problems = _tokens(run, step, groups)
    marks = None if groups is None else [b'"group":%d,' % group for group in groups]

    def may_belong(_number: int, line: bytes) -> bool:
        return marks is None or any(mark in line for mark in marks)

    trajectories = []
    for number, record in run.chosen_trajectories(step, may_belong):
        with wrong_shape(f"{run.trajectory_file(step)}, line {number + 1}"):
            if groups is None or record["group"] in groups:
                trajectories.append(StoredTrajectory(number=number, record=record, tokens=rows.get(key_of(record))))
    return StoredStep(step=step, trajectories=tuple(trajectories), facts=facts, rows=rows, problems=tuple(problems))


def key_of(record: JsonRecord) -> RowKey:
    """Return the key of a trajectory's record. A greedy rollout has a key that no trained trajectory has."""
    return RowKey(record["group"], record["sample"], record.get("branch", 0))


def _tokens(
    run: RunDirectory, step: int, groups: Collection[int] | None
) -> tuple[TokenFacts | None, dict[RowKey, TrajectoryTokens], list[str]]:
    """Facts, rows and problems of the files of all ranks. Ranks of a sequence-parallel group store the same rows."""
    facts: TokenFacts | None = None
    rows: dict[RowKey, TrajectoryTokens] = {}
    problems = []
    for path in run.token_files(step):
        try:
            file = TokenFile(contained(path, run.path))
            wanted = None if groups is None else {key for key in file.stored_keys() if key.group in groups}
            file_rows = list(file.rows(wanted))
        except WorldError as error:
            problems.append(str(error))
            continue
        facts = file.facts
        rows |= {row.key: row for row in file_rows}
    missing = 0 if facts is None else facts.ranks - len(run.token_files(step))
    if facts is not None and missing:
        problems.append(f"the token statistics of {missing} of {facts.ranks} ranks at step {step} are missing")
    return facts, rows, problems
