"""Measure the cost of a step for the rollout worker: planning the step and sending the plans to simulated ranks.

    python benchmarks/plan_scale.py [--groups 512] [--size 16] [--tokens 16384] [--ranks 64] [--turns 8]

Trajectories of half of `--tokens` to `--tokens` tokens, with alternating turns and observations, are planned for all
ranks. As in the worker, the plans are sent through pipes one after the other; here, a process reads and discards them.
Seconds are CPU seconds of this process, so other programs hardly affect them. `bytes per token` is the size of what a
rank receives. `memory` is the memory of the process with all trajectories, and its peak.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import numpy as np
import psutil

from agentrl.training.settings import AlgorithmSettings
from agentrl.training.step.batching import plan_step
from agentrl.training.step.objective_settings import ObjectiveSettings
from agentrl.training.worker.service import CallReply
from agentrl.trajectory import Group, Segment, Trajectory
from agentrl_envs.types import Ended, Problem

PROMPT = 512
VOCABULARY = 150_000


def trajectory(
    draw: np.random.Generator, problem: Problem, group: int, sample: int, options: argparse.Namespace
) -> Trajectory:
    length = int(draw.integers(options.tokens // 2, options.tokens + 1)) // (2 * options.turns)
    segments = []
    for turn in range(2 * options.turns):
        ids = tuple(draw.integers(0, VOCABULARY, length).tolist())
        if turn % 2:
            segments.append(Segment(origin="observation", token_ids=ids, text=""))
        else:
            log_probs = tuple((-draw.random(length)).tolist())
            spans = ((0, length),)
            segments.append(Segment(origin="model", token_ids=ids, text="", log_probs=log_probs, version_spans=spans))
    prompt = tuple(range(PROMPT))
    return Trajectory(
        problem=problem,
        step=1,
        group=group,
        sample=sample,
        prompt_ids=prompt,
        segments=tuple(segments),
        ended=Ended.TURN_LIMIT,
    )


def batch(options: argparse.Namespace) -> list[Group]:
    draw = np.random.default_rng(1)
    groups = []
    for index in range(options.groups):
        problem = Problem(id=str(index), statement="", answer="0", source="")
        rows = tuple(trajectory(draw, problem, index, sample, options) for sample in range(options.size))
        groups.append(Group(problem=problem, index=index, trajectories=rows))
    return groups


def read(connections: list[Connection]) -> None:
    for connection in connections:
        connection.recv_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"groups": 512, "size": 16, "tokens": 16384, "ranks": 64, "turns": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    pairs = [Pipe(duplex=False) for _ in range(options.ranks)]
    reader = Process(target=read, args=([here for here, _ in pairs],))
    reader.start()
    before = psutil.Process().memory_info().rss
    rollouts = batch(options)
    gc.collect()
    held = psutil.Process().memory_info().rss
    tokens = sum(item.length for group in rollouts for item in group.trajectories)
    settings = ObjectiveSettings(algorithm=AlgorithmSettings(), response_tokens=options.tokens)
    began = time.process_time()
    plans = plan_step(rollouts, settings, step=1, version=0, budget=2 * options.tokens, ranks=options.ranks)
    planned = time.process_time()
    sent = 0
    for plan, (_, there) in zip(plans, pairs, strict=True):
        body = ForkingPickler.dumps(CallReply(value=plan))
        sent += len(body)
        there.send_bytes(body)
    ended = time.process_time()
    reader.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{options.groups} x {options.size} trajectories, {tokens / 1e6:.1f} M tokens, {options.ranks} ranks")
    print(f"planned in {planned - began:.2f} s, sent in {ended - planned:.2f} s")
    print(f"{sent / tokens:.1f} bytes per token, {sent / options.ranks / 2**20:.1f} MiB per rank")
    print(
        f"memory: {held / 2**30:.2f} GiB with all trajectories ({(held - before) / tokens:.0f} bytes per token), "
        f"peak {peak / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
