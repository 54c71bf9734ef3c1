"""Route replay: training with the engine's experts equals a model whose router is replaced by fixed routes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from config.support import refused
from rollout.engine_requests import serving
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.batch import Batch, MicroBatch
from agentrl.models.attention import use_agentrl_attention
from agentrl.models.loading import enable_gradient_checkpointing
from agentrl.models.policy import PolicyModel
from agentrl.models.routes import (
    RoutingPass,
    install_route_hooks,
    reason_routes_not_replayable,
    record_and_replay_routes,
)
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.types import Ended, Problem

LAYERS, EXPERTS, TOP = 3, 6, 2
SIZES: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "num_experts_per_tok": TOP,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=EXPERTS, sliding_window=None))


def qwen3_moe() -> Any:
    """The second layer has no experts."""
    config = Qwen3MoeConfig(
        **SIZES, num_experts=EXPERTS, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[1]
    )
    return Qwen3MoeForCausalLM(config)


def gpt_oss() -> Any:
    """Attention with sinks, and routers with a bias. Without windows, which the engine does not support."""
    config = GptOssConfig(**SIZES, num_local_experts=EXPERTS, layer_types=["full_attention"] * LAYERS)
    return GptOssForCausalLM(config)


ROUTERS = ("gate.weight", "router.weight")


@pytest.fixture(params=[mixtral, qwen3_moe, gpt_oss], ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    made = request.param().eval()
    for name, parameter in made.named_parameters():
        if name.endswith(ROUTERS):
            nn.init.normal_(parameter, std=1.0)  # some scores are close to each other and some are not
    return made


async def conversation(engine: TransformersEngine, name: str, *, start: tuple[int, ...], turns: int = 3) -> Trajectory:
    """Generate turns with observations between them. Each turn requests the routes that are not yet recorded."""
    segments: list[Segment] = []
    context, known = start, 0
    for turn in range(turns):
        answer: Completion = await engine.generate(
            context,
            Sampling(max_tokens=4 + turn, routes_from=known),
            trajectory_id=name,
            request_id=f"{name}-{turn}",
            seed=turn,
        )
        segments.append(answer.to_segment("", reward=0.0))
        context += answer.token_ids
        known = len(context) - 1
        seen = tuple(range(turn, 5))
        segments.append(Segment(origin="observation", token_ids=seen, text=""))
        context += seen
    return Trajectory(
        problem=Problem(id="a", statement="", answer="", source=""),
        step=0,
        group=0,
        sample=int(name),
        prompt_ids=start,
        segments=tuple(segments),
        ended=Ended.STOPPED,
    )


async def played(model: Any) -> list[Trajectory]:
    """Sample two trajectories with the same prompt, and one with another prompt."""
    async with serving(model) as engine:
        starts = ((7, 8, 9), (7, 8, 9), (3, 1, 2, 250))
        return await asyncio.gather(*(conversation(engine, str(n), start=start) for n, start in enumerate(starts)))


def routes_of(item: Trajectory) -> Tensor:
    """[tokens, LAYERS * TOP]"""
    joined = b"".join(segment.routes for segment in item.segments)
    return torch.from_numpy(np.frombuffer(joined, dtype=np.int16).reshape(-1, LAYERS * TOP).copy())


async def test_the_engine_returns_the_experts_of_every_token(model: Any) -> None:
    """Over several turns, with cached prefixes and a shared prompt, the routes equal those of one plain forward."""
    items = await played(model)
    for item in items:
        ids = torch.tensor([item.prompt_ids + item.response_ids])
        routes = RoutingPass(num_layers=LAYERS)
        with torch.inference_mode(), record_and_replay_routes(routes):
            model.get_decoder()(input_ids=ids, use_cache=False)
        known = routes_of(item)
        assert len(known) == ids.shape[1] - 1 - len(item.segments[-1].token_ids)  # without the last model token
        assert torch.equal(known.sort(-1).values, routes.recorded_routes()[: len(known)].sort(-1).values)


def with_fixed_routes(model: Any, routes: Callable[[], Tensor]) -> None:
    """Replace the routers: softmax of all scores, gathered at the given experts and normalized."""
    for layer, block in enumerate(model.model.layers):
        gate = getattr(block.mlp, "gate", getattr(block.mlp, "router", None))
        if not hasattr(block.mlp, "experts"):
            continue

        def forward(hidden: Tensor, gate: Any = gate, layer: int = layer) -> tuple[Tensor, Tensor, Tensor]:
            logits = nn.functional.linear(
                hidden.reshape(-1, hidden.shape[-1]), gate.weight, getattr(gate, "bias", None)
            )
            chosen = routes()[:, layer * TOP : (layer + 1) * TOP].long()
            weights = logits.softmax(-1).gather(-1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = forward


@pytest.mark.parametrize("checkpointed", [False, True])
async def test_loss_and_gradients_are_those_of_a_forward_with_fixed_routes(model: Any, checkpointed: bool) -> None:
    items = await played(model)
    micro = MicroBatch.from_trajectories(items)
    assert micro.row.routes is not None
    routes = micro.row.routes.numpy()
    known = routes[:, :1] >= 0
    random = np.random.default_rng(0).permuted(np.arange(EXPERTS)[None].repeat(len(known), 0), axis=1)[:, :TOP]
    routes[:] = np.where(known, np.tile(random, LAYERS), routes)
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    if checkpointed:
        enable_gradient_checkpointing(model)
        model.train()
    policy = PolicyModel(model, backend="chunked")
    batch = Batch.from_micro_batch(micro)
    statistics, _ = policy(batch.row, batch.rows, batch.columns)
    statistics.log_probs.sum().backward()
    total = torch.zeros(())
    for row, item in enumerate(items):
        known_tokens = len(routes_of(item))
        prompt = len(item.prompt_ids)
        given = batch.row.routes[batch.row.document_token_indices(row, known_tokens - prompt)]
        with_fixed_routes(copy, lambda given=given: given)
        ids = torch.tensor([item.prompt_ids + item.response_ids])
        logits = copy(input_ids=ids[:, :known_tokens], use_cache=False).logits[0]
        log_probs = logits.log_softmax(-1).gather(1, ids[0, 1 : known_tokens + 1, None])[:, 0]
        total = total + log_probs[prompt - 1 :][torch.tensor(item.response_mask)[: known_tokens + 1 - prompt]].sum()
    total.backward()
    torch.testing.assert_close(statistics.log_probs.sum(), total, rtol=1e-5, atol=1e-5)
    gates = 0
    for (name, one), other in zip(policy.causal_lm.named_parameters(), copy.parameters(), strict=True):
        assert float((one.grad - other.grad).norm()) <= 1e-4 * float(other.grad.norm()), name
        gates += name.endswith(ROUTERS) and bool(one.grad.abs().sum() > 0)
    assert gates >= 2


async def test_replay_hides_a_router_that_chooses_differently(model: Any) -> None:
    """With noise in the trainer's scores, replay reproduces the engine's experts, and the difference is counted."""
    items = await played(model)
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(items))
    policy = PolicyModel(model, backend="chunked")
    with torch.no_grad():
        policy(batch.row, batch.rows, batch.columns)
        assert policy.routes is not None
        other, total = policy.routes.count_changed_and_replayed()
        assert (int(other), total) == (0, int((batch.row.routes[:, 0] >= 0).sum()) * len(policy.routes.chosen))
        for name, parameter in model.named_parameters():
            if name.endswith(ROUTERS):
                parameter += 0.3 * torch.randn_like(parameter)
        policy(batch.row, batch.rows, batch.columns)
        other, total = policy.routes.count_changed_and_replayed()
        assert 0 < int(other) < total
        policy.records_routes = True
        replayed = batch.row.routes
        row = batch.row.pad_to_multiple(1)
        object.__setattr__(row, "routes", None)
        policy(row, batch.rows, batch.columns)
        own = policy.routes.recorded_routes()
        assert policy.routes.replayed is None
        assert not torch.equal(own[replayed[:, 0] >= 0], replayed[replayed[:, 0] >= 0])


def test_hooks_are_installed_once(model: Any) -> None:
    use_agentrl_attention(model)
    blocks = [block for block in model.modules() if hasattr(block, "experts")]
    assert install_route_hooks(model) == install_route_hooks(model) == len(blocks)
    assert all(len(block._forward_hooks) == 1 for block in blocks)


def config_of(kind: str) -> PreTrainedConfig:
    made = CONFIG_MAPPING[kind]()
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(made, name, None):
            setattr(made, name, 32)
    return made


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"])
def test_families_whose_routes_can_be_replayed(kind: str) -> None:
    assert reason_routes_not_replayable(config_of(kind)) is None


def test_other_models_are_refused_by_name() -> None:
    assert "does not support qwen2: it has no layers with experts" in str(
        reason_routes_not_replayable(config_of("qwen2"))
    )
    assert "does not support phimoe: its 2 layers with experts must each select the same number of experts" in str(
        reason_routes_not_replayable(config_of("phimoe"))
    )


def test_settings_that_cannot_replay_routes_are_named() -> None:
    replay = "correction.route_replay=rollout"
    assert "algorithm.estimator=eob would use other experts" in refused(replay, "algorithm.estimator=eob")


async def test_a_branch_keeps_the_routes_of_the_edge_that_sampled_its_prompt(model: Any) -> None:
    """The prompt of the second trajectory is all of the first, which does not compute its last token."""
    first = (await played(model))[2]
    last = max(at for at, own in enumerate(first.response_mask) if own) + 1
    prompt = first.prompt_ids + first.response_ids[:last]
    async with serving(model) as engine:
        second = replace(await conversation(engine, "1", start=prompt, turns=1), prompt_ids=prompt)
    other = replace(second.segments[0], routes=(~np.frombuffer(second.segments[0].routes, dtype=np.int16)).tobytes())
    micro = MicroBatch.from_trajectories([first, replace(second, segments=(other, *second.segments[1:]))])
    assert micro.row.routes is not None
    routes = micro.row.routes[: len(prompt)]
    assert torch.equal(routes[:-1], routes_of(first))
    assert bool((routes[-1] < 0).all())
