"""vLLM servers that sample in an evaluation: opened as training opens them, and proved to serve the model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from agentrl.errors import SettingsError, WorldError
from agentrl.models.loading import model_fingerprint, read_model
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.vllm.engine import VLLMEngine
from agentrl.rollout.engines.vllm.replica import Replica
from agentrl.rollout.engines.vllm.servers import server_engine
from agentrl.weights.checksums import checksums, with_head
from agentrl.weights.verify import Probe, Verifier

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections

# What the servers and the model score to be compared: text of the kind that is played, of no benchmark.
PROBE = """A farmer has 12 boxes with 25 apples each. He sells 30 % of all apples and gives a quarter of the rest away.
How many apples are left? First there are 12 * 25 = 300 apples. After the sale 300 * (1 - 0.3) = 210 remain, and after
the gift 210 * 3 / 4 = 157.5, so the story cannot be about whole apples. Let $f(x) = x^2 - 4x + 1$; then
$f(x) = (x - 2)^2 - 3$ has its minimum $-3$ at $x = 2$.
```python
print(min(x * x - 4 * x + 1 for x in range(-10, 11)))
```
-3
"""


@dataclass(frozen=True, kw_only=True)
class _Reference:
    """What the model is, as it was read here: a digest of its weights and what it says of a probe."""

    fingerprint: str
    probe: Probe


async def open_servers(settings: EvaluationSections, codec: TextCodec, folder: Path) -> tuple[VLLMEngine, str]:
    """The engine over ``rollout.vllm``'s servers, open, and the fingerprint of the model in ``model.path``.

    ``folder``: for the logs of servers that are started here. Nothing trains beside an evaluation: ``colocated`` ones
    stay awake. Every server must have the checksums of the model that is read here, on the CPU, while they start, and
    score a probe as it does.
    Raises SettingsError and WorldError.
    """
    settings = _awake(settings)
    path = str(settings.model.path)
    # No backend: weights never change. That is also why servers on a CPU may read tied embeddings as they are.
    engine = server_engine(settings, codec, path, served=path, folder=folder, training_gpus=0, backend="file")
    try:
        reference, _ = await asyncio.gather(asyncio.to_thread(_read_reference, settings, path, codec), engine.open())
        await _verify(settings, engine, reference.probe)
    except BaseException:
        await engine.close()
        raise
    return engine, reference.fingerprint


def _awake(settings: EvaluationSections) -> EvaluationSections:
    vllm = settings.rollout.vllm
    if vllm.placement != "colocated":
        return settings
    rollout = settings.rollout.model_copy(update={"vllm": vllm.model_copy(update={"placement": "dedicated"})})
    return settings.model_copy(update={"rollout": rollout})


@torch.inference_mode()
def _read_reference(settings: EvaluationSections, path: str, codec: TextCodec) -> _Reference:
    """Read the model, score the probe, and let go of the model."""
    model = read_model(path, settings.model.model_copy(update={"attention": "sdpa"})).eval()
    token_ids = codec.encode(PROBE)[: settings.rollout.max_prompt_tokens]
    ids = torch.tensor([token_ids])
    log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    scores = tuple(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    probe = Probe(token_ids=token_ids, log_probs=scores, checksums=with_head(checksums(model.named_parameters())))
    return _Reference(fingerprint=model_fingerprint(model.state_dict().items()), probe=probe)


async def _verify(settings: EvaluationSections, engine: VLLMEngine, probe: Probe) -> None:
    """Raise where a server holds another model; one that comes back later must pass the same test."""
    verifier = Verifier(settings.model.dtype, bound=settings.rollout.vllm.probe_bound)

    def look(replica: Replica) -> Coroutine[Any, Any, str | None]:
        return verifier.look(replica, probe)

    problems = "; ".join(await engine.problems(look))
    if problems and settings.rollout.vllm.placement == "external":
        raise SettingsError(
            f"{problems}: it serves another model than model.path, or in another dtype. "
            "Start it with the model that is evaluated (agentrl serve-policy)"
        )
    if problems:
        raise WorldError(f"{problems}, although it was started with this model")
    await engine.adopt()
    engine.admit(look)
