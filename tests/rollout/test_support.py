"""Support replay: from the engine's restricted sampling to the trainer's statistics over the same tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
import torch
from config.support import refused
from rollout.engine_requests import prompts, serving
from rollout.fake_vllm import fakes, sampled
from rollout.fakes import tiny_model
from rollout.vllm_support import CODEC, NEEDS, ask, opened

from agentrl.batch import Batch, MicroBatch
from agentrl.errors import SettingsError
from agentrl.models.policy import PolicyModel
from agentrl.rollout.engines.base import Completion, EngineError, Sampling
from agentrl.rollout.engines.vllm.replica import VLLMClient, VLLMConfig
from agentrl.rollout.settings import RolloutSettings
from agentrl.trajectory import Segment, Trajectory, TrajectoryError
from agentrl_envs.types import Ended, Problem

TEMPERATURE = 0.8
LIMITS = [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {}]


async def completions(model: Any, asked: list[tuple[int, ...]]) -> list[Completion]:
    async with serving(model) as engine:
        return await asyncio.gather(
            *(
                engine.generate(
                    prompt,
                    Sampling(max_tokens=9, temperature=TEMPERATURE, returns_support=bool(limits), **limits),
                    trajectory_id=f"t{number}",
                    request_id=f"t{number}",
                    seed=number,
                )
                for number, (prompt, limits) in enumerate(zip(asked, itertools.cycle(LIMITS), strict=False))
            )
        )


def sets_of(completion: Completion) -> list[list[int]]:
    ends = [0, *itertools.accumulate(completion.support_sizes)]
    return [list(completion.support_ids[start:end]) for start, end in itertools.pairwise(ends)]


def likely(p: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> list[int]:
    """Return the tokens that the limits keep, added one at a time from the most likely."""
    order = [v for v in p.argsort(descending=True).tolist() if p[v] >= min_p * p.max()][: top_k or None]
    total = float(p[order].sum())
    reached = itertools.accumulate((float(p[v]) / total for v in order), initial=0.0)
    return sorted(v for v, before in zip(order, reached, strict=False) if before < top_p or v == order[0])


def log_probs(model: Any, prompt: tuple[int, ...], completion: Completion) -> torch.Tensor:
    """ln p of the tempered distribution at each sampled token, restricted to the tokens that the engine returned."""
    ids = torch.tensor([prompt + completion.token_ids])
    rows = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    for row, kept in enumerate(sets_of(completion)):
        outside = torch.ones(rows.shape[1], dtype=torch.bool)
        outside[kept] = False
        rows = torch.where(outside & (torch.arange(len(rows)) == row)[:, None], -torch.inf, rows)
    return rows.log_softmax(-1)


def trajectory(number: int, prompt: tuple[int, ...], completion: Completion) -> Trajectory:
    return Trajectory(
        problem=Problem(id="a", statement="", answer="", source=""),
        step=0,
        group=0,
        sample=number,
        prompt_ids=prompt,
        segments=(completion.to_segment("", reward=0.0),),
        ended=Ended.STOPPED,
    )


async def test_training_renormalizes_over_the_tokens_that_the_engine_sampled_from() -> None:
    """Sets, log-probabilities, entropies, energies and gradients equal those of a plain restricted softmax."""
    model, asked = tiny_model(), prompts(10)
    found = await completions(model, asked)
    for prompt, completion, limits in zip(asked, found, itertools.cycle(LIMITS), strict=False):
        if limits:
            ids = torch.tensor([prompt + completion.token_ids])
            whole = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].detach() / TEMPERATURE
            assert sets_of(completion) == [likely(row, **limits) for row in whole.softmax(-1)]
        else:
            assert not len(completion.support_sizes)
    model = model.double()
    policy = PolicyModel(tiny_model().double(), backend="chunked")
    policy.causal_lm.load_state_dict(model.state_dict())
    items = [trajectory(number, *pair) for number, pair in enumerate(zip(asked, found, strict=True))]
    batch = Batch.from_micro_batch(MicroBatch.from_trajectories(items))
    statistics, _ = policy(batch.row, batch.rows, batch.columns, TEMPERATURE, support=batch.support)
    engine = batch.rollout_log_probs[batch.response_mask]
    torch.testing.assert_close(statistics.log_probs.detach(), engine.double(), rtol=0, atol=2e-5)
    rows = torch.cat([log_probs(model, *pair) for pair in zip(asked, found, strict=True)])
    p, targets = rows.exp(), torch.tensor([token for one in found for token in one.token_ids])
    expected = rows.gather(1, targets[:, None])[:, 0]
    entropy = -torch.where(p > 0, p * rows.clamp(min=-1e9), 0.0).sum(-1)
    torch.testing.assert_close(statistics.log_probs, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(statistics.entropy, entropy, rtol=0, atol=1e-10)
    energy = 1 - 2 * expected.exp() + p.square().sum(-1)
    torch.testing.assert_close(statistics.energy, energy.detach(), rtol=0, atol=1e-10)
    mix = torch.linspace(-1, 1, len(targets)) / len(targets)
    (mix * statistics.log_probs + 0.1 * mix * statistics.entropy).sum().backward()
    (mix * expected + 0.1 * mix * entropy).sum().backward()
    for one, other in zip(policy.causal_lm.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)


def test_a_support_is_stored_and_contains_its_token() -> None:
    whole = {"origin": "model", "token_ids": (4, 5), "text": "", "log_probs": (-1.0, -1.0), "version_spans": ((0, 2),)}
    one = trajectory(0, (1,), Completion(token_ids=(4,), log_probs=(-1.0,), finish_reason="eos",
                                         version_spans=((0, 1),), support_ids=(4, 9), support_sizes=(2,)))  # fmt: skip
    assert Trajectory.from_record(json.loads(json.dumps(one.to_record()))) == one
    assert len(Segment(**whole, support_ids=(4, 7, 5), support_sizes=(2, 1)).support_ids) == 3
    for ids, sizes in (((4, 7, 6), (2, 1)), ((4, 5), (2, 1)), ((4, 5), (2,))):
        with pytest.raises(TrajectoryError, match="support"):
            Segment(**whole, support_ids=ids, support_sizes=sizes)


LISTED = [{"token_id": 8, "logprob": -0.2231}, {"token_id": 3, "logprob": -1.6094}, {"token_id": 5, "logprob": -9999.0}]


async def test_vllm_lists_the_tokens_that_it_samples_from() -> None:
    async with fakes(CODEC) as (server,), opened([server]) as engine:
        content = [{"token_id": 8, "logprob": -0.2231, "top_logprobs": LISTED}]
        server.on_generate = lambda body: (200, {"choices": [sampled([8], logprobs={"content": content})]})
        answer = await ask(engine, max_tokens=1, top_k=2, min_p=0.1, returns_support=True)
        asked = server.bodies[0]["sampling_params"]
        assert (asked["top_k"], asked["min_p"], asked["logprobs"]) == (2, 0.1, 4)
        assert (list(answer.support_ids), list(answer.support_sizes)) == ([8, 3], [2])


async def test_an_incomplete_list_is_no_support() -> None:
    async with fakes(CODEC) as (server,), opened([server], request_retries=0) as engine:
        content = [{"token_id": 8, "logprob": -0.2231, "top_logprobs": LISTED[:1]}]
        server.on_generate = lambda body: (200, {"choices": [sampled([8], logprobs={"content": content})]})
        with pytest.raises(EngineError, match=r"total probability of 0\.8000, so the server samples from other tokens"):
            await ask(engine, max_tokens=1, top_k=1, returns_support=True)


def test_a_server_that_lists_too_few_tokens_is_refused() -> None:
    replica = VLLMClient("http://localhost:1", RolloutSettings(top_k=40))
    model = {"logprobs_mode": "processed_logprobs", "max_logprobs": 20}
    config = VLLMConfig(model_config=model, cache_config={"enable_prefix_caching": True})
    with pytest.raises(SettingsError, match="start it with --max-logprobs 80"):
        replica._check_config(config, NEEDS)


def test_a_server_with_another_quantization_is_refused() -> None:
    rollout = RolloutSettings.model_validate({"vllm": {"quantization": "fp8_per_channel"}})
    replica = VLLMClient("http://localhost:1", rollout)
    model = {"logprobs_mode": "processed_logprobs", "dtype": "float32", "max_model_len": 200, "quantization": None}
    config = VLLMConfig(model_config=model, cache_config={"enable_prefix_caching": True})
    with pytest.raises(SettingsError, match="start it with --quantization fp8_per_channel"):
        replica._check_config(config, NEEDS)
    model["quantization"] = "fp8_per_channel"
    replica._check_config(config, NEEDS)


def test_quantized_rollouts_need_a_correction() -> None:
    message = refused("rollout.engine=vllm", "rollout.vllm.quantization=fp8_per_block", "training.zero_stage=2")
    assert "rollout.vllm.quantization=fp8_per_block samples from a policy other than" in message
    assert "set correction.weights=token" in message


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["rollout.engine=vllm"], "set rollout.top_k from 1 to 64"),
        (["rollout.engine=vllm", "rollout.top_k=65"], "rollout.top_k=65 and rollout.top_p=0.9"),
        (["training.head_backend=triton"], "training.head_backend=auto"),
        (["algorithm.estimator=eob"], "algorithm.estimator=eob need the whole vocabulary"),
    ],
)
def test_settings_that_cannot_replay_a_support_are_named(overrides: list[str], named: str) -> None:
    message = refused("rollout.top_p=0.9", *overrides)
    assert named in message
