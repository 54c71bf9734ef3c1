"""Scripts run on several ranks of one group, each a process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from warm import WarmPopen


def free_port() -> int:
    """A port that nobody uses, below those that the kernel gives to connections while this one waits for its use."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def start_ranks(
    script: Path, outputs: Sequence[Path], *, gpus: bool = False, shared_gpu: bool = False
) -> list[subprocess.Popen[str]]:
    """The script once for each of ``outputs``, its argument; they are as many ranks of one group.

    ``gpus``: they use GPUs if there is one for each rank. ``shared_gpu``: they use GPUs if there is one at all, over
    gloo, since NCCL refuses two ranks on one GPU. Otherwise they run on the CPU whatever the machine has.
    """
    network = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    network["WORLD_SIZE"] = str(len(outputs))
    wanted = len(outputs) if gpus else 1
    if not (gpus or shared_gpu) or torch.cuda.device_count() < wanted:
        network |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "TRITON_INTERPRET": "1"}
    return [
        WarmPopen(
            [sys.executable, str(script), str(output)],
            env={**os.environ, **network, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, output in enumerate(outputs)
    ]


def finish(ranks: Sequence[subprocess.Popen[str]], *, seconds: float) -> None:
    """Wait for all; one that failed fails the test with what all of them said. None outlives the test."""
    try:
        said = [process.communicate(timeout=seconds)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [process.returncode for process in ranks] == [0] * len(ranks), "\n".join(said)
