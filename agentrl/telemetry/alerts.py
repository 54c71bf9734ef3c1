"""Alerts over the metrics of a run: pure functions of the training rows so far, the newest one last.

A rule returns a sentence that describes the fault, or None. The rules are listed with causes before symptoms. A symptom
whose cause fires too has no advice: what to do is the cause's advice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agentrl.telemetry.machine import DISK_FREE, MEMORY_FREE
from agentrl.telemetry.records import ChangeRecord, Metrics

_START = 3  # rows before the earliest comparison with the start
_RECENT = 5  # rows behind an average of the present
_PAST = 20  # rows behind a median of the past
_FALL = 4.0  # standard errors that a fall from the start exceeds
_WORSE = 3.0  # standard errors by which a policy is worse than at the start
_GROUPS = 8  # groups behind a standard error that is to be trusted
_EARLY = 10  # updates after which a collapse has causes other than the learning rate
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
    symptom_of: tuple[str, ...] = ()  # the rules that explain it where they fire, too


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that began at a step. ``alert``: its rule. ``advice``: empty if another alert explains it."""

    step: int
    alert: str
    message: str
    advice: str

    def __str__(self) -> str:
        return f"alert {self.alert} at step {self.step}: {self.message}" + (f". Try: {self.advice}" * bool(self.advice))


RULES: list[AlertRule] = []
"""All rules, causes before symptoms: in the order of their definitions below."""


def _rule(
    *, metrics: tuple[str, ...], fires: str, advice: str, symptom_of: tuple[str, ...] = ()
) -> Callable[[Rule], Rule]:
    """Add a function to :data:`RULES` under its name."""

    def add(rule: Rule) -> Rule:
        RULES.append(
            AlertRule(name=rule.__name__, metrics=metrics, fires=fires, advice=advice, rule=rule, symptom_of=symptom_of)
        )
        return rule

    return add


def training_rows(rows: Iterable[Metrics]) -> list[Metrics]:
    """The rows of training steps. Each contains the metrics of the evaluations of the policy that it rolled out."""
    trained: list[Metrics] = []
    evaluated: Metrics = {}
    for row in rows:
        if "policy/updates" in row:
            trained.append(evaluated | row)
            evaluated = {}
        else:
            evaluated |= row
    return trained


def alerts(rows: Sequence[Metrics]) -> list[Alert]:
    """The alerts that fire on a history of :func:`training_rows`, causes before symptoms."""
    found = ((rule, rule.rule(rows)) for rule in RULES) if rows else ()
    return explained(
        Alert(step=int(rows[-1]["step"]), alert=rule.name, message=message, advice=rule.advice)
        for rule, message in found
        if message is not None
    )


def explained(found: Iterable[Alert]) -> list[Alert]:
    """The first alert of each rule, causes before symptoms; a symptom names its cause in place of its advice."""
    first: dict[str, Alert] = {}
    for alert in found:
        first.setdefault(alert.alert, alert)
    for rule in RULES:
        cause = next((name for name in rule.symptom_of if name in first), None)
        if cause is not None and rule.name in first and first[rule.name].advice:
            alert = first[rule.name]
            first[rule.name] = replace(alert, message=f"{alert.message} (follows from {cause})", advice="")
    return [first[name] for name in NAMES if name in first]


