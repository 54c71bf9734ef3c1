"""Run a complete evaluation with a scripted model: measure time and memory, and compare scores with closed forms.

    python benchmarks/evaluation.py --data-dir DIR [--benchmarks aime24,aime25,amc23,math500] [--n 32]

The engine is scripted: of the ``n`` rollouts of problem ``i`` exactly ``(7 i + 3) mod (n + 1)`` are right, and all
others give one of three wrong answers. Every rollout runs one program in the sandbox, then answers: whole numbers by a
second program, other answers in a box. Driver, tokenizer, protocol, sandbox, grader, log, results, plots and report are
real. DIR contains the benchmarks' files.

avg@n, pass@k and maj@n must equal the values that the script implies (exact fractions). Otherwise, the exit code is 1.
Memory is the resident set of this process and of all its children, sampled every second. It is printed after a tenth of
the rollouts, at the end, and at its maximum. Target: a duration of minutes, and growth of less than 20 % from the first
tenth to the end.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
from scripted import ScriptedEngine, written

from agentrl.config import load_settings
from agentrl.evaluation.benchmarks import ProblemSet, load_problem_sets
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.results import default_pass_ks
from agentrl.evaluation.run import sample_rollouts_of_sets, write_results
from agentrl.evaluation.samplers import ModelSampler
from agentrl.evaluation.settings import EvaluationOptions, with_evaluation_limits
from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl.telemetry.console import Console
from agentrl.viewer.export import export_evaluation_page
from agentrl_envs.types import Problem

WORK = "Let me compute first.\n```python\nprint(sum(k * k for k in range(1000)))\n```"
WRONG = ("1234567", "7654321", "-99")


def right_of(place: int, n: int) -> int:
    """Return the number of right rollouts among the ``n`` rollouts of the ``place``-th problem."""
    return (7 * place + 3) % (n + 1)


def answer_of(problem: Problem, place: int, rollout: int, n: int) -> str:
    """Return the answer of the ``rollout``-th rollout of a problem."""
    right = right_of(place, n)
    return problem.answer if rollout < right else WRONG[(rollout - right) % len(WRONG)]


class AnsweringEngine(ScriptedEngine[tuple[Problem, int, int]]):
    """Engine whose answer depends on the problem, identified by the prompt, and on the trajectory's number.

    For each running trajectory, it stores the problem, the problem's place and the trajectory's number.
    """

    def __init__(self, codec: TextCodec, sets: Sequence[ProblemSet], n: int) -> None:
        super().__init__()
        self._codec = codec
        self._n = n
        self._problems = [problem for one in sets for problem in one.problems]
        self._places = {problem.statement: place for one in sets for place, problem in enumerate(one.problems)}
        self._work = written(codec, WORK)
        self._begun: dict[str, int] = {}

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        await asyncio.sleep(0)
        if trajectory_id not in self.playing:
            problem = self._asked(self._codec.decode(token_ids))
            rollout = self._begun.get(problem.id, 0)
            self._begun[problem.id] = rollout + 1
            self.playing[trajectory_id] = (problem, self._places[problem.statement], rollout)
            return self._work
        problem, place, rollout = self.playing[trajectory_id]
        answer = answer_of(problem, place, rollout, self._n)
        if answer.lstrip("-").isdigit():
            return written(self._codec, f"So:\n```python\nfinal_answer({answer!r})\n```")
        return written(self._codec, f"So \\boxed{{{answer}}}.", ended=True)

    def _asked(self, prompt: str) -> Problem:
        return next(problem for problem in self._problems if prompt.endswith(f"{problem.statement}\n"))


def scripted_sampler(settings: Any, sets: Sequence[ProblemSet]) -> ModelSampler:
    """Return the sampler of an evaluation with the scripted engine."""
    codec = TextCodec(train_tokenizer([WORK, *WRONG], vocabulary_size=400))
    engine = AnsweringEngine(codec, sets, settings.evaluation.samples)
    return ModelSampler(
        engine=engine, codec=codec, settings=settings, fingerprint="scripted", record={"name": "scripted"}
    )


def expected(one: ProblemSet, n: int, ks: Sequence[int]) -> dict[str, Fraction]:
    """Return avg@n, pass@k and maj@n of a benchmark, computed from the script alone."""
    problems = len(one.problems)
    found = {f"avg@{n}": Fraction(0), f"maj@{n}": Fraction(0)} | {f"pass@{k}": Fraction(0) for k in ks}
    for place in range(problems):
        right = right_of(place, n)
        wrong = n - right
        found[f"avg@{n}"] += Fraction(right, n)
        for k in ks:
            found[f"pass@{k}"] += 1 - Fraction(math.comb(wrong, k), math.comb(n, k))
        votes = [wrong // len(WRONG) + (rest < wrong % len(WRONG)) for rest in range(len(WRONG))]
        if right and right >= max(votes):
            found[f"maj@{n}"] += Fraction(1, 1 + votes.count(right))
    return {name: value / problems for name, value in found.items()}


def measured(results: Mapping[str, Any], name: str, n: int, ks: Sequence[int]) -> dict[str, float]:
    """Return the figures of :func:`expected` as a finished evaluation measured them."""
    one = results["benchmarks"][name]
    found = {f"avg@{n}": one["avg"]["mean"], f"maj@{n}": one["maj"]}
    return found | {f"pass@{k}": one["pass"][str(k)]["value"] for k in ks}


def cpu_seconds() -> tuple[float, float]:
    """Return the CPU time of this process, and of its descendants that have ended and been waited for."""
    own, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime, others.ru_utime + others.ru_stime


class Memory:
    """Resident megabytes of this process and its children over time."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = []  # (bytes of the log, megabytes)

    async def watch(self, log: Path) -> None:
        """Sample until cancelled. Progress is read from the growth of the log, so the run is not affected."""
        while True:
            await asyncio.sleep(1.0)
            self.samples.append((log.stat().st_size if log.exists() else 0, self.now()))

    def now(self) -> float:
        own = psutil.Process()
        total = own.memory_info().rss
        for child in own.children(recursive=True):
            try:
                total += child.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / 2**20

    def at_share(self, share: float) -> float:
        """Return the megabytes at the time when the log had this share of its final size."""
        end = self.samples[-1][0]
        return next(megabytes for size, megabytes in self.samples if size >= share * end)


