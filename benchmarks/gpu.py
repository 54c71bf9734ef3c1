"""What this machine's GPU gives: kernels, training steps, memory against the plan, vLLM beside training, the tiny job.

    python benchmarks/gpu.py                     all sections, under 25 minutes
    python benchmarks/gpu.py --only kernel step  these sections
    python benchmarks/gpu.py --tiny              the same code at small sizes on the CPU: no figure means anything

Every section prints its lines, or why it did not run; one that breaks or takes longer than its limit says so, gives its
memory back, and the next one runs. Sections:

kernel     token statistics by each backend against the bare products (cuBLAS) and the full logits: time, extra memory
step       forward, backward and update of random models of Qwen2.5's shapes with as many layers as fit, packed and
           padded: tokens/s, model FLOP utilisation, peak memory against the planner's estimate
colocated  the tiny job in bfloat16 with vLLM on the same GPU, which sleeps while it trains and wakes with weights over
           CUDA IPC that are verified: seconds of a transfer, mean |log-prob difference| of engine and trainer
job        the tiny job with the `transformers` engine: seconds, share of right answers before and after
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import gpu_step
import torch
from token_statistics import Problem, bare_product, full_logits, gpu_times, make_inputs
from torch import Tensor

from agentrl.kernels import token_statistics, triton_obstacle

Section = Callable[[bool], Iterator[str]]
_LIMIT = 330.0
"""Seconds that a run of the tiny job may take."""
_STEP_LIMIT = 150.0
"""Seconds that the steps of one model may take, packed or padded: two models, both ways."""
_GRACE = 20.0
"""Seconds to end after a command was asked to."""
_SMALL = {
    "coldstart.steps": "120",
    "coldstart.count": "2048",
    "coldstart.direct_steps": "20",
    "evaluation.problems": "8",
    "evaluation.samples": "1",
    "evaluation.falsified": "false",
    "rollout.problems_per_step": "8",
    "algorithm.drop_zero_variance": "false",  # so each step trains and sends its weights
}
"""A short run with a start that is too weak to learn from."""
_SMALLEST = {"coldstart.steps": "21", "coldstart.count": "64", "rollout.problems_per_step": "2", "training.steps": "2"}


class NotRun(Exception):
    """Why a section cannot run here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="small sizes on the CPU, to try the program")
    options = parser.parse_args()
    if options.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before CUDA starts, and for what is started here
    print(f"torch {torch.__version__}, {_device(options.tiny)}", flush=True)
    for name in options.only:
        run_section(name, tiny=options.tiny)


