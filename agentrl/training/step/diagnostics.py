"""Metrics of a step, the fidelity gate, and the recorder of token statistics.

The gate stops a run in which engine and trainer compute different policies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms import HeadVarianceAccumulator, diagonal_proxy, kl_penalty, mismatch_metrics
from agentrl.batch import Batch
from agentrl.errors import AgentRLError
from agentrl.models.policy import PolicyModel
from agentrl.telemetry.tokens import TrajectoryTokens
from agentrl.training.engine.collectives import MetricAccumulator
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.weights.sources import gathered_linear
from agentrl.weights.verify import NOISE_LIMITS, noise_bound

Reduce = Callable[[Tensor], Tensor]

FIDELITY_FLOORS = {"float32": 1e-3, "bfloat16": 3e-2}
"""Smallest fidelity bound (nats) by dtype of the weights, even if the difference at the start was smaller."""


def fidelity_bound(dtype: str, noise: float) -> float:
    """Return the largest allowed mean absolute difference (nats) between engine and trainer in a step.

    ``noise`` is the difference that was measured at the start with equal weights. It is several times larger for models
    with experts, because rounding can change which expert computes a token. In float32, the bound also applies to each
    trajectory's mean.

    >>> fidelity_bound("bfloat16", 0.005), fidelity_bound("bfloat16", 0.03), fidelity_bound("bfloat16", 0.064)
    (0.03, 0.12, 0.15)
    """
    return noise_bound(noise, floor=FIDELITY_FLOORS[dtype], limit=NOISE_LIMITS[dtype])


def record_forward_metrics(meter: MetricAccumulator, batch: Batch, *, version: int) -> None:
    """Record metrics of a micro-batch's first forward pass, which uses the weights of ``version``.

    ``policy/engine_abs_diff`` covers the tokens of this version, except turns during which the weights changed, because
    their keys and values may come from two versions. ``policy/engine_abs_diff_max`` is the mean of the trajectory with
    the largest mean.
    """
    mask, statistics = batch.counted_mask, batch.computed_statistics
    tokens, trajectories = mask.sum(), mask.any(-1).sum()
    meter.add_total("policy/tokens", tokens)
    for name in ("entropy", "sum_pi_squared", "energy"):
        meter.add_mean(f"policy/{name}", _mean(getattr(statistics, name), mask), tokens)
    mismatch = mismatch_metrics(statistics.log_probs, batch.rollout_log_probs, mask)
    meter.add_mean("policy/kl_engine_k1", mismatch["kl_k1"], tokens)
    meter.add_mean("policy/kl_engine_k3", mismatch["kl_k3"], tokens)
    fresh = mask & (batch.versions == version) & ~mixed_version_turn_mask(batch.versions)
    difference = torch.where(fresh, (statistics.log_probs - batch.rollout_log_probs).abs().double(), 0.0)
    sums, counts = difference.sum(-1), fresh.sum(-1)  # [B]
    meter.add_mean("policy/engine_abs_diff", sums.sum() / counts.sum().clamp(min=1), counts.sum())
    meter.add_largest("policy/engine_abs_diff_max", (sums / counts.clamp(min=1)).max(), counts.sum())
    meter.add_mean("policy/log_ppl_gap", mismatch["log_ppl_gap"], trajectories)
    # The gradient of a forked rollout contains each token with the weight of its edge.
    proxies = diagonal_proxy(statistics.energy, batch.advantages * batch.path_weights[:, None], mask)
    rollouts = torch.where(mask.any(-1), batch.weights, 0.0).double().sum()
    meter.add_mean("variance/total_power", proxies.sum() / torch.where(rollouts > 0, rollouts, 1.0), rollouts)


def record_divergences(meter: MetricAccumulator, batch: Batch, settings: ObjectiveSettings) -> None:
    """Record the mean KL penalty for any ``kl.placement``, and the mean divergence from the teacher.

    For several teachers, also record the mean of each source in ``teacher.by_source``.
    """
    mask, statistics = batch.response_mask, batch.computed_statistics
    for name, others, estimator, full in (
        ("kl/mean", batch.reference_log_probs, settings.kl.resolved_estimator, statistics.full_kl),
        ("teacher/divergence", batch.teacher_log_probs, settings.teacher.estimator, statistics.teacher_divergence),
    ):
        if others is not None:
            penalty = kl_penalty(batch.log_probs, others, estimator, mask=mask, full=full).double()
            parts = {name: mask}
            for source in settings.teacher.by_source if name == "teacher/divergence" else ():
                chosen = torch.tensor([one == source for one in batch.sources], device=mask.device)
                parts[f"{name}/{source}"] = mask & chosen[:, None]
            for key, part in parts.items():
                tokens = part.sum()
                meter.add_mean(key, (penalty * part).sum() / tokens.clamp(min=1), tokens * int(batch.counted))


def variance_proxies(*, total_power: float, gradient_norm: float, trajectories: float) -> dict[str, float]:
    """Return a step's signal strength S = ||g||^2 and pure noise (P - S) / (N - 1), as published.

    The total power P is a norm with respect to the logits. S is a norm with respect to the parameters, on the scale of
    the loss. :class:`HeadExactMonitor` measures P and S in one space. With fewer than two trajectories, pure noise is
    omitted.
    """
    signal = gradient_norm * gradient_norm  # ** raises OverflowError for large norms
    if trajectories < 2:
        return {"variance/signal_strength": signal}
    noise = (total_power - signal) / (trajectories - 1)
    return {"variance/signal_strength": signal, "variance/pure_noise": noise}


def mixed_version_turn_mask(versions: Tensor) -> Tensor:
    """Return a mask [B, T] of turns sampled by several versions. ``versions`` [B, T] is -1 outside model tokens.

    >>> mixed_version_turn_mask(torch.tensor([[0, 0, -1, 0, 1, -1, 1, -1]])).int().tolist()
    [[0, 0, 0, 1, 1, 0, 0, 0]]
    """
    before = torch.nn.functional.pad(versions, (1, 0), value=-1)[:, :-1]
    inside = (versions >= 0) & (before >= 0)
    turns = (~inside).cumsum(-1)  # [B, T] the same number for all tokens of a turn
    changes = torch.zeros_like(versions).scatter_add(1, turns - 1, (inside & (versions != before)).to(versions.dtype))
    return changes.gather(1, turns - 1) > 0


def record_algorithm_metrics(
    meter: MetricAccumulator, prefix: str, metrics: dict[str, Tensor], weight: Tensor | float
) -> None:
    """Record an algorithm's metrics over ``weight`` tokens.

    Names ending in ``_max`` or ``_min`` are reduced by max or min, and all other metrics by the mean.
    """
    for name, number in metrics.items():
        if name.endswith("_max"):
            meter.add_largest(f"{prefix}/{name}", number, weight)
        elif name.endswith("_min"):
            meter.add_smallest(f"{prefix}/{name}", number, weight)
        elif name != "tokens":
            meter.add_mean(f"{prefix}/{name}", number, weight)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values.double(), 0.0).sum() / mask.sum().clamp(min=1)


class HeadExactMonitor:
    """Exact variance of the head's gradient with groups as units, over all ranks (docs/reference/formulas.md 7)."""

    def __init__(self, policy: PolicyModel, *, temperature: float) -> None:
        """Copy the head's weight. Collective under ZeRO-3, where the weight is gathered."""
        self._policy = policy
        logit_map = policy.head.logit_map
        with gathered_linear(policy.head) as (weight, bias):
            self._accumulator = HeadVarianceAccumulator(
                weight, bias=bias, temperature=logit_map.head_temperature(temperature), cap=logit_map.output_cap
            )

    def add_groups(self, batch: Batch, hidden: Tensor) -> None:
        """Add whole groups. ``hidden`` [N, D] holds the hidden states of the model tokens in row-major order.

        Under sequence parallelism, ``hidden`` holds only the states of this rank's tokens.

        A group's gradient is the mean over its rollouts. The tokens of a forked rollout are weighted as in the
        rollout's tree. Sequence-parallel ranks exchange their parts of the head's gradient, but no hidden states.
        """
        sequence = self._policy.sequence
        _, labels, sizes = torch.unique(batch.groups, return_inverse=True, return_counts=True)
        rollouts = batch.weights.new_zeros(len(sizes)).index_add_(0, labels, batch.weights)
        factors = batch.path_weights * (sizes / rollouts)[labels]  # the accumulator divides by the number of rows
        local = self._policy.local_token_indices(batch.row, batch.rows, batch.columns)
        self._accumulator.update(
            hidden=hidden if local is None else hidden[: len(local)],
            targets=batch.row.response_token_ids(batch.rows, batch.columns),
            advantages=(batch.advantages * factors[:, None])[batch.rows, batch.columns],
            rows=batch.rows,
            groups=batch.groups,
            token_indices=local,
            support=batch.support,
            over_ranks=None if sequence is None else sequence.all_reduce,
        )

    def metrics_over_ranks(self, reduce: Reduce) -> dict[str, float]:
        """Return P, S and Var over the groups of all ranks. Collective, and called once, after all groups are added."""
        sums = self._accumulator
        sums.gradient_sum = reduce(sums.gradient_sum)
        count = torch.tensor(float(sums.groups)).to(sums.power_sum)
        sums.power_sum, groups = reduce(torch.stack([sums.power_sum, count]))
        sums.groups = int(groups)
        if not sums.groups:
            return {}
        head = sums.result()
        metrics = {"variance/head_exact_total_power": head.power, "variance/head_exact_signal_strength": head.signal}
        return metrics if head.variance is None else metrics | {"variance/head_exact_pure_noise": head.variance}


