"""Squared gradient norms of single layers, row by row, from what went in and the gradient of what came out.

R rows (trajectories) of S tokens; positions that do not count hold zeros in both. Results are [R] in float64; products
are formed in the dtype given. Nothing here reads a weight, so a sharded one need not be gathered.
"""

import torch
from torch import Tensor

from agentrl.kernels.backends.products import batched_product


def gram_is_cheaper(tokens: int, inputs: int, outputs: int) -> bool:
    """Whether two Gram matrices of the tokens cost less than the product [inputs, outputs] itself.

    2 S^2 (D_in + D_out) against 2 S D_in D_out operations, so S < D_in D_out / (D_in + D_out). A Gram matrix is then
    never larger than a quarter of the weight.

    >>> gram_is_cheaper(200, 512, 512), gram_is_cheaper(300, 512, 512)
    (True, False)
    """
    return tokens * (inputs + outputs) < inputs * outputs


def linear_energy(inputs: Tensor, gradients: Tensor, dtype: torch.dtype) -> Tensor:
    """||sum_s g_s a_s^T||_F^2 = sum_{s,s'} (a_s . a_s') (g_s . g_s') from a [R, S, D_in] and g [R, S, D_out].

    Products are accumulated in `dtype`.
    """
    if gram_is_cheaper(inputs.shape[1], inputs.shape[2], gradients.shape[2]):
        product = batched_product(inputs, inputs.mT, dtype).mul_(batched_product(gradients, gradients.mT, dtype))
        return product.sum((1, 2), dtype=torch.float64)
    return squared_norm(batched_product(gradients.mT, inputs, dtype))


def bias_energy(gradients: Tensor) -> Tensor:
    """||sum_s g_s||^2 from g [R, S, D]."""
    return squared_norm(gradients.sum(1))


def scale_energy(normalized: Tensor, gradients: Tensor) -> Tensor:
    """||sum_s g_s * n_s||^2, both [R, S, ..., D]: of a scale that multiplies n elementwise, shared by the dimensions
    between S and D (the heads of a q or k norm)."""
    return squared_norm((normalized * gradients).flatten(1, -2).sum(1))


def embedding_energy(ids: Tensor, rows: Tensor, gradients: Tensor, count: int) -> Tensor:
    """sum_v ||sum_{s: x_s = v} e_s||^2 of each of `count` rows, from N tokens: ids [N], rows [N], gradients [N, D]."""
    _, entry, owner = _distinct(ids, rows)
    sums = gradients.new_zeros(owner.shape[0], gradients.shape[1]).index_add_(0, entry, gradients)
    result = torch.zeros(count, dtype=torch.float64, device=gradients.device)
    return result.index_add_(0, owner, squared_norm(sums))


def squared_norm(values: Tensor) -> Tensor:
    """The sum of squares over all dimensions but the first, in float64."""
    return torch.linalg.vector_norm(values.flatten(1), dim=1).double().square()


def _distinct(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct pairs (row, id): their keys [U], which of them a token is [N], and their rows [U]."""
    width = int(ids.max()) + 1 if ids.numel() else 1
    keys, entry = torch.unique(rows * width + ids, return_inverse=True)
    return keys, entry, keys // width
