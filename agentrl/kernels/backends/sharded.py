"""token_statistics where every rank holds a slice of the vocabulary, as under tensor parallelism."""

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
    """`token_statistics` of a head whose rows are spread over the ranks of `group`, in the order of ranks.

    head_weight [V_r, D] and bias [V_r] or None are this rank's rows, of any number on each rank; hidden [N, D] and
    targets [N], which count in the whole vocabulary [0, sum V_r), are the same on every rank. So are the results.
    Collective, forward and backward: every rank calls it, with gradients for the same inputs.

    Backward takes the gradients of log_probs and entropy to be those of **one** loss that every rank computes alike:
    the gradients of head_weight and bias are this rank's rows of the whole head's, that of hidden is complete on each.
    Raises KernelInputError if the arguments do not fit together on this rank.
    """
    first, vocabulary = _place(head_weight, group)
    check_inputs(hidden, head_weight, targets, temperature, bias, vocabulary=vocabulary)
    epilogue, ranks = epilogue_for(hidden.device), Ranks(first, group)
    with torch.autocast(hidden.device.type, enabled=False):
        return sliced_statistics(hidden, head_weight, targets, temperature, bias, epilogue=epilogue, ranks=ranks)


def _place(head_weight: Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(which token is this rank's first, how many there are on all ranks)."""
    size = head_weight.shape[0] if head_weight.ndim else 0
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=head_weight.device)
    sizes[dist.get_rank(group)] = size
    dist.all_reduce(sizes, group=group)
    counts = sizes.tolist()
    if 0 in counts:  # found by all, so that none waits for the others
        raise KernelInputError(f"rank {counts.index(0)} of the group holds no row of the head: {counts}")
    return sum(counts[: dist.get_rank(group)]), sum(counts)
