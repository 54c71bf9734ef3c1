"""Output at the end of a run: its progress if it ended early, otherwise the exported policy, plots, summary, scores."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

import agentrl
from agentrl.evaluation.play.during_training import EvaluationReport
from agentrl.models.loading import write_model
from agentrl.models.lora import write_adapter
from agentrl.telemetry.alerts import explained, held_out_change, is_worse, reward_change
from agentrl.telemetry.console import Console
from agentrl.telemetry.plots import draw_plots
from agentrl.telemetry.records import EvaluationRecord
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.engine.checkpoint import newest_step
from agentrl.training.run.best import BestPolicy

if TYPE_CHECKING:
    from agentrl.config import Settings

ADAPTER = "adapter"
"""The folder of an exported policy with its adapters alone."""


def resume_command(settings: Settings) -> str:
    """Return the command that continues a run."""
    places = [f"name={settings.name}", f"runs_dir={settings.runs_dir}"]
    return shlex.join(["agentrl", "train", "--resume", *places])


def progress_of(settings: Settings) -> str:
    """Return a sentence on the steps that a run trained and saved, with the command that continues it."""
    run = RunDirectory(settings.run_path)
    if not run.config.is_file():
        return "no step is trained, and nothing was written"
    trained = max((int(row["step"]) for row in run.metrics() if "policy/updates" in row), default=0)
    saved = newest_step(run.checkpoints)
    if not trained:
        done = "no step is trained"
    else:
        done = f"{trained} step{' is' if trained == 1 else 's are'} trained, "
        if saved >= trained:
            done += "and saved in a checkpoint"
        else:
            done += f"the newest checkpoint is of step {saved}" if saved else "none is saved in a checkpoint"
    return f"{done}. To continue: {resume_command(settings)}"


def evaluation_record(report: EvaluationReport) -> EvaluationRecord:
    """An evaluation as stored in checkpoints and ``summary.json``."""
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
class Export:
    """A policy to write: ``state`` holds all parameters of ``model`` after ``steps`` steps.

    ``adapter`` holds those of its adapters, if it has any, on the model ``base``; in ``state`` they are merged.
    """

    settings: Settings
    model: Any
    tokenizer: Any
    state: dict[str, Tensor]
    adapter: dict[str, Tensor]
    base: str
    steps: int

    def write(self, folder: Path, remark: str) -> None:
        """Write the policy in the `transformers` format; ``remark`` ends the model card.

        An adapter is also written on its own, to ``adapter/`` in the format of peft.
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


def finish_run(
    run: RunDirectory,
    settings: Settings,
    console: Console,
    *,
    export: Export,
    updates: int,
    evaluations: list[EvaluationRecord],
    best: BestPolicy,
) -> None:
    """Write the output of a run and show its scores."""
    export.write(run.path / "policy", f"Held-out scores and settings are in {run.path.name}/summary.json.")
    rows = list(run.metrics())
    if settings.telemetry.plots:
        size = f"{settings.rollout.problems_per_step} problems x {settings.rollout.group_size} rollouts a step"
        draw_plots(rows, run.plots, f"{run.path.name}, seed {settings.seed}: {size}")
    chosen = best.record(evaluations)
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
            "worse_than_start": is_worse(reward, held_out),
            "reward_change": reward,
            "held_out_change": held_out,
            "alerts": [asdict(alert) for alert in explained(run.alerts())],
        }
    )
    _table(console, evaluations)
    change, score = (reward, "reward") if held_out is None else (held_out, "held-out score")
    if change is not None and is_worse(reward, held_out):
        console.warning(
            f"the policy is worse than at the start: its {score} fell from {change['start']:.3f} to {change['end']:.3f}"
        )
    repeat_alerts(run, console)
    if chosen is not None:
        console.note(best.line(chosen))
    plots = "plots/overview.png, " if settings.telemetry.plots else ""
    console.note(
        f"output is in {run.path}: policy/ (transformers format), {plots}metrics.jsonl, trajectories/, tokens/, "
        "checkpoints/, summary.json, config.yaml"
    )
    console.note(f"curves, trajectories and tokens in the browser: agentrl view {shlex.quote(str(run.path))}")


def repeat_alerts(run: RunDirectory, console: Console) -> None:
    """Print the alerts of a run again at its end, causes first: early ones have scrolled out of the terminal."""
    for alert in explained(run.alerts()):
        console.warning(str(alert))


def _table(console: Console, evaluations: list[EvaluationRecord]) -> None:
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
