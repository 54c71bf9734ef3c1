"""Token energies (docs/reference/formulas.md 3) and energy-weighted baselines: group means computed per column."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.estimators.inputs import EstimatorInputs
from agentrl.algorithms.options import MissingInputError, check_choice

ENERGIES = ("logit_proxy", "length", "head_exact")


def logit_proxy_energy(log_probs: Tensor, sum_pi_squared: Tensor) -> Tensor:
    """Compute w = ||e_y - p||^2 = (1 - p)^2 + sum_{v != y} p(v)^2 for inputs of any shape.

    w is not negative. (1 - p)^2 is accurate near p = 1. Only the kernel avoids the cancellation in sum p^2 - p^2, so
    prefer its `energy`.

    >>> round(logit_proxy_energy(torch.tensor(0.75).log(), torch.tensor(0.625)).item(), 6)
    0.125
    """
    others = (sum_pi_squared - (2 * log_probs).exp()).clamp(min=0.0)
    return torch.expm1(log_probs).square() + others


def token_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    """Compute w_t [B, T] in float64 for the kind `energy`. It is 0 outside the mask.

    `logit_proxy`: the kernel's `token_energy`, or computed from log_probs and sum_pi_squared. `head_exact`: the proxy
    times ||h||^2. The factor 1 / tau^2 of docs/reference/formulas.md 3 is omitted, because it cancels in every
    baseline. `length`: 1. Raises MissingInputError for a missing input and InvalidInputError for an invalid value.
    """
    check_choice("energy", energy, ENERGIES)
    if energy == "length":
        return inputs.mask.double()
    proxy = _proxy_energy(inputs, energy)
    if energy == "logit_proxy":
        return proxy
    return proxy.mul_(_read_energy_input(inputs, "hidden_norm_squared", energy, negative=False))


def importance_weighted_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    """Compute (rho_t loss_mask_t)^2 w_t on model tokens, [B, T]. Its running sum is the realized energy W_k.

    The ratio is inside that sum (arXiv 2602.07078, the line before Eq. 60).
    """
    energies = token_energy(inputs, energy)
    ratio = inputs.masked_importance_weights
    return energies if ratio is None else energies.mul_(ratio.square())


def _proxy_energy(inputs: EstimatorInputs, energy: str) -> Tensor:
    if inputs.source.token_energy is not None:
        return _read_energy_input(inputs, "token_energy", energy, negative=False)
    if inputs.source.log_probs is None and inputs.source.sum_pi_squared is None:
        raise MissingInputError(
            f"energy={energy!r} needs token_energy (TokenStatistics.energy of the forward pass), or log_probs and "
            "sum_pi_squared; energy='length' needs no input"
        )
    log_probs = _read_energy_input(inputs, "log_probs", energy)
    sum_pi_squared = _read_energy_input(inputs, "sum_pi_squared", energy)
    return logit_proxy_energy(log_probs, sum_pi_squared).masked_fill_(~inputs.mask, 0.0)


def _read_energy_input(inputs: EstimatorInputs, name: str, energy: str, *, negative: bool = True) -> Tensor:
    if getattr(inputs.source, name) is None:
        raise MissingInputError(
            f"energy={energy!r} needs {name} (TokenStatistics.{name} of the policy's forward); energy='length' "
            "needs no input"
        )
    return inputs.token_field(name, allow_negative=negative)


TAILS = ("zero", "carry", "self")


@dataclass(frozen=True, kw_only=True)
class GroupedReturns:
    """J groups of N rows, laid out so that the entries of a group in one column share a baseline.

    `valid` marks existing entries. For these, `returns` is G and `weights` is W + eps.
    """

    returns: Tensor  # [J, N, C] float64
    weights: Tensor  # [J, N, C] float64, positive where valid
    valid: Tensor  # [J, N, C] bool
    sizes: Tensor  # [J] number of rows of each group, at most N


def column_baselines(columns: GroupedReturns, *, tail: str, leave_one_out: bool) -> Tensor:
    """Compute b = sum W G / sum W over the group's entries of a column: [J, N, C], or [J, 1, C] if all rows share it.

    With `leave_one_out`, every entry is excluded from its own sums. If an entry is alone in its column, `tail`
    sets b: `zero` is 0, `self` is G, and `carry` is the row's last baseline in a column with two or more entries, or 0
    without such a column. A group with one row has baseline 0 everywhere. Values outside the mask are arbitrary.
    """
    sums = _ColumnSums.of(columns)
    shared = sums.column_means_of_other_rows() if leave_one_out else sums.column_means()
    baselines = _apply_tail(columns, sums.count, shared, tail)
    return baselines.masked_fill_((columns.sizes == 1)[:, None, None], 0.0)


@dataclass(frozen=True, kw_only=True)
class _ColumnSums:
    """Group sums per column. Returns are relative to the column's minimum, so the mean of equal returns is exact."""

    weights: Tensor  # [J, N, C], 0 where invalid
    above: Tensor  # [J, N, C] G - lowest, 0 where invalid
    lowest: Tensor  # [J, 1, C], 0 in empty columns
    count: Tensor  # [J, 1, C] contributors
    valid: Tensor  # [J, N, C]

    @classmethod
    def of(cls, columns: GroupedReturns) -> _ColumnSums:
        invalid = ~columns.valid
        lowest = columns.returns.masked_fill(invalid, torch.inf).amin(1, keepdim=True)
        lowest = lowest.masked_fill_(lowest == torch.inf, 0.0)
        return cls(
            weights=columns.weights.masked_fill(invalid, 0.0),
            above=(columns.returns - lowest).masked_fill_(invalid, 0.0),
            lowest=lowest,
            count=columns.valid.sum(1, keepdim=True),
            valid=columns.valid,
        )

    def column_means(self) -> Tensor:
        """Return the weighted mean of every column, [J, 1, C]; 0 in empty columns."""
        total = self.weights.sum(1, keepdim=True).masked_fill_(self.count == 0, 1.0)
        return self.lowest + (self.weights * self.above).sum(1, keepdim=True) / total

    def column_means_of_other_rows(self) -> Tensor:
        """Return the weighted mean over the other rows, [J, N, C]; undefined if there are no other rows.

        Subtracting a row from the total cancels if the row dominates it, so the sums without the heaviest row are
        computed separately.
        """
        weighted = self.weights * self.above
        heaviest = self.weights.max(1, keepdim=True).indices
        total = self._sums_without_row(self.weights, heaviest)
        moment = self._sums_without_row(weighted, heaviest)
        others = self.count - self.valid.long()
        return self.lowest + moment / total.masked_fill_(others == 0, 1.0)

    @staticmethod
    def _sums_without_row(terms: Tensor, heaviest: Tensor) -> Tensor:
        rest = terms.scatter(1, heaviest, 0.0).sum(1, keepdim=True)
        return (terms.sum(1, keepdim=True) - terms).scatter_(1, heaviest, rest)


def _apply_tail(columns: GroupedReturns, count: Tensor, shared: Tensor, tail: str) -> Tensor:
    alone = count == 1
    if tail == "zero":
        return shared.masked_fill(alone, 0.0)
    if tail == "self":
        return torch.where(alone, columns.returns, shared)
    position = torch.arange(shared.shape[-1], device=shared.device)
    last = torch.where(count >= 2, position, -1)  # [J, 1, C]
    if last.shape[-1]:
        last = last.cummax(-1).values  # the last column so far with two or more contributors
    carried = shared.gather(-1, last.clamp(min=0).expand_as(shared)).masked_fill_(last < 0, 0.0)
    return torch.where(alone, carried, shared)
