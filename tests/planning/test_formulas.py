"""The formulas of a plan, with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.support import setup, tiny_shape

from agentrl.models.settings import ModelSettings
from agentrl.models.shape import ModelShape, read_model_shape
from agentrl.planning.memory import (
    TrainingSetup,
    activation_bytes_kept_peak_host,
    kv_bytes_per_token,
    rank_memory,
    server_cache_tokens,
)

GIB = 2**30
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameters_are_counted_as_published(name: str, parameters: int) -> None:
    assert read_model_shape(ModelSettings(path=name)).parameters == parameters


def test_states_are_sharded_by_the_stage() -> None:
    shape = replace(tiny_shape(), parameters=1000)
    # float32: 4 bytes a weight and a gradient, 8 for Adam's two moments; ZeRO's optimizer works on a copy.
    assert {stage: states(shape, setup(stage=stage, bfloat16=False)) for stage in (0, 1, 2, 3)} == {
        0: (4000, 4000, 8000, 0),
        1: (4000, 4000, 2000, 1000),
        2: (4000, 1000, 2000, 1000),
        3: (1000, 1000, 2000, 1000),
    }
    # bfloat16: 2 bytes a weight, gradients are added up in float32.
    assert states(shape, setup()) == (2000, 1000, 2000, 1000)


def test_offloaded_states_are_in_the_hosts_memory() -> None:
    shape = replace(tiny_shape(), parameters=1000)
    optimizer = setup(offload="optimizer")
    assert states(shape, optimizer) == (2000, 1000, 0, 0)
    assert rank_memory(shape, optimizer).host == 18 * 250
    everything = setup(stage=3, offload="all")
    assert states(shape, everything) == (0, 0, 0, 0)
    assert rank_memory(shape, everything).host == 16 * 250 + 500


def test_adapters_alone_have_gradients_and_moments() -> None:
    shape = replace(tiny_shape(), parameters=1000, adapted=50)
    lora = rank_memory(shape, setup(lora_rank=2))
    assert states(shape, setup(lora_rank=2)) == (2 * 1100, 100, 200, 100)
    assert lora.phases["reduction"]["reduction"] == 600


def test_stage_3_gathers_no_more_than_a_billion_elements_or_the_largest_tensor() -> None:
    shape = replace(tiny_shape(), parameters=7 * 10**9, largest_parameter=5 * 10**8)
    gathered = [
        rank_memory(one, setup(stage=stage)).static["gathered weights"]
        for one, stage in ((shape, 3), (replace(shape, parameters=1000), 3), (shape, 2))
    ]
    assert gathered == [2 * 10**9, 2000, 0]


def test_a_server_holds_tokens_in_the_memory_that_its_weights_and_its_overhead_leave() -> None:
    shape = replace(tiny_shape(), parameters=5 * GIB, kv_heads=2, head_dim=16, layers=6)
    assert kv_bytes_per_token(shape, 2) == 2 * 6 * 2 * 16 * 2 == 768
    # Half of 40 GiB, less 10 GiB of weights and 2 GiB of overhead.
    assert server_cache_tokens(shape, memory=40 * GIB, share=0.5, gpus=1) == 8 * GIB // 768
    # With 4 GPUs and 2 KV heads each head is held twice.
    assert server_cache_tokens(shape, memory=40 * GIB, share=0.5, gpus=4) == int(15.5 * GIB) * 2 // 768


def test_more_layers_and_more_tokens_need_more_and_checkpointing_less() -> None:
    shape, deeper = tiny_shape(), tiny_shape(num_hidden_layers=12)
    plain = kept(shape, setup())
    assert kept(deeper, setup()) == pytest.approx(2 * plain, rel=0.02)
    assert kept(shape, setup(tokens=2048)) == pytest.approx(2 * plain, rel=0.02)
    assert kept(shape, setup(checkpointing=True)) < plain / 5


def test_activations_of_one_layer_by_hand() -> None:
    # hidden 64, queries 4 x 16, keys and values 2 x 16, MLP 256, float32; for each token and layer:
    # two norms of input, normalized input and result, queries, result, keys, values, 4 tensors of the MLP, 4 maxima.
    layer = 4 * (2 * 3 * 64 + 2 * 64 + 2 * 32 + 4 * 256 + 4)
    # After the last layer the final norm; cosines and sines of 16 dimensions.
    outside = 4 * (3 * 64 + 2 * 16)
    assert kept(tiny_shape(), setup(bfloat16=False)) == 1024 * (6 * layer + outside)


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
    assert [bucket(small, setup(stage=stage)) for stage in (0, 2, 3)] == [0, 2000, 4000]
    assert [bucket(large, setup(stage=stage)) for stage in (0, 2, 3)] == [0, 10**9, 2 * 10**9]


def states(shape: ModelShape, how: TrainingSetup) -> tuple[int, ...]:
    static = rank_memory(shape, how).static
    return static["weights"], static["gradients"], static["optimizer"], static["master copy"]


def bucket(shape: ModelShape, how: TrainingSetup) -> int:
    rank = rank_memory(shape, how)
    return rank.static["gradient bucket"] or rank.phases["backward"].get("gradient bucket", 0)


def kept(shape: ModelShape, how: TrainingSetup) -> int:
    return activation_bytes_kept_peak_host(shape, how)[0]
