"""``results.json``: the scores of every benchmark, with their provenance."""

from __future__ import annotations

from collections.abc import Sequence

import agentrl
from agentrl.errors import WorldError
from agentrl.evaluation.data.problem_sets import ProblemSet
from agentrl.evaluation.formats import BenchmarkResults, Provenance, Results
from agentrl.evaluation.results.rollout_index import RolloutIndex, benchmark_results
from agentrl.evaluation.results.voting import Grades

FORMAT = 1


async def make_results(
    provenance: Provenance, sets: Sequence[ProblemSet], index: RolloutIndex, ks: Sequence[int], grader: Grades
) -> Results:
    """Build ``results.json``. Raises WorldError if all rollouts of a benchmark are excluded."""
    benchmarks: dict[str, BenchmarkResults] = {}
    for one in sets:
        try:
            benchmarks[one.name] = await benchmark_results(one, index, ks=ks, grader=grader)
        except ValueError as error:
            raise WorldError(
                f"{one.name}: every rollout failed for reasons outside the policy, so there is no score; run the same "
                f"command to repeat them ({error})"
            ) from error
    return {
        "format": FORMAT,
        "agentrl": agentrl.__version__,
        "provenance": provenance,
        "benchmarks": benchmarks,
    }
