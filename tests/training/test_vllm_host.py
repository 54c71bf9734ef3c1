"""What a run does about a server of another policy, and about one that does not take its weights; on fake servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollout.fake_vllm import FakeVLLM, fakes

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.models.loading import write_model
from agentrl.models.settings import TinyModelSettings
from agentrl.models.tiny import build_tiny_model, train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.training.hosting import VLLMHost
from agentrl.weights.verify import Probe

TOKENIZER = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
CODEC = TextCodec(TOKENIZER)
PROBE = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -1.0))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=32, layers=1, heads=2, intermediate_size=48)
    model = build_tiny_model(settings, TOKENIZER, seed=5)
    write_model(tmp_path / "policy", model=model, tokenizer=TOKENIZER, title="random", body="Untrained.")
    return tmp_path / "policy"


def host(policy: Path, servers: list[FakeVLLM]) -> VLLMHost:
    addresses = ",".join(server.address for server in servers)
    overrides = [
        f"model.path={policy}",
        "model.dtype=float32",
        "rollout.engine=vllm",
        "rollout.vllm.placement=external",
    ]
    overrides += [f"rollout.vllm.addresses=[{addresses}]", "rollout.max_prompt_tokens=100"]
    overrides += ["rollout.max_response_tokens=100", "rollout.max_turn_tokens=100"]
    for server in servers:
        server.vocabulary = 300
    return VLLMHost(load_settings(None, None, overrides, command="eval"), CODEC, str(policy), policy.parent)


def scored(value: float) -> Any:
    return lambda version, place: value


async def test_a_server_of_the_same_policy_is_taken(policy: Path) -> None:
    async with fakes(CODEC) as servers:
        one = host(policy, servers)
        await one.engine.open()
        assert await one.accept(0, PROBE) is None
        await one.engine.close()


async def test_a_server_of_another_policy_ends_the_run_before_it_begins(policy: Path) -> None:
    async with fakes(CODEC, 2) as servers:
        one = host(policy, servers)
        await one.engine.open()
        servers[1].scores = scored(-1.5)
        message = (
            f"the vLLM server {servers[1].address}: its log-probabilities of the probe differ from the trainer's by "
            r"0.5 nats on average \(bound 0.0001\): it serves another policy than model.path, or in another dtype"
        )
        with pytest.raises(SettingsError, match=message):
            await one.accept(0, PROBE)
        await one.engine.close()


async def test_a_server_that_earlier_weights_were_sent_to_gets_new_ones(policy: Path) -> None:
    async with fakes(CODEC) as servers:
        servers[0].version = "7"
        one = host(policy, servers)
        await one.engine.open()
        assert await one.accept(0, PROBE) == "its weights are of an earlier run"
        await one.engine.close()


async def test_what_did_not_arrive_is_told_with_the_parameters_that_were_not_written(policy: Path) -> None:
    async with fakes(CODEC) as servers:
        one = host(policy, servers)
        await one.engine.open()
        assert await one.accept(0, PROBE) is None
        servers[0].scores = scored(-1.25)
        await one.hold(blank=True)
        said = await one.install(str(policy), 1, PROBE)
        assert said is not None
        assert "differ from the trainer's by 0.25 nats on average" in said
        assert "by its checksums the transfer did not write 1 of 2 parameters: b" in said
        await one.engine.close()
