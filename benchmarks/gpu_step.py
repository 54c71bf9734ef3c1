"""Parts of gpu.py that train random models on one rank: the speed and memory of steps, and out-of-memory errors."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from gpu import Figure, Skip
from gpu_kernels import PEAK, documents
from torch import Tensor

from agentrl.errors import is_out_of_memory
from agentrl.kernels import Support, TokenStatistics
from agentrl.kernels.attention import PackedRow, pack_padded
from agentrl.models.attention import choose_packed_attention
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.policy import FrozenHead, PolicyModel
from agentrl.models.settings import ModelSettings
from agentrl.models.shape import ModelShape, read_model_shape, shape_from_config
from agentrl.planning.memory import CONTEXT, TrainingSetup, rank_memory, usable_gpu_bytes
from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
from agentrl.training.engine.memory import MicroBatchMemoryError, convert_memory_errors
from agentrl.training.settings import OptimizerSettings, TrainingSettings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_REPEATS = 3


class PackedOrPadded(PolicyModel):
    """A policy whose forward pass can also run over rows that are padded to the longest."""

    padded = False

    def forward(
        self,
        row: PackedRow,
        rows: Tensor,
        columns: Tensor,
        temperature: float = 1.0,
        keep_hidden: bool = False,
        reference: FrozenHead | None = None,
        teacher: FrozenHead | None = None,
        support: Support | None = None,
    ) -> tuple[TokenStatistics, Tensor | None]:
        if not self.padded:
            return super().forward(row, rows, columns, temperature, keep_hidden, reference, teacher, support)
        prompts = int(row.prompt_ends[0]) + 1  # prompts have equal lengths, and none is shared
        lengths = row.lengths.to(row.response_starts.device)
        places = (row.response_starts - prompts)[:, None] + torch.arange(
            row.longest_document_length, device=row.response_starts.device
        )
        input_ids = row.input_ids[0, torch.minimum(places, (row.response_starts - prompts + lengths - 1)[:, None])]
        states = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        selected = states[rows, prompts + columns - 1]
        return self.head(
            selected, row.response_token_ids(rows, columns), temperature, reference, teacher, support
        ), None


def step_1_5b(device: torch.device) -> Iterator[Figure | str]:
    """Measure training steps of Qwen2.5-1.5B's shape with 16,384 packed tokens."""
    yield from _steps("Qwen/Qwen2.5-1.5B", device)


def step_7b(device: torch.device) -> Iterator[Figure | str]:
    """Measure training steps of a model with Qwen2.5-7B's shape and as many layers as fit in memory."""
    yield from _steps("Qwen/Qwen2.5-7B", device)


def _steps(name: str, device: torch.device) -> Iterator[Figure | str]:
    start_distributed(deadline=100.0)
    real = device.type == "cuda"
    tokens = 16_384 if real else 256
    shape = _fitting(name, tokens) if real else read_model_shape(ModelSettings())
    yield f"{shape.name}: {shape.layers} layers, {shape.parameters / 1e9:.2f}B parameters, {tokens} tokens"
    policy, engine = _engine(shape, device)
    _step(engine, shape, documents(tokens, 0))  # compiles kernels and creates the optimizer's states
    if real:
        torch.cuda.reset_peak_memory_stats()
    fresh = [documents(tokens, seed) for seed in range(1, 1 + _REPEATS)]
    seconds = [_timed(engine, shape, lengths) for lengths in fresh]
    packed = min(seconds)
    best = fresh[seconds.index(packed)]
    yield Figure(name="step, new lengths each time, fastest", value=packed, unit="s", judged=False)
    yield Figure(
        name="slowest over fastest",
        value=max(seconds) / packed,
        high=1.3,
        judged=real,
        why="new shapes need no new plans",
    )
    yield Figure(name="tokens per second", value=tokens / packed, judged=False)
    yield Figure(
        name="model FLOP utilisation", value=operations(shape, best) / packed / PEAK, low=0.40, judged=real,
        why=f"relative to {PEAK / 1e12:.0f} TFLOP/s; recomputation does not count",
    )  # fmt: skip
    if real:
        peak, planned = torch.cuda.max_memory_allocated(), rank_memory(shape, _setup(tokens)).total
        yield f"peak memory {peak / 1e9:.1f} GB, planned {planned / 1e9:.1f} GB"
        yield Figure(name="planned over peak memory", value=planned / peak, low=0.9, high=1.1, why="agentrl plan")
    policy.padded = True
    cells = len(best) * max(best)
    try:
        padded = _timed(engine, shape, best)
    except torch.OutOfMemoryError:
        yield f"padded: out of memory with {cells} tokens, {cells / tokens:.1f} times as many"
        return
    yield Figure(
        name="padded over packed", value=padded / packed, low=0.7 * cells / tokens, judged=real,
        why=f"padded rows hold {cells / tokens:.1f} times as many tokens",
    )  # fmt: skip