class FidelityError(AgentRLError):
    """Training log-probabilities differ from the engine's on tokens that the trained version sampled."""


def check_fidelity(mean_difference: float, bound: float, *, worst: float | None = None) -> None:
    """Raise FidelityError if the mean absolute difference of log-probabilities exceeds ``bound`` (nats).

    ``worst`` is the largest mean of one trajectory; None if rounding alone may exceed the bound.
    """
    for difference, where in ((mean_difference, "on average"), (worst, "on average over one trajectory")):
        if difference is not None and not difference <= bound:  # NaN included
            raise FidelityError(
                f"the training forward and the engine disagree on the log-probability of sampled tokens by "
                f"{difference:.3g} nats {where} (bound {bound:g}). Possible causes: a different temperature, template, "
                "tokenizer or dtype on one side, or weights that were not transferred. The step was not applied."
            )


class TokenStatisticsRecorder:
    """Collects one rank's rows of one step, in training order, without recomputing anything."""

    def __init__(self, *, hidden_norms: bool = False) -> None:
        """With ``hidden_norms``, also record the norms of hidden states, which the estimator's energies need."""
        self._hidden_norms = hidden_norms
        self.rows: list[TrajectoryTokens] = []

    def add_micro_batch(self, batch: Batch, *, factors: Tensor, update: int, update_log_probs: Tensor | None) -> None:
        """Copy the statistics of a micro-batch's model tokens to the CPU.

        ``factors`` [B] weight the tokens in the loss. ``update_log_probs`` [B, T] are from the forward pass of
        this update, if an earlier update of this step has changed the policy since scoring.
        """
        mask = batch.counted_mask
        ends = mask.sum(-1).cumsum(-1).tolist()
        columns = {
            name: values[mask].cpu().numpy()
            for name, values in self._token_values(batch, update_log_probs).items()
            if values is not None
        }
        columns["entropy"] = columns["entropy"].astype(np.float16)
        numbers = {
            name: values.tolist() for name, values in _trajectory_values(batch, factors).items() if values is not None
        }
        for index, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            row: dict[str, object] = {name: values[index] for name, values in numbers.items()}
            row |= {name: values[start:end] for name, values in columns.items()}
            self.rows.append(TrajectoryTokens(update=update, **row))  # type: ignore[arg-type]

    def _token_values(self, batch: Batch, update_log_probs: Tensor | None) -> dict[str, Tensor | None]:
        """Return values [B, T] by field of TrajectoryTokens."""
        statistics, estimate = batch.computed_statistics, batch.computed_estimate
        return {
            "log_probs": statistics.log_probs,
            "entropy": statistics.entropy,
            "energy": statistics.energy,
            "rewards": batch.rewards,
            "returns": estimate.returns,
            "baselines": estimate.baselines,
            "advantages": estimate.advantages,
            "loss_mask": batch.trained_mask,
            "weights": batch.correction_weights,
            "update_log_probs": update_log_probs,
            "hidden_norm_squared": statistics.hidden_norm_squared if self._hidden_norms else None,
            "reference_log_probs": batch.reference_log_probs,
            "values": batch.values,
        }


def _trajectory_values(batch: Batch, factors: Tensor) -> dict[str, Tensor | None]:
    """Return values [B] by field of TrajectoryTokens."""
    return {
        "group": batch.groups,
        "sample": batch.samples,
        "branch": batch.branches,
        "parent": batch.parents,
        "fork": batch.forks,
        "share": batch.weights,
        "path_weight": batch.path_weights,
        "loss_weight": factors,
        "bootstrap_value": batch.bootstrap_values,
        "greedy_return": batch.greedy_returns,
        "trajectory_energy": batch.trajectory_energy,
    }
