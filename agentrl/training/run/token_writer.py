"""Writes the token statistics of the steps that the settings name, beside training."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agentrl.telemetry.files import BackgroundWriter, world_errors
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.tokens.token_file import TokenFacts, write_tokens
from agentrl.telemetry.tokens.trajectory_tokens import TrajectoryTokens
from agentrl.training.engine.groups import RankGroups
from agentrl.training.step.batching import RankPlan, due
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_options, loss_options, needs
from agentrl.training.step.token_recorder import TokenRecorder


class TokenWriter:
    """One rank's writer; at most one file is being written. A failure is a WorldError of the next call."""

    def __init__(
        self, folder: Path, telemetry: TelemetrySettings, objective: ObjectiveSettings, groups: RankGroups
    ) -> None:
        """Of the ranks that share rows the first one writes them."""
        self._run = RunDirectory(folder)
        self._telemetry = telemetry
        self._objective = objective
        self._groups = groups
        self._hidden_norms = "hidden_norm_squared" in needs(objective).inputs
        self._writer = BackgroundWriter("tokens")

    def recorder(self, step: int) -> TokenRecorder | None:
        """What collects the rows of ``step``; None if they are not recorded."""
        every = (self._telemetry.tokens_every, self._telemetry.trajectories_every)
        if not self._groups.first or not all(due(step, each) for each in every):
            return None
        return TokenRecorder(hidden_norms=self._hidden_norms)

    def write(self, plan: RankPlan, recorder: TokenRecorder | None) -> None:
        """Begin to write the rows of a finished step."""
        self._writer.settle()
        if recorder is not None and plan.updates:
            facts = token_facts(self._objective, plan, self._groups)
            self._writer.submit(partial(self._write, facts, recorder.rows))

    def settle(self) -> None:
        """Return when every file is written."""
        self._writer.settle()

    def close(self) -> None:
        """End the thread; a file that is being written will be complete."""
        self._writer.close()

    def _write(self, facts: TokenFacts, rows: list[TrajectoryTokens]) -> None:
        path = self._run.token_file(facts.step, facts.rank)
        with world_errors(path.parent, "make"):
            path.parent.mkdir(exist_ok=True)
        write_tokens(path, facts, rows)


def token_facts(objective: ObjectiveSettings, plan: RankPlan, groups: RankGroups) -> TokenFacts:
    """What all rows of one rank's file have in common."""
    algorithm = objective.algorithm
    return TokenFacts(
        step=plan.step,
        version=plan.version,
        rank=groups.replica,
        ranks=groups.replicas,
        estimator=algorithm.estimator,
        estimator_options=estimator_options(objective),
        loss=algorithm.loss,
        loss_options=loss_options(objective),
        aggregation=objective.aggregation,
    )
