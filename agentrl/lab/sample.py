"""Token statistics and exact energies of a problem's trajectories, and estimator inputs built from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, rollout_correction
from agentrl.batch import Batch, MicroBatch, scatter_tokens
from agentrl.kernels import TokenStatistics
from agentrl.kernels.attention import pack_padded
from agentrl.models.policy import PolicyModel
from agentrl.trajectory import Group

_TOKEN_VALUES = ("log_probs", "sum_pi_squared", "token_energy", "hidden_norm_squared")


@dataclass(frozen=True, kw_only=True)
class ProblemSample:
    """S trajectories of one problem. [S, T] tensors are 0 except on model tokens."""

    name: str
    batch: Batch
    log_probs: Tensor  # [S, T]
    sum_pi_squared: Tensor  # [S, T]
    token_energy: Tensor  # [S, T] w_t
    hidden_norm_squared: Tensor  # [S, T]
    cross_energy: Tensor  # [S, T] sum_{k <= t} max(0, <delta_k, delta_t>)
    trajectory_energy: Tensor  # [S] exact
    greedy_return: float
    distinct_response_index: Tensor  # [S] index of the first trajectory with equal tokens; only rewards may differ
    importance_weights: Tensor | None = None  # [S, T] rho, 0 if rejected; None if sampled by the policy itself

    @property
    def size(self) -> int:
        return self.batch.rewards.shape[0]

    @property
    def returns(self) -> Tensor:
        """The trajectories' returns [S]."""
        return self.batch.rewards.sum(-1)

    @property
    def lengths(self) -> Tensor:
        """Numbers of model tokens [S] of the trajectories."""
        return self.batch.response_mask.sum(-1)


def reason_unusable(group: Group, *, size: int) -> str | None:
    """Return the reason why a problem cannot be measured with ``size`` trajectories, or None."""
    if len(group.trajectories) < size:
        return "too few usable trajectories"
    if len({item.reward for item in group.trajectories[:size]}) < 2:
        return "equal rewards"
    return None


def build_sample(
    policy: PolicyModel,
    group: Group,
    *,
    temperature: float,
    budget: int,
    greedy_return: float,
    correction: Mapping[str, Any] | None = None,
) -> ProblemSample:
    """Compute statistics and exact energies of a group's trajectories, in micro-batches of at most ``budget`` tokens.

    ``correction`` contains options of `rollout_correction` if another policy sampled the trajectories. Every energy is
    then multiplied by the importance weights.
    """
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(group.trajectories))
    alike = _first_equal_rows(batch, weighted=correction is not None)
    distinct, inverse = alike.unique(return_inverse=True)
    unique = Batch.from_micro_batch(
        MicroBatch.from_trajectories([group.trajectories[row] for row in distinct.tolist()])
    )
    blocks = list(row_slices_within_budget(unique, budget))
    tokens = {name: torch.zeros(unique.response_mask.shape) for name in _TOKEN_VALUES}
    for rows in blocks:
        mask = unique.response_mask[rows]
        with torch.no_grad():
            statistics, _ = _statistics_and_hidden_states(policy, unique, rows, temperature)
        values_by_name = {**vars(statistics), "token_energy": statistics.energy}
        for name, values in tokens.items():
            values[rows] = scatter_tokens(values_by_name[name].float(), mask)
    tokens = {name: values[inverse] for name, values in tokens.items()}
    ratios = None
    if correction is not None:
        corrected = rollout_correction(tokens["log_probs"], batch.rollout_log_probs, batch.response_mask, **correction)
        ratios = corrected.importance_weights
    of_distinct = None if ratios is None else ratios[distinct]
    energies = [_trajectory_energies(policy, unique, rows, temperature, of_distinct) for rows in blocks]
    cross_energies = [_cross_energies(policy, unique, rows, temperature, of_distinct) for rows in blocks]
    return ProblemSample(
        name=group.problem.id,
        batch=batch,
        trajectory_energy=torch.cat(energies)[inverse],
        cross_energy=torch.cat(cross_energies)[inverse],
        greedy_return=greedy_return,
        distinct_response_index=alike,
        importance_weights=ratios,
        **tokens,
    )


def _first_equal_rows(batch: Batch, *, weighted: bool) -> Tensor:
    """Return, for each row, the index [S] of the first row with the same tokens and origins.

    If ``weighted``, the sampling probabilities must be equal too.
    """
    parts = [batch.prompt_lengths.unsqueeze(-1), batch.input_ids, batch.response_mask]
    if weighted:
        # View the floats as integers, so that their bits can be compared together with the integer columns.
        parts.append(batch.rollout_log_probs.view(torch.int32))
    names, number = torch.cat([part.long() for part in parts], dim=-1).unique(dim=0, return_inverse=True)
    rows = torch.arange(len(number))
    first = rows.new_zeros(len(names)).scatter_reduce(0, number, rows, "amin", include_self=False)
    return first[number]


def _statistics_and_hidden_states(
    policy: PolicyModel, batch: Batch, rows: slice, temperature: float
) -> tuple[TokenStatistics, Tensor | None]:
    packed = pack_padded(batch.input_ids[rows], batch.prompt_lengths[rows], batch.response_mask[rows])
    result: tuple[TokenStatistics, Tensor | None] = policy(*packed, temperature, True)
    return result


