"""What the advantages of groups spread over ranks cost each rank: bytes sent and memory, on real gloo ranks.

    python benchmarks/exchange.py [--ranks 1 2 4 8] [--groups 64] [--size 16] [--tokens 8192]

As many trajectories as groups times size, their lengths drawn evenly up to the given number of tokens, are dealt out to
the ranks one by one, so that every group lies on all of them. TIR-OTB's advantages are then made as a statistics pass
makes them. `inputs` are the rank's own tensors, `sent` what it sends there and back, `peak` how far its resident memory
rises above its inputs until it has its own advantages. All in MiB, of the rank with the most.
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
from agentrl.training.step.batching import choose_home_ranks

MICRO_BATCH = 8  # rows


def micro_batches(rank: int, ranks: int, options: argparse.Namespace) -> list[AdvantageInputs]:
    """The rank's rows, padded to the longest of each micro-batch."""
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
    """One rank's figures in bytes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    own = micro_batches(rank, ranks, options)
    counted = Counting(collectives.all_to_all, rank)
    collectives.all_to_all = counted  # type: ignore[assignment]
    start = resident()
    homes = choose_home_ranks({group: [options.size] * ranks for group in range(options.groups)})
    places = torch.tensor([homes[group] for part in own for group in part.groups.tolist()])
    exchange = RowExchange([part.response_mask for part in own], places)
    made = compute_advantages("tir_otb", exchange.send_records_to_home_ranks(own))
    kept = exchange.return_results_to_senders(made.advantages), exchange.return_results_to_senders(made.returns)
    peak = high_water() - start
    results[rank] = (sum(map(size_of, own)), counted.sent, peak, len(kept))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class Counting:
    """A collective that remembers how many bytes it sent to other ranks."""

    def __init__(self, swap: Any, rank: int) -> None:
        self._swap, self._rank = swap, rank
        self.sent = 0

    def __call__(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        self.sent += (sum(sent) - sent[self._rank]) * values.element_size()
        return self._swap(values, sent, received)


def size_of(inputs: AdvantageInputs) -> int:
    return sum(value.nbytes for value in vars(inputs).values() if value is not None)


def resident() -> int:
    """Resident memory now; the high-water mark starts again from here."""
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
