"""The records that go into and come out of the advantage estimators."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AdvantageInputs:
    """The inputs of the estimators. Only the first three are always needed.

    Two trajectories of one problem, the second with an observation (0 in the mask) between two turns:

    >>> import torch
    >>> inputs = AdvantageInputs(
    ...     rewards=torch.tensor([[0., 0., 1., 0.], [0., 0., 0., 0.]]),
    ...     response_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]]).bool(),
    ...     groups=torch.tensor([7, 7]),
    ... )
    >>> from agentrl.algorithms import compute_advantages
    >>> compute_advantages("rloo", inputs).advantages.tolist()
    [[1.0, 1.0, 1.0, 0.0], [-1.0, -1.0, 0.0, -1.0]]

    Values at positions outside the response mask reach no result, whatever they are.

    Rows with the same group and sample are the branches of one rollout, to every estimator one row
    (`agentrl.algorithms.estimators.rows.rollouts`). Discounts, `gae` and the baselines of tokens follow `parents` and
    `forks`, from the root of the conversation to the token.

    Energies count a token with `(importance_weights * loss_mask)^2`; a missing one of the two counts as 1 on every
    model token. So a token rejected by a zero weight and one rejected by the loss mask give the same baseline. Rewards,
    returns and compact indices are those of the response mask whatever is rejected. `cross_energy` and
    `trajectory_energy` come with the weights already inside, because they do not factor.
    """

    rewards: Tensor  # [B, T] float
    response_mask: Tensor  # [B, T] bool, True on model tokens
    groups: Tensor  # [B] int64, equal for trajectories of one problem
    log_probs: Tensor | None = None  # [B, T] of the policy that is trained
    sum_pi_squared: Tensor | None = None  # [B, T]
    token_energy: Tensor | None = None  # [B, T] w_t as the kernel computes it; without it, formed from the two above
    hidden_norm_squared: Tensor | None = None  # [B, T] for head-exact energy
    cross_energy: Tensor | None = None  # [B, T] sum_{k<=t} rho_k rho_t <delta_k, delta_t>^+, laboratory only
    importance_weights: Tensor | None = None  # [B, T] truncated rho, 0 where rejected from the loss
    loss_mask: Tensor | None = None  # [B, T] bool, the response mask minus what is rejected from the loss
    trajectory_energy: Tensor | None = None  # [B] exact ||sum_t rho_t grad log p_t||^2
    values: Tensor | None = None  # [B, T] critic
    bootstrap_values: Tensor | None = None  # [B] critic's V after the last token; 0, or None for all, where it ended
    greedy_returns: Tensor | None = None  # [B] return of the problem's greedy rollout
    samples: Tensor | None = None  # [B] int64 rollout of the group; rows of one rollout count as one
    branches: Tensor | None = None  # [B] int64 the row's place in its rollout; the last one carries the reward
    parents: Tensor | None = (
        None  # [B] int64 the branch of the same rollout that it forks from; -1, or None for all: none
    )
    forks: Tensor | None = None  # [B] int64 model tokens of that branch before the fork, at least 1


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """What `compute_advantages` returns: each [B, T], detached, 0 off model tokens. An estimator returns float64, one
    number a token [B, T] or a trajectory [B, 1]; its values off the model tokens do not matter.

    `returns` holds G_k (token estimators), R on every model token (scalar ones) or A + V (gae), `baselines` what was
    subtracted: without normalisation advantages = returns - baselines, but for gpg's c and grpo's standard deviation.
    """

    advantages: Tensor
    returns: Tensor
    baselines: Tensor

    def take(self, rows: Tensor) -> "Advantages":
        """Some rows."""
        return Advantages(advantages=self.advantages[rows], returns=self.returns[rows], baselines=self.baselines[rows])
