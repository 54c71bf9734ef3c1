"""Compare the tokens per second of rollouts with and without tools on real vLLM servers.

Starts ``--replicas`` servers of a random tiny policy with ``agentrl serve-policy`` and plays one step on them with the
real driver and engine, in turn: with tools, ``--turns`` turns of ``--turn-tokens`` tokens with a tool's latency and a
short observation after each; without, as many tokens in one turn. Latencies are drawn from a Pareto distribution.
Waiting uses no CPU time, so the servers have the whole CPU. Both kinds of rollout fill the trajectory's token
limit. A ratio below 1 is the cost of turns, of repeated prefixes and of waiting for tools.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_simulation import SimulatedEnvironment

from agentrl.models.loading import build_tiny_model, train_tokenizer, write_model
from agentrl.models.settings import TinyModelSettings
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.replica import ServerRequirements
from agentrl.rollout.engines.vllm.engine import build_vllm_engine
from agentrl.rollout.settings import RolloutSettings, VLLMSettings
from agentrl.trajectory import Group
from agentrl_envs.types import Ended, Problem

_START = 900.0
_PROMPT = "How much is 12 + 345? "


def random_policy(folder: Path) -> tuple[Path, TextCodec, int]:
    """Write a policy with random weights. Returns its directory, its tokenizer and the size of its vocabulary."""
    settings = TinyModelSettings(vocabulary_size=300, hidden_size=64, layers=2, heads=2, intermediate_size=128)
    tokenizer = train_tokenizer([_PROMPT], vocabulary_size=300)
    model = build_tiny_model(settings, tokenizer, seed=5)
    write_model(folder / "policy", model=model, tokenizer=tokenizer, title="random", body="Untrained.")
    return folder / "policy", TextCodec(tokenizer), model.config.vocab_size


@contextmanager
def servers(policy: Path, folder: Path, args: argparse.Namespace) -> Iterator[list[str]]:
    """Start the servers, and yield their addresses when they respond."""
    lengths = [f"rollout.{name}={value}" for name, value in token_limits(args).items()]
    command = [sys.executable, "-m", "agentrl.cli", "serve-policy", "--model", str(policy), *lengths]
    command += ["model.dtype=float32", "rollout.engine=vllm"]
    processes, logs = [], [folder / f"server-{place}.log" for place in range(args.replicas)]
    try:
        for log in logs:
            with log.open("w") as file:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=environment))
        yield [address_in(log, process) for log, process in zip(logs, processes, strict=True)]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    """Wait until a server prints its address."""
    deadline = time.monotonic() + _START
    while (found := re.search(r"serving \S+ at (http://\S+)", log.read_text())) is None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start within {_START:g} s:\n{log.read_text()}")
        time.sleep(0.5)
    return found[1]


def token_limits(args: argparse.Namespace) -> dict[str, int]:
    """Return the token limits of prompt, turn and trajectory."""
    whole = args.turns * args.turn_tokens
    return {"max_prompt_tokens": 64, "max_turn_tokens": whole, "max_response_tokens": whole}


async def play(
    addresses: list[str], codec: TextCodec, vocabulary: int, args: argparse.Namespace, *, step: int, tools: bool
) -> tuple[int, float]:
    """Return model tokens and seconds of one step."""
    limits = token_limits(args) | ({"max_turn_tokens": args.turn_tokens} if tools else {})
    vllm = VLLMSettings(placement="external", addresses=addresses)
    settings = RolloutSettings(engine="vllm", vllm=vllm, concurrency=args.trajectories, **limits)

    def latency(numbers: random.Random) -> float:
        return min(args.tool_limit, args.tool_seconds * numbers.paretovariate(args.tool_shape)) if tools else 0.0

    # Allow more turns than fit, so that the token limit ends every trajectory.
    environment = SimulatedEnvironment(turns=10**6, latency=latency, seed=step, observation="= 4" if tools else "")
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    engine = build_vllm_engine(
        addresses, ServerRequirements(codec=codec, vocabulary=vocabulary, max_tokens=longest), settings
    )
    await engine.open()
    try:
        driver = Driver(environment=environment, engine=engine, codec=codec, settings=settings, seed=step)
        problem = Problem(id="p", statement=_PROMPT, answer="4", source="bench")
        requests = [Group(index=i, problem=problem) for i in range(args.trajectories // args.group_size)]
        tokens, began = 0, time.perf_counter()
        async for group in driver.play_groups(requests, step=step, group_size=args.group_size):
            if any(item.ended is not Ended.TOKEN_LIMIT for item in group.trajectories):
                raise RuntimeError(f"a trajectory did not end at the token limit: {group}")
            tokens += sum(item.model_tokens for item in group.trajectories)
        return tokens, time.perf_counter() - began
    finally:
        await engine.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-tokens", type=int, default=32)
    parser.add_argument("--tool-seconds", type=float, default=0.2, help="duration of the shortest tool call")
    parser.add_argument("--tool-shape", type=float, default=1.5, help="Pareto exponent; smaller: heavier tail")
    parser.add_argument("--tool-limit", type=float, default=5.0, help="duration of the longest tool call")
    parser.add_argument("--repeat", type=int, default=3)


def run(args: argparse.Namespace) -> None:
    """Print a row for each pair of steps."""
    with tempfile.TemporaryDirectory() as name:
        policy, codec, vocabulary = random_policy(Path(name))
        with servers(policy, Path(name), args) as addresses:
            ratios = []
            print("without tools: tokens   tokens/s   with tools: tokens   tokens/s   ratio")
            asyncio.run(play(addresses, codec, vocabulary, args, step=0, tools=True))  # warm-up: late compilation
            for step in range(1, args.repeat + 1):
                plain, seconds = asyncio.run(play(addresses, codec, vocabulary, args, step=step, tools=False))
                tooled, longer = asyncio.run(play(addresses, codec, vocabulary, args, step=step, tools=True))
                ratios.append(tooled / longer / (plain / seconds))
                print(
                    f"{plain:21}   {plain / seconds:8.0f}   {tooled:18}   {tooled / longer:8.0f}   {ratios[-1]:5.2f}",
                    flush=True,
                )
            print(f"median ratio {statistics.median(ratios):.2f}")
