"""``agentrl eval``: score a model on benchmarks or on the held-out problems of its settings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.evaluation.benchmarks import load_benchmark
from agentrl.evaluation.evaluate import EvaluationReport, evaluate_policy
from agentrl.models.loading import read_model
from agentrl.models.tokenizer import TextCodec, read_tokenizer
from agentrl.problems.sources import evaluation_set, load_source
from agentrl.rollout.driver import Driver
from agentrl.rollout.engines.transformers import TransformersEngine
from agentrl.rollout.environment import build_environment
from agentrl.telemetry.console import Console
from agentrl_envs.episode import Environment
from agentrl_envs.types import Problem

if TYPE_CHECKING:
    from agentrl.config import Settings


def evaluate_command(
    settings: Settings, model: str, benchmarks: list[str], data_dir: Path | None, n: int
) -> list[EvaluationReport]:
    """Play ``n`` samples of each problem with the model in ``model`` and print a table; returns the reports."""
    sets = {name: list(load_benchmark(name, data_dir=data_dir)) for name in benchmarks}
    if not sets:
        sets = {"held out": held_out_problems(settings)}
    console = Console(settings.telemetry)
    reports = asyncio.run(_evaluate(settings, model, sets, n))
    rows = []
    for name, report in reports:
        score = report.overall
        this, like = score.this_benchmark, score.problems_like_these
        rows.append(
            [
                name + (" (observations falsified)" if report.falsified else ""),
                f"{score.mean:.3f}",
                f"{this.low:.3f} to {this.high:.3f}",
                f"{like.low:.3f} to {like.high:.3f}",
                str(score.problems),
                str(report.no_data),
            ]
        )
    columns = ["benchmark", f"avg@{n}", "95 % this benchmark", "95 % problems like these", "problems", "no data"]
    console.table(f"Evaluation of {model}", columns, rows)
    return [report for _, report in reports]


def held_out_problems(settings: Settings) -> list[Problem]:
    """The first ``evaluation.problems`` of each source in ``data.eval``."""
    sources = [load_source(entry, seed=settings.seed).source for entry in settings.data.eval]
    return [problem for source in sources for problem in evaluation_set(source, settings.evaluation.problems)]


async def _evaluate(
    settings: Settings, model: str, sets: dict[str, list[Problem]], n: int
) -> list[tuple[str, EvaluationReport]]:
    codec = TextCodec(read_tokenizer(model))
    engine = TransformersEngine(read_model(model, settings.model).eval(), codec, settings.rollout)
    environment = build_environment(settings)
    await environment.open()

    def driver_for(chosen: Environment) -> Driver:
        return Driver(environment=chosen, engine=engine, codec=codec, settings=settings.rollout, seed=settings.seed)

    runs = [(name, problems, False) for name, problems in sets.items()]
    if settings.evaluation.falsified:
        revealing = {name: [item for item in problems if item.setup] for name, problems in sets.items()}
        runs += [(name, problems, True) for name, problems in revealing.items() if problems]
    try:
        return [
            (
                name,
                await evaluate_policy(
                    problems,
                    environment=environment,
                    driver_for=driver_for,
                    step=0,
                    samples=n,
                    temperature=settings.evaluation.temperature,
                    seed=settings.seed,
                    falsified=falsified,
                ),
            )
            for name, problems, falsified in runs
        ]
    finally:
        await engine.close()
        await environment.close()