def run_section(name: str, *, tiny: bool) -> None:
    """Print a section, or why there is none."""
    began = time.monotonic()
    try:
        if not tiny and not torch.cuda.is_available():
            raise NotRun("torch finds no GPU")
        for line in SECTIONS[name](tiny):
            print(f"{name}: {line}", flush=True)
    except NotRun as reason:
        print(f"{name}: did not run: {reason}", flush=True)
    except Exception as error:  # noqa: BLE001 - the next section runs, whatever breaks this one
        print(f"{name}: broke: {type(error).__name__}: {str(error).strip()[-600:]}", flush=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the next section's processes use the same GPU
    print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


def _device(tiny: bool) -> str:
    return "the CPU, tiny sizes" if tiny or not torch.cuda.is_available() else torch.cuda.get_device_name()


def kernel(tiny: bool) -> Iterator[str]:
    """Forward, and forward and backward, of log-probabilities and entropy."""
    tokens, width, vocabulary = (64, 16, 1000) if tiny else (8192, 3584, 151_936)
    problem = Problem(tokens=tokens, hidden=width, vocabulary=vocabulary, entropy=True)
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    hidden, weight, targets = (tensor.detach().to(device) for tensor in make_inputs(problem))
    hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    factors = hidden.detach(), weight.detach()
    bare = _seconds(lambda: factors[0] @ factors[1].t()) * 1e3 if tiny else bare_product(*factors, 5)
    yield f"{problem}, {dtype}: bare product {bare:.2f} ms"
    for name in ("triton", "chunked", "full logits"):
        obstacle = triton_obstacle(torch.device(device)) if name == "triton" else None
        if obstacle is not None:
            yield f"{name}: did not run: {obstacle}"
            continue
        try:
            yield from _kernel_lines(name, (hidden, weight, targets), bare, tiny=tiny)
        except torch.OutOfMemoryError:
            yield f"{name}: did not run: it needs more memory than the GPU has"


def _kernel_lines(name: str, inputs: tuple[Tensor, Tensor, Tensor], bare: float, *, tiny: bool) -> Iterator[str]:
    hidden, weight, targets = inputs

    def forward() -> tuple[Tensor, Tensor]:
        if name == "full logits":
            return full_logits(hidden, weight, targets)
        found = token_statistics(hidden, weight, targets, backend="triton" if name == "triton" else "chunked")
        return found.log_probs, found.entropy

    def both() -> None:
        log_probs, entropy = forward()
        (log_probs.sum() - 0.01 * entropy.sum()).backward()
        hidden.grad = weight.grad = None

    runs: Sequence[tuple[str, Callable[[], object], int]] = (("forward", forward, 1), ("forward and backward", both, 4))
    for what, run, products in runs:
        if tiny:
            yield f"{name} {what}: {_seconds(run) * 1e3:.2f} ms; memory is measured on GPUs alone"
            continue
        taken, memory = gpu_times(run, 5)
        memory -= weight.nbytes / 1e6 if products > 1 else 0.0
        ratio = taken / products / bare
        yield f"{name} {what}: {taken:.1f} ms, {ratio:.2f} of {products} bare; extra memory {memory:.0f} MB"


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def step(tiny: bool) -> Iterator[str]:
    """Each model, packed and padded, in a process of its own, whose end frees its memory."""
    for model in ("tiny",) if tiny else ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-7B"):
        for way in gpu_step.WAYS:
            done = _command([sys.executable, gpu_step.__file__, "--model", model, "--way", way], limit=_STEP_LIMIT)
            yield from done.stdout.splitlines()
            if done.returncode:
                yield f"{model}, {way}: broke: {done.stderr.strip()[-600:]}"


def colocated(tiny: bool) -> Iterator[str]:
    """Three steps beside a server."""
    if tiny:
        raise NotRun("vLLM cannot sleep on a CPU")
    settings = {"model.dtype": "bfloat16", "model.tiny.heads": "3", "rollout.engine": "vllm", "training.steps": "3"}
    beside = {"placement": "colocated", "transfer": "ipc", "gpu_memory_utilization": "0.4"}
    settings |= {f"rollout.vllm.{name}": value for name, value in beside.items()}
    for row in _train(_SMALL | settings):
        yield (
            f"step {row['step']:g}: {row['time/step_s']:.1f} s, of which transfer with wake and verification "
            f"{row['time/transfer_s']:.1f} s; mean |log-prob difference| {row['policy/engine_abs_diff']:.2g}"
        )


def job(tiny: bool) -> Iterator[str]:
    """The tiny main job."""
    began = time.monotonic()
    rows = _train(_SMALL | _SMALLEST if tiny else {"training.steps": "30", "evaluation.falsified": "false"})
    seconds = time.monotonic() - began
    shares = [row["reward/mean"] for row in rows]
    ends = max(1, len(shares) // 10)
    yield (
        f"{len(rows)} steps in {seconds:.0f} s, cold start included; mean reward of the first {ends}: "
        f"{sum(shares[:ends]) / ends:.3f}, of the last: {sum(shares[-ends:]) / ends:.3f}"
    )


def _train(settings: Mapping[str, str]) -> list[dict[str, float]]:
    """The metrics of a run of the tiny job. Raises RuntimeError with what it said last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentrl.cli", "train", "--env", "simpletir", f"runs_dir={folder}", "name=gpu"]
        done = _command([*command, *(f"{key}={value}" for key, value in settings.items())], limit=_LIMIT)
        if done.returncode:
            raise RuntimeError(done.stderr.strip() or done.stdout.strip())
        lines = (Path(folder) / "gpu" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


def _command(command: Sequence[str], *, limit: float) -> subprocess.CompletedProcess[str]:
    """What it printed and how it ended; 124 if it took longer than ``limit`` seconds."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, problems = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # agentrl ends its servers
            try:
                out, _ = process.communicate(timeout=_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()  # its servers end with it
                out, _ = process.communicate()
            return subprocess.CompletedProcess(command, 124, out, f"it took longer than {limit:.0f} s")
    return subprocess.CompletedProcess(command, process.returncode, out, problems)


SECTIONS: dict[str, Section] = {"kernel": kernel, "step": step, "colocated": colocated, "job": job}


if __name__ == "__main__":
    main()
