"""Wall time of a step by schedule, in virtual time: minutes of rollouts take seconds and come out the same everywhere.

The engine gives ``--tokens-per-second`` to all running requests together, at most ``--request-tokens-per-second`` to
one, and queues what its ``--kv-tokens`` do not hold. A turn's length is lognormal, a tool's latency Pareto up to the
tool's time limit; training takes the step's model tokens over ``--training-tokens-per-second``. The driver is the real
one; every row plays turns of the same lengths.

lock-step      a barrier before and after the tools of every turn, as most trainers have; then training
synchronous    no barrier but the step's end; then training

"rollouts" and "step" are seconds of one step without and with training, "bound" is tokens over the engine's throughput.
Goal: at 5 turns the rollouts of lock-step take at least 1.6 times those of synchronous.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass

from rollout_simulation import Hardware, LockStep, SimulatedEngine, SimulatedEnvironment, run_virtual, train_codec

from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver, Issue
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.types import Problem

# Tokens of an observation, at most.
_OBSERVED = 64


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a step's rollouts, of the step with its training, and tokens over the engine's throughput."""

    rollouts: float
    step: float
    bound: float


def build_driver(args: argparse.Namespace, codec: TextCodec, turns: int, *, lock_step: bool) -> tuple[
    Driver, SimulatedEngine, RolloutSettings
]:  # fmt: skip
    """The real driver over a simulated engine and environment."""
    hardware = Hardware(
        tokens_per_second=args.tokens_per_second,
        request_tokens_per_second=args.request_tokens_per_second,
        kv_tokens=args.kv_tokens,
    )

    def turn_length(seed: int) -> int:
        drawn = args.turn_tokens * random.Random(seed).lognormvariate(0.0, args.turn_sigma)
        return max(1, min(args.longest_turn, round(drawn)))

    def tool_latency(numbers: random.Random) -> float:
        return min(args.tool_limit, args.tool_seconds * numbers.paretovariate(args.tool_shape))

    engine = SimulatedEngine(hardware, turn_length)
    count = args.problems * args.group_size
    settings = RolloutSettings(
        problems_per_step=args.problems,
        group_size=args.group_size,
        concurrency=count,
        max_turn_tokens=args.longest_turn,
        max_response_tokens=turns * (args.longest_turn + _OBSERVED),
    )
    environment = SimulatedEnvironment(
        turns=turns, latency=tool_latency, seed=args.seed, barrier=LockStep(count) if lock_step else None
    )
    driver = Driver(environment=environment, engine=engine, codec=codec, settings=settings, seed=args.seed)
    return driver, engine, settings


async def play(args: argparse.Namespace, codec: TextCodec, turns: int, *, lock_step: bool) -> Timing:
    """One step by ``Driver.play``, then training."""
    driver, engine, settings = build_driver(args, codec, turns, lock_step=lock_step)
    issues = [
        Issue(index=i, problem=Problem(id=f"p{i}", statement="aaaa", answer="4", source="bench"))
        for i in range(settings.problems_per_step)
    ]
    loop = asyncio.get_running_loop()
    began = loop.time()
    async for group in driver.play(issues, step=0, group_size=settings.group_size):
        if any(item.turns != turns for item in group.trajectories):
            raise RuntimeError(f"a trajectory went wrong: {group}")
    rollouts = loop.time() - began
    return Timing(
        rollouts=rollouts,
        step=rollouts + engine.sampled / args.training_tokens_per_second,
        bound=engine.sampled / args.tokens_per_second,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--problems", type=int, default=32, help="of one step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens-per-second", type=float, default=10_000.0)
    parser.add_argument("--request-tokens-per-second", type=float, default=60.0)
    parser.add_argument("--kv-tokens", type=int, default=1_000_000)
    parser.add_argument("--training-tokens-per-second", type=float, default=25_000.0)
    parser.add_argument("--turn-tokens", type=float, default=300.0, help="median")
    parser.add_argument("--turn-sigma", type=float, default=0.6)
    parser.add_argument("--longest-turn", type=int, default=2048)
    parser.add_argument("--tool-seconds", type=float, default=0.5, help="the shortest tool call")
    parser.add_argument("--tool-shape", type=float, default=1.5, help="of Pareto; smaller: heavier tail")
    parser.add_argument("--tool-limit", type=float, default=30.0, help="the longest tool call")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    """Print a row for each schedule and number of turns."""
    codec = train_codec()
    print("                                                        over the bound      lock-step over this")
    print("turns   schedule       rollouts s    step s   bound s   rollouts    step   rollouts    step")
    for turns in args.turns:
        slow = run_virtual(play(args, codec, turns, lock_step=True))
        rows = {"lock-step": slow, "synchronous": run_virtual(play(args, codec, turns, lock_step=False))}
        for name, row in rows.items():
            print(
                f"{turns:5}   {name:12}   {row.rollouts:10.1f}   {row.step:7.1f}   {row.bound:7.1f}   "
                f"{row.rollouts / row.bound:8.2f}   {row.step / row.bound:5.2f}   "
                f"{slow.rollouts / row.rollouts:8.2f}   {slow.step / row.step:5.2f}"
            )