def operations(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Return the operations of forward and backward: 6 per weight and token, and 6 H E l^2 per layer and document."""
    attention = sum(6 * shape.layers * shape.heads * shape.head_dim * length**2 for length in lengths)
    looked_up = 0 if shape.config.get_text_config().tie_word_embeddings else shape.vocabulary * shape.hidden
    return 6 * (shape.parameters - looked_up) * sum(lengths) + attention


def _setup(tokens: int) -> TrainingSetup:
    return TrainingSetup(ranks=1, stage=2, bfloat16=True, tokens=tokens, checkpointing=True)


def _fitting(name: str, tokens: int) -> ModelShape:
    """Return the shape of a model with as many of its layers as fit on this GPU."""
    whole = read_model_shape(ModelSettings(path=name))
    memory = usable_gpu_bytes(torch.cuda.get_device_properties(0).total_memory)
    for layers in range(whole.layers, 0, -1):
        config = copy.deepcopy(whole.config)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        kinds = getattr(text, "layer_types", None)  # not every architecture's configuration has it
        if kinds is not None:
            text.layer_types = list(kinds)[:layers]
        shape = shape_from_config(whole.name, config)
        if rank_memory(shape, _setup(tokens), context=CONTEXT).total <= memory:
            return shape
    raise Skip(f"not even one layer of {name} fits")


def _engine(shape: ModelShape, device: torch.device) -> tuple[PackedOrPadded, TrainingEngine[PackedOrPadded]]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(shape.config, dtype=torch.bfloat16, attn_implementation="sdpa")
    config: PreTrainedConfig = model.config
    enable_gradient_checkpointing(model)
    policy = PackedOrPadded(model, attention=choose_packed_attention("auto", config, dtype="bfloat16"))
    engine = TrainingEngine(
        policy.train(),
        optimizer=OptimizerSettings(learning_rate=1e-6, weight_decay=0.0, warmup_steps=0),
        training=TrainingSettings(zero_stage=2),
        bfloat16=True,
        updates=100,
    )
    return policy, engine


def _timed(engine: TrainingEngine[PackedOrPadded], shape: ModelShape, lengths: Sequence[int]) -> float:
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    _step(engine, shape, lengths)  # reads the gradient norm, and so waits for the GPU
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _step(engine: TrainingEngine[PackedOrPadded], shape: ModelShape, lengths: Sequence[int]) -> None:
    prompt, longest = 8, max(lengths)
    draw = torch.Generator(engine.device).manual_seed(1)
    ids = torch.randint(0, shape.vocabulary, (len(lengths), longest), device=engine.device, generator=draw)
    counts = torch.tensor(lengths, device=engine.device) - prompt
    mask = torch.arange(longest - prompt, device=engine.device) < counts[:, None]
    prompts = torch.full((len(lengths),), prompt, device=engine.device)
    statistics, _ = engine(*pack_padded(ids, prompts, mask, share_prefixes=False))
    engine.backward(statistics.log_probs.mean())
    engine.step()


def shortage(device: torch.device) -> Iterator[Figure | str]:
    """Check that out-of-memory errors of torch and cuBLAS are recognized."""
    try:
        with convert_memory_errors(tokens=2, trajectories=2):
            _exhaust(device)
    except MicroBatchMemoryError as error:
        yield f"torch without memory: {str(error.__cause__).splitlines()[0][:160]}"
        yield Figure(name="torch's error is recognized", value=1, low=1)
    yield from _library_shortages(device)


def _exhaust(device: torch.device) -> None:
    """Allocate memory until none is left."""
    held = []
    while True:
        held.append(torch.empty(1 << (33 if device.type == "cuda" else 60), dtype=torch.uint8, device=device))


def _library_shortages(device: torch.device) -> Iterator[Figure | str]:
    """Cause an out-of-memory error of cuBLAS, which allocates its workspace outside torch's cache."""
    if device.type != "cuda":
        yield "cuBLAS without memory: skipped: needs a GPU"
        return
    torch.cuda.empty_cache()
    held = []
    for size in (1 << 30, 1 << 24, 1 << 21):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            continue
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # a new stream needs a new workspace
            torch.ones(64, 64, device=device) @ torch.ones(64, 64, device=device)
        torch.cuda.synchronize()
    except RuntimeError as error:
        yield f"a product without memory: {str(error).splitlines()[0][:160]}"
        yield Figure(name="cuBLAS's error is recognized", value=is_out_of_memory(error), low=1)
    else:
        yield "a product without memory: it ran"
    held.clear()
