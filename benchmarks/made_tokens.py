"""Synthetic trajectories and token statistics of realistic size."""

from __future__ import annotations

from typing import Any

import numpy as np

from agentrl.telemetry.tokens import TrajectoryTokens

GROUP = 8
TURNS = 4
VOCABULARY = 32_000


def made_tokens(number: int, length: int, draw: np.random.Generator, *, loss_weight: float) -> TrajectoryTokens:
    """Return statistics of the ``number``-th trajectory of a step of groups of eight, with ``length`` model tokens."""
    probability = draw.beta(5, 1, length).astype(np.float32)
    returns = np.full(length, number % 2, dtype=np.float32)
    baselines = (0.5 + 0.1 * np.cumsum(draw.normal(size=length)) / length).astype(np.float32)
    return TrajectoryTokens(
        group=number // GROUP,
        sample=number % GROUP,
        branch=0,
        parent=-1,
        fork=0,
        share=1.0,
        update=0,
        loss_weight=loss_weight,
        log_probs=np.log(probability),
        entropy=(1 - probability).astype(np.float16),
        energy=(1 - probability) ** 2,
        rewards=np.zeros(length, dtype=np.float32),
        returns=returns,
        baselines=baselines,
        advantages=returns - baselines,
        loss_mask=np.ones(length, dtype=bool),
    )


def made_record(step: int, number: int, length: int, draw: np.random.Generator) -> dict[str, Any]:
    """Return the record of the ``number``-th trajectory of a step, with ``length`` model tokens in four turns."""
    segments = []
    for turn in range(TURNS):
        ids = draw.integers(0, VOCABULARY, length // TURNS).tolist()
        segments.append(
            {
                "origin": "model",
                "token_ids": ids,
                "text": "".join(f" word{token}" for token in ids),
                "log_probs": np.log(draw.beta(5, 1, len(ids))).astype(np.float32).tolist(),
                "version_spans": [[step - 1, len(ids)]],
                "reward": float(number % 2) if turn == TURNS - 1 else 0.0,
            }
        )
        seen = draw.integers(0, VOCABULARY, 20).tolist()
        observation = {"origin": "observation", "token_ids": seen, "text": "\nCode execution result: 5\n"}
        segments.append({**observation, "log_probs": [], "version_spans": [], "reward": 0.0})
    problem = {"id": f"toy-{number // GROUP}", "statement": "What is 2 + 3?", "answer": "5", "source": "toy"}
    return {
        "problem": {**problem, "family": "", "setup": "", "info": {}, "messages": []},
        "step": step,
        "group": number // GROUP,
        "sample": number % GROUP,
        "prompt_ids": draw.integers(0, VOCABULARY, 200).tolist(),
        "segments": segments,
        "ended": "answered",
        "verdict": "correct" if number % 2 else "incorrect",
        "answer": "5",
        "tool_calls": [{"outcome": "ok", "seconds": 0.2, "truncated": False, "printed": "5\n"}] * TURNS,
        "seconds": 30.0,
        "reward_parts": {},
        "branch": 0,
        "branches": 1,
        "parent": -1,
        "fork": 0,
        "weight": 1.0,
    }
