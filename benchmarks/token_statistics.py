"""token_statistics (chunked) against the full logits and autograd: time and peak extra memory, forward and backward.

    python benchmarks/token_statistics.py [--repeats 5] [--threads 2]

Both sides compute log-probabilities, entropy, sum p^2 and energy, and differentiate a loss of log-probabilities alone
or of log-probabilities and entropy. Times are medians of repeats that alternate between the two sides in one process:
of the clock, and of processor time, which other programs on the machine disturb less. Memory is the peak resident size
that one forward and backward adds in a process of its own, after a small warm-up (Linux); the weight's gradient, which
both sides need, is taken off. The targets: memory at most 1/8, time at most 1.4 times.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from agentrl.kernels import token_statistics

Outputs = tuple[Tensor, Tensor]  # log_probs, entropy


@dataclass(frozen=True, kw_only=True)
class Problem:
    """N tokens, D hidden units, V tokens of vocabulary; whether the loss uses the entropy."""

    tokens: int
    hidden: int
    vocabulary: int
    entropy: bool

    def __str__(self) -> str:
        loss = "log p + entropy" if self.entropy else "log p"
        return f"N={self.tokens:<5} D={self.hidden:<4} V={self.vocabulary:<6} loss of {loss}"


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    """The same statistics through logits [N, V] and autograd."""
    log_p = functional.log_softmax(functional.linear(hidden, weight), dim=-1)
    log_probs = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    with torch.no_grad():
        squares = p.square().sum(-1)
        _ = 1 - 2 * log_probs.exp() + squares
    return log_probs, entropy


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    """agentrl's kernel."""
    result = token_statistics(hidden, weight, targets, backend="chunked")
    return result.log_probs, result.entropy


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Outputs]] = {"full logits": full_logits, "chunked": chunked}


def make_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head weight (both with gradient) and targets, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(problem.tokens, problem.hidden, generator=generator)
    weight = torch.randn(problem.vocabulary, problem.hidden, generator=generator) / problem.hidden**0.5
    targets = torch.randint(0, problem.vocabulary, (problem.tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def forward_backward(side: str, problem: Problem, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """One forward and backward; the gradients stand in the inputs afterwards."""
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    log_probs, entropy = SIDES[side](hidden, weight, targets)
    loss = (log_probs * torch.linspace(-1, 1, problem.tokens)).sum()
    if problem.entropy:
        loss = loss - 0.01 * entropy.sum()
    loss.backward()


def measure_times(problem: Problem, repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds (clock, processor) of every side, alternating."""
    inputs = make_inputs(problem)
    clock: dict[str, list[float]] = {side: [] for side in SIDES}
    processor: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(repeats + 1):
        for side in SIDES:
            start, start_processor = time.perf_counter(), time.process_time()
            forward_backward(side, problem, inputs)
            if turn:  # the first is a warm-up
                clock[side].append(time.perf_counter() - start)
                processor[side].append(time.process_time() - start_processor)
    return {side: (statistics.median(clock[side]), statistics.median(processor[side])) for side in SIDES}


def measure_memory(side: str, problem: Problem, threads: int) -> float:
    """Peak extra megabytes of one forward and backward, the weight's gradient taken off."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_in_this_process, side, problem, threads).result()


def _peak_in_this_process(side: str, problem: Problem, threads: int) -> float:
    torch.set_num_threads(threads)
    small = Problem(tokens=8, hidden=problem.hidden, vocabulary=64, entropy=problem.entropy)
    forward_backward(side, small, make_inputs(small))
    inputs = make_inputs(problem)
    before = _kilobytes("VmRSS")
    forward_backward(side, problem, inputs)
    return (_kilobytes("VmHWM") - before) / 1024 - problem.hidden * problem.vocabulary * 4 / 2**20


def _kilobytes(field: str) -> int:
    """VmRSS, the resident size, or VmHWM, its peak (that of getrusage includes the parent's, kept across exec)."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, float32, medians of {options.repeats}\n")
    for tokens, hidden, vocabulary, times in [(4096, 512, 32768, 1), (8000, 96, 512, 6), (1000, 96, 512, 20)]:
        for entropy in (False, True):
            problem = Problem(tokens=tokens, hidden=hidden, vocabulary=vocabulary, entropy=entropy)
            (full, full_cpu), (ours, ours_cpu) = measure_times(problem, options.repeats * times).values()
            print(
                f"time    {problem!s:<54} full {1e3 * full:8.1f} ms   chunked {1e3 * ours:8.1f} ms   "
                f"ratio {ours / full:.2f} (processor {ours_cpu / full_cpu:.2f})",
                flush=True,
            )
    for entropy in (False, True):
        problem = Problem(tokens=4096, hidden=512, vocabulary=32768, entropy=entropy)
        full, ours = (measure_memory(side, problem, options.threads) for side in SIDES)
        print(f"memory  {problem!s:<54} full {full:8.0f} MB   chunked {ours:8.0f} MB   ratio {ours / full:.3f}")


if __name__ == "__main__":
    main()
