"""What the engine asks of servers and reads from them, and which servers it refuses, against fakes."""

from __future__ import annotations

import base64
import io
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import free_port
from rollout.fake_vllm import fakes, sampled
from rollout.vllm_support import CODEC, NEEDS, VOCABULARY, ask, opened, rollout
from transformers import Qwen2Config

from agentrl.errors import SettingsError, WorldError
from agentrl.rollout.engines.base import Completion, EngineError
from agentrl.rollout.engines.replica import ServerRequirements
from agentrl.rollout.engines.vllm.engine import build_vllm_engine

# -- what is said ---------------------------------------------------------------------------------------------------


async def test_a_turn_is_asked_for_and_read_exactly() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        answer = await ask(engine, stop=("END",), temperature=0.7, seed=2**64 - 1)
        body = server.bodies[0]
    assert answer == Completion(
        token_ids=(8, 9, 10, 11), log_probs=(-0.5,) * 4, finish_reason="length", version_spans=((0, 4),)
    )
    assert body["token_ids"] == [1, 2, 3]
    assert body["sampling_params"] == {
        "max_tokens": 4,
        "temperature": 0.7,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [CODEC.eos_id],
        "stop": ["END"],
        "seed": 2**63 - 1,
    }


async def test_how_a_turn_ends_is_told_by_its_last_token() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.on_generate = lambda body: (200, {"choices": [sampled([5, CODEC.eos_id], reason="stop")]})
        assert (await ask(engine)).finish_reason == "eos"
        server.on_generate = lambda body: (200, {"choices": [sampled([5, 6], reason="stop", stop_reason="END")]})
        assert (await ask(engine)).finish_reason == "stop"


async def test_greedy_tokens_have_log_probability_zero() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        assert (await ask(engine, temperature=0.0)).log_probs == (0.0,) * 4


async def test_unseeded_requests_carry_no_seed() -> None:
    async with fakes(CODEC) as (server,), opened([server], seeded=False) as engine:
        await ask(engine)
        assert "seed" not in server.bodies[0]["sampling_params"]


async def test_scores_are_of_the_prompts_own_tokens() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        server.scores = lambda version, place: -float(place)
        assert await engine._servers[0].replica.score((4, 5, 6), salt="x") == (0.0, -1.0)


async def test_routes_are_read_as_they_are_encoded() -> None:
    """Routes cover the context from the requested index on, and the sampled tokens except the last one."""
    experts = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    file = io.BytesIO()
    np.save(file, experts)
    encoded = base64.b64encode(file.getvalue()).decode()
    async with fakes(CODEC) as (server,), opened([server], request_retries=0) as engine:
        server.on_generate = lambda body: (200, {"choices": [sampled([5, 6, 7], routed_experts=encoded)]})
        answer = await ask(engine, max_tokens=3, routes_from=1)  # of a context of three tokens
        assert server.bodies[0]["sampling_params"]["routed_experts_prompt_start"] == 1
        assert np.array_equal(np.frombuffer(answer.routes, dtype=np.int16), experts.ravel())
        with pytest.raises(EngineError, match="expected routes of 5 tokens; got an array of shape"):
            await ask(engine, max_tokens=3, routes_from=0)
        server.on_generate = lambda body: (200, {"choices": [sampled([5, 6, 7])]})
        with pytest.raises(EngineError, match="--enable-return-routed-experts"):
            await ask(engine, max_tokens=3, routes_from=1)


# -- the wrong server -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"controls": False}, "environment variable VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "--enable-scale-out"),
        ({"logprobs_mode": "raw_logprobs"}, "raw_logprobs, which ignore the temperature: start it"),
        ({"caching": False}, "--enable-prefix-caching"),
        ({"max_model_len": 199}, "limit is 199, .* is 200: start it with --max-model-len 200"),
        ({"device": "cpu"}, "--no-enable-chunked-prefill, or set rollout.vllm.seeded=false"),
        (
            {"dtype": "torch.bfloat16"},
            """the server rounds logits to bfloat16, .* --hf-overrides '{"head_dtype": "float32"}""",
        ),
        ({"tokenizes": False}, "without --tokens-only"),
        ({"vocabulary": 256}, "different model: the policy's vocabulary has 257 tokens, the server's has fewer"),
        ({"vocabulary": 300}, "different model: the policy's vocabulary has 257 tokens, the server's has more"),
    ],
)
async def test_a_server_that_cannot_be_used_says_why(change: dict[str, Any], message: str) -> None:
    async with fakes(CODEC) as (server,):
        for name, value in change.items():
            setattr(server, name, value)
        with pytest.raises(SettingsError, match=f"{server.address} cannot be used: .*{message}"):
            async with opened([server]):
                pass


@pytest.mark.parametrize(
    ("device", "overrides", "head"),
    [("cuda", {"head_dtype": "float32"}, "float32"), ("cpu", {}, "bfloat16"), ("cpu", "a function", "bfloat16")],
)
async def test_the_dtype_of_each_servers_logits_is_reported(device: str, overrides: Any, head: str) -> None:
    async with fakes(CODEC) as (server,):
        server.device, server.chunks, server.dtype, server.hf_overrides = device, False, "torch.bfloat16", overrides
        async with opened([server]) as engine:
            assert await engine.health() == f"vLLM 0.32.0, 1 servers: {server.address}; logits in {head}; version 0"


