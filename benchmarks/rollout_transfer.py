"""Measure the cost of sending weights as files: seconds and peak extra memory by model size.

A random float32 model with a tied head is written as by a run (``write_export``: shards of 256 MiB, with the head as a
separate tensor), set to zero, and read back in place as by the ``transformers`` engine. Every parameter must then have
its original values. Each size runs in a separate process. Memory is the rise of the kernel's high-water mark of
resident memory: heap, and while reading also the mapped pages of the file. Files are written to ``--folder``; when they
are read, they are in the page cache.

Goal: peak extra memory does not grow with the size of models that are larger than a few shards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.weights.exports import SHARD_BYTES, read_export, write_export
from agentrl.weights.sources import full_parameters


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a Qwen2 model."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int


SIZES = {
    "1M": Shape(vocabulary=512, hidden=128, intermediate=512, layers=4),
    "10M": Shape(vocabulary=512, hidden=320, intermediate=1280, layers=6),
    "100M": Shape(vocabulary=8192, hidden=768, intermediate=3072, layers=10),
    "300M": Shape(vocabulary=32_000, hidden=1024, intermediate=4096, layers=16),
    "1B": Shape(vocabulary=32_000, hidden=2048, intermediate=5632, layers=18),
}


def random_model(shape: Shape) -> Any:
    """Return a model with random weights, which cannot run a forward pass because its buffers are uninitialized."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    for parameter in model.parameters():
        parameter.detach().normal_()
    return model


def resident(name: str) -> int:
    """Return the bytes of this process under ``name`` in ``/proc/self/status``: VmRSS, or its peak VmHWM."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def measured(work: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of ``work``, and the MiB that it needed in addition to the resident memory."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = resident("VmRSS"), time.perf_counter()
    work()
    return time.perf_counter() - began, (resident("VmHWM") - before) / 2**20


def transfer(size: str, folder: Path) -> None:
    """Send and receive one model's weights, and print a row of the table."""
    model = random_model(SIZES[size])
    sums = {name: parameter.double().sum().item() for name, parameter in model.named_parameters()}
    bytes_ = sum(parameter.nbytes for parameter in model.parameters())
    written: list[Path] = []
    send = measured(lambda: written.append(write_export(folder, full_parameters(model), 1)))
    for parameter in model.parameters():
        parameter.detach().zero_()

    def take() -> None:
        own = dict(model.state_dict(keep_vars=True))
        with torch.no_grad():
            for name, tensor in read_export(written[0]):
                own[name].copy_(tensor)

    receive = measured(take)
    if sums != {name: parameter.double().sum().item() for name, parameter in model.named_parameters()}:
        raise RuntimeError("the weights that were read differ from the weights that were sent")
    print(
        f"{size:5}   {bytes_ / 2**20:9.0f}   {send[0]:6.2f}   {send[1]:14.0f}   {receive[0]:6.2f}   {receive[1]:14.0f}",
        flush=True,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        nargs="+",
        choices=SIZES,
        default=["1M", "10M", "100M", "300M"],
        help="1B needs 5 GiB of memory and 5 GiB of disk space",
    )
    parser.add_argument("--folder", type=Path, default=None, help="folder for the files; default: a temporary folder")
    parser.add_argument("--here", action="store_true", help="measure in this process, and print no heading")


def run(args: argparse.Namespace) -> None:
    """Print a row for each size."""
    if args.here:
        transfer(args.sizes[0], args.folder)
        return
    print(f"shards of {SHARD_BYTES // 2**20} MiB      send                      receive")
    print("size    model MiB        s   peak extra MiB        s   peak extra MiB", flush=True)
    for size in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            program = Path(__file__).with_name("rollout.py")
            subprocess.run(
                [sys.executable, str(program), "transfer", "--sizes", size, "--here", "--folder", folder], check=True
            )
