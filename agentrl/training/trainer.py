"""One training step of one rank: statistics, advantages, loss, backward, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed
from torch import Tensor

from agentrl.algorithms import (
    AdvantageInputs,
    Advantages,
    aggregate,
    compute_advantages,
    policy_loss,
)
from agentrl.kernels import TokenStatistics
from agentrl.models.policy import scatter_tokens
from agentrl.training.batching import MicroBatch, RankPlan, UpdatePlan
from agentrl.training.deepspeed_engine import TrainingEngine
from agentrl.training.diagnostics import HeadExactMonitor, StepMeter
from agentrl.training.fidelity import check_fidelity
from agentrl.training.options import estimator_options, loss_options
from agentrl.training.settings import AlgorithmSettings
from agentrl.trajectory import Batch

_SEQUENCE_MODES = ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
_DETACHED = ("log_probs", "entropy", "sum_pi_squared", "energy", "hidden_norm_squared")


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """A micro-batch with what one forward says of it: each statistic [B, T], zero off model tokens."""

    batch: Batch
    flat: TokenStatistics
    hidden: Tensor | None
    statistics: dict[str, Tensor]  # detached

    def grid(self, name: str) -> Tensor:
        """A statistic [B, T] connected to the graph."""
        return scatter_tokens(getattr(self.flat, name), self.batch.response_mask)


class Trainer:
    """Executes plans. The same plan split over one rank or many, in few micro-batches or many, gives the same step."""

    def __init__(
        self,
        engine: TrainingEngine,
        settings: AlgorithmSettings,
        *,
        temperature: float,
        pad_id: int,
        fidelity_bound: float,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._temperature = temperature
        self._pad_id = pad_id
        self._fidelity_bound = settings.fidelity_bound or fidelity_bound
        self._estimator_options = estimator_options(settings)
        self._loss_options = loss_options(settings)

    def train(self, plan: RankPlan, *, before_update: Callable[[], None] | None = None) -> dict[str, float]:
        """Run one step's updates; returns metrics reduced over ranks. ``before_update`` sees the gradients."""
        self._engine.module.train()
        meter = StepMeter(self._engine.device)
        monitor = self._monitor(plan)
        if not plan.updates:
            norms = []
        elif plan.passes.one_forward:
            norms = [self._one_forward(plan, update, meter, monitor, before_update) for update in plan.updates]
        else:
            norms = self._two_passes(plan, meter, monitor, before_update)
        metrics = meter.reduce(self._engine.all_reduce)
        if norms:
            metrics["policy/gradient_norm"] = math.fsum(norms) / len(norms)
        if monitor is not None and plan.updates:
            metrics |= monitor.metrics(self._engine.all_reduce)
        metrics["policy/updates"] = len(norms)
        metrics["optimizer/learning_rate"] = self._engine.learning_rate
        return metrics

    # -- passes ---------------------------------------------------------------------------------------------------

    def _one_forward(
        self,
        plan: RankPlan,
        update: UpdatePlan,
        meter: StepMeter,
        monitor: HeadExactMonitor | None,
        before_update: Callable[[], None] | None,
    ) -> float:
        """Micro-batches of whole groups: the forward that is back-propagated also gives the advantages."""
        for micro in update.micro_batches:
            scored = self._score(micro, plan, keep_hidden=monitor is not None)
            advantages = self._advantages([scored], weighted=bool(plan.no_loss))
            self._account(micro, scored, advantages[0], meter, monitor)
            self._engine.backward(self._loss(scored, advantages[0], None, update, micro, meter))
        return self._update(meter, before_update)

    def _two_passes(
        self,
        plan: RankPlan,
        meter: StepMeter,
        monitor: HeadExactMonitor | None,
        before_update: Callable[[], None] | None,
    ) -> list[float]:
        """A statistics pass over the whole step, its results gathered over ranks, then the updates."""
        micros = [micro for update in plan.updates for micro in update.micro_batches]
        with torch.no_grad():
            scored = [self._score(micro, plan, keep_hidden=monitor is not None) for micro in micros]
            advantages = self._advantages_over_ranks(micros, scored, weighted=bool(plan.no_loss))
        for micro, item, own in zip(micros, scored, advantages, strict=True):
            self._account(micro, item, own, meter, monitor)
        norms = []
        position = 0
        for update in plan.updates:
            for micro in update.micro_batches:
                fresh = self._score(micro, plan, keep_hidden=False)
                old = scored[position].statistics["log_probs"]
                self._engine.backward(self._loss(fresh, advantages[position], old, update, micro, meter))
                position += 1
            norms.append(self._update(meter, before_update))
        return norms

    def _update(self, meter: StepMeter, before_update: Callable[[], None] | None) -> float:
        check_fidelity(meter.fidelity(self._engine.all_reduce), self._fidelity_bound)
        if before_update is not None:
            before_update()
        return self._engine.step()

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _score(self, micro: MicroBatch, plan: RankPlan, *, keep_hidden: bool) -> _Scored:
        batch = Batch.from_trajectories(micro.trajectories, pad_id=self._pad_id, no_loss=plan.no_loss)
        batch = batch.to(self._engine.device)
        flat, hidden = self._engine(
            batch.input_ids,
            batch.prompt_lengths,
            batch.response_ids,
            batch.response_mask,
            temperature=self._temperature,
            keep_hidden=keep_hidden,
        )
        detached = {name: scatter_tokens(getattr(flat, name).detach(), batch.response_mask) for name in _DETACHED}
        return _Scored(batch=batch, flat=flat, hidden=hidden, statistics=detached)

    def _advantages(self, scored: Sequence[_Scored], *, weighted: bool) -> list[Advantages]:
        """Advantages of micro-batches that hold whole groups among them, cut back into micro-batches.

        ``weighted``: some rows are out of the loss, so the loss mask enters the energies (FORMULAS: section 1, rule 4).
        """
        if len(scored) == 1:
            return [self._estimate(_inputs(scored[0], weighted))]
        steps = max(item.batch.response_ids.shape[1] for item in scored)
        parts = [vars(_inputs(item, weighted)) for item in scored]
        joined = {
            name: torch.cat([_widened(part[name], steps) for part in parts])
            for name in parts[0]
            if parts[0][name] is not None
        }
        whole = self._estimate(AdvantageInputs(**joined))
        return _cut(whole, scored)

    def _advantages_over_ranks(
        self, micros: Sequence[MicroBatch], scored: Sequence[_Scored], *, weighted: bool
    ) -> list[Advantages]:
        """As :meth:`_advantages`, with every rank's rows: groups may lie across micro-batches and ranks."""
        real = [item for micro, item in zip(micros, scored, strict=True) if not micro.dummy]
        if self._engine.world_size == 1:
            estimated = iter(self._advantages(real, weighted=weighted))
        else:
            shared: list[list[_Scored]] = [[] for _ in range(self._engine.world_size)]
            torch.distributed.all_gather_object(shared, [_portable(item) for item in real])
            everyone = [item for rank in shared for item in rank]
            start = sum(len(rank) for rank in shared[: self._engine.rank])
            estimated = iter(self._advantages(everyone, weighted=weighted)[start : start + len(real)])
        return [
            _no_advantages(item.batch) if micro.dummy else next(estimated)
            for micro, item in zip(micros, scored, strict=True)
        ]

    def _estimate(self, inputs: AdvantageInputs) -> Advantages:
        return compute_advantages(self._settings.estimator, inputs, **self._estimator_options)

    def _loss(
        self,
        scored: _Scored,
        advantages: Advantages,
        old_log_probs: Tensor | None,
        update: UpdatePlan,
        micro: MicroBatch,
        meter: StepMeter,
    ) -> Tensor:
        """This micro-batch's part of the loss; the parts of all ranks sum to the step's."""
        mask = scored.batch.loss_mask & (not micro.dummy)
        loss = policy_loss(
            self._settings.loss,
            log_probs=scored.grid("log_probs"),
            old_log_probs=old_log_probs,
            advantages=advantages.advantages,
            loss_mask=mask,
            **self._loss_options,
        )
        value = self._aggregate(loss.per_token, mask, update)
        if self._settings.entropy_coefficient:
            value = value - self._settings.entropy_coefficient * self._aggregate(scored.grid("entropy"), mask, update)
        meter.add_loss(value.detach(), loss.metrics, mask)
        return value * self._engine.world_size

    def _aggregate(self, per_token: Tensor, mask: Tensor, update: UpdatePlan) -> Tensor:
        mode = self._settings.aggregation
        normalizer = update.sequences if mode in _SEQUENCE_MODES else update.tokens
        return aggregate(
            per_token,
            mask,
            mode,
            normalizer=None if mode == "token_sum" else normalizer,
            length=self._settings.norm_length if mode == "seq_mean_token_sum_norm" else None,
        )

    def _account(
        self,
        micro: MicroBatch,
        scored: _Scored,
        advantages: Advantages,
        meter: StepMeter,
        monitor: HeadExactMonitor | None,
    ) -> None:
        if micro.dummy:
            return
        meter.add_tokens(scored.batch, scored.statistics, advantages.advantages)
        if monitor is not None and scored.hidden is not None:
            monitor.add(scored.batch, scored.hidden, advantages.advantages)

    def _monitor(self, plan: RankPlan) -> HeadExactMonitor | None:
        if not plan.head_exact:
            return None
        return HeadExactMonitor(self._engine.module.head, temperature=self._temperature)


