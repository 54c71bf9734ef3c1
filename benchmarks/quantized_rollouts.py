"""Bias and noise of the policy gradient for each correction, with rollouts from a policy with rounded weights.

    python benchmarks/quantized_rollouts.py [--tokens 4]

A tiny policy over 6 tokens answers with a fixed number of tokens, so all answers are enumerated and both figures are
exact. The rounded policy samples the answers. The gradient is the exact policy's, with importance weights and masks
from `agentrl.algorithms.rollout_correction`. The reward is the fraction of one token in the answer.

bias: norm of the error of the expected gradient, relative to the norm of the true gradient.
noise: variance of one trajectory's gradient, relative to rollouts of the exact policy.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.algorithms import rollout_correction
from agentrl.kernels.attention import pack_padded
from agentrl.models.policy import PolicyModel
from agentrl.models.quantization import FORMATS, fake_quantize

VOCABULARY = 6
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "weights=token": {"weights": "token"},
    "weights=token, weight_bound=icepop": {"weights": "token", "weight_bound": "icepop"},
    "weights=sequence": {"weights": "sequence", "weight_high": 10.0},
    "weights=geometric": {"weights": "geometric"},
    "ratio_mask=token, 0.9 to 1.1": {"ratio_mask": "token", "ratio_low": 0.9, "ratio_high": 1.1},
    "weights=token, ratio_mask=sequence": {"weights": "token", "ratio_mask": "sequence"},
}


def policy_of(model: Qwen2ForCausalLM) -> PolicyModel:
    return PolicyModel(model, backend="chunked")


def log_probs(policy: PolicyModel, ids: Tensor) -> Tensor:
    """Return the log-probabilities [B, T] of all tokens after the first."""
    mask = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    statistics, _ = policy(*pack_padded(ids, torch.ones_like(ids[:, 0]), mask))
    return statistics.log_probs.view(mask.shape)


def moments(
    policy: PolicyModel, ids: Tensor, sampled: Tensor, advantages: Tensor, weights: Tensor
) -> tuple[Tensor, float]:
    """Return the expected gradient and its expected squared norm under the probabilities ``sampled`` [B]."""
    policy.zero_grad()
    (sampled * advantages * (weights * log_probs(policy, ids)).sum(-1)).sum().backward()
    mean = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    mask = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    prompts = torch.ones_like(ids[:, 0])
    energies = torch.cat(
        [
            policy.trajectory_energies(part, prompts[: len(part)], mask[: len(part)], importance_weights=own)
            for part, own in zip(ids.split(256), weights.split(256), strict=True)
        ]
    )
    return mean, float((sampled * advantages.square() * energies).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4)
    tokens = parser.parse_args().tokens
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    exact = policy_of(Qwen2ForCausalLM(config).double())
    answers = torch.tensor([*itertools.product(range(VOCABULARY), repeat=tokens)])
    ids = torch.cat([torch.zeros_like(answers[:, :1]), answers], dim=1)
    rewards = (answers == 1).double().mean(-1)
    with torch.no_grad():
        train = log_probs(exact, ids)
    p = train.sum(-1).exp()
    advantages = rewards - (p * rewards).sum()
    truth, square = moments(exact, ids, p, advantages, torch.ones_like(train))
    own_noise = square - float(truth.square().sum())
    print(f"{len(ids)} answers of {tokens} tokens; probabilities sum to {float(p.sum()):.6f}")
    for number_format in FORMATS:
        rounded = policy_of(fake_quantize(copy.deepcopy(exact.causal_lm), number_format))
        with torch.no_grad():
            rollout = log_probs(rounded, ids)
        q = rollout.sum(-1).exp()
        difference = float((q[:, None] * (train - rollout).abs()).sum() / tokens)
        print(f"\n{number_format}: mean |log p - log q| = {difference:.4f} nats per token")
        print(f"{'correction':40}{'bias':>8}{'noise':>8}")
        for name, options in CORRECTIONS.items():
            found = rollout_correction(train, rollout, torch.ones_like(train, dtype=torch.bool), **options)
            mean, square = moments(exact, ids, q, advantages, found.importance_weights.double())
            bias = float((mean - truth).norm() / truth.norm())
            noise = (square - float(mean.square().sum())) / own_noise
            print(f"{name:40}{bias:8.2%}{noise:8.3f}")


if __name__ == "__main__":
    main()
