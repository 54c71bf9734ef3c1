"""Compare forward and backward passes over packed and padded trajectories. Goal: packed is 1.5 times as fast.

    python benchmarks/packing.py                          lengths of responses from a log-normal with sigma 1
    python benchmarks/packing.py --run runs/NAME --step 9  the trajectories of a step of a run, packed and padded
    python benchmarks/packing.py --sharing 1 2 4 8         forked rollouts whose shared prefixes are computed once, or
                                                           with every branch; --record FILE writes the figures

Both sides use the built-in tiny policy and the same whole groups, in micro-batches of ``--budget`` tokens. The planner
of the trainer fills the packed micro-batches. The padded ones contain groups from the longest to the shortest, padded
to the longest trajectory of the micro-batch. The sides alternate; compare them by the ratio of CPU seconds. Peak memory
is measured in a separate process for each side, without the model.

A sharing ratio is the number of tokens of all branches with their prompts, divided by the number of distinct tokens
(`policy/prefix_sharing`). A tree has one root, four branches and 32 leaves on paths of ``--length`` tokens, in one row.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from agentrl.batch import Batch, MicroBatch
from agentrl.kernels.attention import pack_row
from agentrl.models.loading import tiny_config
from agentrl.models.policy import PolicyModel
from agentrl.models.settings import TinyModelSettings
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.training.step.batching import pack_into_micro_batches
from agentrl.trajectory import Segment, Trajectory
from agentrl_envs.types import Ended, Problem

VOCABULARY = 512
Side = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="directory of a run whose trajectories are used")
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=7, help="pairs of measurements, after one warm-up")
    parser.add_argument(
        "--sharing", type=float, nargs="+", help="compare shared with separate prefixes at these sharing ratios"
    )
    parser.add_argument("--length", type=int, default=512, help="number of tokens per path")
    parser.add_argument("--record", type=Path, help="JSON file for the figures of --sharing")
    parser.add_argument("--only", help="run only this side, once, and print its peak memory")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.sharing:
        record = {}
        for ratio in options.sharing:
            documents = tree(ratio, options.length)
            sides = {"shared": one_row(documents, share=True), "separate": one_row(documents, share=False)}
            found = compare(sides, options, "--sharing", str(ratio))
            if found is not None:
                record[str(ratio)] = found
        if options.record is not None and options.only is None:
            options.record.write_text(json.dumps(record, indent=1) + "\n")
        return
    groups = drawn(options.groups) if options.run is None else played(options.run, options.step)
    if options.only is None:
        rows = [row for group in groups for row in group]
        tokens, longest = sum(row.length for row in rows), max(row.length for row in rows)
        print(f"{len(rows)} trajectories with {tokens} tokens in total, the longest with {longest}", flush=True)
    compare({"packed": packed(groups, options.budget), "padded": padded(groups, options.budget)}, options)


def compare(sides: dict[str, Side], options: argparse.Namespace, *last: str) -> dict[str, float] | None:
    """Print and return the figures of two sides. With ``--only``, print one side's peak memory.

    ``sides`` contains the faster side first. ``last``: arguments that select these sides in a separate process.
    """
    if options.only is not None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, which includes the parent's
        before = memory("VmRSS")
        sides[options.only]()
        print(memory("VmHWM") - before)
        return None
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.repetitions + 1):
        for name in sorted(sides, reverse=bool(turn % 2)):
            began = time.process_time()
            sides[name]()
            times[name].append(time.process_time() - began)
    found = {}
    for name, taken in times.items():
        # Without this variable, glibc keeps freed blocks, and the peak depends on the order of their sizes.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, *sys.argv, *last, "--only", name]
        said = subprocess.check_output(command, text=True, env=environment)
        found |= {f"{name}_seconds": statistics.median(taken[1:]), f"{name}_mib": float(said)}
        print(f"{name}: {statistics.median(taken[1:]):.3f} CPU seconds, peak memory {float(said):,.0f} MiB", flush=True)
    fast, slow = (taken[1:] for taken in times.values())
    ratios = [many / few for many, few in zip(slow, fast, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    names = " over ".join(reversed(sides))
    print(f"{names}, median of {len(ratios)} pairs: {middle:.2f} (quartiles {low:.2f}, {high:.2f})", flush=True)
    return found | {"ratio": middle, "low": low, "high": high}


def tree(ratio: float, length: int) -> list[tuple[Tensor, Tensor]]:
    """Return the prompts and responses of a tree's branches.

    The root has 3 a tokens, each of the 4 branches has a, and each of the 32 leaves has length - 4 a.
    """
    # All paths together have 3 a + 4 * 4 a + 32 * length tokens, of which 32 * length - 121 a are distinct.
    a = round(32 * length * (ratio - 1) / (19 + 121 * ratio))
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (count,), generator=generator)

    if a == 0:
        return [(one[:32], one[32:]) for one in (tokens(length) for _ in range(32))]
    root = tokens(3 * a)
    middle = [torch.cat([root, tokens(a)]) for _ in range(4)]
    leaves = [(path, tokens(length - 4 * a)) for path in middle for _ in range(8)]
    return [(root[:32], root[32:]), *((root, path[3 * a :]) for path in middle), *leaves]


def one_row(documents: Sequence[tuple[Tensor, Tensor]], *, share: bool) -> Side:
    """Return a function that runs all documents through the policy, in one row."""
    policy = PolicyModel(tiny_model())
    row = pack_row(documents, share_prefixes=share)
    lengths = torch.tensor([len(response) for _, response in documents])
    rows = torch.arange(len(documents)).repeat_interleave(lengths)
    columns = torch.cat([torch.arange(count) for count in lengths.tolist()])

    def step() -> None:
        policy.zero_grad()
        found, _ = policy(row, rows, columns)
        found.log_probs.sum().backward()

    return step


def memory(name: str) -> float:
    """Return a memory figure of this process in MiB, by its name in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def packed(groups: Sequence[Sequence[Trajectory]], budget: int) -> Side:
    """Return a function that runs all groups through the policy, in packed rows."""
    policy = PolicyModel(tiny_model())
    batches = [
        Batch.from_micro_batch(MicroBatch.from_trajectories(rows))
        for (rows,) in pack_into_micro_batches(groups, budget, ranks=1)
    ]

    def step() -> None:
        policy.zero_grad()
        for batch in batches:
            found, _ = policy(batch.row, batch.rows, batch.columns)
            found.log_probs.sum().backward()

    return step


