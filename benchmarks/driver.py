"""Measure the driver's cost per turn, with 4,096 trajectories in flight and fixed latencies of engine and sandbox.

    python benchmarks/driver.py [--trajectories 4096] [--turns 5] [--repeat 3]

The driver, the tokenizer and the records are real. The engine returns a scripted turn after ``--engine-latency``
seconds, and the sandbox a scripted result after ``--sandbox-latency`` seconds. There are two kinds of run:
``simpletir`` has the SimpleTIR environment between driver and sandbox (parsing, retries, grading), ``episode`` a
scripted episode.

CPU time is the time of the whole process (``time.process_time``), including fakes and event loop, but not of other
programs. Event-loop lag is the delay after which a sleep of 5 ms ends: the time in which no other task could run. On a
busy machine, the lag includes the wait for a core. "own lag" leaves this wait out: it is at most the CPU time used
since the sleep began. "shortest" is the sum of a trajectory's latencies, a lower bound for every driver.

    python benchmarks/driver.py --step 512 16384

prints the cost of one step's tokens outside the model, stage by stage, from the responses of a vLLM server to the
padded tensors of a training rank: CPU seconds of one thread for all trajectories, measured on ``--measured`` of them.
The sum has two parts. Decoding and encoding JSON with msgspec is C code, and proportional to the bytes that vLLM sends.
The rest is Python with its calls to NumPy and torch. The goal for the rest is 2 s for 8 million tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from made_tokens import GROUP, TURNS, made_record
from scripted import ScriptedEngine, written

from agentrl.batch import Batch, MicroBatch
from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.rollout.engines.replica import TurnRequest
from agentrl.rollout.engines.vllm.replica import GenerateResponse, read_completion
from agentrl.rollout.metrics import StalenessTracker, rollout_metrics
from agentrl.rollout.settings import RolloutSettings
from agentrl.telemetry.trajectory_file import write_trajectories
from agentrl.training.step.batching import pack_into_micro_batches
from agentrl.trajectory import Group, Trajectory
from agentrl_envs.episode import Environment
from agentrl_envs.settings import SimpleTIRSettings
from agentrl_envs.simpletir import SimpleTIREnvironment
from agentrl_envs.types import Ended, Problem, Step
from agentrl_sandbox.client import Execution, Isolation, Outcome

_Value = TypeVar("_Value")
GROUP_SIZE = 16
_PROBE = 0.005
WORK = "The train covers 12 km in 3 hours.\n```py\nspeed = 12 / 3\nprint(speed)\n```"
ANSWER = "So the speed is known.\n```py\nfinal_answer(4)\n```"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Measurement of one run, with times in seconds."""

    cpu: float
    wall: float
    longest: float
    shortest: float
    turns: int
    lags: list[float]
    own_lags: list[float]

    @property
    def cpu_ms_per_turn(self) -> float:
        return 1e3 * self.cpu / self.turns


def p99_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.quantiles(seconds, n=100)[98]


class FixedEngine(ScriptedEngine[int]):
    """Engine that returns every turn after a fixed time: programs, and the answer in the last turn."""

    def __init__(self, codec: TextCodec, *, turns: int, latency: float) -> None:
        super().__init__()
        self._script = [written(codec, WORK)] * (turns - 1) + [written(codec, ANSWER)]
        self._latency = latency

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        turn = self.playing.get(trajectory_id, 0)
        self.playing[trajectory_id] = turn + 1
        await asyncio.sleep(self._latency)
        return self._script[turn]


class ScriptedSandbox:
    """Sandbox in which every program ends after a fixed time. ``final_answer(4)`` prints the boxed answer."""

    isolation = Isolation(layers={}, mode="none")

    def __init__(self, latency: float) -> None:
        self._latency = latency

    async def execute(
        self, program: str, *, timeout: float | None = None, stdin: str = "", request_id: str | None = None
    ) -> Execution:
        await asyncio.sleep(self._latency)
        stdout = "\\boxed{4}\n" if program.rstrip().endswith("final_answer(4)") else "4.0\n"
        return Execution(
            outcome=Outcome.OK, stdout=stdout, stderr="", exit_code=0, seconds=self._latency, truncated=False
        )

    async def close(self) -> None:
        pass


