"""One training step of one rank: statistics, advantages, loss, backward, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from agentrl.algorithms import mismatch_metrics
from agentrl.batch import Batch, MicroBatch, scatter_tokens
from agentrl.kernels import TokenStatistics
from agentrl.kernels.attention import rank_slice
from agentrl.models.policy import PolicyModel
from agentrl.models.routes import RoutingPass
from agentrl.training.engine.collectives import MetricAccumulator
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.heartbeat import Heartbeat
from agentrl.training.engine.memory import convert_memory_errors
from agentrl.training.step.batching import RankPlan
from agentrl.training.step.diagnostics import (
    HeadExactMonitor,
    TokenStatisticsRecorder,
    check_fidelity,
    record_algorithm_metrics,
    record_divergences,
    record_forward_metrics,
    variance_proxies,
)
from agentrl.training.step.loss_rows import BatchCompleter, effective_sample_size_metrics
from agentrl.training.step.objective import PolicyObjective
from agentrl.training.step.objective_settings import ObjectiveSettings, advantages_known_before_forward
from agentrl.training.step.reference_and_critic import Critic, ScoringPolicy, create_kl_controller

_Result = TypeVar("_Result")
_Item = TypeVar("_Item", MicroBatch, Batch)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """State shared by the passes of one step."""

    plan: RankPlan
    meter: MetricAccumulator
    monitor: HeadExactMonitor | None
    beta: float
    teacher_coefficient: float
    frozen: Mapping[Literal["reference", "teacher"], ScoringPolicy]
    recorder: TokenStatisticsRecorder | None
    norms: list[float] = field(default_factory=list)


def _convert_memory_errors(batch: MicroBatch | Batch) -> AbstractContextManager[None]:
    return convert_memory_errors(tokens=batch.budgeted_tokens, trajectories=batch.trajectories)


class Trainer:
    """Executes the plans of steps. Up to rounding, results do not depend on the number of ranks or micro-batches."""

    def __init__(
        self,
        engine: TrainingEngine[PolicyModel],
        settings: ObjectiveSettings,
        *,
        temperature: float,
        fidelity_bound: float = math.inf,
        reference: ScoringPolicy | None = None,
        teacher: ScoringPolicy | None = None,
        critic: Critic | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        """Pass ``reference``, ``teacher`` and ``critic`` if and only if ``settings`` need them.

        ``fidelity_bound``: see :func:`.diagnostics.check_fidelity`. A run sets the attribute after it has measured the
        noise. Each pass over a micro-batch is marked in ``heartbeat``.
        """
        self._engine = engine
        self._settings = settings
        self._temperature = temperature
        self.fidelity_bound = fidelity_bound
        # In other dtypes, rounding alone can exceed the bound on short trajectories.
        self._exact = next(engine.module.parameters()).dtype == torch.float32
        self._completer = BatchCompleter(settings)
        self._known_before_forward = advantages_known_before_forward(settings)
        self._objective = PolicyObjective(settings)
        self._reference = reference
        self._teacher = teacher
        self._teacher_coefficient = settings.teacher.coefficient_at
        self._critic = critic
        self._heartbeat = heartbeat or Heartbeat(deadline=math.inf, slow=math.inf)
        self._kl = create_kl_controller(settings.kl)
        engine.module.records_routes = settings.correction.route_replay == "trainer"
        self._routes_measured_at: int | None = None

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Return the JSON-serializable state that a checkpoint stores in addition to the engines' states."""
        return {} if self._reference is None else {"kl": self._kl.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Restore a :meth:`state_dict`."""
        if self._reference is not None:
            self._kl.load_state_dict(state["kl"])

    def train(self, plan: RankPlan, *, recorder: TokenStatisticsRecorder | None = None) -> dict[str, float]:
        """Run one step's updates, and return metrics reduced over ranks.

        ``recorder`` receives the rows of this rank. Raises MicroBatchMemoryError if a micro-batch does not fit in
        memory.
        """
        self._engine.module.train()
        if self._critic is not None:
            self._critic.engine.module.train()
        meter = MetricAccumulator(self._engine.device)
        policy = self._engine.module
        monitor = HeadExactMonitor(policy, temperature=self._temperature) if plan.head_exact else None
        teacher_coefficient = self._teacher_coefficient(plan.step)
        frozen: dict[Literal["reference", "teacher"], ScoringPolicy] = {}
        if self._reference is not None:
            frozen["reference"] = self._reference
        if self._teacher is not None and teacher_coefficient > 0:
            frozen["teacher"] = self._teacher
        step = _Step(
            plan=plan,
            meter=meter,
            monitor=monitor,
            beta=self._kl.beta,
            teacher_coefficient=teacher_coefficient,
            frozen=frozen,
            recorder=recorder,
        )
        if plan.updates and not plan.statistics_pass:
            self._train_with_one_forward(step)
        elif plan.updates:
            # Run a statistics pass over the whole step, then the updates.
            for number, batches in enumerate(self._run_statistics_pass(step)):
                self._train_update(step, batches, tokens=plan.model_tokens[number], weights_unchanged=number == 0)
        metrics = {"policy/tokens": 0.0} | meter.reduce_over_ranks(self._engine)
        metrics |= effective_sample_size_metrics(metrics)
        if step.norms:
            norm = metrics["policy/gradient_norm"] = math.fsum(step.norms) / len(step.norms)
            trajectories = meter.weight_over_ranks("variance/total_power", self._engine)
            power = metrics.get("variance/total_power", 0.0)
            metrics |= variance_proxies(total_power=power, gradient_norm=norm, trajectories=trajectories)
        if step.monitor is not None and plan.updates:
            metrics |= step.monitor.metrics_over_ranks(self._engine.sum_over_replicas)
        if self._reference is not None:
            metrics["kl/coefficient"] = step.beta
            if plan.updates:
                self._kl.update(metrics["kl/mean"], plan.trajectories)
        if self._teacher is not None:
            metrics["teacher/coefficient"] = step.teacher_coefficient
        metrics["policy/updates"] = len(step.norms)
        metrics["optimizer/learning_rate"] = self._engine.learning_rate
        return metrics

    def read_and_reset_seconds(self) -> dict[str, float]:
        """Return this rank's time in forward passes, backward passes and updates since the last call, as metrics."""
        totals: dict[str, float] = {}
        for engine in self._engines:
            for name, seconds in engine.stopwatch.read_and_reset_seconds().items():
                totals[name] = totals.get(name, 0.0) + seconds
        return totals

    # -- passes ---------------------------------------------------------------------------------------------------

    def _train_with_one_forward(self, step: _Step) -> None:
        """Run an update with one forward pass for both advantages and loss.

        :mod:`.batching` describes the additional passes of large groups.
        """
        (update,) = step.plan.updates
        normalizer = self._objective.normalizer(step.plan.tokens, step.plan.sequences)
        if self._known_before_forward:
            for unit in [tuple(chain(*update))] if self._completer.step_wide else update:
                self._train_unit_advantages_first(step, unit, normalizer)
        else:
            with torch.no_grad():
                scored = self._map_micro_batches(partial(self._score_micro_batch, step=step), step.plan.scored_first)
            earlier = iter(batch for batch, _, _ in scored if batch.counted)
            for unit in update:
                self._train_unit_rerunning_earlier_micro_batches(
                    step, unit, [next(earlier) for _ in unit[1:]], normalizer
                )
        self._heartbeat.mark_passes_end()
        self._apply_update(step)

    def _train_unit_advantages_first(self, step: _Step, unit: Sequence[MicroBatch], normalizer: float | None) -> None:
        """Compute advantages first, then run one forward and one backward pass for each micro-batch."""
        batches = [self._to_device(micro) for micro in unit]
        for batch in self._completer.add_advantages_before_forward(batches, self._engine, meter=step.meter):
            with _convert_memory_errors(batch):
                scored, statistics, hidden = self._score_batch(batch, step)
                scored = self._completer.add_correction(scored, meter=step.meter)
                self._record_metrics(step, scored, hidden)
                self._accumulate_loss_gradient(step, statistics, scored, normalizer, ratio_is_one=True)

    def _train_unit_rerunning_earlier_micro_batches(
        self, step: _Step, unit: Sequence[MicroBatch], earlier: Sequence[Batch], normalizer: float | None
    ) -> None:
        """Complete the group by scoring its last micro-batch, then run the ``earlier`` micro-batches again."""
        batch = self._to_device(unit[-1])
        with _convert_memory_errors(batch):
            last, statistics, hidden = self._score_batch(batch, step)
            # Pass the batches in the order in which they are trained on and recorded, so that advantages can be
            # recomputed bitwise.
            last, *others = self._completer.complete_groups([last, *earlier], beta=step.beta, meter=step.meter)
            self._record_metrics(step, last, hidden)
            self._accumulate_loss_gradient(step, statistics, last, normalizer, ratio_is_one=True)
        del statistics
        for batch in others:
            with _convert_memory_errors(batch):
                statistics, _, _ = self._run_policy_forward(batch, step)
                self._record_metrics(step, batch, None)
                self._accumulate_loss_gradient(step, statistics, batch, normalizer, ratio_is_one=True)

    def _map_micro_batches(self, work: Callable[[_Item], _Result], micro_batches: Sequence[_Item]) -> list[_Result]:
        """Return the result of ``work`` for each micro-batch. Raises MicroBatchMemoryError if memory runs out."""
        results = []
        for item in micro_batches:
            with _convert_memory_errors(item):
                results.append(work(item))
        self._heartbeat.mark_passes_end()
        return results

    def _run_statistics_pass(self, step: _Step) -> list[list[Batch]]:
        """Score every micro-batch, and return the completed batches of each update. Groups may span ranks."""
        with torch.no_grad():
            updates = [list(chain(*update)) for update in step.plan.updates]
            scored = iter(self._map_micro_batches(partial(self._score_micro_batch, step=step), [*chain(*updates)]))
            parts = [[next(scored) for _ in update] for update in updates]
            completed = self._completer.complete_over_ranks(
                [[batch for batch, _, _ in update] for update in parts], self._engine, beta=step.beta, meter=step.meter
            )
        for update, others in zip(completed, parts, strict=True):
            for batch, (_, _, hidden) in zip(update, others, strict=True):
                self._record_metrics(step, batch, hidden)
        return completed

    def _train_update(self, step: _Step, batches: Sequence[Batch], *, tokens: int, weights_unchanged: bool) -> None:
        """Run one update of ``tokens`` model tokens after a statistics pass.

        ``weights_unchanged``: the weights have not changed since that pass.
        """
        normalizer = self._objective.normalizer_over_ranks(batches, self._engine)
        if self._objective.needs_selection:
            batches = self._select_tokens(step, batches, weights_unchanged=weights_unchanged)

        def work(batch: Batch) -> None:
            statistics, _, _ = self._run_policy_forward(batch, step)
            self._accumulate_loss_gradient(step, statistics, batch, normalizer, ratio_is_one=False)
            if self._critic is not None:
                measured = self._critic.backward(batch, tokens=tokens)
                record_algorithm_metrics(step.meter, "critic", measured, batch.counted_mask.sum())

        self._map_micro_batches(work, batches)
        self._apply_update(step)

    def _select_tokens(self, step: _Step, batches: Sequence[Batch], *, weights_unchanged: bool) -> list[Batch]:
        """Return the batches with masks of the tokens that the loss selects. Collective."""

        def log_probs(batch: Batch) -> Tensor:
            return batch.log_probs if weights_unchanged else self._run_policy_forward(batch, step)[0].log_probs

        with torch.no_grad():
            current = self._map_micro_batches(log_probs, batches)
        selected = self._objective.select_tokens(current, batches, self._engine, step=step.plan.step)
        return [replace(batch, selected=chosen) for batch, chosen in zip(batches, selected, strict=True)]

    def _apply_update(self, step: _Step) -> None:
        worst = step.meter.largest_over_ranks("policy/engine_abs_diff_max", self._engine)
        check_fidelity(
            step.meter.mean_over_ranks("policy/engine_abs_diff", self._engine),
            self.fidelity_bound,
            worst=worst if self._exact else None,
        )
        norms = [engine.step() for engine in self._engines]
        step.norms.append(norms[0])
        if self._critic is not None:
            step.meter.add_mean("critic/gradient_norm", norms[1], 1.0)

    @property
    def _engines(self) -> list[TrainingEngine[nn.Module]]:
        return [self._engine] if self._critic is None else [self._engine, self._critic.engine]

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _run_policy_forward(
        self, batch: Batch, step: _Step, *, keep_hidden: bool = False
    ) -> tuple[TokenStatistics, Tensor | None, dict[str, Tensor]]:
        """Run the frozen policies whose whole distribution the loss needs, then the policy's forward pass.

        Returns (statistics, hidden states, log-probabilities under these frozen policies). Statistics [B, T] are zero
        outside model tokens and connected to the graph. Hidden states are [N, D] for this rank's N model tokens.
        """
        self._heartbeat.mark_pass_start()
        scored = {
            name: policy.score_batch(batch) for name, policy in step.frozen.items() if policy.needs_full_distribution
        }
        flat, hidden = self._engine(
            batch.row,
            batch.rows,
            batch.columns,
            temperature=self._temperature,
            keep_hidden=keep_hidden,
            support=batch.support,
            **{name: head for name, (_, head) in scored.items()},
        )
        statistics = flat.map(lambda values: scatter_tokens(values, batch.response_mask))
        return statistics, hidden, {name: log_probs for name, (log_probs, _) in scored.items()}

    def _to_device(self, micro: MicroBatch) -> Batch:
        return Batch.from_micro_batch(
            micro, device=self._engine.device, multiple=self._engine.module.row_length_multiple
        )

    def _score_micro_batch(self, micro: MicroBatch, step: _Step) -> tuple[Batch, TokenStatistics, Tensor | None]:
        return self._score_batch(self._to_device(micro), step)

    def _score_batch(self, batch: Batch, step: _Step) -> tuple[Batch, TokenStatistics, Tensor | None]:
        """Run all forward passes over a batch. Collective under ZeRO-3.

        Returns (the batch with the results; statistics connected to the graph; hidden states).
        """
        statistics, hidden, log_probs = self._run_policy_forward(batch, step, keep_hidden=step.monitor is not None)
        routes = self._engine.module.routes
        if routes is not None and routes.replayed is None:
            batch = self._with_recorded_routes(batch, routes)
        elif routes is not None:
            self._record_replay_metrics(batch, routes, step)
        values = final_values = None
        log_probs |= {
            name: policy.score_batch(batch)[0] for name, policy in step.frozen.items() if name not in log_probs
        }
        if self._critic is not None:
            values, final_values = self._critic.values_and_final_values(batch)
        scored = replace(
            batch,
            statistics=statistics.map(Tensor.detach),
            reference_log_probs=log_probs.get("reference"),
            teacher_log_probs=log_probs.get("teacher"),
            values=values,
            final_values=final_values,
        )
        if self._completer.needs_exact_energy:
            energies = self._engine.module.trajectory_energies(
                batch.input_ids,
                batch.prompt_lengths,
                batch.response_mask,
                importance_weights=self._completer.corrector.energy_weights(scored),
                temperature=self._temperature,
            )
            scored = replace(scored, trajectory_energy=energies)
        return scored, statistics, hidden

    def _with_recorded_routes(self, batch: Batch, routes: RoutingPass) -> Batch:
        """Return the batch with the routes that the trainer has selected."""
        recorded = routes.recorded_routes()
        whole = recorded.new_full((len(batch.row.token_ids), recorded.shape[1]), -1)
        whole[rank_slice(batch.row, self._engine.module.sequence)] = recorded
        return replace(batch, row=replace(batch.row, routes=whole))

    def _record_replay_metrics(self, batch: Batch, routes: RoutingPass, step: _Step) -> None:
        """Record metrics of replayed ``routes``.

        In the first micro-batch of a step, a second forward pass measures the difference from the engine without
        replay.
        """
        other, total = routes.count_changed_and_replayed()
        step.meter.add_mean("policy/other_routes", other.double() / max(1, total), total * int(batch.counted))
        if self._routes_measured_at != step.plan.step:
            self._routes_measured_at = step.plan.step
            with torch.no_grad():
                without_replay = replace(batch, row=replace(batch.row, routes=None))
                statistics, _, _ = self._run_policy_forward(without_replay, replace(step, frozen={}))
            mismatch = mismatch_metrics(statistics.log_probs, batch.rollout_log_probs, batch.response_mask)
            weight = mismatch["tokens"] * int(batch.counted)
            step.meter.add_mean("policy/engine_abs_diff_own_routes", mismatch["mean_abs_difference"], weight)

    def _accumulate_loss_gradient(
        self,
        step: _Step,
        statistics: TokenStatistics,
        batch: Batch,
        normalizer: float | None,
        *,
        ratio_is_one: bool,
    ) -> None:
        """Accumulate the gradient of this batch's part of the loss. All parts sum to the step's loss."""
        value, metrics = self._objective.loss(
            statistics,
            batch,
            normalizer=normalizer,
            beta=step.beta,
            teacher_coefficient=step.teacher_coefficient,
            ratio_is_one=ratio_is_one,
        )
        if step.recorder is not None and batch.counted:
            update = len(step.norms)  # index of the update in the step
            step.recorder.add_micro_batch(
                batch,
                factors=self._objective.trajectory_loss_factors(batch, normalizer),
                update=update,
                update_log_probs=statistics.log_probs.detach() if update else None,
            )
        step.meter.add_total("policy/loss", value.detach())
        self._heartbeat.mark_pass_start()
        record_algorithm_metrics(step.meter, "policy", metrics, batch.trained_mask.sum())
        self._engine.backward(value * self._engine.world_size)

    def _record_metrics(self, step: _Step, batch: Batch, hidden: Tensor | None) -> None:
        record_forward_metrics(step.meter, batch, version=step.plan.version)
        record_divergences(step.meter, batch, self._settings)
        if step.monitor is not None and hidden is not None and batch.counted:
            step.monitor.add_groups(batch, hidden)
