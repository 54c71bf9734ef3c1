"""Measure the wall time of a step by schedule, in virtual time: hours take seconds, and results are reproducible.

The engine samples ``--tokens-per-second`` for all running requests together and at most ``--request-tokens-per-second``
for one, and queues requests that do not fit into ``--kv-tokens``. The length of a turn is lognormal, and the latency of
a tool follows a Pareto distribution up to the tool's time limit. Training takes the step's model tokens divided by
``--training-tokens-per-second``. New weights take ``--update-seconds``, in which nothing is sampled. Driver, rollout
worker and schedules are real. Trainer and engine have separate hardware, the same in all rows.

lock-step      a barrier before and after the tools of every turn, as most trainers have; then training
synchronous    a barrier only at the step's end; then training
overlapped     the next batch is sampled during training on the current batch
asynchronous   rollouts never wait unless they would be more than ``--max-staleness`` steps ahead

"rollouts" is the time of a step's rollouts and "step" the time of the whole step, in seconds: means over ``--steps``
steps after ``--warm-up`` steps. "bound" is the number of model tokens of the trained trajectories divided by the
engine's throughput. Goals at 5 turns: lock-step rollouts take at least 1.6 times as long as synchronous rollouts, a
synchronous step at least 1.5 times as long as an asynchronous step, and an asynchronous step at most 1.15 times the
bound.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass

from rollout_simulation import Hardware, LockStep, SimulatedEngine, SimulatedEnvironment, run_virtual, train_codec

from agentrl.models.tokenizer import TextCodec
from agentrl.problems.arithmetic import ArithmeticSource
from agentrl.problems.sampler import ProblemSampler
from agentrl.rollout.driver import Driver
from agentrl.rollout.filters import FilterRules
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.worker import RolloutWorker

SCHEDULES = ("lock-step", "synchronous", "overlapped", "asynchronous")
# Maximum number of tokens of an observation.
_OBSERVED = 64


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Mean seconds per step: rollouts (nan if they overlap with training), the whole step, and the bound.

    ``bound`` is the time to sample the tokens at the engine's full rate. ``staleness`` is the largest staleness.
    """

    rollouts: float
    step: float
    bound: float
    staleness: float


def build(args: argparse.Namespace, codec: TextCodec, turns: int, schedule: str) -> tuple[
    RolloutWorker, SimulatedEngine
]:  # fmt: skip
    """Build the real worker and driver over a simulated engine and environment."""
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
        schedule="synchronous" if schedule == "lock-step" else schedule,
        max_staleness=args.max_staleness,
        problems_per_step=args.problems,
        group_size=args.group_size,
        concurrency=count,
        max_turn_tokens=args.longest_turn,
        max_response_tokens=turns * (args.longest_turn + _OBSERVED),
    )
    environment = SimulatedEnvironment(
        turns=turns, latency=tool_latency, seed=args.seed, barrier=LockStep() if schedule == "lock-step" else None
    )
    driver = Driver(environment=environment, engine=engine, codec=codec, settings=settings, seed=args.seed)
    worker = RolloutWorker(
        driver=driver,
        sampler=ProblemSampler(ArithmeticSource(seed=args.seed), seed=args.seed),
        settings=settings,
        rules=FilterRules(void_turns="exclude", truncated="train", accuracy_range=None, drop_zero_variance=False),
    )
    return worker, engine


async def train(args: argparse.Namespace, codec: TextCodec, turns: int, schedule: str) -> Timing:
    """Run steps as the trainer does, and return the means over the later steps."""
    worker, engine = build(args, codec, turns, schedule)
    loop = asyncio.get_running_loop()
    worker.record_install(0)
    rollouts = bound = began = 0.0
    staleness = 0.0
    try:
        for step in range(args.warm_up + args.steps):
            if step == args.warm_up:
                rollouts, bound, began = 0.0, 0.0, loop.time()
            waited = loop.time()
            await worker.next_batch(step)
            rollouts += loop.time() - waited
            played = [item for group in worker.sampled_groups for item in group.trajectories]
            if any(item.turns != turns for item in played):
                raise RuntimeError(f"a trajectory in step {step} does not have {turns} turns")
            tokens = sum(item.model_tokens for item in played)
            bound += tokens / args.tokens_per_second
            staleness = max(staleness, worker.metrics["staleness/max"])
            await asyncio.sleep(tokens / args.training_tokens_per_second)
            await worker.wait_until_weights_may_change()
            engine.pause()
            await asyncio.sleep(args.update_seconds)
            engine.resume(step + 1)
            worker.record_install(step + 1)
            worker.record_trained()
    finally:
        await worker.close()
    beside = schedule in ("overlapped", "asynchronous")
    return Timing(
        rollouts=float("nan") if beside else rollouts / args.steps,
        step=(loop.time() - began) / args.steps,
        bound=bound / args.steps,
        staleness=staleness,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 3, 5, 10])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--problems", type=int, default=32, help="problems per step")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens-per-second", type=float, default=10_000.0)
    parser.add_argument("--request-tokens-per-second", type=float, default=60.0)
    parser.add_argument("--kv-tokens", type=int, default=1_000_000)
    parser.add_argument("--training-tokens-per-second", type=float, default=25_000.0)
    parser.add_argument("--update-seconds", type=float, default=1.0)
    parser.add_argument("--turn-tokens", type=float, default=300.0, help="median")
    parser.add_argument("--turn-sigma", type=float, default=0.6)
    parser.add_argument("--longest-turn", type=int, default=2048)
    parser.add_argument("--tool-seconds", type=float, default=0.5, help="duration of the shortest tool call")
    parser.add_argument("--tool-shape", type=float, default=1.5, help="Pareto exponent; smaller: heavier tail")
    parser.add_argument("--tool-limit", type=float, default=30.0, help="duration of the longest tool call")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> None:
    """Print a row for each schedule and number of turns."""
    codec = train_codec()
    print("                                                        over the bound     lock-step over this")
    print("turns   schedule       rollouts s    step s   bound s   rollouts    step   rollouts     step   stalest")
    for turns in args.turns:
        slowest: Timing | None = None
        for schedule in args.schedules:
            row = run_virtual(train(args, codec, turns, schedule))
            slowest = slowest or row
            print(
                f"{turns:5}   {schedule:12}   {row.rollouts:10.1f}   {row.step:7.1f}   {row.bound:7.1f}   "
                f"{row.rollouts / row.bound:8.2f}   {row.step / row.bound:5.2f}   "
                f"{slowest.rollouts / row.rollouts:8.2f}   {slowest.step / row.step:6.2f}   {row.staleness:7.0f}",
                flush=True,
            )
