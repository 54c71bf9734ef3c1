"""Measure the cost of advantages of groups that are spread over ranks: bytes sent and memory, on real gloo ranks.

    python benchmarks/exchange.py [--ranks 1 2 4 8] [--groups 64] [--size 16] [--tokens 8192]

`--groups` times `--size` trajectories, with lengths drawn uniformly up to `--tokens`, are distributed over the ranks
one by one, so that every group is spread over all ranks. TIR-OTB's advantages are then computed as in a statistics
pass. `inputs` is the size of the rank's own tensors, `sent` the size of its messages in both directions, and `peak` the
rise of its resident memory above its inputs until it has its own advantages. All figures are in MiB, for the rank with
the largest figure.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from agentrl.algorithms import AdvantageInputs, compute_advantages
from agentrl.training.engine import collectives
from agentrl.training.engine.collectives import RowExchange

MICRO_BATCH = 8  # rows


def micro_batches(rank: int, ranks: int, options: argparse.Namespace) -> list[AdvantageInputs]:
    """Return the rank's rows, padded to the longest row of each micro-batch."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, options.tokens + 1, (options.groups * options.size,), generator=draw)
    own = torch.arange(rank, len(lengths), ranks)
    return [rows_of(part, lengths[part], options.size) for part in own[lengths[own].argsort()].split(MICRO_BATCH)]


def rows_of(numbers: Tensor, lengths: Tensor, size: int) -> AdvantageInputs:
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    noise = torch.rand(mask.shape)
    return AdvantageInputs(
        rewards=torch.zeros(mask.shape).scatter(1, lengths[:, None] - 1, (numbers % 2)[:, None].float()),
        response_mask=mask,
        groups=numbers // size,
        log_probs=-noise,
        sum_pi_squared=noise.clone(),
        token_energy=noise.clone(),
        hidden_norm_squared=noise.clone(),
        importance_weights=noise.clone(),
        loss_mask=mask.clone(),
    )


def measure(rank: int, ranks: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """Measure one rank's figures, in bytes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    own = micro_batches(rank, ranks, options)
    counted = Counting(collectives.all_to_all, rank)
    collectives.all_to_all = counted  # type: ignore[assignment]
    start = resident()
    homes = torch.cat([part.groups for part in own]) % ranks  # all ranks have about as many tokens of a group
    exchange = RowExchange([part.response_mask for part in own], homes)
    made = compute_advantages("tir_otb", exchange.send_records_to_home_ranks(own))
    kept = exchange.return_results_to_senders(made.advantages), exchange.return_results_to_senders(made.returns)
    peak = high_water() - start
    results[rank] = (sum(map(size_of, own)), counted.sent, peak, len(kept))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Counting:
    """Collective that counts the bytes that it sends to other ranks."""

    def __init__(self, swap: Any, rank: int) -> None:
        self._swap, self._rank = swap, rank
        self.sent = 0

    def __call__(self, values: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        self.sent += (sum(sent) - sent[self._rank]) * values.element_size()
        return self._swap(values, sent, received, group)


def size_of(inputs: AdvantageInputs) -> int:
    return sum(value.nbytes for value in vars(inputs).values() if value is not None)


def resident() -> int:
    """Return the resident memory, and reset its high-water mark."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def high_water() -> int:
    return memory("VmHWM")


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    print("| ranks | inputs | sent | peak |\n|---|---|---|---|")
    for ranks in options.ranks:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with torch.multiprocessing.Manager() as manager:
            results = manager.dict()
            torch.multiprocessing.spawn(measure, args=(ranks, port, options, results), nprocs=ranks)
            largest = [max(column) / 2**20 for column in zip(*results.values(), strict=True)]
        print(f"| {ranks} | " + " | ".join(f"{value:.1f}" for value in largest[:3]) + " |", flush=True)


if __name__ == "__main__":
    main()
