"""Parts of gpu.py that run other programs: the kernel tests, and complete training runs."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from gpu import Figure, Skip

ROOT = Path(__file__).resolve().parents[1]
_SHORT = {
    "coldstart.steps": "60",
    "coldstart.count": "1024",
    "coldstart.direct_steps": "20",
    "evaluation.problems": "8",
    "evaluation.samples": "1",
    "evaluation.max_turn_tokens": "32",
    "evaluation.max_response_tokens": "64",
    "evaluation.falsified": "false",
    "rollout.problems_per_step": "8",
    "algorithm.drop_zero_variance": "false",  # train and transfer weights even if all rewards are equal
    "telemetry.plots": "false",
    "sandbox.allow_unisolated": "true",
}
"""A short run of the tiny preset, whose cold start is too weak to learn from."""


def kernel_tests(device: torch.device) -> Iterator[Figure | str]:
    """Run the kernel tests. They put their tensors on the GPU if there is one."""
    real = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--junitxml={report}"]
        # Warnings of other releases of torch and transformers do not count as failures here. A bare machine lacks the
        # plug-in that reruns tests, so neither the plug-in nor the options of the project that need it are used.
        command += ["-p", "no:rerunfailures", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings="]
        command += ["--rootdir", str(ROOT), "--continue-on-collection-errors"]
        if real and importlib.util.find_spec("xdist"):
            command += ["-n", "6"]
        command.append(str(ROOT / "tests" / "kernels" / ("" if real else "test_packed_rows.py")))
        if importlib.util.find_spec("pytest") is None:
            raise Skip("pytest is not installed")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError((done.stdout + done.stderr)[-1200:])
        suite = xml.etree.ElementTree.parse(report).getroot()[0]
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    for case in suite.iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            yield f"failed: {case.attrib['classname']} {case.attrib['name']}"
    reasons = {one.attrib.get("message", "") for one in suite.iter("skipped")}
    yield from (f"skipped: {reason}" for reason in sorted(reasons))
    failed = counts["failures"] + counts["errors"]
    yield Figure(name="passed", value=counts["tests"] - failed - counts["skipped"], low=1)
    yield Figure(name="failed", value=failed, high=0)
    yield Figure(name="skipped", value=counts["skipped"], judged=False)


def train_tiny(device: torch.device) -> Iterator[Figure | str]:
    """Cold start, rollouts, steps and weight transfers of the tiny policy in float32."""
    sizes = {"training.steps": "4"} if device.type == "cuda" else {"training.steps": "2", "coldstart.steps": "21"}
    yield from _fidelity(_train(_SHORT | sizes), bound=1e-3)


def train_0_5b(device: torch.device) -> Iterator[Figure | str]:
    """Rollouts with the built-in engine, steps and weight transfers of a random model of Qwen2.5-0.5B's shape."""
    real = device.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        write_random_model(Path(folder), device)
        settings = _SHORT | {
            "model.path": folder,
            "model.dtype": "bfloat16" if real else "float32",
            "model.gradient_checkpointing": "true",
            "coldstart.demonstrations": "null",
            "environment.protocol": "torl",  # a random model's turns have no program, and would be void in simpletir
            "rollout.problems_per_step": "8" if real else "2",
            "rollout.max_turn_tokens": "256" if real else "16",
            "rollout.max_response_tokens": "256" if real else "64",
            "training.micro_batch_tokens": "16384",
            "training.steps": "2",
        }
        for name in ("coldstart.steps", "coldstart.count", "coldstart.direct_steps"):
            del settings[name]
        yield from _fidelity(_train(settings), bound=3e-2 if real else 1e-3)


def colocated(device: torch.device) -> Iterator[Figure | str]:
    """Three steps beside a vLLM server on the same GPU, which sleeps while training and wakes with new weights."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vllm is not installed")
    if device.type != "cuda":
        raise Skip("vLLM cannot sleep on a CPU")
    settings = _SHORT | {
        "model.dtype": "bfloat16",
        "model.tiny.heads": "3",
        "rollout.engine": "vllm",
        "rollout.vllm.placement": "colocated",
        "rollout.vllm.transfer": "ipc",
        "rollout.vllm.gpu_memory_utilization": "0.4",
        "training.steps": "3",
    }
    rows = _train(settings)
    for row in rows:
        yield f"step {row['step']:g}: transfer, wake and verification {row['time/transfer_s']:.1f} s"
    yield from _fidelity(rows, bound=3e-2)


def write_random_model(folder: Path, device: torch.device) -> None:
    """Write random weights and a tokenizer whose vocabulary fills the head; no text encodes to the filling tokens."""
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    from agentrl.models.loading import EOS, require_model_config, train_tokenizer
    from agentrl.models.settings import ModelSettings

    real = device.type == "cuda"
    config = require_model_config(ModelSettings(path="Qwen/Qwen2.5-0.5B"))
    if not real:
        config.update({"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 1024})
        config.update({"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["full_attention"] * 2})
    state = json.loads(train_tokenizer(["Solve 1 + 2 with Python."], vocabulary_size=300).backend_tokenizer.to_str())
    words = state["model"]["vocab"]
    words |= {f"<filling{number}>": number for number in range(len(words), config.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token=EOS, pad_token=EOS)
    tokenizer.save_pretrained(folder)
    config.update({"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None})
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if real else torch.float32)
    model.save_pretrained(folder)
    del model
    if real:
        torch.cuda.empty_cache()  # the training runs in another process


def _train(settings: Mapping[str, str]) -> list[dict[str, float]]:
    """Run `agentrl train`, and return the metrics of each step."""
    if importlib.util.find_spec("pyarrow") is None:
        raise Skip("pyarrow is not installed")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "agentrl.cli", "train", "--env", "simpletir", "--config", "tiny"]
        command += [f"runs_dir={folder}", "name=gpu"]
        command += [f"{key}={value}" for key, value in settings.items()]
        # The cache is empty, so the cold start runs instead of being read from the cache.
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"XDG_CACHE_HOME": folder})
        last = done.stderr.strip().rpartition("\n")[2]
        if done.returncode and last.startswith("ModuleNotFoundError"):
            raise Skip(last)
        if done.returncode:
            raise RuntimeError((done.stdout.strip()[-300:] + "\n" + done.stderr.strip()[-1200:]).strip())
        lines = (Path(folder) / "gpu" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "time/step_s" in row]


def _fidelity(rows: list[dict[str, float]], *, bound: float) -> Iterator[Figure | str]:
    for row in rows:
        yield Figure(
            name=f"step {row['step']:g}, mean |log p of trainer - engine|", value=row["policy/engine_abs_diff"],
            unit="nats", high=bound, why="the bound of the fidelity gate",
        )  # fmt: skip
    speed = statistics.median(row["tokens_per_s"] for row in rows)
    yield Figure(name="model tokens per second, rollout and step", value=speed, judged=False)
    yield Figure(name="step", value=statistics.median(row["time/step_s"] for row in rows), unit="s", judged=False)
