"""The engine in the worker that holds a copy of the model: what arrives wrong by a file is named at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import load_settings
from agentrl.models.loading import build_tiny_model, train_tokenizer
from agentrl.models.settings import TinyModelSettings
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import EngineSpecification
from agentrl.rollout.engines.transformers import ManagedTransformers
from agentrl.weights.exports import write_export
from agentrl.weights.sources import ParameterSource
from agentrl.weights.verify import Probe

TOKENIZER = train_tokenizer(["1 + 1 = 2\n"], vocabulary_size=300)
SETTINGS = TinyModelSettings(vocabulary_size=300, hidden_size=32, layers=2, heads=2, intermediate_size=48)
TOKENS = tuple(range(1, 65))
DOWN = "model.layers.1.mlp.down_proj.weight"


def policy() -> Any:
    return build_tiny_model(SETTINGS, TOKENIZER, seed=5).to(torch.bfloat16)


@torch.no_grad()
def probe_of(model: Any) -> Probe:
    ids = torch.tensor([TOKENS])
    log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    source = ParameterSource(model)
    for _ in source:
        pass
    scores = tuple(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return Probe(token_ids=TOKENS, log_probs=scores, checksums=source.checksums)


@torch.no_grad()
def step(model: Any, seed: int) -> None:
    """As far as Adam moves at a learning rate of 1e-6; of most values bfloat16 keeps nothing of it."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(parameter.float() + 1e-6 * torch.randn(parameter.shape, generator=generator).sign())


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[ManagedTransformers]:
    settings = load_settings(None, None, ["model.dtype=bfloat16"])
    request = EngineSpecification(
        rollout=settings.rollout,
        policy=settings.model,
        policy_path="",
        codec=TextCodec(TOKENIZER),
        longest=100,
        folder=tmp_path,
        model=policy(),
    )
    one = ManagedTransformers(request)
    yield one
    await one.engine.close()


async def install(host: ManagedTransformers, folder: Path, tensors: Any, probe: Probe, version: int) -> str | None:
    await host.pause()
    return await host.install(str(write_export(folder, tensors, version)), version, probe)


async def test_an_honest_transfer_is_taken_every_time(host: ManagedTransformers, tmp_path: Path) -> None:
    model = policy()
    assert await host.verify(0, probe_of(model)) is None
    for version in range(1, 6):
        step(model, version)
        assert await install(host, tmp_path, model.named_parameters(), probe_of(model), version) is None
    (one,) = host.verifier.verified()
    known = len(probe_of(model).checksums)
    assert f"checksums of {known} of {known} parameters" in str(one)


async def test_a_step_that_did_not_arrive_is_found_at_once(host: ManagedTransformers, tmp_path: Path) -> None:
    model = policy()
    before = probe_of(model)
    assert await host.verify(0, before) is None
    step(model, 1)
    after = probe_of(model)
    assert after.log_probs != before.log_probs
    said = await install(host, tmp_path, policy().named_parameters(), after, 1)
    changed = sum(before.checksums[name] != after.checksums[name] for name in after.checksums)
    assert said is not None
    assert f"the checksums of {changed} of {len(after.checksums)} parameters differ from the trainer's: " in said


async def test_one_matrix_that_did_not_arrive_is_named_and_the_probe_alone_is_silent(
    host: ManagedTransformers, tmp_path: Path
) -> None:
    model, old = policy(), dict(policy().named_parameters())
    assert await host.verify(0, probe_of(model)) is None
    step(model, 1)
    parts = {name: old[name] if name == DOWN else tensor for name, tensor in model.named_parameters()}
    said = await install(host, tmp_path, parts.items(), probe_of(model), 1)
    known = len(probe_of(model).checksums)
    assert said == f"the engine: the checksums of 1 of {known} parameters differ from the trainer's: {DOWN}"
    without = {name: tensor for name, tensor in model.named_parameters() if name != DOWN}
    assert await install(host, tmp_path, without.items(), probe_of(model), 1) == said
    assert await install(host, tmp_path, parts.items(), replace(probe_of(model), checksums={}), 1) is None
