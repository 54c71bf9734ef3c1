"""A real vLLM server on the CPU with adapters: the log-probabilities of transformers', layer by layer, and merged."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout.test_vllm_server import FLOAT32, LENGTHS, codec_of, policy, serving, turn

from agentrl.config import load_settings
from agentrl.models.loading import read_model
from agentrl.models.lora import add_adapters, is_adapter_factor, write_adapter
from agentrl.models.settings import LoRASettings
from agentrl.rollout.engines.base import EngineSpecification
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.engines.vllm.engine import ManagedVLLM
from agentrl.rollout.engines.vllm.replica import VLLMClient
from agentrl.rollout.settings import longest_request_tokens
from agentrl.weights.exports import AdapterSource, adapter_parameters, merged_parameters, write_export
from agentrl.weights.verify import Probe

__all__ = ["policy"]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here"), pytest.mark.xdist_group("vllm")]

LORA = LoRASettings(rank=3, alpha=12)
PROBE = tuple(random.Random(1).choices(range(300), k=64))  # tokens that differ, or queries and keys would not count
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def adapted(folder: Path, *kinds: str) -> Any:
    """The policy with random adapters; only those of layers of ``kinds`` are not zero."""
    model = add_adapters(read_model(folder, FLOAT32), LORA).eval()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if is_adapter_factor(name):
                drawn = torch.randn(value.shape, generator=draw) / 3
                if any(f".{kind}." in name for kind in kinds):
                    value.copy_(drawn)
    return model


async def probe_of(model: Any, folder: Path) -> Probe:
    engine = TransformersEngine(model, codec_of(folder), load_settings().rollout)
    scores = await engine.score(PROBE)
    await engine.close()
    source = AdapterSource(model)
    for _ in source:
        pass
    return Probe(token_ids=PROBE, log_probs=scores, checksums=source.checksums)


def managed(folder: Path, address: str) -> ManagedVLLM:
    external = ["rollout.vllm.placement=external", f"rollout.vllm.addresses=[{address}]"]
    lora = [f"model.lora.rank={LORA.rank}", f"model.lora.alpha={LORA.alpha}"]
    settings = load_settings(None, None, [f"model.path={folder}", *LENGTHS, *external, *lora], command="eval")
    return ManagedVLLM(
        EngineSpecification(
            rollout=settings.rollout,
            policy=settings.model,
            policy_path=str(folder),
            codec=codec_of(folder),
            longest=longest_request_tokens(settings.rollout, None),
            folder=folder.parent,
        )
    )


def difference(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


async def test_adapters_and_merged_weights_give_the_trainers_log_probabilities(policy: Path, tmp_path: Path) -> None:
    small = "rollout.vllm.extra_args=[--kv-cache-memory-bytes, 64M]"
    with serving(policy, tmp_path / "said", f"model.lora.rank={LORA.rank}", small) as address:
        host = managed(policy, address)
        target = host.transfer_target()
        await host.open()
        try:
            start = await probe_of(adapted(policy), policy)
            assert await host.verify(0, start) is None
            last = start
            for version, kinds in enumerate([*((kind,) for kind in KINDS), KINDS], 1):
                model = adapted(policy, *kinds)
                probe = await probe_of(model, policy)
                assert difference(probe.log_probs, start.log_probs) > 1e-3, kinds
                folder = tmp_path / str(version)
                write_adapter(folder, dict(adapter_parameters(model)), LORA, base=str(policy))
                running = asyncio.create_task(turn(host.engine, (3, 4), f"over-{version}", max_tokens=500))
                await asyncio.sleep(0.1)
                await host.pause()
                assert await host.install(str(folder), version, probe) is None, kinds
                answer = await running  # with the adapter that it began with, or the one after
                assert answer.version_spans in [((one, len(answer.token_ids)),) for one in (version - 1, version)]
                assert (
                    difference(await host.engine._servers[0].replica.score(PROBE, salt="x"), probe.log_probs) < 1e-4
                ), kinds
                # The scores of the version before are noticed.
                assert await host._resume_if_verified(last) is not None
                last = probe
        finally:
            await host.close()
        assert target is not None
        assert (target.form, target.backend) == ("adapter", "file")
        # The same server with the merged weights, and no adapter.
        replica = VLLMClient(address, load_settings().rollout)
        await replica.load(str(write_export(tmp_path / "merged", merged_parameters(model, LORA), 1)))
        assert difference(await replica.score(PROBE, salt="merged"), last.log_probs) < 1e-4
        await replica.close()