async def test_the_models_own_config_may_name_the_dtype_of_logits(tmp_path: Path) -> None:
    config = Qwen2Config(vocab_size=VOCABULARY)
    config.head_dtype = "float32"
    config.save_pretrained(tmp_path)
    needs = ServerRequirements.from_policy(str(tmp_path), CODEC, max_tokens=200)
    async with fakes(CODEC) as (server,):
        server.dtype = "torch.bfloat16"
        async with opened([server], needs=needs) as engine:
            assert "; logits in float32; " in await engine.health()


async def test_without_seeds_a_server_on_a_cpu_may_prefill_in_parts() -> None:
    async with fakes(CODEC) as (server,):
        server.device = "cpu"
        async with opened([server], seeded=False) as engine:
            await ask(engine)


async def test_another_tokenizer_is_told_by_its_first_difference() -> None:
    class Shifted:
        def encode(self, text: str) -> tuple[int, ...]:
            return tuple(token + (place == 3) for place, token in enumerate(CODEC.encode(text)))

    async with fakes(CODEC) as (server,):
        server.codec = Shifted()  # type: ignore[assignment]
        with pytest.raises(SettingsError, match=r"tokenizer differs .* policy \[220, 82, 84\], server \[221, 82, 84\]"):
            async with opened([server]):
                pass


async def test_nobody_at_the_address() -> None:
    settings = rollout([f"http://127.0.0.1:{free_port()}"], start_deadline=0.3)
    engine = build_vllm_engine(settings.vllm.addresses, NEEDS, settings)
    with pytest.raises(
        WorldError, match=r"rollout.vllm.start_deadline=0.3 s from the vLLM server .* cannot be reached"
    ):
        await engine.open()
    await engine.close()


@pytest.mark.parametrize("path", ["/server_info", "/weight_info", "/get_world_size", "/version", "/tokenize"])
@pytest.mark.parametrize("said", [[1], {}, None, "x", {"tokens": 3}, b"<html>"], ids=repr)
async def test_what_is_no_vllm_server_is_told_in_one_message(path: str, said: Any) -> None:
    async with fakes(CODEC) as (server,):
        server.says[path] = said
        with pytest.raises((SettingsError, WorldError), match=server.address):
            async with opened([server]):
                pass


async def test_another_release_of_vllm_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with fakes(CODEC) as (server,):
        server.says["/version"] = {"version": "0.29.1"}
        with caplog.at_level(logging.WARNING):
            async with opened([server]):
                pass
    assert f"{server.address} runs vLLM 0.29.1; agentrl supports vLLM 0.32" in caplog.text


# -- garbage --------------------------------------------------------------------------------------------------------

GARBAGE: dict[str, tuple[Any, str]] = {
    "text": (b"<html>busy</html>", "JSON is malformed.*<html>busy"),
    "no choices": ({"choices": []}, "Expected `array` of length >= 1"),
    "a list": ([1], "Expected `object`, got `array`"),
    "no tokens": ({"choices": [sampled([])]}, "expected 1 to 4 token ids"),
    "too many tokens": ({"choices": [sampled([1] * 5)]}, "expected 1 to 4 token ids"),
    "text for tokens": ({"choices": [sampled(["1"])]}, r"Expected `int`, got `str` .*token_ids"),  # type: ignore[list-item]
    "too large a token": ({"choices": [sampled([1 << 31, 1, 1, 1])]}, r"Expected `int` <= 2147483647 .*token_ids"),
    "negative token": ({"choices": [sampled([-1, 1, 1, 1])]}, r"Expected `int` >= 0 .*token_ids"),
    "cut by the server": ({"choices": [sampled([1, 2])]}, "its token limit"),
    "aborted": ({"choices": [sampled([1], reason="abort")]}, "unexpected finish_reason 'abort'"),
    "no log-probs": ({"choices": [sampled([1] * 4, logprobs=None)]}, r"Expected `object`, got `null` .*logprobs"),
    "fewer log-probs": (
        {"choices": [sampled([1] * 4, logprobs=sampled([1, 1, 2])["logprobs"], finish_reason="stop")]},
        "expected one log-probability per token; got 3 for 4 tokens",
    ),
    "clamped": (
        {"choices": [sampled([1] * 4, logprobs={"content": [{"token_id": 1, "logprob": -9999.0}] * 4})]},
        r"Expected `float` > -9999.0 .*logprob",
    ),
    "positive": (
        {"choices": [sampled([1] * 4, logprobs={"content": [{"token_id": 1, "logprob": 0.1}] * 4})]},
        r"Expected `float` <= 1e-06 .*logprob",
    ),
    "no versions": ({"choices": [sampled([1] * 4, weight_versions=None)]}, "do not cover 4 tokens"),
    "unlabelled": ({"choices": [sampled([1] * 4, version="default")]}, "label 'default'"),
    "earlier version": ({"choices": [sampled([1] * 4, version="-1")]}, "label '-1'"),
    "later version": ({"choices": [sampled([1] * 4, version="3")]}, r"versions \[3\], but the request has version 0"),
}


@pytest.mark.parametrize("name", GARBAGE)
async def test_garbage_is_never_a_completion(name: str) -> None:
    answer, message = GARBAGE[name]
    async with fakes(CODEC) as (server,), opened([server], request_retries=0) as engine:
        server.on_generate = lambda body: (200, answer)
        with pytest.raises(EngineError, match=message):
            await ask(engine)
