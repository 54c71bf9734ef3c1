"""The run loop of one training rank: plan, train, send weights, evaluate, save."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn

from agentrl.cluster.launchers import address_of_rank_zero
from agentrl.errors import EXIT_INTERRUPTED
from agentrl.models.exactness import check_packed_forward
from agentrl.models.policy import PolicyModel
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.engines.base import engine_facts, runs_servers_on_nodes
from agentrl.telemetry.alerts import find_alerts, select_training_rows
from agentrl.telemetry.console import Console, RunProgress
from agentrl.telemetry.machine import measure_free_resources
from agentrl.telemetry.records import EvaluationRecord, Metrics
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.trace import start_trace, stop_trace, trace_span
from agentrl.telemetry.tracker_threads import Trackers
from agentrl.training.coldstart.policy import prepare_starting_policy
from agentrl.training.engine.checkpoint import (
    CheckpointWriter,
    RunState,
    adapter_record,
    check_adapter_matches,
    check_reference_matches,
    open_newest_checkpoint,
)
from agentrl.training.engine.deepspeed_engine import TrainingEngine, policy_optimizer_settings, read_policy
from agentrl.training.engine.heartbeat import Heartbeat
from agentrl.training.engine.memory import MicroBatchBudget
from agentrl.training.run.outputs import (
    BestPolicyExport,
    PolicyExport,
    TokenStatisticsWriter,
    best_evaluation,
    evaluation_record,
    reprint_alerts,
    resume_command,
    write_final_outputs,
)
from agentrl.training.step.batching import is_due
from agentrl.training.step.diagnostics import FIDELITY_FLOORS, fidelity_bound
from agentrl.training.step.objective_settings import ObjectiveSettings, estimator_requirements
from agentrl.training.step.reference_and_critic import open_critic, open_reference, open_teachers, reference_path
from agentrl.training.step.trainer import Trainer
from agentrl.training.worker.local import LocalRolloutService
from agentrl.training.worker.service import InterruptedRunError, RolloutService
from agentrl.training.worker.transfer import WeightSender
from agentrl.weights.exports import adapter_parameters, policy_parameters

if TYPE_CHECKING:
    from agentrl.config import Settings
    from agentrl.evaluation.during_training import EvaluationReport

# Repeat the warning after this many more consecutive steps without a group to train on.
_EMPTY_STEPS_BETWEEN_WARNINGS = 10

_UNEVALUATED = (
    "nothing is evaluated, because data.eval is empty: to hold out a part of a file, set data.train.0.part=train, "
    "data.eval.0.part=heldout and data.eval.0.path to the same file"
)


_DROPPED = {
    "dropped_zero_variance": "groups with equal rewards (algorithm.drop_zero_variance)",
    "dropped_accuracy": "groups outside algorithm.accuracy_range",
    "dropped_no_greedy": "groups whose greedy rollout failed",
    "dropped_empty": "groups without a trajectory to train on",
    "excluded": "trajectories excluded from training data (infrastructure failures, cancelled, grader timeouts)",
    "void": "trajectories with a void turn",
}
"""Descriptions of groups and trajectories that are not trained on, by the name of their metric in ``groups/``."""


@dataclass(slots=True)
class _Progress:
    """A run's progress, kept across restarts."""

    step: int = 0
    updates: int = 0
    evaluations: list[EvaluationRecord] = field(default_factory=list)


