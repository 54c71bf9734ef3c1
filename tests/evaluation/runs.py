"""Small evaluations for tests, with scripted answers and without a model or a sandbox."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.fakes import ScriptedEnvironment, ScriptedEpisode

from agentrl.config import Settings, load_settings
from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.run import sample_rollouts_of_sets, write_results
from agentrl.evaluation.settings import EvaluationOptions, with_evaluation_limits
from agentrl.evaluation.transcripts import Sample, Transcript, Turn
from agentrl.telemetry.console import Console
from agentrl.viewer.export import export_evaluation_page
from agentrl_envs.types import Ended, Problem, ToolCall, Verdict

HOSTILE = '</script><img src="http://evil/x" onerror=alert(1)>&{{INDEX}}'


def problem(number: int, **changes: Any) -> Problem:
    values = {"id": f"p{number}", "statement": f"What is {number}?", "answer": str(number), "source": "toy", **changes}
    return Problem(**values)


def problem_set(count: int = 4, name: str = "toy", **changes: Any) -> ProblemSet:
    return ProblemSet(name=name, problems=tuple(problem(number, **changes) for number in range(count)), revision="1")


def settings(*overrides: str) -> Settings:
    given = [
        "model.path=toy/model",
        "evaluation.samples=4",
        "telemetry.console=off",
        "telemetry.plots=false",
        *overrides,
    ]
    return with_evaluation_limits(load_settings("simpletir", None, given, command="eval"))


def transcript(sample: Sample, *, correct: bool = True, **changes: Any) -> Transcript:
    """Return a rollout with one program and an answer."""
    values: dict[str, Any] = {
        "benchmark": sample.benchmark,
        "problem": sample.problem.id,
        "sample": sample.number,
        "attempt": sample.attempt,
        "turns": (
            Turn(origin="model", text="```py\nprint(1)\n```", tokens=10),
            Turn(origin="observation", text="\nCode execution result: 1\n", tokens=5),
        ),
        "ended": Ended.ANSWERED,
        "prompt_tokens": 7,
        "verdict": Verdict.CORRECT if correct else Verdict.INCORRECT,
        "answer": sample.problem.answer if correct else "-1",
        "reward": float(correct),
        "tool_calls": (ToolCall(outcome="ok", seconds=0.5),),
        "seconds": 2.0,
    }
    return Transcript(**{**values, **changes})


def failed(sample: Sample) -> Transcript:
    """Return a rollout that failed for reasons outside the policy."""
    return transcript(
        sample,
        ended=Ended.INFRASTRUCTURE_FAILURE,
        verdict=None,
        answer=None,
        reward=0.0,
        turns=(),
        tool_calls=(),
        failure="the engine is down",
    )


class WrittenSampler:
    """A sampler that returns ``write(sample)``, which may raise, and records the requested samples."""

    def __init__(self, write: Callable[[Sample], Transcript], *, fingerprint: str = "f1") -> None:
        self._write = write
        self._fingerprint = fingerprint
        self.asked: list[Sample] = []
        self.concurrency = 2
        self.longest = 10_000

    def model_record(self) -> Mapping[str, Any]:
        return {"name": "toy/model", "fingerprint": self._fingerprint}

    def engine_record(self) -> Mapping[str, Any]:
        return {"name": "written"}

    async def sample_rollouts(self, environment: Any, samples: Sequence[Sample]) -> AsyncGenerator[Transcript, None]:
        for sample in samples:
            self.asked.append(sample)
            yield self._write(sample)

    def prompts_too_long(self, prompts: Mapping[tuple[str, str], str]) -> Mapping[tuple[str, str], int]:
        return {problem: len(prompt) for problem, prompt in prompts.items() if len(prompt) > self.longest}

    async def close(self) -> None:
        """Do nothing, because there are no resources."""


async def play(sampler: WrittenSampler, output: Path, sets: Sequence[ProblemSet], *overrides: str) -> None:
    """Sample the missing rollouts of the evaluation in ``output``."""
    environment = ScriptedEnvironment(lambda problem, n: ScriptedEpisode([], prompt=f"Solve: {problem.statement}"))
    chosen = settings(*overrides)
    console = Console(chosen.telemetry)
    await sample_rollouts_of_sets(chosen, sets, output, console, sampler=sampler, environment=environment)


def results(output: Path, sets: Sequence[ProblemSet], *overrides: str, **request: Any) -> dict[str, Any]:
    """Write the results of the complete evaluation in ``output``."""
    from agentrl.evaluation.directory import EvaluationDirectory

    chosen = settings(*overrides)
    directory = EvaluationDirectory.open_existing(output)
    return write_results(
        directory, chosen, sets, EvaluationOptions(**request), Console(chosen.telemetry), export_evaluation_page
    )
