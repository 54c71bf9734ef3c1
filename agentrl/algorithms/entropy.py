"""The entropy bonus (docs/formulas.md 5)."""

from torch import Tensor

from agentrl.algorithms.bounds import check_range
from agentrl.algorithms.losses.aggregation import aggregate


def entropy_bonus(
    entropy: Tensor,
    loss_mask: Tensor,
    mode: str,
    *,
    coefficient: float,
    normalizer: Tensor | float | None = None,
    length: float | None = None,
) -> Tensor:
    """-coefficient * aggregate(entropy): what to add to the loss; the other arguments are those of `aggregate`.

    A negative coefficient is allowed: it lowers the entropy.
    """
    check_range("entropy coefficient", coefficient, -float("inf"))
    return -coefficient * aggregate(entropy, loss_mask, mode, normalizer=normalizer, length=length)
