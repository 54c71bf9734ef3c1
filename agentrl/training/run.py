"""A training run from its settings to its summary."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import agentrl
from agentrl.config import dump_yaml
from agentrl.evaluation.evaluate import EvaluationReport
from agentrl.models.loading import read_model, write_model
from agentrl.models.policy import PolicyModel
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.rollout.environment import build_environment
from agentrl.telemetry.console import Console
from agentrl.telemetry.machine import describe_machine
from agentrl.telemetry.plots import draw_plots
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.batching import due
from agentrl.training.checkpoint import RunState, latest_checkpoint, read_state, save_checkpoint
from agentrl.training.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.fidelity import BOUNDS
from agentrl.training.policy import set_threads, starting_policy
from agentrl.training.preflight import check_inputs
from agentrl.training.service import InterruptedRunError, LocalService, RolloutService, StepPlans
from agentrl.training.trainer import Trainer
from agentrl.weights.sources import full_parameters

if TYPE_CHECKING:
    from agentrl.config import Settings

_INTERRUPTED = 130


def train(settings: Settings, resume: bool) -> int:
    """Train; returns the exit code. Under a launcher (RANK is set) this process is one of its ranks."""
    console = Console(settings.telemetry)
    if "RANK" in os.environ:
        first = os.environ["RANK"] == "0"
        run = _open_run(settings, resume) if first else None
        return run_rank(settings, run, console, resume=resume)
    check_inputs(settings)
    run = _open_run(settings, resume)
    for line in describe_machine().lines():
        console.note(line)
    if settings.training.num_processes > 1:
        from agentrl.training.launch import launch

        starting_policy(settings, console)
        run.close()
        return launch(settings, run.path)
    return run_rank(settings, run, console, resume=resume)


def _open_run(settings: Settings, resume: bool) -> RunDirectory:
    path = Path(settings.runs_dir) / str(settings.name)
    if resume:
        run = RunDirectory.resume(path)
        run.write_text("config.yaml", dump_yaml(settings))
        return run
    return RunDirectory.create(path, dump_yaml(settings))


def run_rank(settings: Settings, run: RunDirectory | None, console: Console, *, resume: bool) -> int:
    """One training rank from start to end. ``run`` is rank 0's."""
    set_threads(settings)
    rank, world = start_distributed()
    session = Session(settings, run, console, rank=rank, world=world)
    with _stop_signals(session):
        try:
            session.start(resume=resume)
            return session.loop()
        finally:
            session.close()


@dataclass(slots=True)
class _Progress:
    """What a run counts across restarts."""

    step: int = 0
    updates: int = 0


