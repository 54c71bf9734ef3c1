"""Statistics of one trajectory's model tokens, as used by the training step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np


class RowKey(NamedTuple):
    """Identity of a trajectory in a run: its group, its rollout in the group, its branch of the rollout."""

    group: int
    sample: int
    branch: int


@dataclass(frozen=True, kw_only=True)
class TrajectoryTokens:
    """One trajectory that a step trained on. Arrays have one value for each of its ``K`` model tokens, in order.

    ``log_probs``, ``entropy`` and ``energy`` belong to the policy before the step's updates, at the temperature of the
    rollout. ``rewards`` include penalties for length and KL. ``advantages``, ``returns`` and ``baselines`` are those of
    the estimator. Optional fields are None if the step did not need them: without a rollout correction, a critic, a
    reference policy, or an estimator that uses the energy of the head's gradient.

    ``loss_weight`` is the factor of each token of ``loss_mask`` in the step's loss, before ``weights``: the loss is the
    sum of ``loss_weight * weights * loss of the token`` over the tokens of all trajectories, plus entropy and KL terms.
    """

    group: int
    sample: int
    branch: int
    parent: int  # branch from which this one forks; -1: none
    fork: int  # number of the parent's model tokens before the fork
    share: float  # share of the rollout's model tokens; 1 without branches
    update: int  # index of the update in the step that trained on it
    loss_weight: float
    log_probs: np.ndarray  # [K]
    entropy: np.ndarray  # [K] float16, nats
    energy: np.ndarray  # [K] ||e_y - p||^2
    rewards: np.ndarray  # [K]
    returns: np.ndarray  # [K]
    baselines: np.ndarray  # [K]
    advantages: np.ndarray  # [K]
    loss_mask: np.ndarray  # [K] bool, False if filters or the correction reject the token
    weights: np.ndarray | None = None  # [K] weights of the rollout correction, in loss and energies
    update_log_probs: np.ndarray | None = None  # [K] under the policy that was updated; None if equal to log_probs
    hidden_norm_squared: np.ndarray | None = None  # [K]
    reference_log_probs: np.ndarray | None = None  # [K]
    values: np.ndarray | None = None  # [K] values of the critic
    bootstrap_value: float | None = None  # value of the critic after the last token; 0 if the episode ended
    greedy_return: float | None = None  # return of the problem's greedy rollout
    trajectory_energy: float | None = None  # exact ||sum of the tokens' gradients||^2

    @property
    def key(self) -> RowKey:
        return RowKey(self.group, self.sample, self.branch)

    def __len__(self) -> int:
        return len(self.log_probs)

    def columns(self) -> dict[str, np.ndarray]:
        """Return the arrays that are not None by name, and ``update`` and ``loss_weight`` repeated for each token."""
        arrays = {name: getattr(self, name) for name in LISTS}
        numbers = {name: np.full(len(self), getattr(self, name)) for name in ("update", "loss_weight")}
        return {name: values for name, values in arrays.items() if values is not None} | numbers

    @property
    def ratios(self) -> np.ndarray:
        """Ratios [K] float64 of probabilities under the updated policy and the policy before the step."""
        if self.update_log_probs is None:
            return np.ones(len(self))
        return np.exp(np.clip(self.update_log_probs.astype(np.float64) - self.log_probs, -20.0, 20.0))

    @property
    def weighted_energy(self) -> np.ndarray:
        """Terms of the realized energy [K] float64: (rho_k loss_mask_k)^2 w_k."""
        energy = self.energy.astype(np.float64)
        if self.hidden_norm_squared is not None:
            energy = energy * self.hidden_norm_squared
        return energy * self._kept**2

    @property
    def gradient_power(self) -> np.ndarray:
        """Gradient power [K] float64: w_k times the squared factor of grad log p in the loss, at the first update.

        Its sum over the step is the diagonal proxy of the gradient's variance (docs/formulas.md 7), which omits the
        cross terms between tokens.
        """
        return power_of(self.energy, self.loss_weight, self.advantages, self._kept)

    @property
    def _kept(self) -> np.ndarray:
        """Weights of the correction [K] float64, 0 for tokens that are not in the loss."""
        return kept_of(self.loss_mask, self.weights)


def kept_of(loss_mask: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Return the weights of the correction [K] float64, 0 for tokens that are not in the loss."""
    mask = loss_mask.astype(np.float64)
    return mask if weights is None else mask * weights


def power_of(energy: np.ndarray, loss_weight: float, advantages: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Compute :attr:`TrajectoryTokens.gradient_power` [K] float64."""
    return energy * (loss_weight * advantages * kept) ** 2


LISTS = tuple(item.name for item in fields(TrajectoryTokens) if "ndarray" in str(item.type))
"""Names of the fields with one value per token."""

NUMBERS = tuple(item.name for item in fields(TrajectoryTokens) if item.name not in LISTS)
"""Names of the fields with a single value."""


def realized_energies(rows: Iterable[TrajectoryTokens]) -> Mapping[RowKey, np.ndarray]:
    """Compute W_k [K] float64 of each row: the sum of the weighted energies from the start of the rollout to token k.

    A branch starts with the energy of its parent's tokens before the fork, if the parent is in ``rows``.
    """
    by_key = {row.key: row for row in rows}
    energies: dict[RowKey, np.ndarray] = {}

    def of(row: TrajectoryTokens) -> np.ndarray:
        if row.key not in energies:
            parent = by_key.get(RowKey(row.group, row.sample, row.parent)) if row.parent >= 0 else None
            before = 0.0 if parent is None else float(of(parent)[row.fork - 1])
            energies[row.key] = before + np.cumsum(row.weighted_energy)
        return energies[row.key]

    for row in by_key.values():
        of(row)
    return energies