def padded(groups: Sequence[Sequence[Trajectory]], budget: int) -> Side:
    """Return a function that runs all groups through the same model and head, in padded rows."""
    policy = PolicyModel(tiny_model())
    bins: list[list[Trajectory]] = []
    for group in sorted(groups, key=lambda rows: max(row.length for row in rows), reverse=True):
        if bins and (len(bins[-1]) + len(group)) * max(row.length for row in bins[-1]) <= budget:
            bins[-1] += group
        else:
            bins.append([*group])
    batches = [Batch.from_micro_batch(MicroBatch.from_trajectories(rows)) for rows in bins]

    def states(batch: Batch) -> Tensor:
        hidden: Tensor = policy.backbone(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        rows, columns = batch.response_mask.nonzero(as_tuple=True)
        return hidden[rows, batch.prompt_lengths[rows] + columns - 1]

    def step() -> None:
        policy.zero_grad()
        for batch in batches:
            policy.head(states(batch), batch.response_ids[batch.response_mask]).log_probs.sum().backward()

    return step


def tiny_model() -> object:
    """Return the embedded policy, untrained."""
    from transformers import Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(tiny_config(TinyModelSettings(vocabulary_size=VOCABULARY)))


def played(run: Path, step: int) -> list[list[Trajectory]]:
    """Return the groups of a step of a run."""
    groups: dict[int, list[Trajectory]] = {}
    for record in RunDirectory(run).read_trajectories(step):
        item = Trajectory.from_record(record)
        if not item.is_excluded:
            groups.setdefault(item.group, []).append(item)
    return [*groups.values()]


def drawn(groups: int) -> list[list[Trajectory]]:
    """Return groups of eight with 32 prompt tokens and log-normal response lengths (median 64, sigma 1)."""
    draw = random.Random(1)

    def trajectory(problem: Problem, group: int, sample: int, prompt: tuple[int, ...]) -> Trajectory:
        count = min(900, max(1, round(64 * draw.lognormvariate(0, 1))))
        tokens = tuple(draw.randrange(VOCABULARY) for _ in range(count))
        spans, log_probs = ((0, count),), (-1.0,) * count
        segment = Segment(origin="model", token_ids=tokens, text="", log_probs=log_probs, version_spans=spans)
        return Trajectory(
            problem=problem,
            step=1,
            group=group,
            sample=sample,
            prompt_ids=prompt,
            segments=(segment,),
            ended=Ended.ANSWERED,
        )

    made = []
    for group in range(groups):
        problem = Problem(id=f"random-{group}", statement="?", answer="1", source="random")
        prompt = tuple(draw.randrange(VOCABULARY) for _ in range(32))
        made.append([trajectory(problem, group, sample, prompt) for sample in range(8)])
    return made


if __name__ == "__main__":
    main()
