"""The registry of estimators: their options and traits.

Traits state the inputs that an estimator needs, and the rows that one call must contain. The trainer, the variance
laboratory and the viewer read the traits and never test for a name. Add an estimator with the decorator; its options
are the fields of a frozen dataclass:

    @register_estimator("mean", options=ScalarOptions)
    def mean(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from agentrl.algorithms.estimators.baselines import ENERGIES, TAILS
from agentrl.algorithms.estimators.forks import SIBLINGS
from agentrl.algorithms.losses.registry import AGGREGATIONS
from agentrl.algorithms.options import (
    MissingInputError,
    NoOptions,
    Options,
    OptionsRegistry,
    RegistryEntry,
    UnknownNameError,
    check_bool,
    check_choice,
    check_positive,
    check_range,
    checked_option,
)
from agentrl.algorithms.records import AdvantageInputs, Advantages

EstimatorFunction = Callable[..., Advantages]  # (EstimatorInputs, options record) -> Advantages

Span = Literal["group", "step", "ranks"]
"""Rows of one call: group: one or more complete groups. step: all rows of the step, on rank 0. ranks: all rows of the
rank, while the other ranks make the same call with theirs."""

_INPUTS = tuple(field.name for field in fields(AdvantageInputs))
_OF_ENERGY: Mapping[str, frozenset[str]] = {
    "logit_proxy": frozenset({"token_energy"}),
    "head_exact": frozenset({"token_energy", "hidden_norm_squared"}),
    "length": frozenset(),
    "exact": frozenset({"trajectory_energy"}),
}
_PROVIDERS: Mapping[str, str] = {
    "values": "values [B, T] of a critic: training adds one with algorithm.estimator=gae (critic.*)",
    "greedy_returns": "greedy_returns [B], the return of one greedy rollout per problem: training samples one with "
    "algorithm.estimator=remax",
    "trajectory_energy": "trajectory_energy [B], the exact energies of agentrl.kernels.trajectory_energies: "
    "training computes them with algorithm.estimator=eob",
}


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """Requirements of an estimator for given options.

    `inputs`: AdvantageInputs fields in addition to the three required ones; `token_energy` may be replaced by log_probs
    and sum_pi_squared. `step_wide`: the rows of the whole optimizer step on all ranks must be in one call, not only the
    rows of each group. `reason` says why; it is empty if `step_wide` is False. `weighted`: advantages depend on
    `importance_weights` and `loss_mask`, where these are given.
    """

    inputs: frozenset[str]
    weighted: bool
    step_wide: bool
    reason: str


@dataclass(frozen=True)
class EstimatorEntry(RegistryEntry[EstimatorFunction]):
    """A registered estimator and its traits."""

    requires: frozenset[str] = frozenset()  # inputs required with any options
    weighted: bool = False  # reads `masked_importance_weights`, so that the rollout correction changes its advantages
    span: Span = "group"
    aggregation: str | None = None  # aggregation required by its derivation; None: the loss's default
    equal_groups: bool = False  # groups of equal rewards have advantages other than 0
    group_based: bool = False  # the baseline is computed from the group; it is 0 in a group of one
    per_token: bool = False  # advantages differ between the tokens of a trajectory
    by_column: bool = False  # token baselines are computed by column; a branched rollout has a single baseline

    def requirements(self, record: object) -> EstimatorNeeds:
        """Return the requirements for ``record``, the options returned by `make_options`."""
        inputs = self.requires | _OF_ENERGY.get(getattr(record, "energy", ""), frozenset())
        reason = "" if self.span == "group" else "the estimator needs the groups of the whole step"
        if getattr(record, "normalize", None) == "whiten":
            reason = "whitening needs the mean over the whole step"
        return EstimatorNeeds(inputs=inputs, weighted=self.weighted, step_wide=bool(reason), reason=reason)

    def check_inputs(self, name: str, inputs: AdvantageInputs) -> None:
        """Raise MissingInputError for the first missing input. The message describes how to compute the input."""
        for required in sorted(self.requires):
            if getattr(inputs, required) is None:
                what = _PROVIDERS.get(required, required)
                raise MissingInputError(f"estimator {name!r} needs {what}")


class EstimatorRegistry(OptionsRegistry[EstimatorEntry]):
    """Registry of estimators by name."""

    def register(
        self,
        name: str,
        options: type = NoOptions,
        *,
        requires: Iterable[str] = (),
        weighted: bool = False,
        span: Span = "group",
        aggregation: str | None = None,
        equal_groups: bool = False,
        group_based: bool = False,
        per_token: bool = False,
        by_column: bool = False,
    ) -> Callable[[EstimatorFunction], EstimatorFunction]:
        """Return a decorator that registers an advantage estimator as `name`, a value of `algorithm.estimator`.

        The function is called as `function(inputs, record)`. `inputs` are EstimatorInputs of complete groups, with
        `mask` and `rewards` [B, T], `totals` [B] (the summed rewards) and `groups`, all float64 and 0 outside the model
        tokens. `record` holds the options, an instance of the frozen dataclass `options`. The function returns
        Advantages: `advantages`, `returns` and `baselines`, each float64 [B, T] (per token) or [B, 1] (per trajectory):

            @register_estimator("half", options=ScalarOptions)
            def half(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages:
                totals = inputs.totals.unsqueeze(-1)
                return Advantages(advantages=totals / 2, returns=totals, baselines=totals / 2)

        The other arguments are its traits. `requires` lists the fields of AdvantageInputs that must be given. Set
        `weighted` if the function reads `inputs.masked_importance_weights`, the weights and mask of the rollout
        correction. Advantages are computed before the forward pass if the estimator is not weighted and requires
        nothing that a forward pass computes.

        By default, a call receives one or more complete groups. With span="step", it receives all rows of the step, on
        rank 0. With span="ranks", it receives all rows of its rank, and exchanges sums with other ranks through
        `inputs.communicator`. `aggregation` is the default of `algorithm.aggregation`, for losses that support it. Set
        `equal_groups` if groups of equal rewards have advantages other than 0, so that they are not dropped. Set
        `group_based` if the baseline is computed from the group's trajectories, `per_token` if the advantages of a
        trajectory's tokens differ, and `by_column` if a branched rollout has one baseline.

        docs/reference/estimators.md has a worked example. Raises NameTakenError if the name is taken, UnknownNameError
        if a required input does not exist, and InvalidOptionError for an invalid span or aggregation.
        """
        check_choice(f"span of estimator {name!r}", span, get_args(Span))
        check_choice(f"aggregation of estimator {name!r}", aggregation, (None, *AGGREGATIONS))
        needed = frozenset(requires)
        for each in sorted(needed):
            if each not in _INPUTS:
                raise UnknownNameError("input", each, _INPUTS, owner=f"AdvantageInputs, required by estimator {name!r}")

        def register(function: EstimatorFunction) -> EstimatorFunction:
            entry = EstimatorEntry(
                function,
                options,
                requires=needed,
                weighted=weighted,
                span=span,
                aggregation=aggregation,
                equal_groups=equal_groups,
                group_based=group_based,
                per_token=per_token,
                by_column=by_column,
            )
            self.add(name, entry)
            return function

        return register


ESTIMATORS = EstimatorRegistry("estimator")
register_estimator = ESTIMATORS.register


def estimator_needs(name: str, **options: object) -> EstimatorNeeds:
    """Return the requirements of the named estimator with these options. Omitted options have their defaults.

    >>> estimator_needs("gae").step_wide, sorted(estimator_needs("gae", normalize=None).inputs)
    (True, ['values'])

    Raises UnknownNameError for an unknown estimator or option, and InvalidOptionError for an invalid option.
    """
    entry = ESTIMATORS[name]
    return entry.requirements(entry.make_options(f"estimator {name!r}", options))


NORMALIZATIONS = (None, "group_std", "whiten")


@dataclass(frozen=True, kw_only=True)
class ScalarOptions(Options):
    """Options of estimators with one advantage per trajectory. docs/reference/formulas.md 4 describes `normalize`."""

    normalize: str | None = checked_option(None, check_choice, NORMALIZATIONS)


@dataclass(frozen=True, kw_only=True)
class WhitenedAdvantageOptions(ScalarOptions):
    """ScalarOptions of estimators that whiten advantages by default. `normalize=None` disables the whitening."""

    normalize: str | None = checked_option("whiten", check_choice, NORMALIZATIONS)


@dataclass(frozen=True, kw_only=True)
class DiscountedReturnOptions(WhitenedAdvantageOptions):
    """Options of `reinforce_pp`."""

    gamma: float = checked_option(1.0, check_range, 0.0, 1.0)  # discount per model token


@dataclass(frozen=True, kw_only=True)
class GaeOptions(DiscountedReturnOptions):
    """Options of `gae`."""

    lam: float = checked_option(1.0, check_range, 0.0, 1.0)  # 0: next reward and critic's value; 1: all rewards


@dataclass(frozen=True, kw_only=True)
class WeightedBaselineOptions(ScalarOptions):
    """Options of `opo`, whose baseline is a weighted mean over the group."""

    leave_one_out: bool = checked_option(False, check_bool)  # exclude a trajectory from its own baseline (unbiased)
    epsilon: float = checked_option(1e-8, check_positive)  # added to the weights, in units of their scale


@dataclass(frozen=True, kw_only=True)
class EnergyBaselineOptions(WeightedBaselineOptions):
    """Options of optimal baselines. If the loss aggregation is seq_mean_token_mean, weights are W / K^2."""

    loss_aggregation: str = checked_option("token_mean", check_choice, AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class SiblingBaselineOptions(Options):
    """Options of optimal baselines over the siblings in forked rollouts (docs/reference/formulas.md 10).

    `siblings`: `none` uses the estimator's baseline over the group; `only` uses the branches of the token's nearest
    fork, or the other rollouts above the first fork; `pooled` adds the other rollouts with the weight of `sibling_pool`
    siblings. `only` and `pooled` leave out the token's own branch, so they imply `leave_one_out`.
    """

    siblings: str = checked_option("none", check_choice, SIBLINGS)
    sibling_pool: float = checked_option(1.0, check_positive)


@dataclass(frozen=True, kw_only=True)
class ExactEnergyOptions(SiblingBaselineOptions, EnergyBaselineOptions):
    """Options of `eob`, whose energy is exact by definition. With another energy, `eob` would be `ogb`."""

    energy: str = checked_option("exact", check_choice, ("exact",))


@dataclass(frozen=True, kw_only=True)
class ProxyEnergyOptions(EnergyBaselineOptions):
    """Options of baselines of whole trajectories with a proxy energy."""

    energy: str = checked_option("logit_proxy", check_choice, ENERGIES)


@dataclass(frozen=True, kw_only=True)
class GlobalBaselineOptions(SiblingBaselineOptions, ProxyEnergyOptions):
    """Options of `ogb`."""


@dataclass(frozen=True, kw_only=True)
class ColumnBaselineOptions(ProxyEnergyOptions):
    """Options of `otb`."""

    tail: str = checked_option("zero", check_choice, TAILS)  # baseline of the only trajectory at an index
    gamma: float = checked_option(1.0, check_range, 0.0, 1.0)  # discount per model token


@dataclass(frozen=True, kw_only=True)
class TokenBaselineOptions(SiblingBaselineOptions, ColumnBaselineOptions):
    """Options of optimal token baselines by compact index."""


@dataclass(frozen=True, kw_only=True)
class PooledBaselineOptions(ProxyEnergyOptions):
    """Options of `ogb_pooled`."""

    pool: float = checked_option(4.0, check_positive)  # weight of the step's other groups, in trajectories