class TrainingSession:
    """One training rank: model, DeepSpeed engine, rollout service, and on rank 0 the run's files."""

    def __init__(
        self,
        settings: Settings,
        run: RunDirectory | None,
        console: Console,
        *,
        rank: int,
        world: int,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """Open all parts of a run. ``on_change`` is called after each recorded step, evaluation and checkpoint."""
        self.rank = rank
        self._settings = settings
        self._run = run
        self._console = console
        self._on_change = on_change
        self._world = world
        self._progress = _Progress()
        self._saved: tuple[int, int] | None = None  # steps and evaluations in the newest checkpoint
        self._empty_steps = 0
        self._alerting: set[str] = set()  # names of the alerts after the last step
        self._trained: list[Metrics] | None = None  # rows of all steps; None before this process's first step
        self._held_out: Metrics = {}  # metrics of an evaluation since the last step
        self._run_path = settings.run_path
        self._checkpoints = self._run_path / "checkpoints"
        self._heartbeat = Heartbeat(deadline=settings.cluster.deadline, slow=settings.training.collective_deadline)
        with contextlib.ExitStack() as opened:  # closes the opened parts if a later part fails to open
            self._open(opened)
            self._opened = opened.pop_all()

    def _open(self, opened: contextlib.ExitStack) -> None:
        settings, run = self._settings, self._run
        if run is not None:
            opened.callback(run.close)
        if settings.telemetry.trace:
            start_trace(RunDirectory(self._run_path).trace, f"rank {self.rank}")
            opened.callback(stop_trace)
        self._trackers = Trackers(settings.telemetry, run, notify=self._console.note, warn=self._console.warning)
        opened.callback(self._trackers.close)
        self._best = BestPolicyExport(self._run_path)
        self._start = prepare_starting_policy(settings, self._console)
        self._tokenizer = read_tokenizer(self._start)
        if run is not None:
            run.write_text("tokenizer.json", self._tokenizer.backend_tokenizer.to_str())  # needed to decode token ids
        self._policy = read_policy(self._start, settings.model, settings.training)
        objective = ObjectiveSettings.from_settings(settings)
        updates = settings.training.steps * settings.algorithm.updates_per_step
        self._engine = TrainingEngine(
            self._policy,
            optimizer=policy_optimizer_settings(settings.optimizer, settings.model.lora),
            training=settings.training,
            bfloat16=settings.model.dtype == "bfloat16",
            updates=updates,
        )
        opened.callback(self._engine.close)
        check_packed_forward(self._start, self._policy)
        self._adapter = adapter_record(settings.model.lora, base=self._start)
        has_critic = "values" in estimator_requirements(objective).inputs
        self._critic = open_critic(settings, initial=self._start, updates=updates) if has_critic else None
        self._budget = MicroBatchBudget(settings.training.micro_batch_tokens, self._run_path, rank=self.rank)
        self._reference_path = reference_path(settings.kl, self._start)
        self._trainer = Trainer(
            self._engine,
            objective,
            temperature=settings.rollout.temperature,
            reference=open_reference(self._reference_path, settings, self._engine, initial=self._start),
            teacher=open_teachers(settings, self._engine, initial=self._start),
            critic=self._critic,
            heartbeat=self._heartbeat,
        )
        self._tokens = TokenStatisticsWriter(self._run_path, settings.telemetry, objective, self._engine.groups)
        opened.callback(self._tokens.close)
        self._engines: dict[str, TrainingEngine[nn.Module]] = {"engine": self._engine}
        if self._critic is not None:
            self._engines["critic"] = self._critic.engine
            opened.callback(self._critic.engine.close)
        self._writer = CheckpointWriter(self._checkpoints, settings.checkpoint, published=self._publish_best_policy)
        opened.callback(self._writer.close)
        self._moves_state = bool(engine_facts(settings.rollout).shares_gpus) and settings.training.offload == "none"
        self._offload_state()
        self._service = self._open_service()
        self._sender = self._open_sender()
        opened.callback(self._sender.close)
        opened.callback(self._service.close)  # runs first: stops the servers to which the sender is connected

    def _open_sender(self) -> WeightSender:
        rollout, cluster = self._settings.rollout, self._settings.cluster
        elsewhere = engine_facts(rollout).remote or runs_servers_on_nodes(rollout, cluster.kind)
        return WeightSender(
            self._service,
            self._engine,
            folder=self._run_path / ".weights",
            console=self._console,
            lora=self._settings.model.lora,
            base=self._start,
            host=_address_for_servers() if elsewhere else "127.0.0.1",
        )

    def _open_service(self) -> RolloutService:
        if self._world > 1 or self._settings.rollout.schedule != "synchronous":
            from agentrl.training.worker.remote import RemoteRolloutService

            service = RemoteRolloutService(
                self._settings, self._start, rank=self.rank, ranks=self._world, heartbeat=self._heartbeat
            )
            return cast(RolloutService, service)  # its methods are generated
        shared = engine_facts(self._settings.rollout).in_process and self._settings.training.zero_stage <= 2
        return LocalRolloutService(self._settings, self._start, trained=self._policy.causal_lm if shared else None)

    # -- phases ---------------------------------------------------------------------------------------------------

    def print_setup_and_restore(self, *, resume: bool) -> None:
        """Report the environment, engine and problems; restore the newest checkpoint of a resumed run."""
        for line in self._service.describe_setup():
            self._console.note(line)
        self._console.note(f"training: {_describe_attention(self._policy)}")
        # Before a checkpoint is loaded, trainer and engine both have the initial policy.
        noise = self._sender.verify_initial_policy_and_measure_noise()
        configured = self._settings.algorithm.fidelity_bound
        bound = self._trainer.fidelity_bound = configured or fidelity_bound(self._settings.model.dtype, noise)
        reason = "algorithm.fidelity_bound" if configured else f"from {noise:.2g} measured at the start"
        self._console.note(
            "fidelity: the run stops if the log-probabilities of a step differ from the engine's by more than "
            f"{bound:.2g} nats on average ({reason})"
        )
        if not configured and noise > FIDELITY_FLOORS[self._settings.model.dtype]:
            self._console.warning(
                f"log-probabilities of engine and trainer differ by {noise:.2g} nats with equal weights. This is "
                "expected for mixture-of-experts models, because rounding changes the selected experts. For any other "
                "model, check the server's quantization, cache dtype and rope settings, or set algorithm.fidelity_bound"
            )
        if resume:
            self._load_newest_checkpoint()
        self._budget.warn_if_reduced(self._console.warning)
        self._warn_of_damaged_trajectories()
        settings = self._settings
        self._console.note(
            f"training: {_describe_parameters(self._policy)}, {settings.algorithm.estimator} with "
            f"{settings.algorithm.loss}, {settings.rollout.problems_per_step} problems x "
            f"{settings.rollout.group_size} a step, steps {self._progress.step + 1} to {settings.training.steps}, "
            f"run directory {self._run_path}"
        )
        if not settings.data.eval:
            self._console.note(_UNEVALUATED)
        self._trackers.start(settings.model_dump(mode="json"), step=self._progress.step, resumed=resume)

    def run_all_steps(self) -> int:
        """Run all steps and return the exit code."""
        try:
            self._run_remaining_steps()
        except InterruptedRunError:
            return self._stop()
        self._finish()
        return 0

    def close(self) -> None:
        """Release the worker and the run directory, and flush the trackers."""
        self._opened.close()

    def _offload_state(self) -> None:
        """Offload the optimizer states of policy and critic from GPUs that are shared with servers."""
        for engine in self._engines.values() if self._moves_state else ():
            engine.offload_to_cpu()

    def request_stop(self) -> None:
        """Stop the run before the next step, and cancel rollouts that a rank waits for. Callable from any thread."""
        self._service.cancel_interruptible_calls()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _run_remaining_steps(self) -> None:
        """Run the remaining steps with evaluations and checkpoints. Raises InterruptedRunError on a stop request."""
        steps, every = self._settings.training.steps, self._settings.checkpoint.every
        self._evaluate_if_due()  # the initial evaluation, or one that was skipped when the run was stopped
        with self._console.progress(steps, self._progress.step) as progress:
            for step in range(self._progress.step + 1, steps + 1):
                with trace_span("step", step=step):
                    self._run_step(step, progress)
                self._evaluate_if_due()
                if step < steps and is_due(step, every):  # _finish() saves the last step
                    self._save_checkpoint()
        self._evaluate_once_per_step()
        if self._settings.evaluation.falsified:
            self._evaluate_once_per_step(falsified=True)

    def _run_step(self, step: int, progress: RunProgress) -> None:
        """Roll out, train and send the weights. Raises InterruptedRunError only before the step changes anything."""
        began = time.monotonic()
        with trace_span("wait for rollouts"):
            plan = self._service.roll_out_and_plan_rank(step, self._budget.tokens)
        planned = time.monotonic()
        self._heartbeat.mark_step_start(step)
        recorder = self._tokens.create_recorder(step)
        with self._budget.shrink_on_out_of_memory(step), trace_span("train"):
            for engine in self._engines.values() if self._moves_state else ():
                engine.reload_to_gpu()  # the servers sleep
            metrics = self._trainer.train(plan, recorder=recorder)
        updates = self._progress.updates + int(metrics["policy/updates"])
        self._offload_state()
        trained = time.monotonic()
        with trace_span("send weights"):
            self._service.wait_until_weights_may_change()
            self._sender.send_weights(updates)
        ended = time.monotonic()
        metrics = {"step": step, **plan.metrics, **metrics}
        metrics |= {
            "time/step_s": ended - began,
            "time/train_idle_s": planned - began,
            "time/train_s": trained - planned,
            **self._trainer.read_and_reset_seconds(),
            "time/transfer_s": ended - trained,
            "tokens_per_s": metrics.get("rollout/model_tokens", 0) / (ended - began),
        }
        self._commit_step(step, updates, metrics)
        self._tokens.start_writing(plan, recorder)
        self._report_alerts_and_maybe_stop(metrics)
        if self.rank == 0:
            progress.update(step, metrics)
        self._warn_of_empty_steps(step, metrics)
        self._on_change()

    def _commit_step(self, step: int, updates: int, metrics: Metrics) -> None:
        """Record a finished step. Only this method advances the state of a run.

        If the run is killed at any point, ``--resume`` removes everything written after the newest checkpoint.
        """
        self._service.accept_step(step)
        self._progress.step, self._progress.updates = step, updates
        if self._run is not None:
            self._run.append_metrics(metrics)
        self._trackers.log_metrics(metrics)
        self._writer.publish_pending(wait=False)

    def _report_alerts_and_maybe_stop(self, metrics: Metrics) -> None:
        """Report the alerts that start at this step, and stop the run if ``telemetry.stop_on`` contains one of them."""
        if self._run is None:
            return
        if self._trained is None:
            self._trained = select_training_rows(self._run.metrics())
        else:
            self._trained.append(self._held_out | metrics)
        self._held_out = {}
        self._trained[-1] |= measure_free_resources(self._run.path)
        now = find_alerts(self._trained)
        for alert in now:
            if alert.alert not in self._alerting:
                self._run.append_alert(alert)
                self._console.warning(str(alert))
        self._alerting = {alert.alert for alert in now}
        if stopping := sorted(self._alerting & set(self._settings.telemetry.stop_on)):
            self._console.warning(f"an alert of telemetry.stop_on was raised ({', '.join(stopping)}): stopping the run")
            self.request_stop()

    def _warn_of_empty_steps(self, step: int, metrics: Metrics) -> None:
        if metrics["policy/updates"]:
            self._empty_steps = 0
            return
        if self._empty_steps % _EMPTY_STEPS_BETWEEN_WARNINGS == 0:
            counts = {name: metrics.get(f"groups/{name}", 0) for name in _DROPPED}
            reasons = ", ".join(f"{count:g} {_DROPPED[name]}" for name, count in counts.items() if count)
            self._console.warning(f"step {step} has no group to train on: {reasons or 'no group was rolled out'}")
        self._empty_steps += 1

    def _evaluate_if_due(self) -> None:
        """Evaluate before the first step and every ``evaluation.every`` steps, but not after the last step."""
        step, settings = self._progress.step, self._settings
        if step < settings.training.steps and (step == 0 or is_due(step, settings.evaluation.every)):
            self._evaluate_once_per_step()

    def _evaluate_once_per_step(self, *, falsified: bool = False) -> None:
        """Play the held-out problems, if there are any, at most once per step, even after a resume.

        Raises InterruptedRunError on a stop request. An interrupted evaluation is discarded.
        """
        if not self._settings.data.eval:
            return
        evaluated = {(item["step"], item["falsified"]) for item in self._progress.evaluations}
        if (self._progress.step, falsified) in evaluated:
            return
        with trace_span("evaluate", step=self._progress.step):
            report = self._service.evaluate(self._progress.step, falsified=falsified)
        if report is None:
            how, kind = "evaluated", ""
            if falsified:
                how, kind = "evaluated with falsified observations", " that reveal a value by execution"
            self._console.note(f"step {self._progress.step}: not {how}, because data.eval contains no problems{kind}")
            return
        self._record_evaluation(report)
        if not falsified and self._settings.checkpoint.best:
            self._export_if_best()

    def _record_evaluation(self, report: EvaluationReport) -> None:
        self._progress.evaluations.append(evaluation_record(report))
        if self._run is not None:
            self._run.append_metrics(report.metrics())
        if not report.falsified:
            self._held_out = report.metrics()
        self._trackers.log_metrics(report.metrics())
        name = "with falsified observations" if report.falsified else "held out"
        score = report.overall
        self._console.note(
            f"step {self._progress.step}: avg@{report.samples} {name} {score.mean:.3f} "
            f"[{score.this_benchmark.low:.3f}, {score.this_benchmark.high:.3f}] on {score.problems} problems"
        )
        self._on_change()

    def _export_if_best(self) -> None:
        """Export the policy if this step's evaluation is the best so far. Collective."""
        best = best_evaluation(self._progress.evaluations)
        if best is not None and best["step"] == self._progress.step:
            export = self._gather_export()
            if self.rank == 0:
                self._best.write_pending_export(
                    best, lambda folder: export.write(folder, f"Best of its run at step {best['step']}.")
                )
            self._service.wait_for_all_ranks(f"the export of the best policy at step {self._progress.step}")

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save_checkpoint(self) -> None:
        self._tokens.wait_until_written()
        worker = self._service.state_dict()
        self._heartbeat.mark_work_start(f"the checkpoint of step {self._progress.step}")
        state = RunState(
            step=self._progress.step,
            updates=self._progress.updates,
            ranks=self._world,
            worker=worker,
            evaluations=self._progress.evaluations,
            rows=0 if self._run is None else sum(1 for _ in self._run.metrics()),
            trainer=self._trainer.state_dict(),
            reference=self._reference_path,
            adapter=self._adapter,
        )
        with trace_span("save", step=self._progress.step):
            self._writer.save(self._engines, state)
        self._saved = (self._progress.step, len(self._progress.evaluations))

    def _publish_best_policy(self, saved: RunState) -> None:
        """Publish the export of the best policy once a checkpoint contains all evaluations so far."""
        if (
            self.rank == 0
            and self._settings.checkpoint.best
            and len(saved.evaluations) == len(self._progress.evaluations)
        ):
            self._best.keep_only(best_evaluation(self._progress.evaluations))
        self._on_change()

    def _load_newest_checkpoint(self) -> None:
        """Load the newest checkpoint if one exists."""
        keep, rows, change = self._settings.checkpoint.keep, 0, ""
        newest = open_newest_checkpoint(self._checkpoints, keep=keep, warn=self._console.warning)
        if newest is not None:
            folder, state = newest
            check_reference_matches(folder, state, self._reference_path)
            check_adapter_matches(folder, state.adapter, self._adapter)
            for name, engine in self._engines.items():
                engine.load_checkpoint(folder / name)
            self._trainer.load_state_dict(state.trainer)
            self._service.load_state_dict(state.worker)
            self._progress = _Progress(step=state.step, updates=state.updates, evaluations=state.evaluations)
            self._saved = (state.step, len(state.evaluations))
            rows = state.rows
            if state.ranks != self._world:
                change = f", from a checkpoint of {_format_ranks(state.ranks)}, on {_format_ranks(self._world)}"
            self._offload_state()
            self._sender.send_weights(state.updates)
        if self._run is not None:
            self._run.truncate_after(self._progress.step, rows=rows)
        if self.rank == 0 and self._settings.checkpoint.best:
            self._best.keep_only(best_evaluation(self._progress.evaluations))
        self._console.note(f"resumed after step {self._progress.step}{change}")

    def _warn_of_damaged_trajectories(self) -> None:
        damaged = [] if self._run is None else self._run.truncated_trajectory_files()
        if damaged:
            names = ", ".join(path.name for path in damaged[:5]) + (", ..." if len(damaged) > 5 else "")
            self._console.warning(
                f"{len(damaged)} trajectory files in {damaged[0].parent} are truncated ({names}): they cannot be "
                "viewed or regraded; training is not affected"
            )

    def _stop(self) -> int:
        if self._saved != (self._progress.step, len(self._progress.evaluations)):
            self._save_checkpoint()
        self._writer.publish_pending()
        if self._run is not None:
            reprint_alerts(self._run, self._console)
        self._console.note(
            f"stopped after step {self._progress.step}; checkpoint saved. To continue: {resume_command(self._settings)}"
        )
        self._service.wait_for_all_ranks("the end of the run")
        return EXIT_INTERRUPTED

    # -- end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._save_checkpoint()
        self._writer.publish_pending()
        export = self._gather_export()
        if self._run is not None:
            write_final_outputs(
                self._run,
                self._settings,
                self._console,
                export=export,
                updates=self._progress.updates,
                evaluations=self._progress.evaluations,
                best=self._best,
            )
        self._trackers.log_plots()
        self._service.wait_for_all_ranks("the end of the run")

    def _gather_export(self) -> PolicyExport:
        """Gather the current policy on rank 0 and return it for export. Collective."""
        lora = self._settings.model.lora
        return PolicyExport(
            settings=self._settings,
            model=self._policy.causal_lm,
            tokenizer=self._tokenizer,
            state=self._gather_on_rank_zero(policy_parameters(self._policy.causal_lm, lora)),
            adapter=self._gather_on_rank_zero(adapter_parameters(self._policy.causal_lm)) if lora.rank else {},
            base=self._start,
            steps=self._progress.step,
        )

    def _gather_on_rank_zero(self, parameters: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy the parameters to the CPU on rank 0. Every rank must iterate, because gathering is collective."""
        return {name: value.to("cpu", copy=True) for name, value in parameters if self.rank == 0}


def _describe_attention(policy: PolicyModel) -> str:
    """Describe a policy's attention backend and its number of sequence-parallel ranks."""
    ranks = "" if policy.sequence is None else f", with each row shared by {policy.sequence.size} ranks"
    return f"{policy.attention} attention over packed trajectories{ranks}"


def _describe_parameters(module: nn.Module) -> str:
    """Describe the number of a module's parameters, and the number of trained parameters if some are frozen."""
    sizes = [(getattr(item, "ds_numel", item.numel()), item.requires_grad) for item in module.parameters()]
    total = sum(size for size, _ in sizes)
    trained = sum(size for size, learns in sizes if learns)
    if trained == total:
        return f"{total / 1e6:.2f}M parameters"
    return f"adapters with {trained / 1e6:.2f}M parameters on {(total - trained) / 1e6:.2f}M frozen parameters"


def _address_for_servers() -> str:
    """Return the address at which servers on other machines reach rank 0."""
    known = address_of_rank_zero()
    return socket.gethostname() if known in ("127.0.0.1", "localhost") else known


def _format_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
