"""What a run does about a server of another policy, and about one that does not take its weights; on fake servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.fake_vllm import FakeVLLM, fakes
from rollout.vllm_support import ask, eventually, is_up

from agentrl.config import load_settings
from agentrl.errors import SettingsError
from agentrl.models.loading import build_tiny_model, train_tokenizer, write_model
from agentrl.models.settings import TinyModelSettings
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import EngineSpecification
from agentrl.rollout.engines.vllm.engine import ManagedVLLM, choose_transfer_backend
from agentrl.rollout.engines.vllm.plugin import VLLMSettings
from agentrl.weights.verify import Checksum, Probe

TOKENIZER = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
CODEC = TextCodec(TOKENIZER)
PROBE = Probe(token_ids=(1, 2, 3), log_probs=(-1.0, -1.0))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=32, layers=1, heads=2, intermediate_size=48)
    model = build_tiny_model(settings, TOKENIZER, seed=5)
    write_model(tmp_path / "policy", model=model, tokenizer=TOKENIZER, title="random", body="Untrained.")
    return tmp_path / "policy"


def host(policy: Path, servers: list[FakeVLLM]) -> ManagedVLLM:
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
    settings = load_settings(None, None, overrides, command="eval")
    request = EngineSpecification(
        rollout=settings.rollout,
        policy=settings.model,
        policy_path=str(policy),
        codec=CODEC,
        longest=200,
        folder=policy.parent,
    )
    return ManagedVLLM(request)


def scored(value: float) -> Any:
    return lambda version, place: value


async def test_a_server_of_the_same_policy_is_taken(policy: Path) -> None:
    async with fakes(CODEC) as servers:
        one = host(policy, servers)
        await one.engine.open()
        assert await one.verify(0, PROBE) is None
        await one.engine.close()


async def test_a_server_of_another_policy_ends_the_run_before_it_begins(policy: Path) -> None:
    async with fakes(CODEC, 2) as servers:
        one = host(policy, servers)
        await one.engine.open()
        servers[1].scores = scored(-1.5)
        message = (
            f"the vLLM server {servers[1].address}: its log-probabilities of the probe differ from the trainer's by "
            r"0.5 nats on average \(bound 0.01\): the server serves a different model or dtype than model.path"
        )
        with pytest.raises(SettingsError, match=message):
            await one.verify(0, PROBE)
        await one.engine.close()


async def test_a_server_that_earlier_weights_were_sent_to_gets_new_ones(policy: Path) -> None:
    async with fakes(CODEC) as servers:
        servers[0].version = "7"
        one = host(policy, servers)
        await one.engine.open()
        assert await one.verify(0, PROBE) == "its weights come from an earlier run"
        await one.engine.close()


async def installed(one: ManagedVLLM, policy: Path, version: int, probe: Probe) -> str | None:
    await one.pause()
    return await one.install(str(policy), version, probe)


async def test_a_part_that_did_not_arrive_is_named_whatever_the_probe_says(policy: Path) -> None:
    async with fakes(CODEC, 2) as servers:
        for server in servers:
            server.checksums = {"a": (3, 10), "b": (2, 7)}
        one = host(policy, servers)
        await one.engine.open()
        start = replace(PROBE, checksums={"a": Checksum(values=3, total=10), "b": Checksum(values=2, total=7)})
        assert await one.verify(0, start) is None
        updated = replace(PROBE, checksums={"a": Checksum(values=3, total=11), "b": Checksum(values=2, total=7)})
        servers[0].checksums = {"a": (3, 11), "b": (2, 7)}
        said = await installed(one, policy, 1, updated)
        assert said == (
            f"the vLLM server {servers[1].address}: the checksums of 1 of 2 parameters differ from the trainer's: a"
        )
        servers[1].checksums = {"a": (6, 22), "b": (2, 7)}  # twice, as by two workers
        assert await installed(one, policy, 1, updated) is None
        assert all("checksums of 2 of 2 parameters" in str(item) for item in one.verifier.verified())
        await one.engine.close()


async def test_a_server_that_comes_back_proves_its_checksums(policy: Path) -> None:
    async with fakes(CODEC, 2) as servers:
        for server in servers:
            server.checksums = {"a": (3, 10)}
        one = host(policy, servers)
        await one.engine.open()
        assert await installed(one, policy, 1, replace(PROBE, checksums={"a": Checksum(values=3, total=10)})) is None
        servers[0].checksums = {"a": (3, 9)}
        await servers[0].die()
        await ask(one.engine)
        await servers[0].start()
        member = one.engine._servers[0]
        await eventually(lambda: "after recovery: the vLLM server" in member.failure)
        assert member.failure.endswith("the checksums of 1 of 1 parameters differ from the trainer's: a")
        assert not is_up(one.engine, 0)
        servers[0].checksums = {"a": (3, 10)}
        await eventually(lambda: is_up(one.engine, 0))
        await one.engine.close()


@pytest.mark.parametrize("said", [{}, {"results": []}, {"results": [3]}, {"results": [{"a": "x"}]}], ids=repr)
async def test_garbage_for_checksums_is_no_proof(policy: Path, said: Any) -> None:
    async with fakes(CODEC, 2) as servers:
        servers[0].checksums = servers[1].checksums = {"a": (3, 10)}
        one = host(policy, servers)
        await one.engine.open()
        servers[0].says["/collective_rpc"] = said
        assert await installed(one, policy, 1, PROBE) is None
        assert not is_up(one.engine, 0)
        await one.engine.close()


def test_without_a_gpu_weights_travel_by_file() -> None:
    expected = {"colocated": "ipc", "dedicated": "nccl"} if torch.cuda.is_available() else {}
    for placement in ("colocated", "dedicated", "external"):
        chosen = choose_transfer_backend(VLLMSettings.model_construct(placement=placement, transfer="auto"))
        assert chosen == expected.get(placement, "nccl" if expected else "file")
