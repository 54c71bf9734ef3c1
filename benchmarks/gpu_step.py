"""One model of the section `step` of gpu.py: training steps, packed and padded, at several lengths.

    python benchmarks/gpu_step.py --model Qwen/Qwen2.5-7B --way packed

A random model in bfloat16 with gradient checkpointing, on one rank at ZeRO 2, with as many of its layers as the planner
says fit. The documents' lengths are drawn from a log-normal with sigma 1; padded rows are those of one micro-batch. The
model's operations are 6 a weight and token, and those of causal attention; neither padding nor recomputation counts.
`--model tiny` runs on the CPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.kernels import TokenStatistics
from agentrl.models.attention import choose_attention
from agentrl.models.head import ReferenceHead
from agentrl.models.loading import checkpoint_layers
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import ModelSettings
from agentrl.planning.activations import with_layers
from agentrl.planning.estimate import CONTEXT, rank_memory, usable
from agentrl.planning.memory import ModelShape, TrainingSetup
from agentrl.planning.shapes import read_shape, shape_of
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.settings import OptimizerSettings, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_REPEATS = 3
_PUBLISHED = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 operations a second, by the names of GPUs."""


class PaddedPolicy(PolicyModel):
    """The same model over rows that are padded to the longest."""

    def forward(
        self,
        input_ids: Tensor,
        prompt_lengths: Tensor,
        response_ids: Tensor,
        response_mask: Tensor,
        temperature: float = 1.0,
        keep_hidden: bool = False,
        reference: ReferenceHead | None = None,
    ) -> tuple[TokenStatistics, Tensor | None]:
        rows, columns = response_mask.nonzero(as_tuple=True)
        states = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        selected = states[rows, prompt_lengths[rows] + columns - 1]
        return self.head(selected, response_ids[rows, columns], temperature, reference), None


