"""What a step measures while it trains, summed over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms import HeadVarianceAccumulator, diagonal_proxy, mismatch_metrics
from agentrl.models.head import FusedHead
from agentrl.trajectory import Batch
from agentrl.weights.sources import gathered

Reduce = Callable[[Tensor], Tensor]

# Sums over model tokens, then sums over trajectories, then the counts that turn them into means.
_TOKEN_KEYS = (
    "policy/entropy",
    "policy/sum_pi_squared",
    "policy/energy",
    "policy/kl_engine_k1",
    "policy/kl_engine_k3",
    "policy/engine_abs_diff",
)
_FROM_MISMATCH = {
    "policy/kl_engine_k1": "kl_k1",
    "policy/kl_engine_k3": "kl_k3",
    "policy/engine_abs_diff": "mean_abs_difference",
}
_ROW_KEYS = ("variance/diagonal_proxy", "policy/log_ppl_gap")
_LOSS_KEYS = ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction", "approx_kl", "ratio_mean")


class StepMeter:
    """Sums of one rank; :meth:`reduce` gives the averages over all ranks."""

    def __init__(self, device: torch.device) -> None:
        names = (*_TOKEN_KEYS, *_ROW_KEYS, "tokens", "rows", "policy/loss", *_LOSS_KEYS, "loss_tokens")
        self._index = {name: place for place, name in enumerate(names)}
        self._sums = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._loss_keys: set[str] = set()  # those that the loss reports

    def add_tokens(self, batch: Batch, statistics: dict[str, Tensor], advantages: Tensor) -> None:
        """Account for the first forward over a micro-batch's trajectories."""
        mask = batch.response_mask
        tokens = mask.sum()
        self._add("tokens", tokens)
        self._add("rows", torch.tensor(len(mask)))
        for name in ("entropy", "sum_pi_squared", "energy"):
            self._add(f"policy/{name}", torch.where(mask, statistics[name].double(), 0.0).sum())
        mismatch = mismatch_metrics(statistics["log_probs"], batch.rollout_log_probs, mask)
        for name, key in _FROM_MISMATCH.items():
            self._add(name, mismatch[key] * tokens)
        self._add("policy/log_ppl_gap", mismatch["log_ppl_gap"] * len(mask))
        self._add("variance/diagonal_proxy", diagonal_proxy(statistics["energy"], advantages, mask).sum())

    def add_loss(self, value: Tensor, metrics: dict[str, Tensor], mask: Tensor) -> None:
        """Account for a micro-batch's part of the loss."""
        tokens = mask.sum()
        self._add("policy/loss", value)
        self._add("loss_tokens", tokens)
        for name in _LOSS_KEYS:
            if name in metrics:
                self._loss_keys.add(name)
                self._add(name, metrics[name] * tokens)

    def fidelity(self, reduce: Reduce) -> float:
        """Mean |log-prob difference| to the engine over all ranks' tokens so far."""
        pair = torch.stack([self._get("policy/engine_abs_diff"), self._get("tokens")])
        difference, tokens = reduce(pair).tolist()
        return difference / max(tokens, 1.0)

    def reduce(self, reduce: Reduce) -> dict[str, float]:
        """Averages over tokens, trajectories and the loss's tokens of all ranks; none of them without a token."""
        sums = dict(zip(self._index, reduce(self._sums.clone()).tolist(), strict=True))
        if not sums["tokens"]:
            return {"policy/tokens": 0.0}
        metrics = {name: sums[name] / sums["tokens"] for name in _TOKEN_KEYS}
        metrics |= {name: sums[name] / sums["rows"] for name in _ROW_KEYS}
        metrics |= {f"policy/{name}": sums[name] / max(sums["loss_tokens"], 1.0) for name in sorted(self._loss_keys)}
        metrics["policy/loss"] = sums["policy/loss"]
        metrics["policy/tokens"] = sums["tokens"]
        return metrics

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[self._index[name]] += value.to(self._sums)

    def _get(self, name: str) -> Tensor:
        return self._sums[self._index[name]]


class HeadExactMonitor:
    """The exact variance of the head's gradient with groups as units (FORMULAS: section 7), over all ranks."""

    def __init__(self, head: FusedHead, *, temperature: float) -> None:
        """Collective under ZeRO-3, where the head's weight is gathered."""
        with gathered(head) as (weight, bias):
            self._accumulator = HeadVarianceAccumulator(weight, bias=bias, temperature=temperature)

    def add(self, batch: Batch, hidden: Tensor, advantages: Tensor) -> None:
        """Whole groups: ``hidden`` [N, D] of the model tokens in row-major order."""
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        self._accumulator.update(
            hidden=hidden,
            targets=batch.response_ids[rows, columns],
            advantages=advantages[rows, columns],
            rows=rows,
            groups=batch.groups,
        )

    def metrics(self, reduce: Reduce) -> dict[str, float]:
        """P, S and Var over the groups of all ranks. Collective."""
        own = self._accumulator
        total: Any = reduce(own.gradient_sum)
        power, groups = reduce(torch.stack([own.power_sum, torch.tensor(float(own.groups)).to(own.power_sum)])).tolist()
        if not groups:
            return {}
        mean_power = power / groups
        signal = float(total.double().square().sum()) / groups**2
        metrics = {"variance/head_exact_P": mean_power, "variance/head_exact_S": signal}
        if groups > 1:
            metrics["variance/head_exact_var"] = (mean_power - signal) / (groups - 1)
        return metrics
