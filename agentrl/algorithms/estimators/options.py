"""Options of the estimators: frozen records whose defaults are *the* defaults. InvalidOptionError on a bad value."""

from dataclasses import dataclass

from agentrl.algorithms.errors import check_choice
from agentrl.algorithms.estimators.baselines import TAILS
from agentrl.algorithms.estimators.energy import ENERGIES
from agentrl.algorithms.estimators.normalization import NORMALIZATIONS
from agentrl.algorithms.losses.aggregation import AGGREGATIONS
from agentrl.algorithms.validation import check_flag, check_positive, check_range


@dataclass(frozen=True, kw_only=True)
class ScalarOptions:
    """Options of the estimators that put one number on a trajectory."""

    normalize: str | None = None  # None, group_std or whiten: see docs/formulas.md 4

    def __post_init__(self) -> None:
        check_choice("normalize", self.normalize, NORMALIZATIONS)


@dataclass(frozen=True, kw_only=True)
class WhitenedOptions(ScalarOptions):
    """The same for those that are whitened by definition; `normalize=None` leaves the whitening out."""

    normalize: str | None = "whiten"


@dataclass(frozen=True, kw_only=True)
class DiscountedOptions(WhitenedOptions):
    """Options of `reinforce_pp`."""

    gamma: float = 1.0  # discount a model token, in [0, 1]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("gamma", self.gamma, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class GaeOptions(DiscountedOptions):
    """Options of `gae`."""

    lam: float = 1.0  # in [0, 1]: 0 trusts the critic after one token, 1 the rewards alone

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("lam", self.lam, 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class WeightedOptions(ScalarOptions):
    """Options of `opo`: a weighted mean over the group."""

    leave_one_out: bool = False  # leave a trajectory out of its own baseline: unbiased
    epsilon: float = 1e-8  # added to the weights, in units of their scale

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("leave_one_out", self.leave_one_out)
        check_positive("epsilon", self.epsilon)


@dataclass(frozen=True, kw_only=True)
class ExactEnergyOptions(WeightedOptions):
    """Options of `eob`."""

    energy: str = "exact"  # by definition; with another energy this baseline is `ogb`
    loss_aggregation: str = "token_mean"  # how the loss weighs tokens: seq_mean_token_mean makes the weights E / K^2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("energy", self.energy, ("exact",))
        check_choice("loss_aggregation", self.loss_aggregation, AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class GlobalBaselineOptions(WeightedOptions):
    """Options of `ogb`."""

    energy: str = "logit_proxy"  # logit_proxy, length or head_exact
    loss_aggregation: str = "token_mean"  # how the loss weighs tokens: seq_mean_token_mean makes the weights W / K^2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("energy", self.energy, ENERGIES)
        check_choice("loss_aggregation", self.loss_aggregation, AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class CrossBaselineOptions(WeightedOptions):
    """Options of `otb_cross`, whose energy is given."""

    tail: str = "zero"  # zero, carry or self: the baseline where one trajectory is alone
    gamma: float = 1.0  # discount a model token, in [0, 1]
    loss_aggregation: str = "token_mean"  # how the loss weighs tokens: seq_mean_token_mean makes the weights W / K^2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("tail", self.tail, TAILS)
        check_range("gamma", self.gamma, 0.0, 1.0)
        check_choice("loss_aggregation", self.loss_aggregation, AGGREGATIONS)


@dataclass(frozen=True, kw_only=True)
class TokenBaselineOptions(CrossBaselineOptions):
    """Options of the other optimal token baselines."""

    energy: str = "logit_proxy"  # logit_proxy, length or head_exact

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("energy", self.energy, ENERGIES)
