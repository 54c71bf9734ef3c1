"""Options of the estimators."""

from dataclasses import dataclass

from agentrl.algorithms.errors import check_choice
from agentrl.algorithms.estimators.baselines import TAILS
from agentrl.algorithms.estimators.energy import ENERGIES
from agentrl.algorithms.estimators.normalization import NORMALIZATIONS
from agentrl.algorithms.losses.aggregation import AGGREGATIONS
from agentrl.algorithms.registry import Options, option
from agentrl.algorithms.validation import check_flag, check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class ScalarOptions(Options):
    """Options of the estimators that put one number on a trajectory; for `normalize` see docs/formulas.md 4."""

    normalize: str | None = option(None, check_choice, NORMALIZATIONS)


@dataclass(frozen=True, kw_only=True)
class WhitenedOptions(ScalarOptions):
    """The same for those that are whitened by definition; `normalize=None` leaves the whitening out."""

    normalize: str | None = option("whiten", check_choice, NORMALIZATIONS)


@dataclass(frozen=True, kw_only=True)
class DiscountedOptions(WhitenedOptions):
    """Options of `reinforce_pp`."""

    gamma: float = option(1.0, check_range, 0.0, 1.0)  # discount a model token


@dataclass(frozen=True, kw_only=True)
class GaeOptions(DiscountedOptions):
    """Options of `gae`."""

    lam: float = option(1.0, check_range, 0.0, 1.0)  # 0 trusts the critic after one token, 1 the rewards alone


@dataclass(frozen=True, kw_only=True)
class WeightedOptions(ScalarOptions):
    """Options of `opo`: a weighted mean over the group."""

    leave_one_out: bool = option(False, check_flag)  # leave a trajectory out of its own baseline: unbiased
    epsilon: float = option(1e-8, check_positive)  # added to the weights, in units of their scale


@dataclass(frozen=True, kw_only=True)
class EnergyOptions(WeightedOptions):
    """Options of the optimal baselines: with seq_mean_token_mean as the loss's aggregation weights become W / K^2."""

    loss_aggregation: str = option("token_mean", check_choice, AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class ExactEnergyOptions(EnergyOptions):
    """Options of `eob`, whose energy is exact by definition; with another this baseline is `ogb`."""

    energy: str = option("exact", check_choice, ("exact",))


@dataclass(frozen=True, kw_only=True)
class GlobalBaselineOptions(EnergyOptions):
    """Options of `ogb`."""

    energy: str = option("logit_proxy", check_choice, ENERGIES)


@dataclass(frozen=True, kw_only=True)
class CrossBaselineOptions(EnergyOptions):
    """Options of `otb_cross`, whose energy is given."""

    tail: str = option("zero", check_choice, TAILS)  # the baseline where one trajectory is alone
    gamma: float = option(1.0, check_range, 0.0, 1.0)  # discount a model token


@dataclass(frozen=True, kw_only=True)
class TokenBaselineOptions(CrossBaselineOptions):
    """Options of the other optimal token baselines."""

    energy: str = option("logit_proxy", check_choice, ENERGIES)


@dataclass(frozen=True, kw_only=True)
class PooledOptions(GlobalBaselineOptions):
    """Options of `ogb_pooled`."""

    pool: float = option(4.0, check_positive)  # trajectories that the step's other groups count for
