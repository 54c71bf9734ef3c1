"""Measure whether the default run learns: run `agentrl train --env simpletir` for several seeds and print a table.

    python benchmarks/learning.py --seeds 0,1,2

Each seed is a complete run: cold start (with a separate cache, so it is never taken from an earlier run), evaluation,
training, evaluation, and the evaluation with falsified observations, only on the families that reveal a value by
execution.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    options = arguments(sys.argv[1:])
    rows = [run(seed, options) for seed in options.seeds]
    print("\n".join(table(rows)))


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2], help="separated by commas; default: 0,1,2")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    parser.add_argument("--config", help="a shipped configuration or a file; default: the tiny preset")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    return parser.parse_args(given)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one run from scratch. Returns the figures in its files."""
    name = f"{options.config or 'learning'}-seed-{seed}-{time.strftime('%H%M%S')}"
    command = [sys.executable, "-m", "agentrl.cli", "train", "--env", "simpletir"]
    command += ["--config", options.config] if options.config else []
    command += [f"seed={seed}", f"name={name}", f"runs_dir={options.runs_dir}", *options.overrides]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        subprocess.run(command, check=True, env={**os.environ, "XDG_CACHE_HOME": cache})
    metrics = [json.loads(line) for line in (options.runs_dir / name / "metrics.jsonl").open()]
    summary = json.loads((options.runs_dir / name / "summary.json").read_text())
    rewards = [row["reward/mean"] for row in metrics if "reward/mean" in row]
    return {
        "seed": seed,
        "scores": summary["scores"],
        "train_seconds": summary["train_seconds"],
        "seconds": time.monotonic() - began,
        "steps": summary["steps"],
        "reward_first": sum(rewards[:10]) / len(rewards[:10]),
        "reward_last": sum(rewards[-10:]) / len(rewards[-10:]),
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table: held-out avg@k before and after with 95 % intervals, falsified observations, time."""
    lines = [
        "| seed | held out before | held out after | falsified observations | training reward, first and last 10 steps "
        "| steps | training s | whole run s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        plain = [score for score in row["scores"] if not score["falsified"]]
        falsified = [score for score in row["scores"] if score["falsified"]]
        cells = [
            str(row["seed"]),
            _score(plain[0]),
            _score(plain[-1]),
            _score(falsified[-1]) if falsified else "not measured",
            f"{row['reward_first']:.3f}, {row['reward_last']:.3f}",
            str(row["steps"]),
            f"{row['train_seconds']:.0f}",
            f"{row['seconds']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _score(score: dict[str, Any]) -> str:
    interval = score["this_benchmark"]
    return f"{score['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


if __name__ == "__main__":
    main()