class ScriptedEpisode:
    """Episode with a fixed number of turns. Runs every turn's program in the sandbox, without parsing or grading."""

    stop_strings = ("\n```",)

    def __init__(self, problem: Problem, sandbox: ScriptedSandbox) -> None:
        self._problem = problem
        self._sandbox = sandbox

    def turn_complete(self, text: str) -> bool:
        return True

    async def start(self) -> str:
        return self._problem.statement

    async def step(self, action: str) -> Step:
        execution = await self._sandbox.execute(action)
        if "final_answer" in action:
            return Step(observation="", reward=1.0, ended=Ended.ANSWERED)
        return Step(observation=f"\nCode execution result: {execution.stdout}", reward=0.0, ended=None)

    async def fork(self) -> ScriptedEpisode:
        return ScriptedEpisode(self._problem, self._sandbox)

    async def close(self) -> None:
        pass


class ScriptedEnvironment(Environment):
    def __init__(self, sandbox: ScriptedSandbox) -> None:
        self._sandbox = sandbox

    async def open(self) -> None:
        pass

    def episode(self, problem: Problem) -> ScriptedEpisode:
        return ScriptedEpisode(problem, self._sandbox)

    async def close(self) -> None:
        pass

    def describe(self) -> list[str]:
        return ["scripted"]


async def watch_lag(lags: list[float], own_lags: list[float]) -> None:
    """Append the delay of each short sleep to ``lags``, and this process's share of the delay to ``own_lags``."""
    while True:
        due, cpu = time.perf_counter() + _PROBE, time.process_time()
        await asyncio.sleep(_PROBE)
        lags.append(max(0.0, time.perf_counter() - due))
        own_lags.append(min(lags[-1], time.process_time() - cpu))


def build_environment(kind: str, args: argparse.Namespace) -> Environment:
    sandbox = ScriptedSandbox(args.sandbox_latency)
    if kind == "episode":
        return ScriptedEnvironment(sandbox)
    return SimpleTIREnvironment(SimpleTIRSettings(max_turns=args.turns), sandbox=sandbox)


