"""Evaluation during training: avg@k of the policy on held-out problems, with a 95 % interval."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.errors import WorldError
from agentrl.evaluation.scores import Score, avg_at_k
from agentrl.rollout.driver import Driver
from agentrl.trajectory import Group
from agentrl_envs.adapters.falsified import FalsifiedObservationsEnvironment
from agentrl_envs.episode import Environment
from agentrl_envs.types import Problem

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Result of one evaluation: avg@k over all problems and by family."""

    step: int
    samples: int
    falsified: bool
    overall: Score
    families: dict[str, Score]
    excluded: int

    def metrics(self) -> dict[str, float]:
        """Return a row for ``metrics.jsonl``, with the interval for these fixed problems."""
        prefix = "eval_falsified" if self.falsified else "eval"
        row: dict[str, float] = {
            "step": self.step,
            f"{prefix}/avg_at_k": self.overall.mean,
            f"{prefix}/low": self.overall.this_benchmark.low,
            f"{prefix}/high": self.overall.this_benchmark.high,
            f"{prefix}/k": self.samples,
            f"{prefix}/problems": self.overall.problems,
            f"{prefix}/excluded": self.excluded,
        }
        return row | {f"{prefix}/family/{name}": score.mean for name, score in self.families.items()}


async def evaluate_policy(
    problems: Sequence[Problem],
    *,
    environment: Environment,
    driver_for: Callable[[Environment], Driver],
    step: int,
    samples: int,
    temperature: float,
    seed: int,
    falsified: bool = False,
) -> EvaluationReport:
    """Sample ``samples`` rollouts of each problem and score them.

    ``falsified`` replaces the numbers in observations and uses only the problems that reveal a value by execution
    (``Problem.setup``). A policy that uses its observations must fail on these problems.
    """
    if falsified:
        problems = [problem for problem in problems if problem.setup]
        environment = FalsifiedObservationsEnvironment(environment, seed)
    requests = [Group(index=index, problem=problem) for index, problem in enumerate(problems)]
    driver = driver_for(environment)
    played = driver.play_groups(requests, step=step, group_size=samples, temperature=temperature)
    groups = sorted([group async for group in played], key=lambda group: group.index)
    driver.raise_if_all_crashed(groups, f"evaluation at step {step}")
    failed = [group.problem.id for group in groups if any(item.is_excluded for item in group.rollouts)]
    if failed and driver.last_failure:
        logger.warning(
            "evaluation at step %d: %d problems have excluded rollouts, such as %s; the last failure was: %s",
            step, len(failed), failed[0], driver.last_failure,
        )  # fmt: skip
    return score_groups(groups, step=step, samples=samples, falsified=falsified)


def score_groups(groups: Sequence[Group], *, step: int, samples: int, falsified: bool = False) -> EvaluationReport:
    """Score finished groups, counting excluded rollouts separately. Raises WorldError if all rollouts are excluded."""
    if not _has_counted_rollout(groups):
        raise WorldError(
            f"evaluation at step {step}: every rollout of {len(groups)} problems failed for reasons outside the "
            "policy; run agentrl doctor to check the sandbox and the servers"
        )
    families: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        families[group.problem.family or group.problem.source].append(group)
    trajectories = [item for group in groups for item in group.rollouts]
    return EvaluationReport(
        step=step,
        samples=samples,
        falsified=falsified,
        overall=_avg_at_k_of_groups(groups),
        families={
            name: _avg_at_k_of_groups(part) for name, part in sorted(families.items()) if _has_counted_rollout(part)
        },
        excluded=sum(item.is_excluded for item in trajectories),
    )


def _avg_at_k_of_groups(groups: Sequence[Group]) -> Score:
    data = [[item for item in group.rollouts if not item.is_excluded] for group in groups]
    return avg_at_k([len(part) for part in data], [sum(item.reward >= 1.0 for item in part) for part in data])


def _has_counted_rollout(groups: Sequence[Group]) -> bool:
    return any(not item.is_excluded for group in groups for item in group.rollouts)