def reward_change(rows: Sequence[Metrics]) -> ChangeRecord | None:
    """The mean reward of the last steps against the first, up to five each; None for fewer than two steps."""
    scored = [row for row in rows if "reward/stderr" in row]
    count = min(_RECENT, len(scored) // 2)
    return _compared(scored[:count], scored[-count:]) if count else None


def held_out_change(rows: Sequence[Metrics]) -> ChangeRecord | None:
    """The newest held-out score against the one before training; None if there are not both.

    The problems are the same, so the errors are those of the interval for this benchmark.
    """
    scored = [row for row in rows if "eval/avg_at_k" in row]
    if len(scored) < 2:
        return None
    first, last = scored[0], scored[-1]
    errors = [(row["eval/high"] - row["eval/low"]) / (2 * 1.96) for row in (first, last)]
    return _change_record(first["eval/avg_at_k"], last["eval/avg_at_k"], math.hypot(*errors))


def is_worse(reward: ChangeRecord | None, held_out: ChangeRecord | None) -> bool:
    """Whether a policy is worse than at the start by three standard errors: held out, or else by its reward."""
    change = held_out or reward
    return change is not None and change["end"] < change["start"] and _errors(change) >= _WORSE


@_rule(
    metrics=("groups/infrastructure_failures",),
    fires="over a tenth of the rollouts of 5 steps failed outside the policy",
    advice="look at the sandbox and the servers (agentrl doctor); the run's console names the errors",
)
def infrastructure(rows: Sequence[Metrics]) -> str | None:
    recent = rows[-_RECENT:]
    failed = sum(row.get("groups/infrastructure_failures", 0.0) for row in recent)
    whole = failed + sum(row.get("reward/count", 0.0) for row in recent)
    if len(recent) < _RECENT or failed <= 0.1 * whole:
        return None
    return f"{failed / whole:.0%} of the rollouts failed outside the policy"


@_rule(
    metrics=("policy/engine_abs_diff",),
    fires="5-step mean of `policy/engine_abs_diff` over 0.005 nats and over 5 times the first 5 steps'",
    advice="set correction.weights=token, or a wider dtype on one side; see docs/rollout.md",
)
def engine_difference(rows: Sequence[Metrics]) -> str | None:
    first, last = _first_and_last(rows, "policy/engine_abs_diff")
    if last is None or first is None or last <= 5 * first or last <= 0.005:
        return None
    return f"engine and trainer differ by {last:.3g} nats a token; it was {first:.3g}"


@_rule(
    metrics=("policy/log_ppl_gap",),
    fires="5-step mean of `policy/log_ppl_gap` over 0.1 nats a token",
    advice="lower the staleness (rollout.schedule) or mask what is far off (correction.ratio_mask=geometric)",
)
def perplexity_gap(rows: Sequence[Metrics]) -> str | None:
    return _above(rows, "policy/log_ppl_gap", 0.1, "trajectories are {0:.3g} nats a token apart in log-perplexity")


@_rule(
    metrics=("staleness/mean",),
    fires="5-step mean of `staleness/mean` over 4 steps",
    advice="lower rollout.max_staleness, or give rollouts more of the hardware",
)
def staleness(rows: Sequence[Metrics]) -> str | None:
    return _above(rows, "staleness/mean", 4.0, "tokens are {0:.3g} steps old on average")


@_rule(
    metrics=("reward/mean", "eval/avg_at_k"),
    fires="mean of 2 to 5 steps (from step 3 on) of `reward/mean` under half of the first steps' by 4 standard errors; "
    "5-step mean under its best by 5 standard errors (the largest) and half of the range; `eval/avg_at_k` under that "
    "before training by 4 standard errors",
    advice="lower optimizer.learning_rate and start again, or go back to a checkpoint before the fall; if the rate is "
    "not the cause, read the trajectories of the fall",
)
def reward_collapse(rows: Sequence[Metrics]) -> str | None:
    held_out = held_out_change(rows)
    if held_out is not None and (errors := _errors(held_out)) > _FALL:
        start, end = held_out["start"], held_out["end"]
        return f"the held-out score fell from {start:.3g} before training to {end:.3g}, by {errors:.1f} standard errors"
    return _below_the_start(rows) or _below_the_best(rows)


def _below_the_start(rows: Sequence[Metrics]) -> str | None:
    scored = [row for row in rows if "reward/stderr" in row]
    if len(scored) < _START:
        return None
    count = max(2, min(_RECENT, len(scored) // 2))
    last = scored[-count:]
    # The first steps of a policy that collapses at once are few: later ones would hide the fall.
    for first in (scored[:number] for number in range(1, min(_RECENT, len(scored) - count) + 1)):
        change = _compared(first, last)
        groups = sum(row.get("groups/issued", 0.0) for row in first)
        if groups < _GROUPS or change["end"] > 0.5 * change["start"] or _errors(change) <= _FALL:
            continue
        updates = sum(row.get("policy/updates", 0.0) for row in scored[:-count])
        cause = "; so early, the usual cause is a too large optimizer.learning_rate" if updates <= _EARLY else ""
        return (
            f"the reward fell from {change['start']:.3g} ({_steps(first)}) to {change['end']:.3g} ({_steps(last)}), by "
            f"{_errors(change):.1f} standard errors, after {updates:.0f} update{'s' * (updates != 1)}{cause}"
        )
    return None


def _below_the_best(rows: Sequence[Metrics]) -> str | None:
    values = _series(rows, "reward/mean")
    if len(values) < _PAST + _RECENT:
        return None
    means = [statistics.fmean(values[end - _RECENT : end]) for end in range(_RECENT, len(values) + 1)]
    best, lowest, now = max(means[:-_RECENT]), min(values), means[-1]
    noise = max(_series(rows, "reward/stderr"), default=0.0) * (2 / _RECENT) ** 0.5  # of the difference of two means
    if best - now <= 5 * noise or best - now <= 0.5 * (best - lowest) or best == lowest:
        return None
    return f"the reward fell from {best:.3g} to {now:.3g} (means of {_RECENT} steps)"


@_rule(
    metrics=("rollout/ended/{ending}",),
    fires="over half of the rollouts of 5 steps ended with a void turn",
    advice="raise rollout.max_turn_tokens, or start from a policy that knows the protocol (agentrl coldstart)",
    symptom_of=("reward_collapse",),
)
def void_share(rows: Sequence[Metrics]) -> str | None:
    return _share(rows, ("rollout/ended/void_turn",), 0.5, "{0:.0%} of the rollouts ended with a turn without action")


@_rule(
    metrics=("rollout/ended/{ending}",),
    fires="over half of the rollouts of 5 steps ended at a limit",
    advice="raise rollout.max_response_tokens or environment.max_turns, or set reward.overlong_buffer",
    symptom_of=("reward_collapse",),
)
def truncated_share(rows: Sequence[Metrics]) -> str | None:
    limits = ("rollout/ended/turn_limit", "rollout/ended/token_limit", "rollout/ended/deadline")
    return _share(rows, limits, 0.5, "{0:.0%} of the rollouts ended at a limit of turns, tokens or time")


@_rule(
    metrics=("rollout/tool_outcome/{outcome}",),
    fires="over half of the tool calls of 5 steps failed, and over twice the share of the first 5 steps",
    advice="read what the failing programs print; raise environment.execution_timeout if they time out",
    symptom_of=("reward_collapse",),
)
def tool_failures(rows: Sequence[Metrics]) -> str | None:
    shares = [share for row in rows if (share := _failed_calls(row)) is not None]
    if len(shares) < 2 * _RECENT:
        return None
    first, last = statistics.fmean(shares[:_RECENT]), statistics.fmean(shares[-_RECENT:])
    return None if last <= max(0.5, 2 * first) else f"{last:.0%} of the tool calls fail; it was {first:.0%}"


@_rule(
    metrics=("reward/mean", "rollout/verdict/{verdict}"),
    fires="all rewards equal and not above 0, without a correct verdict, from the first step on (from step 3 on)",
    advice="train longer before RL (coldstart.steps, docs/data.md), name a stronger model.path, begin with easier "
    "problems; see in the trajectories that the reward accepts a right answer",
)
def never_correct(rows: Sequence[Metrics]) -> str | None:
    played = [row for row in rows if row.get("reward/count")]
    if len(played) < _START or any(row.get("rollout/verdict/correct") for row in played):
        return None
    if _constant(played) is None or played[0]["reward/mean"] > 0:
        return None
    return f"no rollout of {_steps(played)} was correct: all have the reward {played[0]['reward/mean']:.3g}"


@_rule(
    metrics=("reward/mean", "reward/stderr"),
    fires="all rollouts of 5 steps with the same reward, above 0 or with a correct verdict",
    advice="if the problems are solved, end the run or take harder ones; if not, the reward does not tell rollouts "
    "apart: test it on a right and on a wrong answer",
    symptom_of=("reward_collapse",),
)
def constant_reward(rows: Sequence[Metrics]) -> str | None:
    recent = rows[-_RECENT:]
    value = _constant(recent)
    if len(recent) < _RECENT or value is None:
        return None
    if value <= 0 and not any(row.get("rollout/verdict/correct") for row in recent):
        return None  # rare successes: no_signal
    since = " since the first step" if _constant(rows) is not None else ""
    return f"every rollout of {_RECENT} steps has the reward {value:.3g}{since}"


@_rule(
    metrics=("reward/mean", "reward/problem_share"),
    fires="under 5 % of the variance of rewards between problems (40 steps, by 2 standard errors), and 20 steps of "
    "`reward/mean` within 2.5 standard errors of the first 20",
    advice="test the reward on a right and on a wrong answer of one problem; see that it reads the answer of its own "
    "rollout",
)
def random_reward(rows: Sequence[Metrics]) -> str | None:
    # Problems that are all equally hard look the same, until training improves the reward.
    shares = _series(rows, "reward/problem_share")[-2 * _PAST :]
    values = _series(rows, "reward/mean")
    change = _change(values)
    if len(shares) < 2 * _PAST or change is None or change >= 2.5:
        return None
    share = statistics.fmean(shares)
    if share + 2 * statistics.stdev(shares) / len(shares) ** 0.5 >= 0.05:
        return None
    first, last = statistics.fmean(values[:_PAST]), statistics.fmean(values[-_PAST:])
    return (
        f"the reward looks random: {max(share, 0.0):.0%} of its variance lies between problems, and training does not "
        f"change it ({first:.3g}, now {last:.3g})"
    )


@_rule(
    metrics=("rollout/sampled_entropy", "reward/mean"),
    fires="5-step mean of `rollout/sampled_entropy` under 0.01 nats and under a twentieth of the first 5 steps', and "
    "of `reward/mean` under 0.9",
    advice="lower optimizer.learning_rate, raise algorithm.clip_high, or set algorithm.entropy_coefficient",
)
def entropy_collapse(rows: Sequence[Metrics]) -> str | None:
    # A policy that solves nearly every problem is nearly certain too: healthy runs end below 0.01 nats at 0.97.
    # `policy/entropy` is missing in steps that train on nothing, as after a collapse.
    first, last = _first_and_last(rows, "rollout/sampled_entropy")
    if last is None or first is None or last >= 0.05 * first or last >= 0.01:
        return None
    _, reward = _first_and_last(rows, "reward/mean")
    if reward is not None and reward >= 0.9:
        return None
    return f"entropy fell from {first:.3g} to {last:.3g} nats a token"


@_rule(
    metrics=("policy/gradient_norm",),
    fires="5-step median of `policy/gradient_norm` over 10 times that of the 20 before, and over all before",
    advice="look at the step's tokens with the largest share (agentrl explain); lower optimizer.gradient_clip",
    symptom_of=("reward_collapse",),
)
def gradient_spike(rows: Sequence[Metrics]) -> str | None:
    # Single steps are heavy-tailed, and norms return to early values where groups with signal become rare.
    values = _series(rows, "policy/gradient_norm")
    if len(values) < _PAST + _RECENT:
        return None
    usual, now = statistics.median(values[-_PAST - _RECENT : -_RECENT]), statistics.median(values[-_RECENT:])
    if usual == 0 or now <= 10 * usual or now <= max(values[:-_RECENT]):
        return None
    return f"the gradient norm rose from {usual:.3g} to {now:.3g} (medians of {_PAST} and {_RECENT} steps)"


@_rule(
    metrics=("rollout/model_tokens_mean",),
    fires="5-step mean of `rollout/model_tokens_mean` over 3 times the first 5 steps'",
    advice="read the longest trajectories; set reward.overlong_buffer, or aggregate by token_mean",
    symptom_of=("reward_collapse",),
)
def length_explosion(rows: Sequence[Metrics]) -> str | None:
    first, last = _first_and_last(rows, "rollout/model_tokens_mean")
    if last is None or first is None or last <= 3 * first:
        return None
    return f"rollouts grew from {first:.0f} to {last:.0f} model tokens"


@_rule(
    metrics=("groups/trained",),
    fires="no group was trained in 5 steps in a row",
    advice="mix in easier or harder problems, raise rollout.group_size, or set rollout.max_extra_rounds",
    symptom_of=(
        "reward_collapse",
        "never_correct",
        "constant_reward",
    ),
)
def no_signal(rows: Sequence[Metrics]) -> str | None:
    recent = rows[-_RECENT:]
    if len(recent) < _RECENT or any(row.get("groups/trained", 1) for row in recent):
        return None
    return f"no group had a signal to train on for {_RECENT} steps"


@_rule(
    metrics=("reward/mean", "policy/entropy"),
    fires="after 100 steps, `reward/mean` and `policy/entropy` within 2.5 standard errors of the first 20 steps'",
    advice="raise optimizer.learning_rate; see that groups have a signal (groups/trained) and that tokens get it",
    symptom_of=(
        "never_correct",
        "constant_reward",
        "random_reward",
        "no_signal",
    ),
)
def standstill(rows: Sequence[Metrics]) -> str | None:
    if len(rows) < 5 * _PAST:
        return None
    moved = [_change(_series(rows, key)) for key in ("reward/mean", "policy/entropy")]
    if any(change is None or change >= 2.5 for change in moved):
        return None
    return f"reward and entropy are those of the first {_PAST} steps"


@_rule(
    metrics=(DISK_FREE,),
    fires="under 1 GiB free in the run directory, or full in 20 steps at the pace of the last 20",
    advice="lower checkpoint.keep; raise telemetry.trajectories_every and telemetry.tokens_every; free space",
)
def disk(rows: Sequence[Metrics]) -> str | None:
    free = _series(rows, DISK_FREE)
    if not free:
        return None
    if free[-1] < _GIB:
        return f"the disk of the run directory has {free[-1] / _GIB:.2f} GiB left"
    pace = (free[-_PAST - 1] - free[-1]) / _PAST if len(free) > _PAST else 0.0
    if pace <= 0 or free[-1] > _PAST * pace:
        return None
    return f"the disk of the run directory is full in {free[-1] / pace:.0f} steps ({free[-1] / _GIB:.2f} GiB left)"


@_rule(
    metrics=(MEMORY_FREE,),
    fires="under 5 % of the memory of rank 0's machine (or its control group) free, mean of 5 steps",
    advice="lower rollout.concurrency or training.micro_batch_tokens; lower rollout.kv_cache_tokens",
)
def memory(rows: Sequence[Metrics]) -> str | None:
    free = _series(rows[-_RECENT:], MEMORY_FREE)
    if len(free) < _RECENT or statistics.fmean(free) >= 0.05:
        return None
    return f"{statistics.fmean(free):.1%} of the memory of rank 0's machine is free"


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


def _constant(rows: Sequence[Metrics]) -> float | None:
    """The reward that all rollouts of the rows have; None if they differ, or cannot be told from their errors."""
    values = {row.get("reward/mean") for row in rows}
    alike = len(values) == 1 and all(row.get("reward/stderr") == 0 for row in rows)
    return values.pop() if alike else None


def _compared(first: Sequence[Metrics], last: Sequence[Metrics]) -> ChangeRecord:
    """The mean reward of the last rows against the first.

    The first rows get at least the noise of the last: few groups may have equal means by chance. The reverse would hide
    a collapse, after which rewards no longer vary.
    """
    start, end = (statistics.fmean(row["reward/mean"] for row in part) for part in (first, last))
    noises = [statistics.fmean(row["reward/stderr"] ** 2 for row in part) for part in (first, last)]
    error = math.sqrt(max(noises) / len(first) + noises[1] / len(last))
    return _change_record(start, end, error)


def _change_record(start: float, end: float, error: float) -> ChangeRecord:
    return {"start": start, "end": end, "standard_errors": (end - start) / error if error else None}


def _errors(change: ChangeRecord) -> float:
    """By how many standard errors the end is below the start."""
    if change["standard_errors"] is None:
        return math.inf if change["end"] < change["start"] else 0.0
    return -change["standard_errors"]


def _steps(rows: Sequence[Metrics]) -> str:
    first, last = (int(row["step"]) for row in (rows[0], rows[-1]))
    return f"step {first}" if first == last else f"steps {first} to {last}"


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
