"""The formulas of a plan, with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.support import setup, tiny_shape

from agentrl.models.settings import ModelSettings
from agentrl.planning.estimate import kv_bytes, rank_memory, server_memory
from agentrl.planning.formulas import (
    bucket_bytes,
    gathered_bytes,
    gradient_bytes,
    host_bytes,
    master_bytes,
    moment_bytes,
    reduction_bytes,
    weight_bytes,
)
from agentrl.planning.memory import GIB, ModelShape, TrainingSetup
from agentrl.planning.shapes import read_shape, shipped_shapes

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_counted_as_published(name: str, parameters: int) -> None:
    assert read_shape(ModelSettings(path=name)).parameters == parameters
    assert name in shipped_shapes()


def test_states_are_shared_out_as_the_stage_says() -> None:
    shape = replace(tiny_shape(), parameters=1000)
    states = (weight_bytes, gradient_bytes, moment_bytes, master_bytes)
    parts = {stage: tuple(part(shape, setup(stage=stage, bfloat16=False)) for part in states) for stage in (0, 1, 2, 3)}
    # float32: 4 bytes a weight and a gradient, 8 for Adam's two moments; ZeRO's optimizer works on a copy.
    assert parts == {
        0: (4000, 4000, 8000, 0),
        1: (4000, 4000, 2000, 1000),
        2: (4000, 1000, 2000, 1000),
        3: (1000, 1000, 2000, 1000),
    }
    # bfloat16: 2 bytes a weight, gradients are added up in float32.
    assert tuple(part(shape, setup()) for part in states) == (2000, 1000, 2000, 1000)


def test_what_is_offloaded_stands_in_the_hosts_memory() -> None:
    shape = replace(tiny_shape(), parameters=1000)
    optimizer = setup(offload="optimizer")
    assert (weight_bytes(shape, optimizer), moment_bytes(shape, optimizer)) == (2000, 0)
    assert host_bytes(shape, optimizer) == 18 * 250
    everything = setup(stage=3, offload="all")
    assert weight_bytes(shape, everything) == 0
    assert host_bytes(shape, everything) == 16 * 250 + 500


def test_adapters_have_gradients_and_moments_alone() -> None:
    shape = replace(tiny_shape(), parameters=1000, adapted=50)
    lora = setup(lora_rank=2)
    assert weight_bytes(shape, lora) == 2 * 1100
    assert (gradient_bytes(shape, lora), moment_bytes(shape, lora), reduction_bytes(shape, lora)) == (100, 200, 600)


def test_stage_3_gathers_no_more_than_a_billion_elements_or_the_largest_tensor() -> None:
    shape = replace(tiny_shape(), parameters=7 * 10**9, largest_parameter=5 * 10**8)
    assert gathered_bytes(shape, setup(stage=3)) == 2 * 10**9
    assert gathered_bytes(replace(shape, parameters=1000), setup(stage=3)) == 2000
    assert gathered_bytes(shape, setup(stage=2)) == 0


def test_a_server_keeps_what_its_weights_and_its_overhead_leave() -> None:
    shape = replace(tiny_shape(), parameters=5 * GIB, kv_heads=2, head_dim=16, layers=6)
    assert kv_bytes(shape, 2) == 2 * 6 * 2 * 16 * 2
    server = server_memory(shape, memory=40 * GIB, share=0.5, tensor_parallel=1)
    assert (server.weights, server.kv_cache, server.total) == (10 * GIB, 8 * GIB, 20 * GIB)
    assert server.kv_tokens == 8 * GIB // 768
    # With 4 GPUs and 2 KV heads each head is held twice.
    assert server_memory(shape, memory=40 * GIB, share=0.5, tensor_parallel=4).kv_tokens == int(15.5 * GIB) * 2 // 768


def test_more_layers_and_more_tokens_need_more_and_checkpointing_less() -> None:
    shape, deeper = tiny_shape(), tiny_shape(num_hidden_layers=12)
    plain = kept(shape, setup())
    assert kept(deeper, setup()) == pytest.approx(2 * plain, rel=0.02)
    assert kept(shape, setup(tokens=2048)) == pytest.approx(2 * plain, rel=0.02)
    assert kept(shape, setup(checkpointing=True)) < plain / 5


def test_ranks_that_share_rows_keep_attentions_result_twice_and_copies_of_heads() -> None:
    shape = tiny_shape()
    plain = kept(shape, setup())
    # Of each of the 6 layers the result [1024, 4 x 16] in 2 bytes by heads, beside that by tokens.
    results = 6 * 1024 * 4 * 16 * 2
    assert kept(shape, setup(tokens=2048, sequence_parallel=2)) == plain + results
    # Four ranks hold a copy each of one of two heads: keys and values of 4096 tokens instead of two heads' of 1024.
    copies = 6 * 2 * (4096 - 2 * 1024) * 16 * 2
    assert kept(shape, setup(tokens=4096, sequence_parallel=4)) == plain + results + copies


def test_inputs_of_layers_move_to_the_hosts_memory() -> None:
    shape, on_device = tiny_shape(), setup(checkpointing=True)
    moved = setup(checkpointing=True, checkpoint_offload=True)
    inputs = 6 * 1024 * 64 * 2
    assert kept(shape, on_device) - kept(shape, moved) >= inputs
    assert inputs <= rank_memory(shape, moved).host < 2 * inputs
    assert rank_memory(shape, on_device).host == 0


def test_the_bucket_is_no_larger_than_the_gradients() -> None:
    small, large = replace(tiny_shape(), parameters=1000), replace(tiny_shape(), parameters=10**9)
    assert [bucket_bytes(small, setup(stage=stage)) for stage in (0, 2, 3)] == [0, 2000, 4000]
    assert [bucket_bytes(large, setup(stage=stage)) for stage in (0, 2, 3)] == [0, 10**9, 2 * 10**9]


def kept(shape: ModelShape, how: TrainingSetup) -> int:
    return rank_memory(shape, how).phases["backward"]["activations"]