def _trajectory_energies(
    policy: PolicyModel, batch: Batch, rows: slice, temperature: float, ratios: Tensor | None
) -> Tensor:
    """Compute ||grad sum_t rho_t ln p(y_t)||^2 [b] with respect to the trainable parameters."""
    if all(item.requires_grad for item in policy.parameters()):
        return policy.trajectory_energies(
            batch.input_ids[rows],
            batch.prompt_lengths[rows],
            batch.response_mask[rows],
            importance_weights=None if ratios is None else ratios[rows],
            temperature=temperature,
        ).float()
    # The closed form requires all parameters to be trainable. With adapters, each trajectory needs a backward pass.
    learning = [item for item in policy.parameters() if item.requires_grad]
    energies = []
    for row in range(rows.start, rows.stop):
        one = slice(row, row + 1)
        statistics, _ = _statistics_and_hidden_states(policy, batch, one, temperature)
        weights = torch.ones_like(statistics.log_probs)
        if ratios is not None:
            weights = ratios[one][batch.response_mask[one]].to(weights.dtype)
        parts = torch.autograd.grad(statistics.log_probs, learning, weights)
        energies.append(torch.stack([part.float().square().sum() for part in parts]).sum())
    return torch.stack(energies)


def advantage_inputs(
    samples: Sequence[ProblemSample], rows: Sequence[Tensor], *, cross: bool = False
) -> AdvantageInputs:
    """Build the estimator inputs of one step from the groups ``rows[j]`` [M, N] of every problem j, in order.

    ``cross`` replaces the energies of tokens with their cross energies, which include the importance weights.
    """
    width = max(sample.batch.rewards.shape[1] for sample in samples)

    def gather(name: str) -> Tensor:
        parts = []
        for sample, chosen in zip(samples, rows, strict=True):
            source = sample if hasattr(sample, name) else sample.batch
            values = getattr(source, name)[chosen.flatten()]
            parts.append(torch.nn.functional.pad(values, (0, width - values.shape[1])))
        return torch.cat(parts)

    def each(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([value[chosen.flatten()] for value, chosen in zip(values, rows, strict=True)])

    groups, size = sum(map(len, rows)), rows[0].shape[1]
    weighted = samples[0].importance_weights is not None and not cross
    values = {name: gather(name) for name in _TOKEN_VALUES}
    if cross:
        values["token_energy"] = gather("cross_energy")
    return AdvantageInputs(
        rewards=gather("rewards").double(),
        response_mask=gather("response_mask"),
        groups=torch.arange(groups).repeat_interleave(size),
        importance_weights=gather("importance_weights") if weighted else None,
        trajectory_energy=each([sample.trajectory_energy for sample in samples]),
        greedy_returns=each([torch.full((sample.size,), sample.greedy_return) for sample in samples]),
        **values,
    )


def row_slices_within_budget(batch: Batch, budget: int) -> Iterator[slice]:
    """Yield slices of consecutive rows with at most ``budget`` tokens, not counting padding.

    A row with more tokens gets its own slice.
    """
    start = tokens = 0
    for row, length in enumerate((batch.prompt_lengths + batch.response_lengths).tolist()):
        if row > start and tokens + length > budget:
            yield slice(start, row)
            start, tokens = row, 0
        tokens += length
    yield slice(start, batch.input_ids.shape[0])


def _cross_energies(
    policy: PolicyModel, batch: Batch, rows: slice, temperature: float, ratios: Tensor | None
) -> Tensor:
    """Compute sum_{k <= t} rho_k rho_t max(0, <delta_k, delta_t>) [b, T], one row at a time."""
    mask, ids = batch.response_mask[rows], batch.response_ids[rows]
    with torch.no_grad():
        _, hidden = _statistics_and_hidden_states(policy, batch, rows, temperature)
    assert hidden is not None  # because of keep_hidden
    parts = []
    lengths = mask.sum(-1).tolist()
    weights = [None] * len(lengths) if ratios is None else ratios[rows][mask].split(lengths)
    for states, targets, token_weights in zip(hidden.split(lengths), ids[mask].split(lengths), weights, strict=True):
        logits, slope = policy.head.logit_map.logits_and_slope(policy.head(states).float())
        parts.append(
            cross_energy(torch.log_softmax(logits / temperature, dim=-1), targets, token_weights, slope=slope).float()
        )
    return scatter_tokens(torch.cat(parts), mask)


@torch.no_grad()
def cross_energy(
    log_p: Tensor, targets: Tensor, importance_weights: Tensor | None = None, slope: Tensor | None = None
) -> Tensor:
    """Compute sum_{j <= k} rho_j rho_k max(0, <delta_j, delta_k>) [K] float64 for a trajectory's K model tokens.

    ``log_p`` [K, V] are the log-probabilities of the whole vocabulary, ``targets`` [K] the sampled tokens, and
    ``importance_weights`` [K] the truncated rho times the loss mask (default: 1). delta = e_y - p (arXiv 2602.07078,
    Eq. 46 and 48), multiplied by ``slope`` [K, V], the derivative of capped logits. Memory and time grow as K^2 + K V,
    so only the laboratory measures them, as the estimator `otb_cross`: at the model token k of a trajectory, the
    baseline of `otb_isolated` with this sum as the energy of the token.

    >>> both = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    >>> [round(value, 6) for value in cross_energy(both, torch.tensor([0, 1])).tolist()]
    [0.5, 0.5]
    """
    delta = -log_p.double().exp()
    delta.scatter_add_(-1, targets.unsqueeze(-1), torch.ones_like(delta[:, :1]))
    if slope is not None:
        delta *= slope
    products = (delta @ delta.t()).clamp_(min=0.0)
    if importance_weights is not None:
        ratio = importance_weights.double()
        products *= ratio * ratio.unsqueeze(-1)
    return products.tril().sum(-1)
