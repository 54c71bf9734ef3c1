"""Measure the host time of an attention layer over packed rows of new lengths, and count new shapes, by backend.

    python benchmarks/attention_host.py                    16 micro-batches of 8 documents, 16,384 tokens each
    python benchmarks/attention_host.py --shared           with prompts that four documents share

This is the host's part of a layer on a GPU: the Python code of `agentrl.kernels.attention` and the operations that it
starts. Attention kernels do not run; stand-ins count their calls. Heads have a single number per token, and rows have
few tokens, so all other operations take almost no time. Each micro-batch runs `--layers` layers, forward and backward.
The preparation of a row, once for all its layers, is measured at `--tokens`.

A new shape is a combination of the sizes and strides of the kernel's inputs that no earlier micro-batch had. A library
that plans each shape (cuDNN: 22 to 37 ms each) would make one plan for each new shape.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from agentrl.kernels.attention import AttentionBackend, AttentionPass, PackedRow, attend, backends, pack_row

HEADS, GROUPS = 2, 1
_FEW_TOKENS = 512  # per measured row; the host time does not depend on the number of tokens
Kernel = Callable[..., Tensor]


class Counter:
    """Stands in for a kernel: counts calls, seconds and shapes, and returns its query."""

    def __init__(self) -> None:
        self.calls = 0
        self.seconds = 0.0
        self.shapes: set[object] = set()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        began = time.perf_counter()
        self.calls += 1
        self.shapes.add(tuple((tuple(one.shape), one.stride()) for one in (query, key, value)))
        # Connect the result to all three inputs, so that the backward pass reaches the operations that prepared them.
        result = query + key.flatten()[0] + value.flatten()[0]
        self.seconds += time.perf_counter() - began
        return result


@contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Replace the kernels of the backends `sdpa` and `flash`."""
    before = backends.scaled_dot_product_attention, backends.varlen_attention_function
    backends.scaled_dot_product_attention, backends.varlen_attention_function = counter, lambda: counter  # type: ignore[assignment]
    try:
        yield
    finally:
        backends.scaled_dot_product_attention, backends.varlen_attention_function = before


def drawn(tokens: int, documents: int, seed: int, *, shared: bool) -> PackedRow:
    """Return a row of documents of log-normal lengths (sigma 1) that add up to ``tokens``."""
    draw = random.Random(seed)
    shares = [draw.lognormvariate(0, 1) for _ in range(documents)]
    lengths = [max(9, int(tokens * share / sum(shares))) for share in shares]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    prompts = [torch.full((200 if shared else 1,), number // 4 if shared else number) for number in range(documents)]
    return pack_row([(prompts[i], torch.zeros(lengths[i], dtype=torch.int64)) for i in range(documents)])


def measure(backend: AttentionBackend, options: argparse.Namespace) -> str:
    """Measure a backend and return its line of the table."""
    counter = Counter()
    prepared: list[float] = []
    layers: list[float] = []
    new_shapes = 0
    with counting(counter):
        for seed in range(options.micro_batches):
            large = drawn(options.tokens, options.documents, seed, shared=options.shared)
            began = time.perf_counter()
            _ = large.varlen_bounds if backend == "flash" else large.segment_batches_by_length
            prepared.append(time.perf_counter() - began)
            row = drawn(_FEW_TOKENS, options.documents, seed, shared=options.shared)
            now = AttentionPass(row=row, backend=backend)
            _ = row.varlen_bounds, row.segment_batches_by_length
            known = len(counter.shapes)
            for _ in range(options.layers):
                sizes = [(1, heads, row.input_ids.shape[1], 1) for heads in (HEADS, GROUPS, GROUPS)]
                states = [torch.zeros(size, requires_grad=True) for size in sizes]
                before, began = counter.seconds, time.perf_counter()
                attended = attend(now, *states)
                torch.autograd.grad(attended.sum(), states)
                layers.append(time.perf_counter() - began - (counter.seconds - before))
            new_shapes += (len(counter.shapes) - known) * bool(seed)  # the first micro-batch warms up
    return (
        f"{backend}: {counter.calls / len(layers):.1f} calls and {statistics.median(layers) * 1e6:,.0f} us of host "
        f"time per layer; {statistics.median(prepared) * 1e6:,.0f} us once per row; {new_shapes} new shapes in "
        f"{options.micro_batches - 1} micro-batches after the first"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--shared", action="store_true", help="four documents share each prompt of 200 tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for backend in ("flash", "sdpa"):
        print(measure(backend, options), flush=True)


if __name__ == "__main__":
    main()
