"""Metrics of a step's rollouts, and the age of their tokens.

Excluded trajectories are counted, but do not enter averages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from agentrl.trajectory import Group, Trajectory


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return averages over all rollouts except greedy rollouts. Branches of a rollout count as one rollout.

    Mean rewards weight rollouts by :attr:`.Trajectory.token_weight`, so that mean rewards do not depend on the budget
    or on forks. Other averages count every rollout, and every leaf of a forked rollout, once. The standard error treats
    groups as clusters. Undefined metrics are omitted.
    """
    played = [item for group in groups for item in group.trajectories]
    rollouts = [item for group in groups for item in group.rollouts]
    data = [item for item in rollouts if not item.is_excluded]
    metrics: dict[str, float] = {
        "groups/issued": len(groups),
        "groups/infrastructure_failures": len(rollouts) - len(data),
        "reward/count": len(data),
    }
    for ended, count in Counter(item.ended for item in rollouts).items():
        metrics[f"rollout/ended/{ended}"] = count
    for verdict, count in Counter(item.verdict for item in rollouts if item.verdict is not None).items():
        metrics[f"rollout/verdict/{verdict}"] = count
    for outcome, count in Counter(call.outcome for item in played for call in item.tool_calls).items():
        metrics[f"rollout/tool_outcome/{outcome}"] = count
    greedy = [group.greedy for group in groups if group.greedy is not None]
    if greedy:
        graded = [item.reward for item in greedy if not item.is_excluded]
        metrics |= {"rollout/greedy": len(greedy)} | ({"reward/greedy_mean": _mean(graded)} if graded else {})
    if not data:
        return metrics
    branches = [item for item in played if not item.is_excluded]
    metrics |= {
        "reward/mean": _weighted_mean([item.reward for item in data], data),
        "reward/stderr": clustered_reward_stderr(groups),
        "reward/problem_share": between_problem_variance_fraction(groups),
        "rollout/turns_mean": math.fsum(item.turns for item in branches) / len(data),
        "rollout/turns_max": max(item.turns for item in branches),
        "rollout/tool_calls_mean": math.fsum(len(item.tool_calls) for item in branches) / len(data),
        "rollout/response_tokens_mean": math.fsum(item.length - len(item.prompt_ids) for item in branches) / len(data),
        "rollout/model_tokens_mean": math.fsum(item.model_tokens for item in branches) / len(data),
        "rollout/sampled_entropy": _sampled_entropy(branches),
        "rollout/model_tokens": sum(item.model_tokens for item in played),
        "rollout/seconds_max": max(item.seconds for item in played),
    }
    metrics |= _fork_metrics(branches)
    parts = [item for item in data if item.reward_parts]
    for name in parts[0].reward_parts if parts else ():
        metrics[f"rewards/{name}"] = _weighted_mean([item.reward_parts[name] for item in parts], parts)
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _fork_metrics(branches: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of forked rollouts, or {} without forked rollouts."""
    forked = [item for item in branches if item.path_weight is not None]
    if not forked:
        return {}
    leaves = [item for item in forked if item.receives_reward]
    prompts = {(item.group, item.sample): len(item.prompt_ids) for item in forked if item.parent < 0}
    on_paths = sum(item.length - prompts[item.group, item.sample] for item in leaves)
    return {
        "rollout/forked": len(prompts),
        "rollout/leaves_mean": len(leaves) / len(prompts),
        "rollout/fork_width_mean": (len(forked) - len(prompts)) / (len(forked) - len(leaves)),
        "rollout/fork_sharing": on_paths / sum(item.length - len(item.prompt_ids) for item in forked),
    }


def clustered_reward_stderr(groups: Sequence[Group]) -> float:
    """Return the standard error of ``reward/mean``, with groups as clusters (ratio estimator).

    Returns nan for fewer than two groups.
    """
    parts = [part for group in groups if (part := [item for item in group.rollouts if not item.is_excluded])]
    if len(parts) < 2:
        return math.nan
    sums = [math.fsum(item.reward * item.token_weight for item in part) for part in parts]
    counts = [math.fsum(item.token_weight for item in part) for part in parts]
    count = math.fsum(counts)
    mean = math.fsum(sums) / count
    squares = math.fsum((one - mean * own) ** 2 for one, own in zip(sums, counts, strict=True))
    return math.sqrt(squares * len(parts) / (len(parts) - 1)) / count


def between_problem_variance_fraction(groups: Sequence[Group]) -> float:
    """Return the fraction of reward variance between problems (ANOVA intraclass correlation).

    The value may be negative for a single step, because the estimate is centred on 0 if rewards do not depend on the
    problem. Returns nan for fewer than two groups, if no group has two rollouts, and if all rewards are equal.
    """
    rewards = ([item.reward for item in group.rollouts if not item.is_excluded] for group in groups)
    parts = [part for part in rewards if part]
    count = sum(map(len, parts))
    if len(parts) < 2 or count == len(parts):
        return math.nan
    means = list(map(_mean, parts))
    mean = math.fsum(map(math.fsum, parts)) / count
    squares = zip(parts, means, strict=True)
    within = math.fsum((value - average) ** 2 for part, average in squares for value in part) / (count - len(parts))
    between = math.fsum(len(part) * (average - mean) ** 2 for part, average in zip(parts, means, strict=True)) / (
        len(parts) - 1
    )
    size = (count - math.fsum(len(part) ** 2 for part in parts) / count) / (len(parts) - 1)
    total = between + (size - 1) * within
    return (between - within) / total if total else math.nan


def _sampled_entropy(trajectories: Sequence[Trajectory]) -> float:
    """Return the mean of ``-log p`` over sampled tokens, an estimate of the sampling distribution's entropy."""
    model = [item for row in trajectories for item in row.segments if item.origin == "model"]
    return -math.fsum(math.fsum(item.log_probs) for item in model) / sum(len(item.token_ids) for item in model)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _weighted_mean(values: Sequence[float], rollouts: Sequence[Trajectory]) -> float:
    weights = [item.token_weight for item in rollouts]
    return math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / math.fsum(weights)


class StalenessTracker:
    """Maps policy versions to the training steps after which they were installed in the engine.

    Versions count optimizer updates, but staleness counts steps. The staleness of a token is the number of steps
    trained since its version was the newest. A trajectory is as stale as its oldest model token.
    """

    def __init__(self) -> None:
        self._steps_at = {0: 0}
        self._version = 0
        self._trained = 0
        self._training = False

    @property
    def version(self) -> int:
        return self._version

    def record_install(self, version: int) -> None:
        """Record that ``version`` has been installed in the engine."""
        self._version = version
        self._steps_at[version] = self._trained + self._training

    def record_training_start(self) -> None:
        """Record that a batch has been passed to the trainer."""
        self._training = True

    def record_training_end(self) -> None:
        """Record that training on the batch has finished. From now on, the engine's version counts as the newest."""
        self._trained += self._training
        self._training = False
        self._steps_at[self._version] = self._trained

    def staleness(self, version: int) -> int:
        """Return the age of ``version`` in training steps. Raises RuntimeError if it was never installed."""
        if version not in self._steps_at:
            raise RuntimeError(f"a token was sampled by version {version}, which was never installed in the engine")
        return self._trained - self._steps_at[version]

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the mean and maximum staleness of model tokens, and the fraction of trajectories with mixed versions.

        Excluded trajectories do not count.
        """
        played = [item for group in groups for item in group.all_trajectories if not item.is_excluded]
        spans = [[span for segment in item.segments for span in segment.version_spans] for item in played]
        tokens = sum(count for row in spans for _, count in row)
        if not tokens:
            return {}
        return {
            "staleness/mean": sum(self.staleness(version) * count for row in spans for version, count in row) / tokens,
            "staleness/max": max(self.staleness(version) for row in spans for version, _ in row),
            "staleness/mixed_share": sum(len({version for version, _ in row}) > 1 for row in spans) / len(played),
        }
