"""Alerts over the metrics of a run: pure functions of the training rows so far, the newest one last.

A rule gives a sentence that names what it saw, or None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.telemetry.machine import DISK_FREE, MEMORY_FREE
from agentrl.telemetry.records import Metrics

_RECENT = 5  # rows behind an average of the present
_PAST = 20  # rows behind a median of the past
_GIB = 1024**3

Rule = Callable[[Sequence[Metrics]], str | None]


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """A rule, the metrics that it reads, and what to try when it fires."""

    name: str
    metrics: tuple[str, ...]  # what the rule reads, by its name in the catalogue
    fires: str  # when, with the threshold
    advice: str
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that began at a step. ``alert``: the name of its rule."""

    step: int
    alert: str
    message: str
    advice: str


def alerts(rows: Sequence[Metrics]) -> list[Alert]:
    """The alerts that fire on a history of training rows, in the order of :data:`RULES`."""
    found = ((rule, rule.rule(rows)) for rule in RULES) if rows else ()
    return [
        Alert(step=int(rows[-1]["step"]), alert=rule.name, message=message, advice=rule.advice)
        for rule, message in found
        if message is not None
    ]


def entropy_collapse(rows: Sequence[Metrics]) -> str | None:
    """Mean entropy of five steps under a twentieth of that of the first five, and under 0.01 nats.

    A policy that has solved its task is nearly certain too: healthy runs with 0.93 of the reward reach 0.015 nats.
    """
    first, last = _first_and_last(rows, "policy/entropy")
    if last is None or first is None or last >= 0.05 * first or last >= 0.01:
        return None
    return f"entropy fell from {first:.3g} to {last:.3g} nats a token"


def reward_collapse(rows: Sequence[Metrics]) -> str | None:
    """Mean reward of five steps under the best so far by five standard errors (the largest) and half of the range."""
    values = _series(rows, "reward/mean")
    if len(values) < _PAST + _RECENT:
        return None
    means = [statistics.fmean(values[end - _RECENT : end]) for end in range(_RECENT, len(values) + 1)]
    best, lowest, now = max(means[:-_RECENT]), min(values), means[-1]
    noise = max(_series(rows, "reward/stderr"), default=0.0) / _RECENT**0.5
    if best - now <= 5 * noise or best - now <= 0.5 * (best - lowest) or best == lowest:
        return None
    return f"the reward fell from {best:.3g} to {now:.3g} (means of {_RECENT} steps)"


def gradient_spike(rows: Sequence[Metrics]) -> str | None:
    """Median gradient norm of five steps over ten times that of the 20 before, and over all norms before.

    Single steps are heavy-tailed, and norms return to early values where groups with signal become rare.
    """
    values = _series(rows, "policy/gradient_norm")
    if len(values) < _PAST + _RECENT:
        return None
    usual, now = statistics.median(values[-_PAST - _RECENT : -_RECENT]), statistics.median(values[-_RECENT:])
    if usual == 0 or now <= 10 * usual or now <= max(values[:-_RECENT]):
        return None
    return f"the gradient norm rose from {usual:.3g} to {now:.3g} (medians of {_PAST} and {_RECENT} steps)"


def engine_difference(rows: Sequence[Metrics]) -> str | None:
    """Mean difference of engine and trainer over five steps at least five times that of the first five, over 0.005."""
    first, last = _first_and_last(rows, "policy/engine_abs_diff")
    if last is None or first is None or last <= 5 * first or last <= 0.005:
        return None
    return f"engine and trainer differ by {last:.3g} nats a token; it was {first:.3g}"


def perplexity_gap(rows: Sequence[Metrics]) -> str | None:
    """Mean gap of log-perplexity over five steps over 0.1 nats a token."""
    return _above(rows, "policy/log_ppl_gap", 0.1, "trajectories are {0:.3g} nats a token apart in log-perplexity")


def void_share(rows: Sequence[Metrics]) -> str | None:
    """Over half of the rollouts of five steps ended with a void turn."""
    return _share(rows, ("rollout/ended/void_turn",), 0.5, "{0:.0%} of the rollouts ended with a turn without action")


def truncated_share(rows: Sequence[Metrics]) -> str | None:
    """Over half of the rollouts of five steps ended at a limit."""
    limits = ("rollout/ended/turn_limit", "rollout/ended/token_limit", "rollout/ended/deadline")
    return _share(rows, limits, 0.5, "{0:.0%} of the rollouts ended at a limit of turns, tokens or time")


def tool_failures(rows: Sequence[Metrics]) -> str | None:
    """Over half of the tool calls of five steps did not end with ``ok``, and over twice the share of the first five."""
    shares = [share for row in rows if (share := _failed_calls(row)) is not None]
    if len(shares) < 2 * _RECENT:
        return None
    first, last = statistics.fmean(shares[:_RECENT]), statistics.fmean(shares[-_RECENT:])
    return None if last <= max(0.5, 2 * first) else f"{last:.0%} of the tool calls fail; it was {first:.0%}"