WAYS: dict[str, type[PolicyModel]] = {"packed": PolicyModel, "padded": PaddedPolicy}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where it runs."""

    device: torch.device
    memory: int | None  # bytes; None: do not care
    speed: float  # operations a second
    about: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--way", choices=list(WAYS), required=True)
    options = parser.parse_args()
    tiny = options.model == "tiny"
    start_distributed(deadline=600.0)
    machine = this_machine(tiny=tiny)
    lengths = (256,) if tiny else (2048, 8192, 16384)
    shape = fitting(read_shape(ModelSettings(path=None if tiny else options.model)), max(lengths), machine)
    print(f"{shape.name}: {shape.layers} layers, {shape.parameters / 1e9:.2f}B parameters, {machine.about}", flush=True)
    engine = _engine(WAYS[options.way], shape, machine)
    for place, tokens in enumerate(lengths):
        try:
            print(_line(engine, shape, tokens, machine, way=options.way), flush=True)
        except torch.OutOfMemoryError:
            # A backward pass that broke off leaves gradients behind, and longer rows need more.
            left = ", ".join(str(count) for count in lengths[place:])
            print(f"{options.way}, {left} tokens: did not run: out of memory", flush=True)
            break


def this_machine(*, tiny: bool) -> Machine:
    """The CPU, or the first GPU with its published speed, else the speed of a product of 8192 x 8192 matrices."""
    if tiny:
        return Machine(device=torch.device("cpu"), memory=None, speed=1e12, about="utilisation of an assumed 1 TFLOP/s")
    name = torch.cuda.get_device_name()
    memory = torch.cuda.get_device_properties(0).total_memory
    published = next((speed for known, speed in _PUBLISHED.items() if known in name), None)
    about = f"utilisation of {'published' if published else 'measured'} "
    speed = published or _measured_speed()
    return Machine(
        device=torch.device("cuda", 0), memory=memory, speed=speed, about=f"{about}{speed / 1e12:.0f} TFLOP/s"
    )


def _measured_speed() -> float:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        matrix @ matrix
    torch.cuda.synchronize()
    return 10 * 2 * 8192**3 / (time.perf_counter() - began)


def setup(tokens: int, *, tiny: bool) -> TrainingSetup:
    backend = "chunked" if tiny else "triton"
    return TrainingSetup(ranks=1, stage=2, bfloat16=True, tokens=tokens, checkpointing=not tiny, head_backend=backend)


def fitting(whole: ModelShape, tokens: int, machine: Machine) -> ModelShape:
    """The shape with as many layers as fit beside the process that started this one, which may hold a context too."""
    if machine.memory is None:
        return whole
    for layers in range(whole.layers, 0, -1):
        shape = shape_of(whole.name, with_layers(whole.config, layers))
        if rank_memory(shape, setup(tokens, tiny=False), context=2 * CONTEXT).total <= usable(machine.memory):
            return shape
    raise SystemExit(f"{whole.name}: did not run: not even one layer fits")


def _engine(way: type[PolicyModel], shape: ModelShape, machine: Machine) -> TrainingEngine[PolicyModel]:
    from transformers import AutoModelForCausalLM

    tiny = machine.memory is None
    torch.manual_seed(0)
    with machine.device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if not tiny:
        checkpoint_layers(model)
    attention = choose_attention("auto", _config(model), dtype="bfloat16")
    return TrainingEngine(
        way(model, backend="auto", attention=attention).train(),
        optimizer=OptimizerSettings(),
        training=TrainingSettings(zero_stage=2),
        bfloat16=True,
        updates=100,
    )


def _config(model: torch.nn.Module) -> PreTrainedConfig:
    config: PreTrainedConfig = model.config
    return config


def _line(engine: TrainingEngine[PolicyModel], shape: ModelShape, tokens: int, machine: Machine, *, way: str) -> str:
    lengths = documents(tokens)
    on_gpu = machine.memory is not None
    _step(engine, shape, lengths)  # to warm up
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(_REPEATS):
        _step(engine, shape, lengths)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / _REPEATS
    used = operations(shape, lengths) / seconds / machine.speed
    said = f"{way}, {tokens} tokens in {len(lengths)} documents: {seconds:.3f} s a step, "
    said += f"{tokens / seconds:,.0f} tokens/s, utilisation {used:.3f}"
    if not on_gpu:
        return f"{said}; memory is measured on GPUs alone"
    held = tokens if way == "packed" else len(lengths) * max(lengths)
    estimate = rank_memory(shape, replace(setup(tokens, tiny=False), tokens=held)).total
    peak = torch.cuda.max_memory_allocated()
    return f"{said}; peak {peak / 1e9:.1f} GB, estimate {estimate / 1e9:.1f} GB, ratio {estimate / peak:.3f}"


def documents(tokens: int) -> list[int]:
    """Lengths that add up to ``tokens``: eight shares of a log-normal with sigma 1, none shorter than 9."""
    draw = random.Random(1)
    shares = [draw.lognormvariate(0, 1) for _ in range(8)]
    ends = [0, *(round(tokens * sum(shares[: count + 1]) / sum(shares)) for count in range(8))]
    return [max(9, stop - start) for start, stop in pairwise(ends)]


def operations(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Of forward and backward: 6 a weight and token; causal attention has 6 H E l^2 a layer and document."""
    attention = sum(6 * shape.layers * shape.heads * shape.head_dim * length**2 for length in lengths)
    return 6 * (shape.parameters - _lookups(shape)) * sum(lengths) + attention


def _lookups(shape: ModelShape) -> int:
    """Weights that are looked up and never multiplied: an embedding that is not the head too."""
    return 0 if shape.config.get_text_config().tie_word_embeddings else shape.vocabulary * shape.hidden


def _step(engine: TrainingEngine[PolicyModel], shape: ModelShape, lengths: Sequence[int]) -> None:
    prompt, longest = 8, max(lengths)
    ids = torch.randint(0, shape.vocabulary, (len(lengths), longest), device=engine.device)
    responses = ids[:, prompt:].contiguous()
    counts = torch.tensor(lengths, device=engine.device) - prompt
    mask = torch.arange(longest - prompt, device=engine.device) < counts[:, None]
    statistics, _ = engine(ids, torch.full((len(lengths),), prompt, device=engine.device), responses, mask)
    engine.backward(statistics.log_probs.mean())
    engine.step()


if __name__ == "__main__":
    main()
