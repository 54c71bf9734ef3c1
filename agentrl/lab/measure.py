"""Exact moments of the gradient estimate of one problem, by estimator and group size.

For group size N, g_m is the gradient of group m: the mean over its N trajectories of sum_t A_t grad ln p_t. The
trajectories of a problem are divided at random into M disjoint groups. Products are taken only between independent
trajectories: g_m with g_m', and g_m with the scores of trajectories outside the group. These products are therefore
unbiased estimates of the products of expectations. A reference gradient from the group's trajectories would share its
noise.

The gradients of single trajectories, the scores s_i = sum_t rho_t grad ln p(y_it), are kept in memory, one for each
distinct trajectory. If the advantages are constant over each trajectory, the gradient of a group is a combination of
scores, and all inner products follow from the Gram matrix of the scores. Otherwise a group takes one backward pass.

The true gradient is g* = Cov(R, s), with the score s and the return R of a trajectory: the expectation of REINFORCE
with the mean of the other trajectories as baseline. A product of two covariances is a mean over four different
trajectories (i, j, k, l) of

    (R_i - R_j) (R_k - R_l) <s_i, s_k>

and needs only inner products of scores.

Problems are measured one at a time, and only their moments are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import (
    ESTIMATORS,
    HeadVarianceAccumulator,
    MissingInputError,
    compute_advantages,
    diagonal_proxy,
    estimator_needs,
)
from agentrl.errors import SettingsError
from agentrl.kernels.attention import pack_padded
from agentrl.lab.sample import ProblemSample, advantage_inputs
from agentrl.lab.settings import EstimatorChoice, LabSettings
from agentrl.models.policy import PolicyModel

SCORE_BYTES = 2 << 30
"""Maximum bytes for the scores of one problem."""


@dataclass(frozen=True, kw_only=True)
class GroupGradientProducts:
    """Inner products (float64) of the gradients g_m of M disjoint groups of a problem with S trajectories."""

    score_products: Tensor  # [M, S] <g_m, s_i>
    squared: Tensor  # [M] ||g_m||^2
    sum_squared: Tensor  # [] ||sum_m g_m||^2

    @property
    def variance(self) -> float:
        """Unbiased variance of one group's gradient, summed over parameters."""
        count = len(self.squared)
        return float(self.squared.sum() - self.sum_squared / count) / (count - 1)

    @property
    def unbiased_squared_norm_of_expected_gradient(self) -> float:
        """Unbiased squared norm of the expected gradient: the mean of <g_m, g_m'> over m != m'."""
        count = len(self.squared)
        return float(self.sum_squared - self.squared.sum()) / (count * (count - 1))