def no_signal(rows: Sequence[Metrics]) -> str | None:
    """No group was trained in five steps in a row."""
    recent = rows[-_RECENT:]
    if len(recent) < _RECENT or any(row.get("groups/trained", 1) for row in recent):
        return None
    return f"no group had a signal to train on for {_RECENT} steps"


def length_explosion(rows: Sequence[Metrics]) -> str | None:
    """Model tokens of a rollout over five steps over three times those of the first five."""
    first, last = _first_and_last(rows, "rollout/model_tokens_mean")
    if last is None or first is None or last <= 3 * first:
        return None
    return f"rollouts grew from {first:.0f} to {last:.0f} model tokens"


def staleness(rows: Sequence[Metrics]) -> str | None:
    """Mean age of tokens over five steps over four steps."""
    return _above(rows, "staleness/mean", 4.0, "tokens are {0:.3g} steps old on average")


def infrastructure(rows: Sequence[Metrics]) -> str | None:
    """Over a tenth of the rollouts of five steps failed for reasons outside the policy."""
    recent = rows[-_RECENT:]
    failed = sum(row.get("groups/infrastructure_failures", 0.0) for row in recent)
    whole = failed + sum(row.get("reward/count", 0.0) for row in recent)
    if len(recent) < _RECENT or failed <= 0.1 * whole:
        return None
    return f"{failed / whole:.0%} of the rollouts failed outside the policy"


def standstill(rows: Sequence[Metrics]) -> str | None:
    """After 100 steps, neither reward nor entropy of 20 steps differs from the first 20 by 2.5 standard errors."""
    if len(rows) < 5 * _PAST:
        return None
    moved = [_change(_series(rows, key)) for key in ("reward/mean", "policy/entropy")]
    if any(change is None or change >= 2.5 for change in moved):
        return None
    return f"reward and entropy are those of the first {_PAST} steps"


def disk(rows: Sequence[Metrics]) -> str | None:
    """Less than 1 GiB free, or full within 20 steps at the pace of the last 20."""
    free = _series(rows, DISK_FREE)
    if not free:
        return None
    if free[-1] < _GIB:
        return f"the disk of the run directory has {free[-1] / _GIB:.2f} GiB left"
    pace = (free[-_PAST - 1] - free[-1]) / _PAST if len(free) > _PAST else 0.0
    if pace <= 0 or free[-1] > _PAST * pace:
        return None
    return f"the disk of the run directory is full in {free[-1] / pace:.0f} steps ({free[-1] / _GIB:.2f} GiB left)"


def memory(rows: Sequence[Metrics]) -> str | None:
    """Mean share of free memory over five steps under 5 %."""
    free = _series(rows[-_RECENT:], MEMORY_FREE)
    if len(free) < _RECENT or statistics.fmean(free) >= 0.05:
        return None
    return f"{statistics.fmean(free):.1%} of the memory of rank 0's machine is free"


