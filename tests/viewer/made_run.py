"""A run directory that is generated without training: conversations, exact advantages, metrics, alerts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.algorithms import AdvantageInputs, compute_advantages
from agentrl.telemetry.alerts import Alert
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import TokenMetadata, TrajectoryTokens, write_tokens

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> javascript:alert(1) \u202eright to left"
PROGRAM = "Let me compute.\n```py\nprint(2 + 3)\n```\n"
OUTPUT = "\nCode execution result: 5\n"
ENDS = (
    ("answered", "correct", "So \\boxed{5}."),
    ("answered", "incorrect", "So \\boxed{6}."),
    ("void_turn", None, "?"),
)
END = "<|endoftext|>"


def make_run(
    folder: Path,
    *,
    steps: int = 3,
    groups: int = 2,
    size: int = 4,
    said: str = "",
    words: int = 1,
    seed: int = 0,
    estimator: str = "tir_otb",
    forked: bool = False,
) -> RunDirectory:
    """Write a run of ``steps`` steps. The first turn of each trajectory contains ``said`` ``words`` times.

    ``forked``: the trajectories of a group are one tree, which forks into all others after the first one.
    """
    settings = {"name": folder.name, "seed": seed, "model": {"path": None}, "algorithm": {"estimator": estimator}}
    run = RunDirectory.create(folder, yaml.safe_dump(settings))
    run.tokens.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    draw = np.random.default_rng(seed)
    for step in range(1, steps + 1):
        records = [
            _record(tokenizer, step, step * 100 + group, sample, said * words, draw)
            for group in range(groups)
            for sample in range(size)
        ]
        if forked:
            records = [record | _branch(record, size) for record in records]
        run.write_trajectories(step, records)
        facts = TokenMetadata(
            step=step, version=step - 1, rank=0, ranks=1, estimator=estimator, loss="reinforce", aggregation="token_sum"
        )
        write_tokens(run.token_statistics_file(step, 0), facts, _statistics(records, draw, estimator))
        run.append_metrics(metrics_row(step, draw))
    run.append_alert(Alert(step=2, alert="entropy_collapse", message="entropy fell below 0.1", advice="explore more"))
    run.close()
    return run


def make_tokenizer() -> Tokenizer:
    """Build a tokenizer of bytes, a few merges, and one special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([PROGRAM * 4, OUTPUT * 4, *(text for *_, text in ENDS)], trainer)
    return tokenizer


def metrics_row(step: int, draw: np.random.Generator) -> dict[str, float]:
    """Return a step's metrics, with the names of training."""
    reward = float(draw.uniform(0.2, 0.8))
    return {
        "step": step,
        "reward/mean": reward,
        "reward/stderr": 0.05,
        "policy/entropy": float(draw.uniform(0.5, 1.0)),
        "policy/gradient_norm": float(draw.uniform(0.1, 1.0)),
        "policy/tokens": 100.0,
        "rollout/ended/answered": 6,
        "rollout/ended/void_turn": 2,
        "rollout/turns_mean": 1.5,
        "rollout/model_tokens_mean": 30.0,
        "time/step_s": 2.0,
        "time/rollout_s": 1.2,
        "time/train_s": 0.7,
        "time/forward_s": 0.2,
        "time/backward_s": 0.3,
        "time/transfer_s": 0.1,
    }


def _record(
    tokenizer: Tokenizer, step: int, group: int, sample: int, said: str, draw: np.random.Generator
) -> dict[str, Any]:
    ended, verdict, answer = ENDS[sample % 3]
    first = tokenizer.encode(said + PROGRAM).ids
    last = [*tokenizer.encode(answer).ids, tokenizer.token_to_id(END)]
    reward = float(verdict == "correct")
    problem = {"id": f"toy-{group % 100}", "statement": f"What is 2 + 3? {said[:500]}", "answer": "5", "source": "toy"}
    return {
        "problem": {**problem, "family": "", "setup": "", "info": {}, "messages": []},
        "step": step,
        "group": group,
        "sample": sample,
        "prompt_ids": tokenizer.encode(f"{problem['statement']}\n").ids,
        "segments": [
            _segment("model", first, said + PROGRAM, step, draw),
            _segment("observation", tokenizer.encode(OUTPUT).ids, OUTPUT, step, draw),
            {**_segment("model", last, answer, step, draw), "reward": reward},
        ],
        "ended": ended,
        "verdict": verdict,
        "answer": answer,
        "tool_calls": [{"outcome": "ok", "seconds": 0.25, "truncated": False, "printed": "5\n", "exit_code": 0}],
        "seconds": 1.5,
        "reward_parts": {"shorter": -2.5},
        "branch": 0,
        "branches": 1,
        "parent": -1,
        "fork": 0,
        "weight": 1.0,
    }


