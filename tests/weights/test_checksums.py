"""What checksums of parameters see, and what vLLM's worker is extended by, on modules shaped like vLLM's."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from agentrl.rollout.engines.vllm.plan import WORKER_EXTENSION
from agentrl.rollout.engines.vllm.worker_extension import WorkerExtension
from agentrl.weights.sources import ParameterSource
from agentrl.weights.verify import Checksum, add_tied_head, checksum, checksums, describe_differing, sum_checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def told(model: nn.Module) -> dict[str, Checksum]:
    """What a worker with this model tells, read as the engine's side reads it."""
    worker = type("Worker", (WorkerExtension,), {"get_model": lambda self: model})()
    return sum_checksums([{name: (values, total) for name, (values, total) in worker.agentrl_checksums().items()}])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_that_differs_by_its_last_bit_is_seen(dtype: torch.dtype) -> None:
    weights = torch.randn(64, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    whole = checksum(weights)
    flat = weights.view(-1)
    for place in range(0, flat.numel(), 97):
        changed = weights.clone()
        changed.view(-1)[place] = torch.nextafter(flat[place], torch.tensor(float("inf"), dtype=dtype))
        assert not whole.matches_copies(checksum(changed))
    assert whole == checksum(weights.clone())


def test_a_perturbation_of_1e_6_is_seen_in_float32() -> None:
    weights = torch.randn(50, 20, generator=torch.Generator().manual_seed(1))
    assert not checksum(weights).matches_copies(checksum(weights * (1 + 1e-6)))
    # What bfloat16 rounds away is no other policy.
    small = weights.bfloat16()
    assert checksum(small) == checksum((small.float() * (1 + 1e-6)).bfloat16())


def test_layout_and_padding_are_not_seen_and_shards_add_up() -> None:
    weights = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    whole = checksum(weights)
    assert whole == checksum(weights.T.contiguous()) == checksum(torch.cat([weights, torch.zeros(4, 10)]))
    assert whole == checksum(weights[:5]) + checksum(weights[5:])
    assert whole == checksum(weights[:, :3]) + checksum(weights[:, 3:])
    assert whole.matches_copies(whole + whole)  # two workers with a copy each
    assert not whole.matches_copies(whole + checksum(weights * 2))
    assert not whole.matches_copies(checksum(weights[:6]))
    assert not whole.matches_copies(checksum(torch.zeros(3)))
    assert checksum(torch.zeros(3)).matches_copies(checksum(torch.zeros(9)))


def test_the_sign_of_zero_and_denormal_numbers_are_not_seen() -> None:
    assert checksum(torch.tensor([1.0, -0.0, 1e-40])) == checksum(torch.tensor([1.0]))


def test_a_sum_over_several_chunks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(999, generator=torch.Generator().manual_seed(1))
    whole = checksum(weights)
    monkeypatch.setattr("agentrl.weights.verify._CHUNK", 10)
    assert checksum(weights) == whole
    # Cross-checked with integers of any size.
    total = 0
    for bits in weights.view(torch.int32).tolist():
        mixed = bits * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0x94D049BB133111EB % 2**64
        total += mixed ^ (mixed >> 31)
    assert whole == Checksum(values=999, total=total % 2**64)


def test_swapped_matrices_are_named_and_not_all_of_many() -> None:
    generator = torch.Generator().manual_seed(1)
    trainer = checksums((f"p{place:02d}", torch.randn(4, generator=generator)) for place in range(12))
    assert describe_differing(trainer, trainer) is None
    swapped = trainer | {"p03": trainer["p05"], "p05": trainer["p03"]}
    assert (
        describe_differing(trainer, swapped)
        == "the checksums of 2 of 12 parameters differ from the trainer's: p03, p05"
    )
    other = {name: checksum(torch.ones(4)) for name in trainer}
    said = describe_differing(trainer, other)
    assert said is not None
    assert said.startswith("the checksums of 12 of 12 parameters differ from the trainer's: p00, p01, ")
    assert said.endswith("p07 and 4 more")
    assert describe_differing(trainer, {}) is None


def test_a_source_knows_the_checksums_of_what_it_gave_tied_heads_included() -> None:
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(5, 4)
    source = ParameterSource(model)
    assert source.checksums == {}
    values = next(value for _, value in list(source))
    assert source.checksums == {name: checksum(values) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    unneeded = ParameterSource(model, with_checksums=False)
    assert [name for name, _ in unneeded] == ["model.embed_tokens.weight"]
    assert unneeded.checksums == {}


# -- vLLM's modules -------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """As vLLM's linear layers: several of a checkpoint in one, and packed out of sight on a CPU."""

    def __init__(self, *weights: Tensor, packed: bool = False, bias: Tensor | None = None) -> None:
        super().__init__()
        self.output_partition_sizes = [len(weight) for weight in weights]
        self.input_size_per_partition = weights[0].shape[1]
        whole = torch.cat(weights)
        self.weight = nn.Parameter(torch.empty(0, dtype=whole.dtype) if packed else whole, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        if packed:
            self.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, whole, bias)


class ParallelLMHead(nn.Module):
    """As vLLM's head on a CPU: the weight is there, and a packed copy that it computes with."""

    def __init__(self, weight: Tensor, packed: Tensor) -> None:
        super().__init__()
        self.embedding_dim = weight.shape[1]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, packed, bias)


class Served(nn.Module):
    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.model = nn.ModuleDict(layers)


def matrices(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_packed_layers_are_told_by_a_checkpoints_names(packed: bool, dtype: torch.dtype) -> None:
    width = 600  # read in three pieces
    q, k, v, down, bias = matrices((8, width), (4, width), (4, width), (6, width), (16,), dtype=dtype)
    model = Served(qkv_proj=Linear(q, k, v, packed=packed, bias=bias), down_proj=Linear(down, packed=packed))
    expected: list[tuple[str, Any]] = [
        ("model.q_proj.weight", q), ("model.k_proj.weight", k), ("model.v_proj.weight", v),
        ("model.q_proj.bias", bias[:8]), ("model.k_proj.bias", bias[8:12]), ("model.v_proj.bias", bias[12:]),
        ("model.down_proj.weight", down),
    ]  # fmt: skip
    assert told(model) == checksums(expected)


def test_a_packed_head_that_kept_its_old_values_is_seen() -> None:
    old, new = matrices((9, 8), (9, 8))
    trainer = {"model.head.weight": checksum(new)}
    assert describe_differing(trainer, told(Served(head=ParallelLMHead(new, new)))) is None
    assert describe_differing(trainer, told(Served(head=ParallelLMHead(new, old)))) is not None


def test_what_has_no_name_in_a_checkpoint_is_not_told() -> None:
    experts, quantized = matrices((4, 3), (4, 3))
    fused = Linear(experts, quantized)
    fused.output_partition_sizes = [8]
    model = Served(gate_up_proj=fused, down_proj=Linear(experts))
    model.model["down_proj"].weight = nn.Parameter(quantized.to(torch.float8_e4m3fn), requires_grad=False)
    assert told(model) == {}


def test_workers_of_one_server_are_added_up() -> None:
    gate, up, norm = matrices((6, 4), (6, 4), (4,))
    shares = []
    for rank in range(2):
        rows = slice(3 * rank, 3 * rank + 3)
        model = Served(gate_up_proj=Linear(gate[rows], up[rows]), norm=nn.LayerNorm(4, bias=False))
        model.model["norm"].weight = nn.Parameter(norm, requires_grad=False)
        shares.append({name: (one.values, one.total) for name, one in told(model).items()})
    trainer = checksums([("model.gate_proj.weight", gate), ("model.up_proj.weight", up), ("model.norm.weight", norm)])
    assert describe_differing(trainer, sum_checksums(shares)) is None
    swapped = checksums([("model.gate_proj.weight", up), ("model.up_proj.weight", gate), ("model.norm.weight", norm)])
    assert describe_differing(swapped, sum_checksums(shares)) is not None


def test_servers_are_told_where_the_extension_lies() -> None:
    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert getattr(importlib.import_module(module), name) is WorkerExtension


def test_a_head_of_its_own_keeps_its_checksum() -> None:
    one, other = Checksum(values=1, total=1), Checksum(values=1, total=2)
    assert add_tied_head({"model.embed_tokens.weight": one, "lm_head.weight": other})["lm_head.weight"] == other