async def play(rollouts: Coroutine[Any, Any, EvaluationDirectory], memory: Memory, log: Path) -> EvaluationDirectory:
    watch = asyncio.create_task(memory.watch(log))
    try:
        return await rollouts
    finally:
        watch.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--benchmarks", default="aime24,aime25,amc23,math500")
    parser.add_argument("--n", type=int, default=32)
    parser.add_argument("--problems", type=int, default=None, help="use only the first N problems of each benchmark")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("settings", nargs="*", help="further key=value settings")
    options = parser.parse_args()
    overrides = ["model.path=scripted/scripted", f"evaluation.samples={options.n}", *options.settings]
    settings = with_evaluation_limits(load_settings("simpletir", None, overrides, command="eval"))
    names = tuple(options.benchmarks.split(","))
    sets = load_problem_sets(settings, names, options.data_dir)
    if options.problems is not None:
        sets = [
            ProblemSet(name=one.name, problems=one.problems[: options.problems], revision=one.revision) for one in sets
        ]
    rollouts = options.n * sum(len(one.problems) for one in sets)
    console = Console(settings.telemetry)
    request = EvaluationOptions(benchmarks=names)
    memory = Memory()
    with tempfile.TemporaryDirectory() as temporary:
        output = options.output or Path(temporary) / "evaluation"
        sampler = scripted_sampler(settings, sets)
        began, cpu = time.monotonic(), cpu_seconds()
        directory = asyncio.run(
            play(
                sample_rollouts_of_sets(settings, sets, output, console, sampler=sampler),
                memory,
                output / "rollouts.jsonl.zst",
            )
        )
        played, cpu_then = time.monotonic(), cpu_seconds()
        results = write_results(directory, settings, sets, request, console, export_evaluation_page)
        ended = time.monotonic()
        size = directory.rollouts.stat().st_size / 2**20
        report = directory.report.stat().st_size / 2**20
    own, others = (1e3 * (after - before) / rollouts for before, after in zip(cpu, cpu_then, strict=True))
    print(f"CPU per rollout: {own:.1f} ms in this process, {others:.1f} ms in the sandbox's and the grader's processes")
    return summary(options.n, sets, results, memory, rollouts, (played - began, ended - played), (size, report))


def summary(
    n: int,
    sets: Sequence[ProblemSet],
    results: Mapping[str, Any],
    memory: Memory,
    rollouts: int,
    seconds: tuple[float, float],
    sizes: tuple[float, float],
) -> int:
    """Print the measurements. Returns 1 if a score differs from its closed form, otherwise 0."""
    ks = default_pass_ks(n)
    wrong = [
        f"{one.name} {name}: {found[name]!r}, expected {float(value)!r}"
        for one in sets
        for found in [measured(results, one.name, n, ks)]
        for name, value in expected(one, n, ks).items()
        if abs(found[name] - float(value)) > 1e-12
    ]
    calls = sum(sum(one["tool_calls"]["outcomes"].values()) for one in results["benchmarks"].values())
    print(f"{rollouts} rollouts with {calls} programs took {seconds[0] / 60:.2f} min; ", end="")
    print(f"writing the results took {seconds[1]:.1f} s")
    if memory.samples:
        tenth, end = memory.at_share(0.1), memory.samples[-1][1]
        most = max(megabytes for _, megabytes in memory.samples)
        growth = end / tenth - 1
        print(f"memory: {tenth:.0f} MB after a tenth of the log, {end:.0f} MB at the end ({growth:+.1%}), ", end="")
        print(f"{most:.0f} MB at most")
    print(f"rollouts.jsonl.zst {sizes[0]:.1f} MB, report.html {sizes[1]:.1f} MB")
    for line in wrong:
        print(f"WRONG {line}")
    if not wrong:
        print("avg, pass@k and maj equal their closed forms")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
