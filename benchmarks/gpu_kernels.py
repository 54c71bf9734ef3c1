"""Parts of gpu.py that need torch and the kernels: head, attention, accumulation, energies, determinism."""

from __future__ import annotations

import inspect
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from gpu import Figure
from token_statistics import bare_product, gpu_times
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agentrl.kernels import reason_triton_unavailable, token_statistics

if TYPE_CHECKING:
    from agentrl.models.policy import PolicyModel

PEAK = 989e12
"""Dense bfloat16 operations per second that NVIDIA publishes for the H100 SXM and the H200."""
Attend = Callable[[Tensor, Tensor, Tensor, Sequence[int]], Tensor]


def head(device: torch.device) -> Iterator[Figure | str]:
    """Measure log-probabilities and entropies, forward and backward: 8,192 tokens, width 3,584, vocabulary 151,936."""
    real = device.type == "cuda"
    tokens, width, vocabulary = (8192, 3584, 151_936) if real else (64, 16, 1000)
    dtype = torch.bfloat16 if real else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, device=device, dtype=dtype).div_(width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    hopper = real and any(name in torch.cuda.get_device_name() for name in ("H100", "H200"))
    bare = bare_product(hidden.detach(), weight.detach(), 5) if real else _milliseconds(lambda: hidden @ weight.t())
    operations = 2 * tokens * width * vocabulary
    yield Figure(
        name="bare matrix product", value=bare, unit="ms", low=operations / PEAK * 1e3, high=14.0 if hopper else None,
        why="time of its operations at the published speed", judged=real,
    )  # fmt: skip
    for backend in ("triton", "chunked"):
        obstacle = reason_triton_unavailable(device) if backend == "triton" else None
        if obstacle is not None:
            yield f"{backend}: skipped: the backend {obstacle}"
            continue
        yield from _head(backend, hidden, weight, targets, bare, hopper)


def _head(
    backend: str, hidden: Tensor, weight: Tensor, targets: Tensor, bare: float, hopper: bool
) -> Iterator[Figure | str]:
    def forward(rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        found = token_statistics(hidden[rows], weight, targets[rows], backend=backend)
        return found.log_probs, found.entropy

    def both() -> None:
        log_probs, entropy = forward()
        (log_probs.sum() - 0.01 * entropy.sum()).backward()
        hidden.grad = weight.grad = None

    real, some = hidden.is_cuda, slice(0, 64)
    with torch.no_grad():
        log_p = torch.log_softmax(hidden[some].float() @ weight.float().t(), -1)
        expected = log_p.gather(-1, targets[some, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        error = max(float((own - other).abs().max()) for own, other in zip(forward(some), expected, strict=True))
    yield Figure(
        name=f"{backend}, largest error", value=error, unit="nats", high=1e-3, why="exact products, summed in float32"
    )
    # Limits of the forward pass, and of forward and backward: (least and most milliseconds on an H100 or H200, largest
    # multiple of the bare products).
    limits = {"triton": ((12.5, 14.0, 1.3), (54.0, 60.0, 1.4)), "chunked": ((None, None, 3.0), (None, None, 3.0))}
    for (name, run, products), (low, high, multiple) in zip(
        (("forward", forward, 1), ("forward and backward", both, 4)), limits[backend], strict=True
    ):
        taken, memory = gpu_times(run, 5) if real else (_milliseconds(run), 0.0)
        label = f"{backend}, {name}"
        on_hopper = (low, high) if hopper else (None, None)
        yield Figure(name=label, value=taken, unit="ms", low=on_hopper[0], high=on_hopper[1], judged=real)
        yield Figure(
            name=f"{label}, multiple of {products} bare", value=taken / products / bare, high=multiple, judged=real
        )
        memory -= weight.nbytes / 1e6 if products > 1 else 0.0  # the weight's gradient
        yield Figure(name=f"{label}, extra memory", value=memory, unit="MB", high=300.0, judged=real)


def attention(device: torch.device) -> Iterator[Figure | str]:
    """Measure one layer's attention over packed documents, forward and backward, with new lengths in each call."""
    real = device.type == "cuda"
    heads, groups, size, total = (28, 4, 128, 16_384) if real else (4, 2, 16, 128)
    dtype = torch.bfloat16 if real else torch.float32
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(total, count, size, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, groups, groups)
    )
    states = (query, key, value)
    repeats = 8 if real else 2
    fresh = [documents(total, seed) for seed in range(2 * repeats)]
    floor = statistics.median(7 * heads * size * sum(n * n for n in one) / PEAK * 1e3 for one in fresh)
    yield f"floor of the same operations: {floor:.2f} ms for {len(fresh[0])} documents of {total} tokens together"
    short = documents(max(128, total // 8), 0)  # shorter, because the reference stores all attention scores
    few = [one.detach()[: sum(short)] for one in states]
    exact = _each_document(SDPBackend.MATH)(few[0].float(), few[1].float(), few[2].float(), short)
    own, backend = _own_attention(device)
    ways: dict[str, tuple[Attend, float | None, float | None]] = {
        # name: (function, least and most time with new lengths relative to the time with repeated lengths)
        f"agentrl ({backend})": (own, None, 1.3),
        "varlen": (_varlen, None, 1.3),
        "flash, a call a document": (_each_document(SDPBackend.FLASH_ATTENTION), None, 1.3),
        "cuDNN, a call a document": (_each_document(SDPBackend.CUDNN_ATTENTION), 3.0, None),
    }
    for name, (attend, least, most) in ways.items():
        try:
            error = float((attend(few[0], few[1], few[2], short).float() - exact).abs().max())
            new, again = (
                statistics.median(_milliseconds(lambda: _both(attend, states, lengths)) for lengths in every)  # noqa: B023
                for every in (fresh[1:], [fresh[-1]] * repeats)
            )
        except (ImportError, NotImplementedError, RuntimeError) as reason:  # this GPU or torch lacks the kernel
            yield f"{name}: skipped: {str(reason).splitlines()[0][:160]}"
            continue
        yield Figure(
            name=f"{name}, largest error", value=error, high=2e-2 if real else 1e-4, why="inputs are unit normals"
        )
        yield Figure(name=f"{name}, new lengths", value=new, unit="ms", judged=False)
        yield Figure(
            name=f"{name}, new over repeated lengths", value=new / again, low=least, high=most, judged=real,
            why="only cuDNN makes a plan for each new shape",
        )  # fmt: skip


def documents(total: int, seed: int) -> list[int]:
    """Return eight lengths that add up to ``total``: shares of a log-normal with sigma 1, none shorter than 9."""
    draw = random.Random(seed)
    shares = [draw.lognormvariate(0, 1) for _ in range(8)]
    lengths = [max(9, int(total * share / sum(shares))) for share in shares]
    lengths[lengths.index(max(lengths))] += total - sum(lengths)
    return lengths


def _own_attention(device: torch.device) -> tuple[Attend, str]:
    """Return attention as training computes it, and the backend that ``model.attention=auto`` selects."""
    from transformers import Qwen2Config

    from agentrl.kernels.attention import AttentionPass, attend, pack_row
    from agentrl.models.attention import choose_packed_attention, register_attention

    register_attention()  # loading a model also calls this function, which disables cuDNN's attention
    config = Qwen2Config(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4)
    backend = choose_packed_attention("auto", config, dtype="bfloat16" if device.type == "cuda" else "float32")

    def own(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        ids = torch.zeros(max(lengths), dtype=torch.int64, device="cpu")
        row = pack_row([(ids[:1], ids[1:length]) for length in lengths], share_prefixes=False).to(device)
        now = AttentionPass(row=row, backend=backend)
        return attend(now, *(one.transpose(0, 1)[None] for one in (query, key, value)))[0]

    return own, backend


def _varlen(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
    """Compute attention with torch's function, even if flash-attn is installed."""
    from torch.nn.attention.varlen import varlen_attn

    if "enable_gqa" not in inspect.signature(varlen_attn).parameters:  # torch 2.11
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=query.device)
    longest = max(lengths)
    found: Tensor = varlen_attn(query, key, value, bounds, bounds, longest, longest, window_size=(-1, 0), **grouped)
    return found


def _each_document(backend: SDPBackend) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        parts = []
        with sdpa_kernel(backend):
            for one in zip(*(states.split(list(lengths)) for states in (query, key, value)), strict=True):
                turned = (part.transpose(0, 1)[None] for part in one)
                parts.append(scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def _both(attend: Attend, states: tuple[Tensor, Tensor, Tensor], lengths: Sequence[int]) -> None:
    query, key, value = states
    torch.autograd.grad(attend(query, key, value, lengths).sum(), states)


def _milliseconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call, including the work that it queued on the GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


class Products(nn.Module):
    """The sum of ``weight * x``: its gradient is ``x``, exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def accumulation(device: torch.device) -> Iterator[Figure | str]:
    """Check sums that bfloat16 would round: gradients over micro-batches, and products of the head."""
    from agentrl.kernels.arithmetic import write_head_logits

    # In bfloat16, the next number after 16384 is 16512.
    terms = 16_392
    ones = torch.ones(128, terms, dtype=torch.bfloat16, device=device)
    found = write_head_logits(ones, ones, torch.empty(128, 128, device=device))
    yield Figure(
        name=f"error of a product of {terms} ones", value=float((found - terms).abs().max()), high=0.0,
        why="float32 holds the sum exactly",
    )  # fmt: skip

    from deepspeed.utils import safe_get_full_optimizer_state

    from agentrl.training.engine.deepspeed_engine import TrainingEngine, start_distributed
    from agentrl.training.settings import OptimizerSettings, TrainingSettings

    start_distributed(deadline=60.0)
    for stage in (0, 2, 3):
        module = Products().to(device)
        engine = TrainingEngine(
            module,
            optimizer=OptimizerSettings(gradient_clip=1e6, weight_decay=0.0, betas=(0.5, 0.99)),
            training=TrainingSettings(zero_stage=stage, persistence_threshold=0),
            bfloat16=True,
            updates=1,
        )
        # In bfloat16, 256 + 1 is 256.
        for _ in range(300):
            engine.backward(engine(torch.ones(64, dtype=torch.bfloat16, device=device)))
        engine.step()
        total = 2 * safe_get_full_optimizer_state(module.weight, "exp_avg")  # beta 0.5 halves the first gradient
        yield Figure(
            name=f"ZeRO {stage}, error of 300 gradients of one", value=float((total - 300).abs().max()), high=1e-3,
            why="gradients accumulate in float32",
        )  # fmt: skip


def energies(device: torch.device) -> Iterator[Figure | str]:
    """Check exact energies of trajectories, and compare their time with a forward and backward pass of the batch."""
    from energies import Case

    real = device.type == "cuda"
    with device:
        case = Case(rows=4, length=128 if real else 32, hidden=256 if real else 32, layers=2, vocabulary=1024)
        error = float((case.energies() / case.one_by_one() - 1).abs().max())
    yield Figure(name="largest relative error in float32", value=error, high=1e-3, why="compared with one pass per row")
    if real:
        with device:
            case = Case(rows=8, length=2048, hidden=1536, layers=8, vocabulary=32_768)
        _as_in_training(case.policy)
    runs = (case.energies, case.training)
    times: list[list[float]] = [[], []]
    for _ in range(5):
        for own, run in zip(times, runs, strict=True):
            own.append(_milliseconds(run))
    taken, training = (statistics.median(one[1:]) for one in times)
    yield Figure(name="energies", value=taken, unit="ms", judged=False)
    yield Figure(
        name="energies over forward plus backward", value=taken / training, high=1.5, judged=real,
        why="one forward, one backward, and products of each layer's inputs and gradients",
    )  # fmt: skip


def determinism(device: torch.device) -> Iterator[Figure | str]:
    """Compute the gradients of a batch twice with ``training.deterministic``, and compare them."""
    from energies import Case

    from agentrl.training.engine.determinism import set_determinism
    from agentrl.training.settings import TrainingSettings

    set_determinism(TrainingSettings(deterministic=True))
    real = device.type == "cuda"
    with device:
        case = Case(rows=8, length=512 if real else 32, hidden=512 if real else 32, layers=2, vocabulary=8192)
    if real:
        _as_in_training(case.policy)

    def gradients() -> list[Tensor]:
        found, _ = case.policy(*case.packed)
        loss = found.log_probs.mean() - 0.01 * found.entropy.mean()
        return [*torch.autograd.grad(loss, list(case.policy.parameters())), case.energies()]

    first = gradients()
    different = sum(
        not torch.equal(one, other) for _ in range(3) for one, other in zip(first, gradients(), strict=True)
    )
    yield Figure(name="tensors that differ in three repeats", value=different, high=0, why="training.deterministic")


def _as_in_training(policy: PolicyModel) -> None:
    """Convert the weights to bfloat16, and select the attention backend of ``model.attention=auto``."""
    from agentrl.models.attention import choose_packed_attention

    policy.to(torch.bfloat16)
    policy.attention = choose_packed_attention("auto", policy.causal_lm.config, dtype="bfloat16")
