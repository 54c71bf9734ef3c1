"""Compare the planner's estimate with the memory of real training steps under DeepSpeed. Target: at most 15 % apart.

    python benchmarks/plan.py [--only TEXT]

Each shape trains on the CPU in separate processes, one for each rank: two updates of two micro-batches. The second
update counts. `tensors` is the peak of all live tensors, counted as torch counts them on a GPU; the estimate is
compared with this peak. `resident` is the rise of the process's peak resident memory (Linux) since before it created
the model. It does not include pages that were never written, such as most of DeepSpeed's gradient bucket.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from live_bytes import LiveBytes
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.kernels.attention import pack_padded
from agentrl.models.loading import enable_gradient_checkpointing, offload_checkpoints_to_host
from agentrl.models.lora import add_adapters
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import LoRASettings
from agentrl.models.shape import ModelShape, shape_from_config
from agentrl.planning.memory import Offload, TrainingSetup, rank_memory
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.engine.groups import get_rank_groups
from agentrl.training.settings import OptimizerSettings, TrainingSettings

_BASE: Mapping[str, object] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_LARGE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14, "num_attention_heads": 16}
_TIED = {"tie_word_embeddings": True}
_ROWS = 4


class Peak(TypedDict):
    """Peak memory of one rank, in bytes."""

    tensors: int
    resident: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model shape and the setup of its training."""

    kind: str
    stage: int
    tokens: int
    more: Mapping[str, object] = field(default_factory=dict)
    ranks: int = 1
    bfloat16: bool = False
    checkpointing: bool = False
    checkpoint_offload: bool = False
    shared: int = 1  # ranks that share a row
    offload: Offload = "none"
    lora_rank: int = 0

    def __str__(self) -> str:
        words = [self.kind, f"ZeRO {self.stage}", "bfloat16" if self.bfloat16 else "float32", f"{self.tokens} tokens"]
        words += [f"{self.ranks} ranks"] * (self.ranks > 1) + ["checkpointing"] * self.checkpointing
        words += ["in host memory"] * self.checkpoint_offload
        words += [f"rows shared by {self.shared}"] * (self.shared > 1)
        words += [f"offload {self.offload}"] * (self.offload != "none")
        words += [f"adapters of rank {self.lora_rank}"] * (self.lora_rank > 0)
        return ", ".join(words)

    @property
    def shape(self) -> ModelShape:
        return shape_from_config(self.kind, AutoConfig.for_model(self.kind, **{**_BASE, **self.more}))

    @property
    def setup(self) -> TrainingSetup:
        return TrainingSetup(
            ranks=self.ranks,
            stage=self.stage,
            bfloat16=self.bfloat16,
            tokens=self.tokens,
            checkpointing=self.checkpointing,
            checkpoint_offload=self.checkpoint_offload,
            sequence_parallel=self.shared,
            offload=self.offload,
            lora_rank=self.lora_rank,
            head_backend="chunked",
            device="cpu",
        )


CASES = (
    Case(kind="qwen2", stage=0, tokens=2048),
    Case(kind="qwen2", stage=0, tokens=2048, checkpointing=True),
    Case(kind="qwen3", stage=0, tokens=512, more={**_LARGE, **_TIED, "head_dim": 64}),
    Case(kind="llama", stage=1, tokens=1024, ranks=2),
    Case(kind="gemma2", stage=2, tokens=512, ranks=2, bfloat16=True, more={**_TIED, "head_dim": 64}),
    Case(kind="mistral", stage=2, tokens=1024, ranks=2, more={"sliding_window": None}, checkpointing=True),
    Case(kind="qwen2", stage=3, tokens=512, ranks=2, bfloat16=True, more=_TIED),
    Case(kind="llama", stage=3, tokens=1024, ranks=2, more={"num_hidden_layers": 12}),
    Case(kind="qwen2", stage=2, tokens=4096, ranks=2, shared=2),
    Case(kind="qwen2", stage=3, tokens=4096, ranks=2, shared=2, more={"num_key_value_heads": 1}, checkpointing=True),
    Case(kind="qwen2", stage=0, tokens=2048, checkpointing=True, checkpoint_offload=True),
    Case(kind="qwen2", stage=2, tokens=512, more=_LARGE, lora_rank=16),
    Case(kind="qwen2", stage=2, tokens=4096, lora_rank=16, bfloat16=True),
    Case(kind="qwen3", stage=2, tokens=512, more={"head_dim": 64}, bfloat16=True, offload="optimizer"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose line contains this text")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        print(json.dumps(measured(CASES[options.rank_of])))
        return
    for number, case in enumerate(CASES):
        if options.only in str(case):
            compare(number, case)


def compare(number: int, case: Case) -> None:
    """Compare the estimate of a case with its measurement, and print a line."""
    shape, estimate = case.shape, rank_memory(case.shape, case.setup)
    expected = estimate.total + estimate.host
    peaks = [json.loads(text) for text in _on_ranks(number, case.ranks)]
    tensors, resident = (max(peak[name] for peak in peaks) for name in ("tensors", "resident"))
    print(
        f"{shape.parameters / 1e6:6.1f}M  {case!s:<70} estimate {expected / 1e6:7.0f} MB  tensors {tensors / 1e6:7.0f}"
        f" MB  ratio {expected / tensors:.3f}  resident {resident / 1e6:7.0f} MB",
        flush=True,
    )


def _on_ranks(number: int, ranks: int) -> list[str]:
    """Return the last line that each rank prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--rank-of", str(number)]
    started = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"case {number} failed")
    return [output.splitlines()[-1] for output in outputs]


def measured(case: Case) -> Peak:
    """Return the peaks of this rank in the second update."""
    start_distributed(deadline=600.0)
    torch.set_num_threads(1)
    shape = case.shape
    before = resident("VmRSS")
    with LiveBytes() as counted:
        engine = _engine(case, shape)
        for _ in range(2):
            gc.collect()
            counted.restart()
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            for _ in range(2):
                micro_batch(engine, shape, case.tokens)
            engine.step()
        return {"tensors": counted.peak, "resident": resident("VmHWM") - before}


def _engine(case: Case, shape: ModelShape) -> TrainingEngine[PolicyModel]:
    dtype = torch.bfloat16 if case.bfloat16 else torch.float32
    model = AutoModelForCausalLM.from_config(shape.config, dtype=dtype, attn_implementation="sdpa")
    add_adapters(model, LoRASettings(rank=case.lora_rank))
    if case.checkpointing:
        enable_gradient_checkpointing(model)
    if case.checkpoint_offload:
        offload_checkpoints_to_host(model.get_decoder())
    training = TrainingSettings(
        zero_stage=case.stage, offload=case.offload, num_processes=case.ranks, sequence_parallel=case.shared
    )
    return TrainingEngine(
        PolicyModel(model, backend="chunked", sequence=get_rank_groups(training).sequence).train(),
        optimizer=OptimizerSettings(),
        training=training,
        bfloat16=case.bfloat16,
        updates=2,
    )


def micro_batch(engine: TrainingEngine[PolicyModel], shape: ModelShape, tokens: int) -> None:
    """Run a forward and backward pass over several trajectories that are packed into one row."""
    ids = torch.randint(0, shape.vocabulary, (_ROWS, tokens // _ROWS))
    mask = torch.ones_like(ids[:, 4:], dtype=torch.bool)
    packed = pack_padded(ids, torch.full((_ROWS,), 4), mask, multiple=engine.module.row_length_multiple)
    statistics, _ = engine(*packed)
    engine.backward(statistics.log_probs.sum())


def resident(name: str) -> int:
    """Return VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    main()
