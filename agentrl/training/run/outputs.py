"""Files that a run writes in addition to its metrics: token statistics, best and final policy, and summary."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import agentrl
from agentrl.evaluation.during_training import EvaluationReport
from agentrl.models.loading import write_model
from agentrl.models.lora import write_adapter
from agentrl.telemetry.alerts import held_out_change, policy_is_worse, remove_repeated_alerts, reward_change
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import BackgroundWriter, os_errors_as_world_errors
from agentrl.telemetry.plots import draw_plots
from agentrl.telemetry.records import BestRecord, EvaluationRecord
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.tokens import TokenMetadata, TrajectoryTokens, write_tokens
from agentrl.training.engine.checkpoint import newest_checkpoint_step
from agentrl.training.engine.groups import RankGroups
from agentrl.training.step.batching import RankPlan, is_due
from agentrl.training.step.diagnostics import TokenStatisticsRecorder
from agentrl.training.step.objective_settings import (
    ObjectiveSettings,
    estimator_options,
    estimator_requirements,
    loss_options,
)

if TYPE_CHECKING:
    from agentrl.config import Settings


_RECORD = "best.json"


def best_evaluation(evaluations: Sequence[EvaluationRecord]) -> EvaluationRecord | None:
    """Return the evaluation with the highest avg@k (the earliest on a tie). Falsified evaluations are ignored.

    >>> one, two = {"step": 0, "mean": 0.5, "falsified": False}, {"step": 9, "mean": 0.5, "falsified": False}
    >>> best_evaluation([one, two, {"step": 9, "mean": 0.9, "falsified": True}])["step"]
    0
    """
    held_out = [item for item in evaluations if not item["falsified"]]
    return max(held_out, key=lambda item: item["mean"], default=None)


class BestPolicyExport:
    """The export of the best policy in a run directory. Used on rank 0 only."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._checkpoints = run / "checkpoints"
        self.path = self._checkpoints / "best"

    def write_pending_export(self, evaluation: EvaluationRecord, export: Callable[[Path], None]) -> None:
        """Export the policy of ``evaluation``, for :meth:`keep_only` to publish. Raises WorldError if writing fails."""
        pending = self._pending(evaluation["step"])
        partial = self._checkpoints / f"{pending.name}.partial"
        with os_errors_as_world_errors(partial, "write the best policy to"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            export(partial)
            (partial / _RECORD).write_text(json.dumps(evaluation, indent=1) + "\n")
            shutil.rmtree(pending, ignore_errors=True)
            partial.rename(pending)

    def keep_only(self, best: EvaluationRecord | None) -> None:
        """Keep the export of ``best``, the best saved evaluation, and remove all other exports."""
        with os_errors_as_world_errors(self.path, "move the best policy to"):
            if best is not None and self._pending(best["step"]).is_dir():
                shutil.rmtree(self.path, ignore_errors=True)
                self._pending(best["step"]).rename(self.path)
            elif self.path.exists() and not self.contains(best):
                shutil.rmtree(self.path)
            for other in self._checkpoints.glob(".best-*"):
                shutil.rmtree(other)

    def contains(self, best: EvaluationRecord | None) -> bool:
        """Return True if the current export belongs to ``best``."""
        record = self.path / _RECORD
        return best is not None and record.is_file() and bool(json.loads(record.read_text())["step"] == best["step"])

    def best_record(self, evaluations: Sequence[EvaluationRecord]) -> BestRecord | None:
        """Return the best evaluation, with the path of its policy in the run directory; None without evaluations."""
        best = best_evaluation(evaluations)
        if best is None:
            return None
        return {**best, "policy": self.path.relative_to(self._run).as_posix() if self.contains(best) else None}

    def describe_best_record(self, record: BestRecord) -> str:
        """Format a result of :meth:`best_record` as a line for the console."""
        score = f"best evaluation: step {record['step']}, avg@{record['k']} {record['mean']:.3f}"
        if record["policy"] is None:
            return f"{score}; its policy was not kept (checkpoint.best)"
        return f"{score}; to evaluate its policy: agentrl eval --model {self.path}"

    def _pending(self, step: int) -> Path:
        return self._checkpoints / f".best-{step:06d}"


ADAPTER = "adapter"
"""Subdirectory of an exported policy that contains only its adapters."""


def resume_command(settings: Settings) -> str:
    """Return the command that continues a run."""
    return shlex.join(["agentrl", "train", "--resume", f"name={settings.name}", f"runs_dir={settings.runs_dir}"])


def describe_progress(settings: Settings) -> str:
    """Describe the steps that a run completed and saved, with the command that continues it."""
    run = RunDirectory(settings.run_path)
    if not run.config.is_file():
        return "no step was completed, and no file was written"
    trained = max((int(row["step"]) for row in run.metrics() if "policy/updates" in row), default=0)
    saved = newest_checkpoint_step(run.checkpoints)
    if not trained:
        done = "no step was completed"
    else:
        done = f"{trained} step{' was' if trained == 1 else 's were'} completed, "
        if saved >= trained:
            done += "all saved in a checkpoint"
        else:
            done += f"the newest checkpoint is from step {saved}" if saved else "none saved in a checkpoint"
    return f"{done}. To continue: {resume_command(settings)}"


def evaluation_record(report: EvaluationReport) -> EvaluationRecord:
    """Convert an evaluation to the record in checkpoints and ``summary.json``."""
    score = report.overall
    return {
        "step": report.step,
        "falsified": report.falsified,
        "k": report.samples,
        "mean": score.mean,
        "this_benchmark": {"low": score.this_benchmark.low, "high": score.this_benchmark.high},
        "problems_like_these": {"low": score.problems_like_these.low, "high": score.problems_like_these.high},
        "problems": score.problems,
        "samples": score.samples,
        "problems_without_samples": score.problems_without_samples,
    }


@dataclass(frozen=True, kw_only=True)
class PolicyExport:
    """A policy to export: ``state`` holds all parameters of ``model`` after ``steps`` steps.

    ``adapter`` holds the parameters of the policy's adapters on the model ``base``, if there are any. In ``state``,
    adapters are merged.
    """

    settings: Settings
    model: Any
    tokenizer: Any
    state: dict[str, Tensor]
    adapter: dict[str, Tensor]
    base: str
    steps: int

    def write(self, folder: Path, remark: str) -> None:
        """Write the policy in the `transformers` format. The model card ends with ``remark``.

        Adapters are also written separately to ``adapter/``, in the format of PEFT.
        """
        settings = self.settings
        write_model(
            folder,
            model=self.model,
            tokenizer=self.tokenizer,
            state=self.state,
            title=str(settings.name),
            body=f"Trained by agentrl {agentrl.__version__} for {self.steps} steps with {settings.algorithm.estimator} "
            f"on `{settings.env}`. {remark}",
        )
        if self.adapter:
            write_adapter(folder / ADAPTER, self.adapter, settings.model.lora, base=self.base)


def write_final_outputs(
    run: RunDirectory,
    settings: Settings,
    console: Console,
    *,
    export: PolicyExport,
    updates: int,
    evaluations: list[EvaluationRecord],
    best: BestPolicyExport,
) -> None:
    """Write the output of a run and print its scores."""
    export.write(run.path / "policy", f"Held-out scores and settings are in {run.path.name}/summary.json.")
    rows = list(run.metrics())
    if settings.telemetry.plots:
        size = f"{settings.rollout.problems_per_step} problems x {settings.rollout.group_size} rollouts a step"
        draw_plots(rows, run.plots, f"{run.path.name}, seed {settings.seed}: {size}")
    chosen = best.best_record(evaluations)
    reward, held_out = reward_change(rows), held_out_change(rows)
    run.write_summary(
        {
            "agentrl": agentrl.__version__,
            "steps": export.steps,
            "updates": updates,
            "seed": settings.seed,
            "train_seconds": sum(row.get("time/step_s", 0.0) for row in rows),
            "evaluations": [row for row in rows if "eval/avg_at_k" in row or "eval_falsified/avg_at_k" in row],
            "scores": evaluations,
            "best": chosen,
            "worse_than_start": policy_is_worse(reward, held_out),
            "reward_change": reward,
            "held_out_change": held_out,
            "alerts": [asdict(alert) for alert in remove_repeated_alerts(run.alerts())],
        }
    )
    _print_scores(console, evaluations)
    change, score = (reward, "reward") if held_out is None else (held_out, "held-out score")
    if change is not None and policy_is_worse(reward, held_out):
        console.warning(
            f"the policy is worse than at the start: its {score} fell from {change['start']:.3f} to {change['end']:.3f}"
        )
    reprint_alerts(run, console)
    if chosen is not None:
        console.note(best.describe_best_record(chosen))
    plots = "plots/overview.png, " if settings.telemetry.plots else ""
    console.note(
        f"output is in {run.path}: policy/ (transformers format), {plots}metrics.jsonl, trajectories/, tokens/, "
        "checkpoints/, summary.json, config.yaml"
    )
    console.note(f"to view curves, trajectories and tokens in the browser: agentrl view {shlex.quote(str(run.path))}")


def reprint_alerts(run: RunDirectory, console: Console) -> None:
    """Print the run's alerts again at its end, causes first. Early alerts have scrolled off the terminal by then."""
    for alert in remove_repeated_alerts(run.alerts()):
        console.warning(str(alert))


def _print_scores(console: Console, evaluations: list[EvaluationRecord]) -> None:
    if not evaluations:
        return
    rows = [
        [
            f"step {item['step']}" + (", observations falsified (reveal families)" if item["falsified"] else ""),
            f"avg@{item['k']}",
            f"{item['mean']:.3f}",
            f"{item['this_benchmark']['low']:.3f} to {item['this_benchmark']['high']:.3f}",
            str(item["problems"]),
        ]
        for item in evaluations
    ]
    console.table("Held-out problems", ["", "score", "mean", "95 % interval", "problems"], rows)


class TokenStatisticsWriter:
    """Writes one rank's token statistics in the background, one file at a time.

    If a write fails, the next call raises WorldError.
    """

    def __init__(
        self, folder: Path, telemetry: TelemetrySettings, objective: ObjectiveSettings, groups: RankGroups
    ) -> None:
        """Create a writer. Only the first rank of a sequence-parallel group writes files."""
        self._run = RunDirectory(folder)
        self._telemetry = telemetry
        self._objective = objective
        self._groups = groups
        self._hidden_norms = "hidden_norm_squared" in estimator_requirements(objective).inputs
        self._writer = BackgroundWriter("tokens")

    def create_recorder(self, step: int) -> TokenStatisticsRecorder | None:
        """Return a recorder for the rows of ``step``, or None if they are not recorded."""
        every = (self._telemetry.tokens_every, self._telemetry.trajectories_every)
        if not self._groups.is_first_in_group or not all(is_due(step, each) for each in every):
            return None
        return TokenStatisticsRecorder(hidden_norms=self._hidden_norms)

    def start_writing(self, plan: RankPlan, recorder: TokenStatisticsRecorder | None) -> None:
        """Start writing the rows of a finished step."""
        self._writer.wait()
        if recorder is not None and plan.updates:
            facts = token_file_metadata(self._objective, plan, self._groups)
            self._writer.submit(partial(self._write, facts, recorder.rows))

    def wait_until_written(self) -> None:
        """Wait until every file is written."""
        self._writer.wait()

    def close(self) -> None:
        """Stop the thread after it has completed the current file."""
        self._writer.close()

    def _write(self, facts: TokenMetadata, rows: list[TrajectoryTokens]) -> None:
        path = self._run.token_statistics_file(facts.step, facts.rank)
        with os_errors_as_world_errors(path.parent, "create"):
            path.parent.mkdir(exist_ok=True)
        write_tokens(path, facts, rows)


def token_file_metadata(objective: ObjectiveSettings, plan: RankPlan, groups: RankGroups) -> TokenMetadata:
    """Return the metadata shared by all rows of one rank's file."""
    algorithm = objective.algorithm
    return TokenMetadata(
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
