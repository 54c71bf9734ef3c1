"""Measure the cost of telemetry: the trajectories and the token statistics of a step, and the slices of a trace.

``python benchmarks/telemetry.py [--rows 128] [--tokens 4096] [--run RUN]``. The values are as random as in a real step:
log-probabilities, energies and entropies in all digits, and equal returns within a trajectory. With ``--run``, the
program also prints the share of a step's time that token statistics and slices take; the share of slices needs a run
with ``telemetry.trace=true``.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from made_tokens import made_record, made_tokens

from agentrl.telemetry.files import BackgroundWriter
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import TokenFile, TokenMetadata, TrajectoryTokens, write_tokens
from agentrl.telemetry.trace import start_trace, stop_trace, trace_span

REPEATS = 5
SLICES = 100_000


def rows(trajectories: int, tokens: int) -> list[TrajectoryTokens]:
    draw = np.random.default_rng(3)
    weight = 1 / (trajectories * tokens)
    return [made_tokens(number, tokens, draw, loss_weight=weight) for number in range(trajectories)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128, help="number of trajectories in the step")
    parser.add_argument("--tokens", type=int, default=4096, help="model tokens of each trajectory")
    parser.add_argument("--run", type=Path, help="a run directory")
    options = parser.parse_args()
    trajectories_cost(options.rows, options.tokens)
    token_seconds = statistics_cost(options.rows, options.tokens)
    slice_seconds = trace_cost()
    if options.run is not None:
        shares(RunDirectory(options.run), token_seconds, slice_seconds)


def trajectories_cost(trajectories: int, tokens: int) -> None:
    """Print how long a step waits for its trajectories, and the CPU time of writing them in the background."""
    draw = np.random.default_rng(3)
    records = [made_record(1, number, tokens, draw) for number in range(trajectories)]
    count = sum(len(segment["token_ids"]) for record in records for segment in record["segments"])
    waits, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        run, writer = RunDirectory(folder), BackgroundWriter("trajectories")
        run.trajectories.mkdir()
        for _ in range(REPEATS):
            began, used = time.perf_counter(), time.process_time()
            writer.submit(partial(run.write_trajectories, 1, records))
            waits.append(time.perf_counter() - began)
            writer.wait()
            seconds.append(time.process_time() - used)
        writer.close()
        size = run.trajectory_file(1).stat().st_size
    print(f"trajectories: a step of {count} tokens waits {median(waits) * 1e3:.1f} ms; writing in the background takes")
    print(f"{median(seconds) / count * 1e6:.2f} CPU seconds per million tokens, {size / count:.1f} bytes per token")


def statistics_cost(trajectories: int, tokens: int) -> float:
    """Print the cost of token statistics. Returns the seconds to write a token's statistics."""
    step = rows(trajectories, tokens)
    facts = TokenMetadata(step=1, version=0, rank=0, ranks=1, estimator="tir_otb", loss="ppo", aggregation="token_mean")
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
    print(f"{count} tokens: {size / count:.1f} bytes per token")
    print(f"write {median(writing):.3f} s, read {median(reading):.3f} s (medians of {REPEATS})")
    print(f"write {median(writing) / count * 1e6:.2f} s per million tokens")
    return median(writing) / count


def trace_cost() -> float:
    """Print the cost of tracing. Returns the seconds per slice."""
    without = min(slices() for _ in range(REPEATS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        start_trace(path, "rank 0")
        seconds = median(slices() for _ in range(REPEATS))
        stop_trace()
        size = path.stat().st_size / (REPEATS * SLICES)
    print(f"a slice of the trace: {seconds * 1e6:.1f} us, {size:.0f} bytes; without a trace {without * 1e6:.2f} us")
    return seconds


def slices() -> float:
    began = time.perf_counter()
    for number in range(SLICES):
        with trace_span("turn", number=number):
            pass
    return (time.perf_counter() - began) / SLICES


def shares(run: RunDirectory, token_seconds: float, slice_seconds: float) -> None:
    """Print the medians over the steps of a run."""
    steps = [row for row in run.metrics() if row.get("policy/tokens")]
    tokens = [row["policy/tokens"] * token_seconds / row["time/step_s"] for row in steps]
    seconds = median(row["time/step_s"] for row in steps)
    own = median(row["policy/tokens"] for row in steps)
    print(f"{run.path.name}: a step takes {seconds:.2f} s and trains on {own:.0f} tokens (medians)")
    print(f"token statistics are written during training and take {median(tokens):.3%} of a step's time")
    if run.trace.exists():
        with run.trace.open("rb") as lines:
            count = sum(1 for _ in lines) / len(steps)
        print(f"the trace has {count:.0f} slices per step, {count * slice_seconds / seconds:.3%} of the step's time")


if __name__ == "__main__":
    main()
