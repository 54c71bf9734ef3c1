"""Opening of an engine, with a check that its servers serve the model in ``model.path``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from agentrl.errors import WorldError
from agentrl.models.loading import model_fingerprint, read_model
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import ManagedEngine
from agentrl.weights.checksums import checksums, with_head
from agentrl.weights.verify import Probe

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections

# Text that servers and model score for the comparison. It resembles evaluation text, but is from no benchmark.
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
    """Weight digest and probe scores of the model as loaded by this process."""

    fingerprint: str
    probe: Probe


async def open_verified(managed: ManagedEngine, settings: EvaluationSections, codec: TextCodec) -> str:
    """Open the engine, verify its weights and return the fingerprint of the model in ``model.path``.

    While the servers start, this process loads the model on the CPU. Every server must have the same weight checksums
    and give the probe the same scores. Raises SettingsError and WorldError.
    """
    try:
        reading = asyncio.to_thread(_read_reference, settings, codec)
        reference, _ = await asyncio.gather(reading, managed.open())
        problem = await managed.verify(0, reference.probe)
        if problem is not None:
            raise WorldError(f"{problem}, although it was started with this model")
    except BaseException:
        await managed.close()
        raise
    return reference.fingerprint


@torch.inference_mode()
def _read_reference(settings: EvaluationSections, codec: TextCodec) -> _Reference:
    """Load the model, score the probe, and release the model."""
    policy = settings.model.model_copy(update={"attention": "sdpa"})
    model = read_model(str(settings.model.path), policy).eval()
    token_ids = codec.encode(PROBE)[: settings.rollout.max_prompt_tokens]
    ids = torch.tensor([token_ids])
    log_probs = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, :-1].float(), dim=-1)
    scores = tuple(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    probe = Probe(token_ids=token_ids, log_probs=scores, checksums=with_head(checksums(model.named_parameters())))
    return _Reference(fingerprint=model_fingerprint(model.state_dict().items()), probe=probe)
