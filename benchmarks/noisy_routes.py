"""An engine whose routers are noisy, and a tiny mixture of experts, for the study of route replay.

    python benchmarks/noisy_routes.py POLICY OUTPUT

writes a random Qwen3-MoE of 0.7 million parameters with the tokenizer of the model POLICY to OUTPUT. With
``plugins=[benchmarks/noisy_routes.py] rollout.engine=noisy_routes``, the engine multiplies each expert's score by
``exp(std * N(0, 1))`` before it selects the experts of a token. ``rollout.options`` sets ``std``. Selected experts keep
their exact scores, so that training with the engine's routes computes the engine's log-probabilities.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from agentrl import register_engine
from agentrl.models.loading import write_model
from agentrl.models.routes import Routes
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.engines import batcher
from agentrl.rollout.engines.base import EngineRequest, ManagedEngine, TransformersPlugin


class NoiseOptions(BaseModel):
    """``rollout.options`` of the engine."""

    std: float = 0.5


@register_engine("noisy_routes")
class NoisyRoutesPlugin(TransformersPlugin):
    """The transformers engine with noisy routers."""

    options_model = NoiseOptions

    def managed(self, request: EngineRequest) -> ManagedEngine:
        add_noise(self.options(request.rollout).std)
        return super().managed(request)


def add_noise(std: float) -> None:
    """Let the engine of this process, but not its trainer, select experts with noise."""
    original = batcher.routing

    class NoisyRoutes(Routes):
        def select(self, layer: int, scores: Tensor, top: Any) -> Any:
            noisy = scores * torch.exp(std * torch.randn_like(scores))
            chosen = noisy.topk(top.indices.shape[-1], dim=-1).indices
            return super().select(layer, scores, type(top)((scores.gather(-1, chosen), chosen)))

    @contextmanager
    def routing(routes: Routes | None) -> Iterator[None]:
        with original(routes or NoisyRoutes(num_layers=0)):
            yield

    batcher.Routes, batcher.routing = NoisyRoutes, routing  # type: ignore[misc, assignment]


def write_tiny_mixture(policy: str, output: Path) -> None:
    """Write a random mixture of experts with the tokenizer of ``policy``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = read_tokenizer(policy)
    end = tokenizer.eos_token_id
    config = Qwen3MoeConfig(
        vocab_size=max(512, len(tokenizer)), hidden_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=24, intermediate_size=192, moe_intermediate_size=96, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=1024, tie_word_embeddings=True,
        initializer_range=0.04, eos_token_id=end, pad_token_id=end, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    output.mkdir(parents=True)
    write_model(output, model=Qwen3MoeForCausalLM(config), tokenizer=tokenizer, title=output.name, body="Random.")


if __name__ == "__main__":
    write_tiny_mixture(sys.argv[1], Path(sys.argv[2]))
