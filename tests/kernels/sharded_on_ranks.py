"""One rank of a head whose vocabulary is spread over two: writes its statistics and gradients to the file given.

Both ranks compute on the machine's GPU if it has one, and communicate over gloo.
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.kernels import KernelInputError, TokenStatistics, sharded_token_statistics

N, D, V = 9, 4, 11


@dataclass(frozen=True, kw_only=True)
class Case:
    """What differs; the first `split` tokens of the vocabulary are on rank 0."""

    dtype: torch.dtype = torch.float64
    split: int = 6
    scale: float = 1.0
    temperature: float = 1.0
    bias: bool = False
    impossible: int | None = None


CASES = {
    "plain": Case(),
    "temperature": Case(temperature=0.7, split=3),
    "uneven_with_bias": Case(split=10, bias=True, temperature=1.7),
    "peaked": Case(scale=30.0, split=1),
    "a_rank_of_impossible_tokens": Case(split=1, bias=True, impossible=10),
    "float32": Case(dtype=torch.float32, scale=3.0, temperature=0.7),
    "bfloat16": Case(dtype=torch.bfloat16, bias=True),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """hidden, the whole weight, bias, targets: the same on every rank; the first three with gradient."""
    device, generator = torch.get_default_device(), torch.Generator("cpu").manual_seed(5)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(device)

    hidden = (drawn(N, D) * case.scale).to(case.dtype)
    weight = drawn(V, D).to(case.dtype)
    bias = None
    if case.bias:
        bias = drawn(V).to(case.dtype)
        if case.impossible is not None:
            bias[-case.impossible :] = -torch.inf
        bias.requires_grad_()
    targets = torch.tensor([0, 10, 0, 10, 5, 6, 0, 10, 0])
    return hidden.requires_grad_(), weight.requires_grad_(), bias, targets


def loss_of(statistics: TokenStatistics) -> Tensor:
    """A loss of both differentiable fields, where they are finite."""
    scale = torch.linspace(-1, 2, N, dtype=statistics.log_probs.dtype)
    finite = statistics.log_probs.isfinite()
    return (statistics.log_probs * scale)[finite].sum() + (statistics.entropy.square() * scale).sum()


def on_this_rank(case: Case, rank: int) -> dict[str, Tensor]:
    hidden, weight, bias, targets = inputs(case)
    own = slice(0, case.split) if rank == 0 else slice(case.split, V)
    weight = weight.detach()[own].clone().requires_grad_()
    if bias is not None:
        bias = bias.detach()[own].clone().requires_grad_()
    statistics = sharded_token_statistics(hidden, weight, targets, temperature=case.temperature, bias=bias)
    loss_of(statistics).backward()
    found: dict[str, Any] = {name: value.detach() for name, value in vars(statistics).items() if value is not None}
    found |= {"hidden": hidden.grad, "weight": weight.grad, "bias": None if bias is None else bias.grad}
    return found


def errors(rank: int) -> list[str]:
    said = []
    hidden, weight, _, targets = inputs(Case())
    for split, shift in ((V, 0), (6, 1)):
        try:
            sharded_token_statistics(
                hidden, weight[:split] if rank == 0 else weight[split:], targets + shift * (targets == 10)
            )
        except KernelInputError as error:
            said.append(str(error))
    return said


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    results: dict[str, Any] = {name: on_this_rank(case, rank) for name, case in CASES.items()}
    results["errors"] = errors(rank)
    torch.save(results, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
