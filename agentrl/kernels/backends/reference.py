"""Token statistics with all logits [N, V]: slow, but obvious. The other backends are tested against this one."""

import torch
from torch import Tensor
from torch.nn import functional

from agentrl.kernels.records import TokenStatistics, statistics_dtype


def reference_statistics(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, cap: float | None
) -> TokenStatistics:
    """Compute the statistics of docs/formulas.md 2 with plain autograd. Arguments as in `token_statistics`.

    A logit of -inf is a token with probability 0, which contributes 0 to every sum.
    """
    dtype = statistics_dtype(hidden, head_weight)
    logits = functional.linear(hidden.to(dtype), head_weight.to(dtype), None if bias is None else bias.to(dtype))
    capped = logits if cap is None else cap * torch.tanh(logits / cap)
    log_p = functional.log_softmax(capped / temperature, dim=-1)  # (N, V)
    index = targets.long().unsqueeze(-1)
    log_probs = log_p.gather(-1, index).squeeze(-1)
    possible = log_p != -torch.inf
    log_p_finite = torch.where(possible, log_p, 0.0)
    entropy = -(torch.where(possible, log_p_finite.exp(), 0.0) * log_p_finite).sum(-1)
    with torch.no_grad():
        others = log_p.exp().scatter(-1, index, 0.0)  # without the target
        sum_pi_squared = (2 * log_probs).exp() + others.square().sum(-1)
        gradient = others.scatter(-1, index, -torch.expm1(log_probs).unsqueeze(-1))
        if cap is not None:
            gradient = gradient * (1 - (capped / cap).square())
        energy = gradient.square().sum(-1)
        norms = hidden.to(dtype).square().sum(-1)
    return TokenStatistics(
        log_probs=log_probs, entropy=entropy, sum_pi_squared=sum_pi_squared, energy=energy, hidden_norm_squared=norms
    )
