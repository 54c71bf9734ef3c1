"""Token statistics with the vocabulary sliced over ranks, as in tensor parallelism."""

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.kernels.backends.sliced import sliced_statistics
from agentrl.kernels.backends.sums import Ranks
from agentrl.kernels.backends.triton_backend import epilogue_for
from agentrl.kernels.records import KernelInputError, TokenStatistics, check_inputs


def sharded_token_statistics(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
) -> TokenStatistics:
    """Compute `token_statistics` of a head whose rows are distributed over the ranks of `group`, in rank order.

    head_weight [V_r, D] and bias [V_r] or None contain this rank's rows; their number may differ between ranks.
    hidden [N, D] and targets [N], which index the complete vocabulary [0, sum V_r), are the same on every rank, and so
    are the results. Forward and backward are collective: every rank must call them, with gradients for the same inputs.

    The gradients of log_probs and entropy must be those of **one** loss that every rank computes identically. The
    gradients of head_weight and bias are this rank's rows of the complete gradient; the gradient of hidden is complete
    on each rank. Raises KernelInputError if the arguments do not fit together on this rank.
    """
    first, vocabulary = _place(head_weight, group)
    check_inputs(hidden, head_weight, targets, temperature, bias, vocabulary=vocabulary)
    epilogue, ranks = epilogue_for(hidden.device), Ranks(first, group)
    with torch.autocast(hidden.device.type, enabled=False):
        return sliced_statistics(hidden, head_weight, targets, temperature, bias, epilogue=epilogue, ranks=ranks)


def _place(head_weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(index of this rank's first token, number of tokens on all ranks)."""
    size = head_weight.shape[0] if head_weight.ndim else 0
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=head_weight.device)
    sizes[dist.get_rank(group)] = size
    dist.all_reduce(sizes, group=group)
    counts = sizes.tolist()
    if 0 in counts:  # every rank sees the same counts, so all raise and none waits for the others
        raise KernelInputError(f"rank {counts.index(0)} of the group has no row of the head; rows by rank: {counts}")
    return sum(counts[: dist.get_rank(group)]), sum(counts)
