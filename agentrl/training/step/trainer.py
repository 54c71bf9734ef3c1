"""One training step of one rank: statistics, advantages, loss, backward, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from agentrl.kernels import TokenStatistics
from agentrl.models.policy import PolicyModel, scatter_tokens
from agentrl.training.engine.deepspeed_engine import TrainingEngine
from agentrl.training.engine.meter import Meter
from agentrl.training.step.batching import MicroBatch, RankPlan, UpdatePlan
from agentrl.training.step.correction import effective_sample_size
from agentrl.training.step.critic import Critic
from agentrl.training.step.diagnostics import HeadExactMonitor, measure, measure_forward, measure_loss
from agentrl.training.step.fidelity import check_fidelity
from agentrl.training.step.loss_inputs import LossRowMaker, LossRows, Part
from agentrl.training.step.objective import Normalizers, PolicyObjective
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.training.step.reference import Reference, ReferenceReading, kl_controller
from agentrl.training.step.scored_rows import ScoredRows
from agentrl.trajectory import Batch

_DETACHED = ("log_probs", "entropy", "sum_pi_squared", "energy", "hidden_norm_squared")


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """A micro-batch with what one forward says of it: each statistic [B, T], zero off model tokens."""

    batch: Batch
    flat: TokenStatistics
    hidden: Tensor | None
    statistics: dict[str, Tensor]  # detached
    reference: ReferenceReading | None  # only where the forward needed it

    def grid(self, name: str) -> Tensor:
        """A statistic [B, T] connected to the graph."""
        return scatter_tokens(getattr(self.flat, name), self.batch.response_mask)


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What the passes of one step share."""

    plan: RankPlan
    meter: Meter
    monitor: HeadExactMonitor | None
    beta: float
    before_update: Callable[[], None] | None
    norms: list[float] = field(default_factory=list)


