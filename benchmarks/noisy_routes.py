"""An engine with noisy routers, and a tiny mixture of experts, for the study of route replay.

    python benchmarks/noisy_routes.py POLICY OUTPUT [mixtral]

writes a Qwen3-MoE (or a Mixtral) with eight experts to OUTPUT, with the weights of the Qwen2 model POLICY. Each expert
is a copy of the model's feed-forward layer plus noise. The mixture therefore needs only a short cold start.

With ``plugins=[benchmarks/noisy_routes.py] rollout.engine=noisy_routes``, the engine multiplies each expert's score by
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
from agentrl.models.routes import RoutingPass
from agentrl.models.tokenizer import read_tokenizer
from agentrl.rollout.engines import batcher
from agentrl.rollout.engines.base import EngineSpecification, ManagedEngine, TransformersPlugin


class NoiseOptions(BaseModel):
    """``rollout.options`` of the engine."""

    std: float = 0.5


@register_engine("noisy_routes")
class NoisyRoutesPlugin(TransformersPlugin):
    """The transformers engine with noisy routers."""

    options_model = NoiseOptions

    def managed(self, request: EngineSpecification) -> ManagedEngine:
        add_noise(self.options(request.rollout).std)
        return super().managed(request)


def add_noise(std: float) -> None:
    """Add noise to the expert selection of this process's engine, but not of its trainer."""
    original = batcher.record_and_replay_routes

    class NoisyRoutes(RoutingPass):
        def select_experts(self, layer: int, scores: Tensor, top: Any) -> Any:
            noisy = scores * torch.exp(std * torch.randn_like(scores))
            chosen = noisy.topk(top.indices.shape[-1], dim=-1).indices
            return super().select_experts(layer, scores, type(top)((scores.gather(-1, chosen), chosen)))

    @contextmanager
    def record_and_replay_routes(routes: RoutingPass | None) -> Iterator[None]:
        with original(routes or NoisyRoutes(num_layers=0)):
            yield

    batcher.RoutingPass, batcher.record_and_replay_routes = NoisyRoutes, record_and_replay_routes  # type: ignore[misc, assignment]


@torch.no_grad()
def write_mixture(policy: str, output: Path, family: str = "qwen3_moe", *, noise: float = 0.5) -> None:
    """Write a mixture of experts with the weights of ``policy``. ``noise`` is relative to the weights' scale."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    old, tokenizer = dense.config, read_tokenizer(policy)
    head = old.hidden_size // old.num_attention_heads
    copied = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
        "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    same: dict[str, Any] = {"head_dim": head, **{name: getattr(old, name) for name in copied}}
    sizes: dict[str, Any] = {"intermediate_size": old.intermediate_size}
    if family == "qwen3_moe":
        sizes = {"moe_intermediate_size": old.intermediate_size, "norm_topk_prob": True, "attention_bias": True}
    config = AutoConfig.for_model(
        family, **same, **sizes, num_local_experts=8, num_experts_per_tok=2, bos_token_id=None
    )
    model = AutoModelForCausalLM.from_config(config)
    outputs: dict[Any, Tensor] = {}
    for layer in dense.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.register_forward_hook(lambda module, _, values: outputs.update({module: values}))
    dense(input_ids=torch.randint(old.vocab_size, (8, 64)))
    model.load_state_dict(dense.state_dict(), strict=False)  # embeddings, attention and norms
    for layer, source in zip(model.model.layers, dense.model.layers, strict=True):
        attention = layer.self_attn
        if family == "qwen3_moe":
            attention.o_proj.bias.zero_()
            for norm, projection in ((attention.q_norm, "q_proj"), (attention.k_norm, "k_proj")):
                # Qwen2 does not normalize queries and keys. Scale the normalized vectors to Qwen2's mean magnitude.
                by_head = outputs[getattr(source.self_attn, projection)].unflatten(-1, (-1, head))
                norm.weight.fill_(by_head.pow(2).mean(-1).sqrt().mean())
        mixture, mlp = layer.mlp.experts, source.mlp
        merged = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        for target, weight in ((mixture.gate_up_proj, merged), (mixture.down_proj, mlp.down_proj.weight)):
            target.copy_(weight + noise * weight.std() * torch.randn_like(target))
    output.mkdir(parents=True)
    write_model(output, model=model, tokenizer=tokenizer, title=output.name, body=f"A mixture made of {policy}.")


if __name__ == "__main__":
    write_mixture(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