class Session:
    """The pieces of one rank: model, DeepSpeed engine, rollout service, files."""

    def __init__(
        self, settings: Settings, run: RunDirectory | None, console: Console, *, rank: int, world: int
    ) -> None:
        self._settings = settings
        self._run = run
        self._console = console
        self._rank = rank
        self._stop = False
        self._done = _Progress()
        path = starting_policy(settings, console)
        self._tokenizer = read_tokenizer(path)
        codec = TextCodec(self._tokenizer)
        self._policy = PolicyModel(read_model(path, settings.model), backend=settings.training.head_backend)
        self._engine = TrainingEngine(
            self._policy,
            optimizer=settings.optimizer,
            training=settings.training,
            bfloat16=settings.model.dtype == "bfloat16",
            updates=settings.training.steps * settings.algorithm.updates_per_step,
        )
        self._trainer = Trainer(
            self._engine,
            settings.algorithm,
            temperature=settings.rollout.temperature,
            pad_id=codec.pad_id,
            fidelity_bound=BOUNDS[settings.model.dtype],
        )
        self._service = self._open_service(path, codec, world)
        self._evaluations: list[EvaluationReport] = []

    def _open_service(self, path: str, codec: TextCodec, world: int) -> RolloutService:
        if world > 1:
            from agentrl.training.remote import RemoteService

            return RemoteService(self._settings, path, rank=self._rank, ranks=world)
        shared = self._settings.training.zero_stage <= 2
        model = self._policy.causal_lm if shared else read_model(path, self._settings.model).to(self._engine.device)
        return LocalService(
            self._settings,
            environment=build_environment(self._settings),
            model=model,
            codec=codec,
            ranks=1,
            shared=shared,
        )

    # -- phases ---------------------------------------------------------------------------------------------------

    def start(self, *, resume: bool) -> None:
        """Say what was found; restore the newest checkpoint of a resumed run; evaluate a fresh one."""
        if self._run is None:
            self._restore(resume)
            return
        for line in self._service.describe():
            self._console.note(line)
        self._restore(resume)
        settings = self._settings
        size = sum(
            item.numel() if not hasattr(item, "ds_numel") else item.ds_numel for item in self._policy.parameters()
        )
        self._console.note(
            f"training: {size / 1e6:.2f}M parameters, {settings.algorithm.estimator} with {settings.algorithm.loss}, "
            f"{settings.rollout.problems_per_step} problems x {settings.rollout.group_size} a step, "
            f"steps {self._done.step + 1} to {settings.training.steps}, run directory {self._run.path}"
        )

    def loop(self) -> int:
        """All steps; returns the exit code."""
        steps = self._settings.training.steps
        if self._done.step == 0:
            self._evaluate()
        with self._console.progress(steps, self._done.step) if self._run else _silence() as progress:
            for step in range(self._done.step + 1, steps + 1):
                try:
                    metrics = self._step(step)
                except InterruptedRunError:
                    return self._stopped()
                if progress is not None:
                    progress.update(step, metrics)
                if self._settings.evaluation.every and due(step, self._settings.evaluation.every) and step < steps:
                    self._evaluate()
                if self._stop_everywhere():
                    return self._stopped()
                if due(step, self._settings.checkpoint.every) and step < steps:
                    self._save()
        self._finish()
        return 0

    def close(self) -> None:
        self._service.close()
        if self._run is not None:
            self._run.close()

    def request_stop(self) -> None:
        """From a signal handler: end at the next safe point; rollouts under way are cancelled."""
        self._stop = True
        self._service.interrupt()

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, step: int) -> dict[str, Any]:
        began = time.monotonic()
        plans = self._service.plan(step)
        planned = time.monotonic()
        metrics = self._trainer.train(plans.ranks[self._rank])
        self._done = _Progress(step=step, updates=self._done.updates + int(metrics["policy/updates"]))
        self._service.update_weights(full_parameters(self._policy.causal_lm), self._done.updates)
        self._service.confirm(step)
        ended = time.monotonic()
        metrics = {"step": step, **plans.harvest.metrics, **metrics} if self._run is not None else metrics
        metrics |= {
            "time/step_s": ended - began,
            "time/train_s": ended - planned,
            "tokens_per_s": metrics.get("rollout/model_tokens", 0) / (ended - began),
        }
        if self._run is not None:
            self._write(self._run, step, plans, metrics)
        return metrics

    def _write(self, run: RunDirectory, step: int, plans: StepPlans, metrics: dict[str, Any]) -> None:
        if due(step, self._settings.telemetry.trajectories_every):
            rows = (item.to_record() for group in plans.harvest.played for item in group.trajectories)
            run.write_trajectories(step, rows)
        run.append_metrics(metrics)

    def _evaluate(self, *, falsified: bool = False) -> None:
        report = self._service.evaluate(self._done.step, falsified=falsified)
        if self._run is None:
            return
        self._evaluations.append(report)
        self._run.append_metrics(report.metrics())
        name = "with falsified observations" if falsified else "held out"
        score = report.overall
        self._console.note(
            f"step {self._done.step}: avg@{report.samples} {name} {score.mean:.3f} "
            f"[{score.this_benchmark.low:.3f}, {score.this_benchmark.high:.3f}] on {score.problems} problems"
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        root = Path(self._settings.runs_dir) / str(self._settings.name) / "checkpoints"
        state = RunState(step=self._done.step, updates=self._done.updates, worker=self._service.state_dict())
        save_checkpoint(root, self._engine, state, keep=self._settings.checkpoint.keep)

    def _restore(self, resume: bool) -> None:
        root = Path(self._settings.runs_dir) / str(self._settings.name) / "checkpoints"
        newest = latest_checkpoint(root) if resume else None
        if newest is not None:
            state = read_state(newest)
            self._engine.load(newest)
            self._service.load_state_dict(state.worker)
            self._done = _Progress(step=state.step, updates=state.updates)
            self._service.update_weights(full_parameters(self._policy.causal_lm), state.updates)
        if self._run is not None and resume:
            self._run.truncate_after(self._done.step if newest is not None else -1)
            self._console.note(f"resumed after step {self._done.step}")

    def _stopped(self) -> int:
        self._save()
        if self._run is not None:
            self._console.note(
                f"stopped after step {self._done.step}; checkpoint saved. To go on: "
                f"agentrl train --resume name={self._settings.name} runs_dir={self._settings.runs_dir}"
            )
        return _INTERRUPTED

    def _stop_everywhere(self) -> bool:
        """Whether any rank was asked to stop: all ranks must leave the loop at the same step."""
        flag = torch.tensor([float(self._stop)], device=self._engine.device)
        return bool(self._engine.all_reduce(flag).item())

    # -- end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._evaluate()
        if self._settings.evaluation.falsified:
            self._evaluate(falsified=True)
        self._save()
        state = {name: value.to("cpu", copy=True) for name, value in full_parameters(self._policy.causal_lm)}
        if self._run is None:
            return
        self._export(self._run, state)
        rows = list(self._run.metrics())
        if self._settings.telemetry.plots:
            draw_plots(rows, self._run.plots)
        self._run.write_summary(self._summary(rows))
        self._tables()
        self._console.note(
            f"everything lies in {self._run.path}: policy/ (transformers format), plots/overview.png, metrics.jsonl, "
            "trajectories/, checkpoints/, summary.json, config.yaml"
        )

    def _export(self, run: RunDirectory, state: dict[str, torch.Tensor]) -> None:
        score = self._evaluations[0].overall if self._evaluations else None
        write_model(
            run.path / "policy",
            model=self._policy.causal_lm,
            tokenizer=self._tokenizer,
            state=state,
            title=str(self._settings.name),
            body=f"Trained by agentrl {agentrl.__version__} for {self._done.step} steps with "
            f"{self._settings.algorithm.estimator} on `{self._settings.env}`."
            + ("" if score is None else f" Held-out scores and settings stand in {run.path.name}/summary.json."),
        )

    def _summary(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "agentrl": agentrl.__version__,
            "steps": self._done.step,
            "updates": self._done.updates,
            "seed": self._settings.seed,
            "train_seconds": sum(row.get("time/step_s", 0.0) for row in rows),
            "evaluations": [row for row in rows if "eval/avg_at_k" in row or "eval_falsified/avg_at_k" in row],
            "scores": [
                {"step": item.step, "falsified": item.falsified, **asdict(item.overall)} for item in self._evaluations
            ],
        }

    def _tables(self) -> None:
        rows = []
        for item in self._evaluations:
            score = item.overall
            name = f"step {item.step}" + (", observations falsified (reveal families)" if item.falsified else "")
            interval = score.this_benchmark
            rows.append([name, f"{score.mean:.3f}", f"{interval.low:.3f} to {interval.high:.3f}", str(score.problems)])
        samples = self._settings.evaluation.samples
        self._console.table("Held-out problems", ["", f"avg@{samples}", "95 % interval", "problems"], rows)


@contextmanager
def _silence() -> Iterator[None]:
    yield None


@contextmanager
def _stop_signals(session: Session) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the run at a safe point; a second one ends it at once."""

    def handle(number: int, frame: object) -> None:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_DFL)
        print("stopping at the next safe point (again: at once)", file=sys.stderr, flush=True)
        session.request_stop()

    previous = {name: signal.signal(name, handle) for name in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for name, before in previous.items():
            signal.signal(name, before)
