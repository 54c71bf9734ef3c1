"""vLLM servers that sample in an evaluation: opened as training opens them, and proved to serve the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agentrl.errors import SettingsError, WorldError
from agentrl.models.loading import model_fingerprint, read_model
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.servers import server_engine
from agentrl.rollout.engines.vllm import VLLMEngine
from agentrl.weights.verify import BOUNDS, Probe, compare, probe_tokens

if TYPE_CHECKING:
    from agentrl.config import Settings


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """What the model is, as it was read here: a digest of its weights and what it says of a probe."""

    fingerprint: str
    probe: Probe


async def open_servers(settings: Settings, codec: TextCodec, folder: Path) -> tuple[VLLMEngine, str]:
    """The engine over ``rollout.vllm``'s servers, open, and the fingerprint of the model in ``model.path``.

    ``folder``: for the logs of servers that are started here. Nothing trains beside an evaluation: ``colocated`` ones
    stay awake. Every server must score a probe as the model does that is read here, on the CPU, while they start.
    Raises SettingsError and WorldError.
    """
    settings = _awake(settings)
    path = str(settings.model.path)
    # No backend: weights never change. That is also why servers on a CPU may read tied embeddings as they are.
    engine = server_engine(settings, codec, path, served=path, folder=folder, training_gpus=0, backend="file")
    try:
        reference, _ = await asyncio.gather(
            asyncio.to_thread(_read_reference, settings, path, len(codec.table)), engine.open()
        )
        await _verify(settings, engine, reference.probe)
    except BaseException:
        await engine.close()
        raise
    return engine, reference.fingerprint


def _awake(settings: Settings) -> Settings:
    vllm = settings.rollout.vllm
    if vllm.placement != "colocated":
        return settings
    rollout = settings.rollout.model_copy(update={"vllm": vllm.model_copy(update={"placement": "dedicated"})})
    return settings.model_copy(update={"rollout": rollout})


@torch.inference_mode()
def _read_reference(settings: Settings, path: str, vocabulary: int) -> _Reference:
    """Read the model, score the probe, and let go of the model."""
    model = read_model(path, settings.model.model_copy(update={"attention": "sdpa"})).eval()
    token_ids = probe_tokens(vocabulary, longest=settings.rollout.max_prompt_tokens)
    ids = torch.tensor([token_ids])
    log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    scores = tuple(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return _Reference(
        fingerprint=model_fingerprint(model.state_dict().items()), probe=Probe(token_ids=token_ids, log_probs=scores)
    )


async def _verify(settings: Settings, engine: VLLMEngine, probe: Probe) -> None:
    """Raise where a server holds another model; one that comes back later must pass the same test."""
    bound = settings.rollout.vllm.probe_bound or BOUNDS[settings.model.dtype]

    def problem(scores: Sequence[float]) -> str | None:
        return compare(probe, scores, bound=bound).problem

    for address, scores in (await engine.scores(probe.token_ids)).items():
        said = problem(scores)
        if said is None:
            continue
        if settings.rollout.vllm.placement == "external":
            raise SettingsError(
                f"the vLLM server {address}: {said}: it serves another model than model.path, or in another dtype. "
                "Start it with the model that is evaluated (agentrl serve-policy)"
            )
        raise WorldError(f"the vLLM server {address}: {said} although it was started with this model")
    await engine.adopt()
    engine.admit(probe.token_ids, problem)
