"""Compare token_statistics with full logits and autograd, and on a GPU with the bare matrix product.

    python benchmarks/token_statistics.py [--repeats 5] [--threads 2] [--only cpu|gpu]

Both sides compute log-probabilities, entropy, sum p^2 and energy, and differentiate a loss of log-probabilities alone
or of log-probabilities and entropy. Times are medians of repeats that alternate between the two sides in one process:
wall-clock time, and CPU time, which depends less on other programs. Memory is the peak resident size that one forward
and backward pass adds in a separate process, after a small warm-up (Linux), without the weight's gradient, which both
sides need. Targets: memory at most 1/8, time at most 1.4 times.

On a GPU: 8,192 tokens, 3,584 hidden units, 151,936 tokens of vocabulary, bfloat16. The bare products are required by
every implementation: one in forward, four in forward and backward (the logits are recomputed). Extra memory is the peak
that torch allocates, without the weight's gradient. Targets: forward at most 1.5 times the bare product, at most 300
MB.
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

from agentrl.kernels import reason_triton_unavailable, token_statistics

Outputs = tuple[Tensor, Tensor]  # log_probs, entropy


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes: N tokens, D hidden units, a vocabulary of V tokens. ``entropy``: the loss uses the entropy."""

    tokens: int
    hidden: int
    vocabulary: int
    entropy: bool

    def __str__(self) -> str:
        loss = "log p + entropy" if self.entropy else "log p"
        return f"N={self.tokens:<5} D={self.hidden:<4} V={self.vocabulary:<6} loss of {loss}"


def full_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    """Compute the same statistics through logits [N, V] and autograd."""
    log_p = functional.log_softmax(functional.linear(hidden, weight), dim=-1)
    log_probs = log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    with torch.no_grad():
        squares = p.square().sum(-1)
        _ = 1 - 2 * log_probs.exp() + squares
    return log_probs, entropy


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Outputs:
    """Compute the statistics with agentrl's kernel."""
    result = token_statistics(hidden, weight, targets, backend="chunked")
    return result.log_probs, result.entropy


SIDES: dict[str, Callable[[Tensor, Tensor, Tensor], Outputs]] = {"full logits": full_logits, "chunked": chunked}


def make_inputs(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Make hidden states, head weight (both with gradient) and targets, the same for every call."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(problem.tokens, problem.hidden, generator=generator)
    weight = torch.randn(problem.vocabulary, problem.hidden, generator=generator) / problem.hidden**0.5
    targets = torch.randint(0, problem.vocabulary, (problem.tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def forward_backward(side: str, problem: Problem, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Run one forward and backward pass. The gradients are stored in the inputs."""
    hidden, weight, targets = inputs
    hidden.grad = weight.grad = None
    log_probs, entropy = SIDES[side](hidden, weight, targets)
    loss = (log_probs * torch.linspace(-1, 1, problem.tokens)).sum()
    if problem.entropy:
        loss = loss - 0.01 * entropy.sum()
    loss.backward()


def measure_times(problem: Problem, repeats: int) -> dict[str, tuple[float, float]]:
    """Return the median wall-clock and CPU seconds of each side. The sides alternate."""
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
    """Return the peak extra megabytes of one forward and backward pass, without the weight's gradient."""
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
    """Return VmRSS (resident size) or VmHWM (its peak). getrusage would include the parent's peak, even after exec."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field + ":"))


def gpu_obstacle() -> str | None:
    """Return the reason why nothing can be measured on a GPU, or None."""
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    obstacle = reason_triton_unavailable(torch.device("cuda"))
    return None if obstacle is None else f"the triton backend {obstacle}"


def gpu_times(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Return (median milliseconds, peak extra megabytes) of a call, after two warm-up calls."""
    milliseconds = []
    torch.cuda.synchronize()
    for turn in range(repeats + 2):
        if turn == 2:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        milliseconds.append(start.elapsed_time(stop))
    return statistics.median(milliseconds[2:]), (torch.cuda.max_memory_allocated() - before) / 1e6


def bare_product(hidden: Tensor, weight: Tensor, repeats: int) -> float:
    """Return the median milliseconds of the product hidden weight^T, written to preallocated memory."""
    logits = hidden.new_empty((hidden.shape[0], weight.shape[0]))
    return gpu_times(lambda: torch.mm(hidden, weight.t(), out=logits), repeats)[0]


def gpu_table(repeats: int) -> None:
    """Print the comparison with the bare products."""
    problem = Problem(tokens=8192, hidden=3584, vocabulary=151_936, entropy=True)
    hidden, weight, targets = (tensor.detach().cuda() for tensor in make_inputs(problem))
    hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    bare = bare_product(hidden.detach(), weight.detach(), repeats)
    print(f"{torch.cuda.get_device_name()}, {problem}, bfloat16: bare product {bare:.1f} ms")
    for backend in ("triton", "chunked"):

        def forward(backend: str = backend) -> Outputs:
            result = token_statistics(hidden, weight, targets, backend=backend)
            return result.log_probs, result.entropy

        def both(forward: Callable[[], Outputs] = forward) -> None:
            log_probs, entropy = forward()
            (log_probs.sum() - 0.01 * entropy.sum()).backward()
            hidden.grad = weight.grad = None

        for name, run, products in (("forward", forward, 1), ("forward and backward", both, 4)):
            time_taken, memory = gpu_times(run, repeats)
            memory -= weight.nbytes / 1e6 if products > 1 else 0.0
            print(
                f"{backend:<8} {name:<21} {time_taken:8.1f} ms   {memory:6.0f} MB   "
                f"ratio to {products} bare products {time_taken / products / bare:.2f}"
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("cpu", "gpu"))
    options = parser.parse_args()
    if options.only != "gpu":
        cpu_tables(options.repeats, options.threads)
    if options.only != "cpu":
        obstacle = gpu_obstacle()
        if obstacle is None:
            gpu_table(options.repeats)
        else:
            print(f"the GPU was not measured: {obstacle}")


def cpu_tables(repeats: int, threads: int) -> None:
    """Print time and memory of the chunked head and of full logits."""
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} threads, float32, medians of {repeats}\n")
    for tokens, hidden, vocabulary, times in [(4096, 512, 32768, 1), (8000, 96, 512, 6), (1000, 96, 512, 20)]:
        for entropy in (False, True):
            problem = Problem(tokens=tokens, hidden=hidden, vocabulary=vocabulary, entropy=entropy)
            (full, full_cpu), (ours, ours_cpu) = measure_times(problem, repeats * times).values()
            print(
                f"time    {problem!s:<54} full {1e3 * full:8.1f} ms   chunked {1e3 * ours:8.1f} ms   "
                f"ratio {ours / full:.2f} (CPU {ours_cpu / full_cpu:.2f})",
                flush=True,
            )
    for entropy in (False, True):
        problem = Problem(tokens=4096, hidden=512, vocabulary=32768, entropy=entropy)
        full, ours = (measure_memory(side, problem, threads) for side in SIDES)
        print(f"memory  {problem!s:<54} full {full:8.0f} MB   chunked {ours:8.0f} MB   ratio {ours / full:.3f}")


if __name__ == "__main__":
    main()
