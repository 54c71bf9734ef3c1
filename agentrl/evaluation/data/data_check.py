"""``agentrl eval --check-data``: check the data of benchmarks without sampling."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError
from agentrl.evaluation.data.benchmarks import DataCheck, check_benchmark
from agentrl.evaluation.options import EvaluationRequest
from agentrl.telemetry.console import Console
from agentrl_envs.grading import Grader

if TYPE_CHECKING:
    from agentrl.evaluation.settings import EvaluationSections


def check_data_command(settings: EvaluationSections, request: EvaluationRequest) -> list[DataCheck]:
    """Print the data errors of each benchmark: counts, repeats, ids, and reference answers that cannot be graded.

    Raises SettingsError if there is any error.
    """
    if not request.benchmarks:
        raise SettingsError("--check-data requires --benchmarks with names, or with files (.jsonl or .parquet)")
    console = Console(settings.telemetry)
    checks = asyncio.run(_check(settings, request))
    for line in (line for check in checks for line in check.describe()):
        console.note(line)
    wrong = {check.name: len(check.errors) + len(check.timeouts) for check in checks}
    if any(wrong.values()):
        named = ", ".join(f"{name} {count}" for name, count in wrong.items() if count)
        raise SettingsError(f"data errors, listed above: {named}")
    return checks


async def _check(settings: EvaluationSections, request: EvaluationRequest) -> list[DataCheck]:
    grader = Grader(settings.grader)
    try:
        return [await check_benchmark(name, grader, data_dir=request.data_dir) for name in request.benchmarks]
    finally:
        await grader.close()