def _inputs(scored: _Scored, weighted: bool) -> AdvantageInputs:
    batch, statistics = scored.batch, scored.statistics
    return AdvantageInputs(
        rewards=batch.rewards,
        response_mask=batch.response_mask,
        groups=batch.groups,
        log_probs=statistics["log_probs"],
        sum_pi_squared=statistics["sum_pi_squared"],
        token_energy=statistics["energy"],
        hidden_norm_squared=statistics["hidden_norm_squared"],
        importance_weights=batch.loss_mask.to(batch.rewards.dtype) if weighted else None,
    )


def _portable(item: _Scored) -> _Scored:
    """Without the graph and on the CPU, for the trip to other ranks."""
    empty = TokenStatistics(**{name: torch.empty(0) for name in _DETACHED})
    statistics = {name: value.cpu() for name, value in item.statistics.items()}
    return _Scored(batch=item.batch.to("cpu"), flat=empty, hidden=None, statistics=statistics)


def _widened(value: Tensor, steps: int) -> Tensor:
    """[B, T] padded with zeros to [B, steps]; [B] as it is."""
    return value if value.dim() == 1 else torch.nn.functional.pad(value, (0, steps - value.shape[1]))


def _cut(whole: Advantages, scored: Sequence[_Scored]) -> list[Advantages]:
    parts = []
    row = 0
    for item in scored:
        rows, steps = item.batch.response_ids.shape
        device = item.batch.rewards.device
        parts.append(
            Advantages(**{name: value[row : row + rows, :steps].to(device) for name, value in vars(whole).items()})
        )
        row += rows
    return parts


def _no_advantages(batch: Batch) -> Advantages:
    zeros = torch.zeros_like(batch.rewards)
    return Advantages(advantages=zeros, returns=zeros, baselines=zeros)