def _branch(record: dict[str, Any], size: int) -> dict[str, Any]:
    branch = record["sample"]
    tokens = len(record["segments"][0]["token_ids"]) + len(record["segments"][2]["token_ids"])
    return {
        "sample": 0,
        "branch": branch,
        "branches": size,
        "parent": -1 if branch == 0 else 0,
        "fork": 0 if branch == 0 else tokens,
        "path_weight": 1.0 if branch == 0 else 1 / (size - 1),
        "ended": "stopped" if branch else "forked",
    }


def _segment(origin: str, ids: list[int], text: str, step: int, draw: np.random.Generator) -> dict[str, Any]:
    ours = origin == "model"
    return {
        "origin": origin,
        "token_ids": ids,
        "text": text,
        "log_probs": (-draw.exponential(0.5, len(ids))).tolist() if ours else [],
        "version_spans": [[step - 1, len(ids)]] if ours else [],
        "reward": 0.0,
    }


def _statistics(records: Sequence[dict[str, Any]], draw: np.random.Generator, estimator: str) -> list[TrajectoryTokens]:
    """Compute token statistics of all records without a void turn, with the estimator's advantages."""
    kept = [record for record in records if record["ended"] != "void_turn"]
    model = [[item for item in record["segments"] if item["origin"] == "model"] for record in kept]
    engine = [np.concatenate([item["log_probs"] for item in items]).astype(np.float32) for items in model]
    rows, width = len(kept), max(map(len, engine))
    mask = torch.zeros(rows, width, dtype=torch.bool)
    rewards, energy = torch.zeros(rows, width), torch.rand(rows, width, generator=torch.Generator().manual_seed(3))
    for row, values in enumerate(engine):
        mask[row, : len(values)] = True
        rewards[row, len(values) - 1] = model[row][-1]["reward"]
    groups = torch.tensor([record["group"] for record in kept])
    made = compute_advantages(
        estimator,
        AdvantageInputs(
            rewards=rewards,
            response_mask=mask,
            groups=groups,
            token_energy=energy,
            loss_mask=mask,
            samples=torch.tensor([record["sample"] for record in kept]),
            branches=torch.tensor([record["branch"] for record in kept]),
            parents=torch.tensor([record["parent"] for record in kept]),
            forks=torch.tensor([record["fork"] for record in kept]),
            path_weights=torch.tensor([record.get("path_weight", 1.0) for record in kept]),
        ),
    )
    return [
        TrajectoryTokens(
            group=record["group"],
            sample=record["sample"],
            branch=record["branch"],
            parent=record["parent"],
            fork=record["fork"],
            path_weight=record.get("path_weight", 1.0),
            share=1.0,
            update=0,
            loss_weight=1 / rows,
            log_probs=values + draw.normal(0, 1e-3, len(values)).astype(np.float32),
            entropy=draw.uniform(0, 2, len(values)).astype(np.float16),
            energy=energy[row, : len(values)].numpy(),
            rewards=rewards[row, : len(values)].numpy(),
            returns=made.returns[row, : len(values)].numpy(),
            baselines=made.baselines[row, : len(values)].numpy(),
            advantages=made.advantages[row, : len(values)].numpy(),
            loss_mask=np.ones(len(values), dtype=bool),
        )
        for row, (record, values) in enumerate(zip(kept, engine, strict=True))
    ]