class Trainer:
    """Executes plans. The same plan split over one rank or many, in few micro-batches or many, gives the same step."""

    def __init__(
        self,
        engine: TrainingEngine[PolicyModel],
        settings: ObjectiveSettings,
        *,
        temperature: float,
        pad_id: int,
        fidelity_bound: float,
        reference: Reference | None = None,
        critic: Critic | None = None,
    ) -> None:
        """``reference`` and ``critic`` are there exactly if ``settings`` ask for them."""
        self._engine = engine
        self._temperature = temperature
        self._pad_id = pad_id
        self._fidelity_bound = settings.algorithm.fidelity_bound or fidelity_bound
        # In coarser dtypes rounding alone moves short trajectories far.
        self._exact = next(engine.module.parameters()).dtype == torch.float32
        self._targets = LossRowMaker(settings)
        self._objective = PolicyObjective(settings)
        self._reference = reference
        self._critic = critic
        self._kl = kl_controller(settings.kl)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engines, JSON-able."""
        return {} if self._reference is None else {"kl": self._kl.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        if self._reference is not None:
            self._kl.load_state_dict(state["kl"])

    def train(self, plan: RankPlan, *, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        """Run one step's updates; returns metrics reduced over ranks. ``before_update`` sees the gradients."""
        self._engine.module.train()
        if self._critic is not None:
            self._critic.engine.module.train()
        meter = Meter(self._engine.device)
        step = _Step(
            plan=plan, meter=meter, monitor=self._monitor(plan), beta=self._kl.beta, before_update=before_update
        )
        if plan.updates and plan.passes.one_forward:
            for update in plan.updates:
                self._one_forward(step, update)
        elif plan.updates:
            self._two_passes(step)
        metrics = {"policy/tokens": 0.0} | meter.reduce(self._engine)
        metrics |= effective_sample_size(metrics)
        if step.norms:
            metrics["policy/gradient_norm"] = math.fsum(step.norms) / len(step.norms)
        if step.monitor is not None and plan.updates:
            metrics |= step.monitor.metrics(self._engine.all_reduce)
        if self._reference is not None:
            metrics["kl/coefficient"] = step.beta
            if plan.updates:
                self._kl.update(metrics["kl/mean"], plan.trajectories)
        metrics["policy/updates"] = len(step.norms)
        metrics["optimizer/learning_rate"] = self._engine.learning_rate
        return metrics

    # -- passes ---------------------------------------------------------------------------------------------------

    def _one_forward(self, step: _Step, update: UpdatePlan) -> None:
        """Micro-batches of whole groups: the forward that is back-propagated also gives the targets."""
        normalizers = Normalizers(tokens=update.tokens, sequences=update.sequences)
        for micro in update.micro_batches:
            scored = self._score(micro, step, keep_hidden=step.monitor is not None)
            evidence = self._evidence(scored, step)
            targets = self._targets.make(evidence, beta=step.beta, meter=step.meter, counted=not micro.dummy)
            self._account(step, scored, targets, counted=not micro.dummy)
            self._backward(step, scored, targets, normalizers, fresh=True)
        self._update(step)

    def _two_passes(self, step: _Step) -> None:
        """A statistics pass over the whole step, then the updates."""
        targets = self._statistics_pass(step)
        done = 0
        for number, update in enumerate(step.plan.updates):
            part = targets[done : done + len(update.micro_batches)]
            self._train_update(step, update, part, fresh=number == 0)
            done += len(part)

    def _statistics_pass(self, step: _Step) -> list[LossRows]:
        """LossRows of every micro-batch of all updates, their groups those of all ranks; nothing else of it stays."""
        numbered = [
            (number, micro) for number, update in enumerate(step.plan.updates) for micro in update.micro_batches
        ]
        micros = [micro for _, micro in numbered]
        with torch.no_grad():
            scored = [self._score(micro, step, keep_hidden=step.monitor is not None) for micro in micros]
            parts = [
                Part(evidence=self._evidence(item, step), update=number, counted=not micro.dummy)
                for item, (number, micro) in zip(scored, numbered, strict=True)
            ]
            targets = self._targets.make_over_ranks(
                parts, step.plan.homes, self._engine, beta=step.beta, meter=step.meter
            )
        for micro, item, own in zip(micros, scored, targets, strict=True):
            self._account(step, item, own, counted=not micro.dummy)
        return targets

    def _train_update(self, step: _Step, update: UpdatePlan, targets: Sequence[LossRows], *, fresh: bool) -> None:
        """``fresh``: the weights are still those of the statistics pass."""
        normalizers = Normalizers.over_ranks(targets, self._engine)
        selected: Sequence[Tensor | None] = [None] * len(targets)
        if self._objective.selects:
            now = [part.log_probs for part in targets] if fresh else self._rescored(step, update)
            selected = self._objective.selection(now, targets, self._engine, seed=step.plan.step)
        for micro, own, chosen in zip(update.micro_batches, targets, selected, strict=True):
            scored = self._score(micro, step)
            self._backward(step, scored, own, normalizers, fresh=False, selected=chosen)
            if self._critic is not None:
                measured = self._critic.backward(scored.batch, own, tokens=update.model_tokens)
                measure(step.meter, "critic", measured, own.response_mask.sum())
        self._update(step)

    def _update(self, step: _Step) -> None:
        worst = step.meter.largest_of("policy/engine_abs_diff_max", self._engine)
        check_fidelity(
            step.meter.mean_of("policy/engine_abs_diff", self._engine),
            self._fidelity_bound,
            worst=worst if self._exact else None,
        )
        if step.before_update is not None:
            step.before_update()
        step.norms.append(self._engine.step())
        if self._critic is not None:
            step.meter.mean("critic/gradient_norm", self._critic.engine.step(), 1.0)

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _score(self, micro: MicroBatch, step: _Step, *, keep_hidden: bool = False) -> _Scored:
        batch = Batch.from_rows(micro.rows, pad_id=self._pad_id, no_loss=step.plan.no_loss)
        batch = batch.to(self._engine.device)
        reading = None
        if self._reference is not None and self._reference.over_vocabulary:
            reading = self._reference.read(batch)
        flat, hidden = self._engine(
            batch.input_ids,
            batch.prompt_lengths,
            batch.response_ids,
            batch.response_mask,
            temperature=self._temperature,
            keep_hidden=keep_hidden,
            reference=None if reading is None else reading.head,
        )
        names = _DETACHED if flat.full_kl is None else (*_DETACHED, "full_kl")
        detached = {name: scatter_tokens(getattr(flat, name).detach(), batch.response_mask) for name in names}
        return _Scored(batch=batch, flat=flat, hidden=hidden, statistics=detached, reference=reading)

    def _evidence(self, scored: _Scored, step: _Step) -> ScoredRows:
        """What is known before the update. Collective under ZeRO-3."""
        batch = scored.batch
        values = final = greedy = None
        reading = scored.reference
        if reading is None and self._reference is not None:
            reading = self._reference.read(batch)
        if self._critic is not None:
            values, final = self._critic.values(batch)
        if step.plan.greedy_returns:
            returns = [step.plan.greedy_returns[group] for group in batch.groups.tolist()]
            greedy = torch.tensor(returns, device=batch.rewards.device)
        evidence = ScoredRows.of(
            batch,
            scored.statistics,
            reference_log_probs=None if reading is None else reading.log_probs,
            full_kl=scored.statistics.get("full_kl"),
            values=values,
            final_values=final,
            greedy_returns=greedy,
        )
        if not self._targets.needs_exact_energy:
            return evidence
        exact = self._engine.module.trajectory_energies(
            batch.input_ids,
            batch.prompt_lengths,
            batch.response_mask,
            importance_weights=self._targets.energy_weights(evidence),
            temperature=self._temperature,
        )
        return replace(evidence, trajectory_energy=exact)

    def _rescored(self, step: _Step, update: UpdatePlan) -> list[Tensor]:
        """Log-probabilities [B, T] of the weights as they are now."""
        with torch.no_grad():
            return [self._score(micro, step).statistics["log_probs"] for micro in update.micro_batches]

    def _backward(
        self,
        step: _Step,
        scored: _Scored,
        targets: LossRows,
        normalizers: Normalizers,
        *,
        fresh: bool,
        selected: Tensor | None = None,
    ) -> None:
        """Add the gradient of this micro-batch's part of the loss; the parts of all ranks sum to the step's."""
        loss = self._objective.loss(
            scored.grid("log_probs"),
            scored.grid("entropy"),
            targets,
            normalizers,
            beta=step.beta,
            fresh=fresh,
            selected=selected,
            full_kl=None if scored.flat.full_kl is None else scored.grid("full_kl"),
        )
        measure_loss(step.meter, loss.value.detach(), loss.metrics, targets.loss_mask)
        self._engine.backward(loss.value * self._engine.world_size)

    def _account(self, step: _Step, scored: _Scored, targets: LossRows, *, counted: bool) -> None:
        measure_forward(
            step.meter, scored.batch, scored.statistics, targets.advantages, counted, version=step.plan.version
        )
        if counted and step.monitor is not None and scored.hidden is not None:
            step.monitor.add(scored.batch, scored.hidden, targets.advantages)

    def _monitor(self, plan: RankPlan) -> HeadExactMonitor | None:
        if not plan.head_exact:
            return None
        return HeadExactMonitor(self._engine.module.head, temperature=self._temperature)
