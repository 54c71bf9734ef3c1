"""Measure time and peak memory of compute_advantages for every estimator, on one step's rows.

The rows resemble tool-integrated answers: turns of model tokens with observations between them, different lengths,
groups of 16, an outcome reward, float32 inputs. The table has the best and the median wall-clock time of the repeats
(other programs can only increase it), the CPU seconds of the best repeat, and the peak resident memory that one call
adds to its inputs, including the three results (`least` is the memory of the results alone). The target: at most 1 s on
two cores at 2,048 rows of 8,192 positions, for every estimator.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms import ESTIMATORS, AdvantageInputs, compute_advantages

_VARIANTS: tuple[tuple[str, dict[str, object]], ...] = (
    ("tir_otb", {"leave_one_out": True}),
    ("tir_otb", {"tail": "carry"}),
    ("tir_otb", {"energy": "head_exact"}),
    ("tir_otb", {"gamma": 0.99}),
    ("tir_otb", {"normalize": "group_std"}),
    ("gae", {"gamma": 0.99, "lam": 0.95}),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of one estimator: wall-clock seconds, CPU seconds, megabytes."""

    best: float
    median: float
    processor: float
    memory: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this section."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="estimators; default: all")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)


def run(options: argparse.Namespace) -> None:
    """Print the table."""
    torch.set_num_threads(options.threads)
    inputs = make_inputs(options.rows, options.width, options.group_size)
    least = 3 * inputs.rewards.numel() * 4 / 2**20
    share = float(inputs.response_mask.float().mean())
    print(f"torch {torch.__version__}, {options.threads} threads, B={options.rows} T={options.width}, ", end="")
    print(f"groups of {options.group_size}, {share:.0%} model tokens; memory: least {least:.0f} MB\n")
    print(f"{'estimator':<36} {'best s':>8} {'median s':>9} {'processor s':>12} {'memory MB':>10}")
    cases = [(name, {}) for name in options.names or ESTIMATORS.names()]
    for name, changed in cases if options.names else (*cases, *_VARIANTS):
        found = measure(name, inputs, changed, options.repeats)
        title = " ".join([name, *(f"{key}={value}" for key, value in changed.items())])
        times = f"{found.best:8.2f} {found.median:9.2f} {found.processor:12.2f}"
        print(f"{title:<36} {times} {found.memory:10.0f}", flush=True)


def make_inputs(rows: int, width: int, group_size: int) -> AdvantageInputs:
    """Make rows that fill at least a quarter of the width. Turns have about 700 tokens, observations about 100."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.rand(rows, width // 400 + 2, 2, generator=generator)
    lengths = (turns * torch.tensor([700.0, 100.0]) + torch.tensor([350.0, 50.0])).long()
    ends = lengths.flatten(1).cumsum(-1)  # ends of turn, observation, turn, ...
    position = torch.arange(width)
    mask = torch.stack([torch.searchsorted(row, position, right=True) % 2 == 0 for row in ends])
    mask &= position < torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    last = width - 1 - mask.flip(-1).int().argmax(-1)
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), last] = torch.randint(0, 2, (rows,), generator=generator).float()

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    return AdvantageInputs(
        rewards=rewards,
        response_mask=mask,
        groups=torch.arange(rows) // group_size,
        token_energy=noise(rows, width),
        hidden_norm_squared=noise(rows, width),
        values=noise(rows, width),
        trajectory_energy=noise(rows),
        greedy_returns=noise(rows).round(),
    )


def measure(name: str, inputs: AdvantageInputs, options: dict[str, object], repeats: int) -> Measured:
    """Measure the repeats after one warm-up, which determines the peak memory."""
    memory = peak_megabytes(name, inputs, options)
    times = []
    for _ in range(repeats):
        start, processor = time.perf_counter(), time.process_time()
        compute_advantages(name, inputs, **options)
        times.append((time.perf_counter() - start, time.process_time() - processor))
    clock = [seconds for seconds, _ in times]
    return Measured(best=min(clock), median=statistics.median(clock), processor=min(times)[1], memory=memory)


def peak_megabytes(name: str, inputs: AdvantageInputs, options: dict[str, object]) -> float:
    """Return the memory that one call adds at its peak (Linux)."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")  # reset the peak
    before = _kilobytes("VmRSS")
    compute_advantages(name, inputs, **options)
    return (_kilobytes("VmHWM") - before) / 1024


def _kilobytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))