RULES = (
    AlertRule(
        name="entropy_collapse",
        metrics=("policy/entropy",),
        fires="5-step mean of `policy/entropy` under 0.01 nats and under a twentieth of the first 5 steps'",
        advice="lower optimizer.learning_rate, raise algorithm.clip_high, or set algorithm.entropy_coefficient",
        rule=entropy_collapse,
    ),
    AlertRule(
        name="reward_collapse",
        metrics=("reward/mean",),
        fires="5-step mean of `reward/mean` under its best by 5 standard errors (the largest) and half of the range",
        advice="go back to a checkpoint with a lower optimizer.learning_rate; look at the trajectories of the fall",
        rule=reward_collapse,
    ),
    AlertRule(
        name="gradient_spike",
        metrics=("policy/gradient_norm",),
        fires="5-step median of `policy/gradient_norm` over 10 times that of the 20 before, and over all before",
        advice="look at the step's tokens with the largest share (agentrl explain); lower optimizer.gradient_clip",
        rule=gradient_spike,
    ),
    AlertRule(
        name="engine_difference",
        metrics=("policy/engine_abs_diff",),
        fires="5-step mean of `policy/engine_abs_diff` over 0.005 nats and over 5 times the first 5 steps'",
        advice="set correction.weights=token, or a wider dtype on one side; see docs/rollout.md",
        rule=engine_difference,
    ),
    AlertRule(
        name="perplexity_gap",
        metrics=("policy/log_ppl_gap",),
        fires="5-step mean of `policy/log_ppl_gap` over 0.1 nats a token",
        advice="lower the staleness (rollout.schedule) or mask what is far off (correction.ratio_mask=geometric)",
        rule=perplexity_gap,
    ),
    AlertRule(
        name="void_share",
        metrics=("rollout/ended/{ending}",),
        fires="over half of the rollouts of 5 steps ended with a void turn",
        advice="raise rollout.max_turn_tokens, or start from a policy that knows the protocol (agentrl coldstart)",
        rule=void_share,
    ),
    AlertRule(
        name="truncated_share",
        metrics=("rollout/ended/{ending}",),
        fires="over half of the rollouts of 5 steps ended at a limit",
        advice="raise rollout.max_response_tokens or environment.max_turns, or set reward.overlong_buffer",
        rule=truncated_share,
    ),
    AlertRule(
        name="tool_failures",
        metrics=("rollout/tool_outcome/{outcome}",),
        fires="over half of the tool calls of 5 steps failed, and over twice the share of the first 5 steps",
        advice="read what the failing programs print; raise environment.execution_timeout if they time out",
        rule=tool_failures,
    ),
    AlertRule(
        name="no_signal",
        metrics=("groups/trained",),
        fires="no group was trained in 5 steps in a row",
        advice="mix in easier or harder problems, raise rollout.group_size, or set rollout.max_extra_rounds",
        rule=no_signal,
    ),
    AlertRule(
        name="length_explosion",
        metrics=("rollout/model_tokens_mean",),
        fires="5-step mean of `rollout/model_tokens_mean` over 3 times the first 5 steps'",
        advice="read the longest trajectories; set reward.overlong_buffer, or aggregate by token_mean",
        rule=length_explosion,
    ),
    AlertRule(
        name="staleness",
        metrics=("staleness/mean",),
        fires="5-step mean of `staleness/mean` over 4 steps",
        advice="lower rollout.max_staleness, or give rollouts more of the hardware",
        rule=staleness,
    ),
    AlertRule(
        name="infrastructure",
        metrics=("groups/infrastructure_failures",),
        fires="over a tenth of the rollouts of 5 steps failed outside the policy",
        advice="look at the sandbox and the servers (agentrl doctor); the run's console names the errors",
        rule=infrastructure,
    ),
    AlertRule(
        name="standstill",
        metrics=("reward/mean", "policy/entropy"),
        fires="after 100 steps, `reward/mean` and `policy/entropy` within 2.5 standard errors of the first 20 steps'",
        advice="raise optimizer.learning_rate; see that groups have a signal (groups/trained) and that tokens get it",
        rule=standstill,
    ),
    AlertRule(
        name="disk",
        metrics=(DISK_FREE,),
        fires="under 1 GiB free in the run directory, or full in 20 steps at the pace of the last 20",
        advice="lower checkpoint.keep; raise telemetry.trajectories_every and telemetry.tokens_every; free space",
        rule=disk,
    ),
    AlertRule(
        name="memory",
        metrics=(MEMORY_FREE,),
        fires="under 5 % of the memory of rank 0's machine (or its control group) free, mean of 5 steps",
        advice="lower rollout.concurrency or training.micro_batch_tokens; lower rollout.kv_cache_tokens",
        rule=memory,
    ),
)

MACHINE_METRICS = (DISK_FREE, MEMORY_FREE)
"""What :func:`agentrl.telemetry.machine.free_room` adds to the rows that the rules see; no row of a file has them."""

NAMES = tuple(rule.name for rule in RULES)


def _series(rows: Sequence[Metrics], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


def _first_and_last(rows: Sequence[Metrics], key: str) -> tuple[float | None, float | None]:
    """The means of the first and of the last rows; None while they overlap."""
    values = _series(rows, key)
    if len(values) < 2 * _RECENT:
        return None, None
    return statistics.fmean(values[:_RECENT]), statistics.fmean(values[-_RECENT:])


def _change(values: Sequence[float]) -> float | None:
    """How far the means of the first and last 20 values lie apart, in standard errors; None for too few values."""
    if len(values) < 2 * _PAST:
        return None
    first, last = values[:_PAST], values[-_PAST:]
    difference = abs(statistics.fmean(last) - statistics.fmean(first))
    error = ((statistics.variance(first) + statistics.variance(last)) / _PAST) ** 0.5
    if error == 0:
        return math.inf if difference else 0.0
    return difference / error


def _above(rows: Sequence[Metrics], key: str, limit: float, message: str) -> str | None:
    values = _series(rows[-_RECENT:], key)
    if len(values) < _RECENT or statistics.fmean(values) <= limit:
        return None
    return message.format(statistics.fmean(values))


def _share(rows: Sequence[Metrics], names: Sequence[str], limit: float, message: str) -> str | None:
    recent = rows[-_RECENT:]
    whole = sum(value for row in recent for key, value in row.items() if key.startswith("rollout/ended/"))
    part = sum(row.get(name, 0.0) for row in recent for name in names)
    return message.format(part / whole) if len(recent) == _RECENT and whole and part > limit * whole else None


def _failed_calls(row: Metrics) -> float | None:
    prefix = "rollout/tool_outcome/"
    calls = sum(value for key, value in row.items() if key.startswith(prefix))
    return 1 - row.get(f"{prefix}ok", 0.0) / calls if calls else None