async def measure(kind: str, codec: TextCodec, args: argparse.Namespace) -> Measurement:
    environment = build_environment(kind, args)
    await environment.open()
    driver = Driver(
        environment=environment,
        engine=FixedEngine(codec, turns=args.turns, latency=args.engine_latency),
        codec=codec,
        settings=RolloutSettings(concurrency=args.trajectories),
        seed=0,
    )
    statement = "A train covers 12 km in 3 hours. How fast is it, in km/h? (Train number {}.)"
    requests = [
        Group(index=i, problem=Problem(id=f"p{i}", statement=statement.format(i), answer="4", source="bench"))
        for i in range(args.trajectories // GROUP_SIZE)
    ]
    lags: list[float] = []
    own_lags: list[float] = []
    watcher = asyncio.create_task(watch_lag(lags, own_lags))
    await asyncio.sleep(0)
    cpu, began = time.process_time(), time.perf_counter()
    turns, longest = 0, 0.0
    async for group in driver.play_groups(requests, step=0, group_size=GROUP_SIZE):
        for item in group.trajectories:
            if item.ended is not Ended.ANSWERED or item.reward != 1.0 or item.turns != args.turns:
                raise RuntimeError(f"unexpected trajectory: {item}")
            turns += item.turns
            longest = max(longest, item.seconds)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    await environment.close()
    return Measurement(
        cpu=cpu,
        wall=wall,
        longest=longest,
        shortest=args.turns * (args.engine_latency + args.sandbox_latency),
        turns=turns,
        lags=lags,
        own_lags=own_lags,
    )


def step_costs(trajectories: int, tokens: int, measured: int) -> None:
    """Print the CPU seconds that a step of ``trajectories`` of ``tokens`` tokens takes on the worker and a rank."""
    draw = np.random.default_rng(0)
    records = [made_record(1, number, tokens, draw) for number in range(measured)]
    answers = [server_answer(segment) for record in records for segment in record["segments"][::2]]
    sampling = Sampling(max_tokens=tokens // TURNS)
    turn = TurnRequest(token_ids=(), sampling=sampling, request_id="", seed=0, eos_ids=frozenset(), salt="")
    codec = small_codec()
    known = [
        [token % len(codec.token_bytes) for token in part["token_ids"]] for one in records for part in one["segments"]
    ]
    contexts = [
        record["prompt_ids"] + [id for part in record["segments"] for id in part["token_ids"]] for record in records
    ]
    rows = [Trajectory.from_record({**record, "seconds": 0.0}) for record in records]
    seconds: dict[str, float] = {}

    def stage(name: str, work: Callable[[], _Value]) -> _Value:
        """Run ``work`` three times, store the shortest time, scaled to the whole step, and return the result."""
        spent = []
        for _ in range(3):
            began = time.thread_time()
            result = work()
            spent.append(time.thread_time() - began)
        seconds[name] = min(spent) * trajectories / measured
        return result

    stage("encode requests (msgspec)", lambda: [msgspec.json.encode(context) for context in contexts])
    decode = msgspec.json.Decoder(GenerateResponse).decode
    stage("decode responses (msgspec)", lambda: deque(map(decode, answers), maxlen=0))
    stage("decode and check responses", lambda: [read_completion(decode(content), turn) for content in answers])
    stage("decode text", lambda: [codec.decode(token_ids) for token_ids in known])
    stage("check segments", lambda: [replace(segment) for one in rows for segment in one.segments])
    made = [
        Group(problem=part[0].problem, index=part[0].group, trajectories=tuple(part))
        for part in (rows[start : start + GROUP] for start in range(0, len(rows), GROUP))
    ]
    clock = StalenessTracker()
    stage("metrics", lambda: (rollout_metrics(made), clock.metrics(made)))
    units = [group.trajectories for group in made]
    shares = stage("plan", lambda: pack_into_micro_batches(units, 8 * tokens, ranks=1))
    packed = stage("pack", lambda: [MicroBatch.from_trajectories(items) for (items,) in shares])
    sent = stage("send plans", lambda: pickle.dumps(packed, protocol=5))
    received = stage("receive plans", lambda: pickle.loads(sent))
    batches = stage("pad", lambda: [Batch.from_micro_batch(micro) for micro in received])
    computed = attrgetter("input_ids", "position_ids", "varlen_bounds")  # cached per row; a copy computes them again
    stage("inputs of the model", lambda: [computed(replace(one.row)) for one in batches])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.parquet"
        stage("write trajectories", lambda: write_trajectories(path, (r.to_record() for r in rows)))
    seconds["check responses"] = seconds.pop("decode and check responses") - seconds["decode responses (msgspec)"]
    beside = seconds.pop("write trajectories")
    in_c = sum(value for name, value in seconds.items() if "msgspec" in name)
    print(f"{trajectories * tokens / 1e6:.1f} million tokens, CPU seconds")
    lines = {**seconds, "JSON in C (msgspec)": in_c, "Python, NumPy and torch": sum(seconds.values()) - in_c}
    for name, value in {**lines, "in the background: write trajectories": beside}.items():
        print(f"{name:40}{value:7.3f} s")


def server_answer(segment: dict[str, Any]) -> bytes:
    """Return the response of vLLM 0.32 at /inference/v1/generate that produced a model's segment."""
    ids, log_probs = segment["token_ids"], segment["log_probs"]
    content = [
        {**(own := {"token_id": token, "logprob": value, "rank": 1}), "top_logprobs": [own]}
        for token, value in zip(ids, log_probs, strict=True)
    ]
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": ids,
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
    }
    return json.dumps({"request_id": "r", "choices": [choice], "usage": None}, separators=(",", ":")).encode()


def small_codec() -> TextCodec:
    codec = TextCodec(train_tokenizer([WORK, ANSWER] * 20, vocabulary_size=512))
    codec.decode(())  # builds its table
    return codec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--engine-latency", type=float, default=2.0, help="seconds")
    parser.add_argument("--sandbox-latency", type=float, default=0.5, help="seconds")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--step", type=int, nargs=2, metavar=("TRAJECTORIES", "TOKENS"), help="print the costs of one step"
    )
    parser.add_argument("--measured", type=int, default=32, help="number of trajectories of --step to measure")
    args = parser.parse_args()
    if args.step is not None:
        step_costs(args.step[0], args.step[1], args.measured)
        return
    codec = small_codec()
    print(
        f"{args.trajectories} trajectories of {args.turns} turns in flight, engine {args.engine_latency:g} s, ", end=""
    )
    print(f"sandbox {args.sandbox_latency:g} s per turn; goals: 0.3 ms of CPU per turn, p99 lag 50 ms")
    print("environment   CPU ms/turn   p99 lag ms (own)   wall s   longest s   longest + CPU s   shortest + CPU s")
    for kind in ("episode", "simpletir"):
        runs = [asyncio.run(measure(kind, codec, args)) for _ in range(args.repeat)]
        for run in runs:
            lag = f"{p99_ms(run.lags):.0f} ({p99_ms(run.own_lags):.0f})"
            print(
                f"{kind:11}   {run.cpu_ms_per_turn:11.3f}   {lag:>16}   {run.wall:6.2f}   {run.longest:9.2f}   "
                f"{run.longest + run.cpu:15.2f}   {run.shortest + run.cpu:16.2f}"
            )
        cpu = statistics.median(run.cpu_ms_per_turn for run in runs)
        print(f"{kind}: median of {cpu:.3f} ms of CPU per turn")


if __name__ == "__main__":
    main()
