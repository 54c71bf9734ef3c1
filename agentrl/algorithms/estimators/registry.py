"""The registry of estimators and their traits: which inputs they need, and how much of the step at once.

The trainer, the variance laboratory and the viewer read the traits and never test for a name. Add an estimator with the
decorator; its options are the fields of a frozen dataclass:

    @register_estimator("mean", options=ScalarOptions)
    def mean(inputs: EstimatorInputs, options: ScalarOptions) -> Advantages: ...
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

from agentrl.algorithms.errors import MissingInputError, UnknownNameError, check_choice
from agentrl.algorithms.losses.aggregation import AGGREGATIONS
from agentrl.algorithms.records import AdvantageInputs, Advantages
from agentrl.algorithms.registry import Entry, NoOptions, OptionsRegistry

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
    "values": "values [B, T] of a critic: in training the setting algorithm.estimator=gae brings one along (critic.*)",
    "greedy_returns": "greedy_returns [B], the return of one greedy rollout a problem: in training the setting "
    "algorithm.estimator=remax samples it",
    "trajectory_energy": "trajectory_energy [B], the exact energies of agentrl.kernels.trajectory_energies: in "
    "training the setting algorithm.estimator=eob computes them",
    "cross_energy": "cross_energy [B, T], which only the laboratory computes: agentrl variance --estimators otb_cross",
}


@dataclass(frozen=True, kw_only=True)
class EstimatorNeeds:
    """The requirements of an estimator with its options.

    `inputs`: names of AdvantageInputs beside the three that are always needed; `token_energy` may be replaced by
    log_probs and sum_pi_squared. `step_wide`: the rows of the whole optimizer step, of all ranks, must be in one call;
    otherwise the rows of each group. `reason` gives the cause, and is empty if not step_wide.
    """

    inputs: frozenset[str]
    step_wide: bool
    reason: str


@dataclass(frozen=True)
class EstimatorEntry(Entry[EstimatorFunction]):
    """A registered estimator and its traits."""

    requires: frozenset[str] = frozenset()  # inputs that it needs whatever its options
    span: Span = "group"
    aggregation: str | None = None  # of the loss, by the estimator's derivation; None: the loss's default
    equal_groups: bool = False  # it learns from groups of equal rewards: their advantages are not all 0
    group_based: bool = False  # its baseline comes from the group's trajectories: groups of one have baseline 0
    per_token: bool = False  # advantages differ between the tokens of a trajectory
    by_column: bool = False  # baselines of tokens that branches do not share: branched rollouts get one of the rollout

    def needs(self, record: object) -> EstimatorNeeds:
        """With options as `make_options` gives them."""
        inputs = self.requires | _OF_ENERGY.get(getattr(record, "energy", ""), frozenset())
        reason = "" if self.span == "group" else "its rule looks at the groups of the whole step"
        if getattr(record, "normalize", None) == "whiten":
            reason = "whitening takes the mean over the whole step"
        return EstimatorNeeds(inputs=inputs, step_wide=bool(reason), reason=reason)

    def check_inputs(self, name: str, inputs: AdvantageInputs) -> None:
        """Raise MissingInputError for the first required input that is missing; the message names its provider."""
        for required in sorted(self.requires):
            if getattr(inputs, required) is None:
                what = _PROVIDERS.get(required, required)
                raise MissingInputError(f"estimator {name!r} needs {what}")


class EstimatorRegistry(OptionsRegistry[EstimatorEntry]):
    """Names -> estimators."""

    def register(
        self,
        name: str,
        options: type = NoOptions,
        *,
        requires: Iterable[str] = (),
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

        The other arguments are its traits. `requires` lists the fields of AdvantageInputs that must be given. By
        default, a call gets one or more complete groups. With span="step" it gets all rows of the step, on rank 0. With
        span="ranks" it gets all rows of its rank, and exchanges sums with other ranks through `inputs.calls`.
        `aggregation` is the default of `algorithm.aggregation`, for losses that admit it. Set `equal_groups` if groups
        of equal rewards have advantages other than 0, so that they are not dropped. Set `group_based` if the baseline
        is computed from the group's trajectories, `per_token` if the advantages of a trajectory's tokens differ, and
        `by_column` if a branched rollout has one baseline.

        docs/estimators.md has a worked example. Raises NameTakenError if the name is taken, UnknownNameError if a
        required input does not exist, InvalidOptionError if a span or an aggregation does not.
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
    """The requirements of the named estimator with these options; omitted options have their defaults.

    >>> estimator_needs("gae").step_wide, sorted(estimator_needs("gae", normalize=None).inputs)
    (True, ['values'])

    Raises UnknownNameError, InvalidOptionError.
    """
    entry = ESTIMATORS[name]
    return entry.needs(entry.make_options(f"estimator {name!r}", options))