class TrajectoryGradients:
    """Gradients [P] of one problem's trajectories. The policy must not change during the lifetime of this object."""

    def __init__(self, policy: PolicyModel, sample: ProblemSample, *, temperature: float) -> None:
        """Compute the scores, P numbers for each distinct trajectory.

        Raises SettingsError if the scores exceed 2 GiB.
        """
        self._policy = policy
        self._sample = sample
        self._temperature = temperature
        self._parameters = [item for item in policy.parameters() if item.requires_grad]
        self.size = sum(item.numel() for item in self._parameters)
        kind = self._parameters[0].dtype
        # Scores of half-precision parameters are stored in float32, because they are factors of inner products.
        self._dtype = kind if kind == torch.float64 else torch.float32
        distinct, self._distinct_index = sample.distinct_response_index.unique(return_inverse=True)
        needed = len(distinct) * self.size * self._dtype.itemsize
        if needed > SCORE_BYTES:
            raise SettingsError(
                f"the gradients of {len(distinct)} trajectories with {self.size} parameters take "
                f"{needed / 2**30:.1f} GiB, but {SCORE_BYTES / 2**30:.1f} GiB are allowed; lower --samples, or use a "
                "smaller model or adapters (model.lora.rank)"
            )
        width = sample.batch.response_mask.shape[1]
        self._scores = torch.empty(len(distinct), self.size, dtype=self._dtype)
        for score, row in zip(self._scores, distinct, strict=True):
            score.copy_(self._backward(row.unsqueeze(0), [torch.ones(1, width)])[0])
        self.gram = (self._scores @ self._scores.T).double()[self._distinct_index][:, self._distinct_index]  # [S, S]

    def products_between_groups(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[GroupGradientProducts]:
        """Compute the inner products of the gradients of the groups ``rows`` [M, N] for each A in ``advantages``.

        A is [M, N, T]. The gradient of a group is (1/N) sum_i sum_t A_it rho_it grad ln p_it.
        """
        sums = [_GroupProductAccumulator(self.gram) for _ in advantages]
        for group, chosen in enumerate(rows):
            mask = self._sample.batch.response_mask[chosen]
            left: dict[int, Tensor] = {}
            for index, values in enumerate(advantages):
                constant = _row_constants(values[group], mask)
                if constant is None:
                    left[index] = values[group] / len(chosen)
                else:
                    sums[index].add_weighted_scores(chosen, constant.double() / len(chosen))
            for indices, gradient in self._gradients_of_distinct_advantages(chosen, left, mask):
                products = self._products_with_scores(gradient), gradient.square().sum().double()
                for index in indices:
                    sums[index].add_gradient(gradient, *products)
        return [item.result(self._products_with_scores) for item in sums]

    def hidden_states(self, rows: Tensor) -> Tensor:
        """Compute the hidden states [n, D] of the model tokens of ``rows``, in row-major order."""
        with torch.no_grad():
            _, states = self._forward(rows, keep_hidden=True)
        assert states is not None  # because of keep_hidden
        return states

    def _products_with_scores(self, gradient: Tensor) -> Tensor:
        """Compute the inner products <g, s_i> [S] of a gradient and all scores."""
        return (self._scores @ gradient).double()[self._distinct_index]

    def _gradients_of_distinct_advantages(
        self, rows: Tensor, advantages: dict[int, Tensor], mask: Tensor
    ) -> list[tuple[list[int], Tensor]]:
        """Compute a gradient for each distinct value in ``advantages``. Returns (keys, gradient) pairs."""
        # Estimators often agree on a group, so equal advantages share a backward pass.
        different: list[tuple[list[int], Tensor]] = []
        for index, values in advantages.items():
            masked = values.masked_fill(~mask, 0.0)
            same = next((indices for indices, other in different if torch.equal(masked, other)), None)
            if same is None:
                different.append(([index], masked))
            else:
                same.append(index)
        gradients = self._backward(rows, [values for _, values in different]) if different else []
        return [(indices, gradient) for (indices, _), gradient in zip(different, gradients, strict=True)]

    def _forward(self, rows: Tensor, *, keep_hidden: bool) -> tuple[Tensor, Tensor | None]:
        batch = self._sample.batch
        packed = pack_padded(batch.input_ids[rows], batch.prompt_lengths[rows], batch.response_mask[rows])
        statistics, hidden = self._policy(*packed, self._temperature, keep_hidden)
        return statistics.log_probs, hidden

    def _backward(self, rows: Tensor, advantages: Sequence[Tensor]) -> list[Tensor]:
        """Compute the gradient for each of ``advantages``, with one forward pass and one backward pass per gradient."""
        distinct, inverse = self._sample.distinct_response_index[rows].unique(return_inverse=True)
        mask = self._sample.batch.response_mask[distinct]
        log_probs, _ = self._forward(distinct, keep_hidden=False)
        ratios = self._sample.importance_weights
        results = []
        for number, values in enumerate(advantages):
            weighted = values if ratios is None else values * ratios[rows]
            weights = weighted.new_zeros(mask.shape).index_add_(0, inverse, weighted)[mask].to(log_probs.dtype)
            # All backward passes share one forward pass, and only the last one may free its graph.
            last = number == len(advantages) - 1
            parts = torch.autograd.grad(log_probs, self._parameters, weights, retain_graph=not last)
            results.append(torch.cat([part.flatten().to(self._dtype) for part in parts]))
        return results


class _GroupProductAccumulator:
    """Accumulates inner products of group gradients. A gradient is added as a vector or as coefficients of scores."""

    def __init__(self, gram: Tensor) -> None:
        self._gram = gram
        self._score_products: list[Tensor] = []
        self._squared: list[Tensor] = []
        self._coefficients = torch.zeros(len(gram), dtype=torch.float64)
        self._vector: Tensor | None = None

    def add_weighted_scores(self, rows: Tensor, coefficients: Tensor) -> None:
        vector = torch.zeros_like(self._coefficients)
        vector[rows] = coefficients
        self._coefficients += vector
        self._score_products.append(self._gram @ vector)
        self._squared.append(vector @ self._score_products[-1])

    def add_gradient(self, gradient: Tensor, score_products: Tensor, squared: Tensor) -> None:
        self._vector = gradient.clone() if self._vector is None else self._vector.add_(gradient)
        self._score_products.append(score_products)
        self._squared.append(squared)

    def result(self, score_products: Callable[[Tensor], Tensor]) -> GroupGradientProducts:
        total = self._coefficients @ self._gram @ self._coefficients
        if self._vector is not None:
            total = total + 2 * (self._coefficients @ score_products(self._vector))
            total = total + self._vector.square().sum().double()
        return GroupGradientProducts(
            score_products=torch.stack(self._score_products), squared=torch.stack(self._squared), sum_squared=total
        )


def _row_constants(values: Tensor, mask: Tensor) -> Tensor | None:
    """Return the value of each row [N] if ``values`` [N, T] are constant over its model tokens, else None."""
    high = torch.where(mask, values, -torch.inf).amax(-1)
    low = torch.where(mask, values, torch.inf).amin(-1)
    return high if torch.equal(high, low) else None


MIN_TRAJECTORIES = 4
"""Minimum number of trajectories for a product of two covariances."""


def covariance_inner_product(returns: Tensor, products: Tensor) -> Tensor:
    """Estimate <Cov(R, a), Cov(R, b)> [...] without bias from n trajectories, with R [n] and <a_i, b_k> [..., n, n].

    The trajectories must be independent. Uses the closed form of the mean over all different i, j, k, l. Products of
    the form y_i z_k yield the product of two scalar covariances.

    >>> covariance_inner_product(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.ones(4, 4)).item()
    0.0
    """
    count = len(returns)
    if count < MIN_TRAJECTORIES:
        raise ValueError(f"a product of two covariances needs at least {MIN_TRAJECTORIES} trajectories; got {count}")
    rewards = returns.double()
    cross = products.double() * (1 - torch.eye(count, dtype=torch.float64))
    total, squares = rewards.sum(), rewards.square().sum()
    pair = rewards[:, None] + rewards
    both = (cross * (rewards[:, None] * rewards)).sum((-2, -1))
    one = (cross * (pair * (total - pair))).sum((-2, -1))
    others = (total - pair).square() - (squares - rewards.square()[:, None] - rewards.square())
    none = (cross * others).sum((-2, -1))
    pairs = count * (count - 1)
    return both / pairs - one / (pairs * (count - 2)) + none / (pairs * (count - 2) * (count - 3))


def leave_one_out_weights(returns: Tensor, rows: Tensor) -> Tensor:
    """Return the coefficients [S] of s_i in (1/n) sum_i (R_i - mean of the other returns) s_i over ``rows`` [n]."""
    rewards = returns[rows].double()
    coefficients = torch.zeros(len(returns), dtype=torch.float64)
    coefficients[rows] = (rewards - rewards.mean()) / (len(rows) - 1)
    return coefficients


class TrueGradientProducts:
    """Inner products of group gradients with the true gradient."""

    def __init__(self, returns: Tensor, gram: Tensor) -> None:
        """Estimate ||g*||^2 from ``returns`` [S] and the Gram matrix ``gram`` [S, S] of the scores."""
        self._returns = returns.double()
        self._gram = gram
        self.squared = float(covariance_inner_product(self._returns, gram))  # ||g*||^2

    def mean_projections_and_leave_one_out(self, rows: Tensor, products: Tensor) -> tuple[Tensor, float]:
        """Compute the mean of <g_m, g*> over the groups ``rows`` [M, N], from <g_m, s_i> [E, M, S].

        Returns the mean for each estimator [E], and for the leave-one-out gradient. All trajectories together yield a
        more precise value for leave-one-out, so its error on these groups corrects the errors of the estimators.
        """
        same = torch.stack([leave_one_out_weights(self._returns, group) for group in rows]) @ self._gram  # [M, S]
        outside = torch.stack(
            [leave_one_out_weights(self._returns, self._trajectories_not_in(group)) for group in rows]
        )
        return (products * outside).sum(-1).mean(-1), float((same * outside).sum(-1).mean())

    def projection_variance_and_squared_mean(self, rows: Tensor, products: Tensor) -> tuple[Tensor, Tensor] | None:
        """Compute (Var <g, g*>, <E g, g*>^2), each [E], from <g_m, s_i> [E, M, S] of E estimators.

        Returns None if fewer than ``MIN_TRAJECTORIES`` trajectories are outside each pair of groups.
        """
        count = len(rows)
        if len(self._returns) - 2 * rows.shape[1] < MIN_TRAJECTORIES:
            return None
        squares = [self._estimate_true_gradient_product(products[:, m], products[:, m], rows[m]) for m in range(count)]
        pairs = [
            self._estimate_true_gradient_product(products[:, m], products[:, other], torch.cat([rows[m], rows[other]]))
            for m in range(count)
            for other in range(m)
        ]
        apart = torch.stack(pairs).mean(0)
        return torch.stack(squares).mean(0) - apart, apart

    def _estimate_true_gradient_product(self, first: Tensor, second: Tensor, excluded: Tensor) -> Tensor:
        """Estimate <a, g*> <b, g*> [E] from <a, s_i> and <b, s_i> [E, S], using no trajectory in ``excluded``."""
        outside = self._trajectories_not_in(excluded)
        products = first[:, outside, None] * second[:, None, outside]
        return covariance_inner_product(self._returns[outside], products)

    def _trajectories_not_in(self, rows: Tensor) -> Tensor:
        """Return the indices of the trajectories that are not in ``rows``."""
        kept = torch.ones(len(self._returns), dtype=torch.bool)
        kept[rows] = False
        return kept.nonzero().squeeze(-1)


@dataclass(frozen=True, kw_only=True)
class GradientMoments:
    """Moments of an estimator's gradient on one problem at one group size."""

    variance: float  # variance of one group's gradient: sum_m ||g_m - mean g||^2 / (M - 1)
    mean_squared: float  # squared norm of the expected gradient: mean <g_m, g_m'>, m != m'
    along: float  # product of the expected gradient with the true gradient, <E g, g*>
    reference_squared: float  # squared norm of the true gradient, ||g*||^2, from all trajectories
    reference_along: float  # <E g, g*> of the leave-one-out gradient on the same groups, an estimate of ||g*||^2
    along_variance: float | None  # Var <g, g*>; None if too few trajectories are outside each pair of groups
    along_squared: float | None  # <E g, g*>^2
    head_variance: float | None  # exact variance of the head's gradient alone; None if not requested
    diagonal: float  # mean over groups of sum_i sum_t w_t A_t^2 / N^2, the diagonal proxy of ||g_m||^2


ProblemMoments = dict[int, dict[str, GradientMoments]]
"""Moments of one problem, by group size and estimator label."""


def draw_disjoint_groups(samples: int, group_size: int, *, max_groups: int, seed: int, problem_index: int) -> Tensor:
    """Draw disjoint groups [M, N] of trajectory indices below ``samples``, with M at most ``max_groups``.

    Disjoint groups are independent draws, so the variance over them is an unbiased estimate.
    """
    # Seeds are distinct while the group size is below 1,009 squared, so groups do not depend on which other problems
    # and sizes are measured.
    key = (seed * 1_000_003 + problem_index) * 1_009**2 + group_size
    draw = torch.Generator().manual_seed(key % (1 << 63))
    groups = min(max_groups, samples // group_size)
    return torch.randperm(samples, generator=draw)[: groups * group_size].reshape(groups, group_size)


def compute_problem_advantages(
    samples: Sequence[ProblemSample], rows: Sequence[Tensor], choice: EstimatorChoice
) -> list[Tensor]:
    """Compute the advantages [M, N, T_j] of each problem j with the groups ``rows[j]`` [M, N].

    For an estimator that spans the step (for example by whitening), a step contains one group of each problem. As in
    training, groups with equal rewards are removed from the step and have advantage 0, unless the estimator learns from
    them. Raises SettingsError if the estimator needs an input that rollouts alone do not provide.
    """
    groups, size = rows[0].shape
    needs = estimator_needs(choice.name, **choice.options)
    greedy = "greedy_returns" in needs.inputs
    dropped = torch.zeros(len(samples), groups, dtype=torch.bool)
    if not ESTIMATORS[choice.name].equal_groups:
        dropped = torch.stack(
            [_has_equal_rewards(sample, indices, greedy) for sample, indices in zip(samples, rows, strict=True)]
        )
    result = [torch.zeros(groups, size, sample.batch.rewards.shape[1], dtype=torch.float64) for sample in samples]
    steps = [[index] for index in range(groups)] if needs.step_wide else [list(range(groups))]
    for step in steps:
        kept = [index for index in range(len(samples)) if not dropped[index, step].all()]
        if not kept:
            continue
        drawn = [rows[index][step] for index in kept]
        inputs = advantage_inputs([samples[index] for index in kept], drawn, cross=choice.cross)
        try:
            advantages = compute_advantages(choice.name, inputs, **choice.options).advantages
        except MissingInputError as error:
            raise SettingsError(f"--estimators: {choice.label} cannot be measured: {error}") from error
        for index, values in zip(kept, advantages.unflatten(0, (len(kept), len(step), size)), strict=True):
            result[index][step] = values[..., : result[index].shape[-1]]
    for values, equal in zip(result, dropped, strict=True):
        values[equal] = 0.0
    return result


def _has_equal_rewards(sample: ProblemSample, rows: Tensor, include_greedy: bool) -> Tensor:
    """Return a mask [M] of groups with equal rewards, including the greedy rollout's reward if ``include_greedy``."""
    returns = sample.returns[rows]  # [M, N]
    if include_greedy:
        returns = torch.nn.functional.pad(returns, (0, 1), value=sample.greedy_return)
    # The group filter in training uses the same tolerance.
    return returns.amax(-1) - returns.amin(-1) <= 1e-8


def measure_problems(
    policy: PolicyModel,
    samples: Sequence[ProblemSample],
    numbers: Sequence[int],
    settings: LabSettings,
    *,
    temperature: float,
    seed: int,
    skip: Set[int] = frozenset(),
) -> Iterator[tuple[int, ProblemMoments]]:
    """Yield (index, moments) for each problem, with the moments of every estimator at every group size.

    ``numbers`` identify the problems and, with ``seed``, determine the division into groups. Problems in ``skip`` are
    not measured, but belong to the step if an estimator spans the step.
    """
    rows = {
        size: [
            draw_disjoint_groups(sample.size, size, max_groups=settings.groups, seed=seed, problem_index=number)
            for sample, number in zip(samples, numbers, strict=True)
        ]
        for size in settings.group_sizes
    }
    advantages = {
        (size, choice.label): compute_problem_advantages(samples, drawn, choice)
        for size, drawn in rows.items()
        for choice in settings.choices
    }
    for index, (sample, number) in enumerate(zip(samples, numbers, strict=True)):
        if number in skip:
            continue
        gradients = TrajectoryGradients(policy, sample, temperature=temperature)
        truth = TrueGradientProducts(sample.returns, gradients.gram)
        hidden = (
            gradients.hidden_states(torch.arange(sample.size)).split(sample.lengths.tolist()) if settings.head else None
        )
        moments: ProblemMoments = {}
        for size in settings.group_sizes:
            drawn = rows[size][index]
            tensors = [advantages[size, choice.label][index] for choice in settings.choices]
            products = gradients.products_between_groups(drawn, tensors)
            heads = [None if hidden is None else head_variance(policy, hidden, sample, drawn, values, temperature)
                     for values in tensors]  # fmt: skip
            found = _moments_by_estimator(sample, truth, drawn, tensors, products, heads)
            moments[size] = dict(zip((choice.label for choice in settings.choices), found, strict=True))
        yield index, moments


def _moments_by_estimator(
    sample: ProblemSample,
    truth: TrueGradientProducts,
    rows: Tensor,
    advantages: Sequence[Tensor],
    products: Sequence[GroupGradientProducts],
    heads: Sequence[float | None],
) -> Iterator[GradientMoments]:
    """Yield the moments of each estimator from one division into groups ``rows`` [M, N]."""
    score_products = torch.stack([item.score_products for item in products])
    along, paired = truth.mean_projections_and_leave_one_out(rows, score_products)
    directional = truth.projection_variance_and_squared_mean(rows, score_products)
    for index, (item, values) in enumerate(zip(products, advantages, strict=True)):
        yield GradientMoments(
            variance=item.variance,
            mean_squared=item.unbiased_squared_norm_of_expected_gradient,
            along=float(along[index]),
            reference_squared=truth.squared,
            reference_along=paired,
            along_variance=None if directional is None else float(directional[0][index]),
            along_squared=None if directional is None else float(directional[1][index]),
            head_variance=heads[index],
            diagonal=_mean_diagonal_proxy(sample, rows, values),
        )


def _mean_diagonal_proxy(sample: ProblemSample, rows: Tensor, advantages: Tensor) -> float:
    flat = rows.flatten()
    mask = sample.batch.response_mask[flat]
    ratios = 1.0 if sample.importance_weights is None else sample.importance_weights[flat]
    values = diagonal_proxy(sample.token_energy[flat], advantages.flatten(0, 1) * ratios, mask)
    return float(values.sum()) / (rows.numel() * rows.shape[1])


def head_variance(
    policy: PolicyModel,
    hidden: Sequence[Tensor],
    sample: ProblemSample,
    rows: Tensor,
    advantages: Tensor,
    temperature: float,
) -> float:
    """Compute the variance of a group's gradient with respect to the head's weight.

    ``hidden`` contains the states [K, D] that predict the model tokens of each trajectory.
    """
    count, size = rows.shape
    head, logit_map = policy.head, policy.head.logit_map
    accumulator = HeadVarianceAccumulator(
        head.weight, temperature=logit_map.head_temperature(temperature), bias=head.bias, cap=logit_map.output_cap
    )
    flat, weights = rows.flatten(), advantages.flatten(0, 1)
    if sample.importance_weights is not None:
        weights = weights * sample.importance_weights[flat]
    mask = sample.batch.response_mask[flat]
    accumulator.update(
        hidden=torch.cat([hidden[row] for row in flat.tolist()]),
        targets=sample.batch.response_ids[flat][mask],
        advantages=weights[mask],
        rows=mask.nonzero()[:, 0],
        groups=torch.arange(count).repeat_interleave(size),
    )
    measured = accumulator.result()
    assert measured.variance is not None  # because there are at least two groups
    return measured.variance * count
