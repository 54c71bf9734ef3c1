"""What token statistics cost: seconds to write and to read a step, and bytes a token.

``python benchmarks/telemetry.py [TRAJECTORIES TOKENS]`` (default 128 of 4096). The values are random as those of a real
step are: log-probabilities, energies and entropies to their last digit, returns equal within a trajectory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from agentrl.telemetry.tokens.token_file import TokenFacts, TokenFile, write_tokens
from agentrl.telemetry.tokens.trajectory_tokens import TrajectoryTokens

REPEATS = 5


def rows(trajectories: int, tokens: int) -> list[TrajectoryTokens]:
    draw = np.random.default_rng(3)
    made = []
    for number in range(trajectories):
        probability = draw.beta(5, 1, tokens).astype(np.float32)
        returns = np.full(tokens, number % 2, dtype=np.float32)
        baselines = (0.5 + 0.1 * np.cumsum(draw.normal(size=tokens)) / tokens).astype(np.float32)
        made.append(
            TrajectoryTokens(
                group=number // 8,
                sample=number % 8,
                branch=0,
                parent=-1,
                fork=0,
                share=1.0,
                update=0,
                loss_weight=1 / (trajectories * tokens),
                log_probs=np.log(probability),
                entropy=(1 - probability).astype(np.float16),
                energy=(1 - probability) ** 2,
                rewards=np.zeros(tokens, dtype=np.float32),
                returns=returns,
                baselines=baselines,
                advantages=returns - baselines,
                loss_mask=np.ones(tokens, dtype=bool),
            )
        )
    return made


def main() -> None:
    trajectories, tokens = map(int, sys.argv[1:3]) if len(sys.argv) > 2 else (128, 4096)
    step = rows(trajectories, tokens)
    facts = TokenFacts(step=1, version=0, rank=0, ranks=1, estimator="tir_otb", loss="ppo", aggregation="token_mean")
    writing, reading = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.parquet"
        for _ in range(REPEATS):
            began = time.perf_counter()
            write_tokens(path, facts, step)
            written = time.perf_counter()
            assert sum(map(len, TokenFile(path).rows())) == trajectories * tokens
            reading.append(time.perf_counter() - written)
            writing.append(written - began)
        size = path.stat().st_size
    count = trajectories * tokens
    print(f"{count} tokens: {size / count:.1f} bytes a token")
    print(f"write {median(writing):.3f} s, read {median(reading):.3f} s (medians of {REPEATS})")
    print(f"write {median(writing) / count * 1e6:.2f} s a million tokens")


if __name__ == "__main__":
    main()
