"""Alerts about the metrics of a run. Rules are pure functions of the training rows so far, in the order of steps.

A rule returns a sentence that describes the problem, or None. Causes are defined before symptoms. If a symptom and its
cause both fire, only the cause has advice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agentrl.telemetry.machine import DISK_FREE, MEMORY_FREE
from agentrl.telemetry.records import ChangeRecord, Metrics

_FIRST_COMPARISON = 3  # minimum number of rows for a comparison with the start
_RECENT_STEPS = 5  # rows in an average of the newest steps
_PAST_STEPS = 20  # rows in an average or a median of earlier steps
_COLLAPSE_ERRORS = 4.0  # in standard errors; a larger fall from the start is a collapse
_WORSE_ERRORS = 3.0  # in standard errors; a policy whose score fell by at least this much is worse than at the start
_FEWEST_GROUPS = 8  # minimum number of groups for a usable standard error
_EARLY_UPDATES = 10  # a collapse within this many updates is usually caused by the learning rate
_GIB = 1024**3

Rule = Callable[[Sequence[Metrics]], str | None]


@dataclass(frozen=True, kw_only=True)
class AlertRule:
    """A rule, the metrics that it reads, and advice for the user."""

    name: str
    metrics: tuple[str, ...]  # catalogue names of the metrics that the rule reads
    when: str  # condition under which the rule fires, with its threshold
    advice: str
    rule: Rule
    symptom_of: tuple[str, ...] = ()  # rules whose alerts explain an alert of this rule


@dataclass(frozen=True, kw_only=True)
class Alert:
    """An alert that fired at a step.

    ``alert`` is the name of the rule. ``advice`` is empty if another alert explains this alert.
    """

    step: int
    alert: str
    message: str
    advice: str

    def __str__(self) -> str:
        return f"alert {self.alert} at step {self.step}: {self.message}" + (f". Try: {self.advice}" * bool(self.advice))


RULES: list[AlertRule] = []
"""All rules in the order of their definitions, causes before symptoms."""


def _register_rule(
    *, metrics: tuple[str, ...], when: str, advice: str, symptom_of: tuple[str, ...] = ()
) -> Callable[[Rule], Rule]:
    """Add the decorated function to :data:`RULES` under its name."""

    def add(rule: Rule) -> Rule:
        RULES.append(
            AlertRule(
                name=rule.__name__,
                metrics=metrics,
                when=when,
                advice=advice,
                rule=rule,
                symptom_of=symptom_of,
            )
        )
        return rule

    return add


def select_training_rows(rows: Iterable[Metrics]) -> list[Metrics]:
    """Return the rows of training steps. Evaluations before a step are merged into its row."""
    trained: list[Metrics] = []
    evaluated: Metrics = {}
    for row in rows:
        if "policy/updates" in row:
            trained.append(evaluated | row)
            evaluated = {}
        else:
            evaluated |= row
    return trained


def find_alerts(rows: Sequence[Metrics]) -> list[Alert]:
    """Return the alerts that fire after the last row of ``rows``, causes before symptoms.

    ``rows`` contains rows of metrics, as :func:`select_training_rows` returns them.
    """
    fired = ((rule, rule.rule(rows)) for rule in RULES) if rows else ()
    return remove_repeated_alerts(
        Alert(step=int(rows[-1]["step"]), alert=rule.name, message=message, advice=rule.advice)
        for rule, message in fired
        if message is not None
    )


def remove_repeated_alerts(fired: Iterable[Alert]) -> list[Alert]:
    """Return the first alert of each rule, causes before symptoms.

    If the cause of a symptom is also in ``fired``, the message of the symptom names the cause, and its advice is empty.
    """
    first: dict[str, Alert] = {}
    for alert in fired:
        first.setdefault(alert.alert, alert)
    for rule in RULES:
        cause = next((name for name in rule.symptom_of if name in first), None)
        if cause is not None and rule.name in first and first[rule.name].advice:
            alert = first[rule.name]
            first[rule.name] = replace(alert, message=f"{alert.message} (follows from {cause})", advice="")
    return [first[name] for name in ALERT_NAMES if name in first]


def reward_change(rows: Sequence[Metrics]) -> ChangeRecord | None:
    """Compare the mean rewards of the first and last steps, up to five each. Returns None for fewer than two steps."""
    scored = [row for row in rows if "reward/stderr" in row]
    count = min(_RECENT_STEPS, len(scored) // 2)
    return _reward_change(scored[:count], scored[-count:]) if count else None


def held_out_change(rows: Sequence[Metrics]) -> ChangeRecord | None:
    """Compare the held-out score before training with the newest score. Returns None for fewer than two scores.

    Both evaluations use the same problems, so the standard errors are taken from the interval for this benchmark.
    """
    scored = [row for row in rows if "eval/avg_at_k" in row]
    if len(scored) < 2:
        return None
    first, last = scored[0], scored[-1]
    errors = [(row["eval/high"] - row["eval/low"]) / (2 * 1.96) for row in (first, last)]
    return _change_record(first["eval/avg_at_k"], last["eval/avg_at_k"], math.hypot(*errors))


def policy_is_worse(reward: ChangeRecord | None, held_out: ChangeRecord | None) -> bool:
    """Return True if the held-out score fell by at least three standard errors. Without a score, use the reward."""
    change = held_out or reward
    return change is not None and change["end"] < change["start"] and _fall_in_errors(change) >= _WORSE_ERRORS


@_register_rule(
    metrics=("groups/infrastructure_failures",),
    when="more than 10 % of the rollouts of 5 steps failed for reasons outside the policy",
    advice="run agentrl doctor to check the sandbox and the servers; the run's console output contains the errors",
)
def infrastructure(rows: Sequence[Metrics]) -> str | None:
    recent = rows[-_RECENT_STEPS:]
    failed = sum(row.get("groups/infrastructure_failures", 0.0) for row in recent)
    whole = failed + sum(row.get("reward/count", 0.0) for row in recent)
    if len(recent) < _RECENT_STEPS or failed <= 0.1 * whole:
        return None
    return f"{failed / whole:.0%} of the rollouts failed for reasons outside the policy"


@_register_rule(
    metrics=("policy/engine_abs_diff",),
    when="5-step mean of `policy/engine_abs_diff` above 0.005 nats and above 5 times the mean of the first 5 steps; "
    "float32 runs stop earlier unless their bound, which the console prints, is above 0.005 nats",
    advice="set correction.weights=token, or a wider dtype on one side; see docs/how-to/rollout.md",
)
def engine_difference(rows: Sequence[Metrics]) -> str | None:
    first, last = _first_and_last_means(rows, "policy/engine_abs_diff")
    if last is None or first is None or last <= 5 * first or last <= 0.005:
        return None
    return f"log-probabilities of engine and trainer differ by {last:.3g} nats per token (first steps: {first:.3g})"


@_register_rule(
    metrics=("policy/log_ppl_gap",),
    when="5-step mean of `policy/log_ppl_gap` above 0.1 nats per token",
    advice="lower the staleness (rollout.schedule), or mask trajectories with a large gap "
    "(correction.ratio_mask=geometric)",
)
def perplexity_gap(rows: Sequence[Metrics]) -> str | None:
    return _mean_above(
        rows, "policy/log_ppl_gap", 0.1, "log-perplexities of engine and trainer differ by {0:.3g} nats per token"
    )


@_register_rule(
    metrics=("staleness/mean",),
    when="5-step mean of `staleness/mean` above 4 steps",
    advice="lower rollout.max_staleness, or assign more of the hardware to rollouts",
)
def staleness(rows: Sequence[Metrics]) -> str | None:
    return _mean_above(rows, "staleness/mean", 4.0, "tokens are {0:.3g} steps old on average")


@_register_rule(
    metrics=("reward/mean", "eval/avg_at_k"),
    when="any of: from step 3 on, the mean of `reward/mean` over the last 2 to 5 steps is below half of its value in "
    "the first steps, by more than 4 standard errors; its 5-step mean is below its best by more than 5 standard "
    "errors, computed from the largest `reward/stderr`, and by more than half of the range; `eval/avg_at_k` is below "
    "its value before training by more than 4 standard errors",
    advice="lower optimizer.learning_rate and start again, or resume from a checkpoint before the fall; if the "
    "learning rate is not the cause, read the trajectories of those steps",
)
def reward_collapse(rows: Sequence[Metrics]) -> str | None:
    held_out = held_out_change(rows)
    if held_out is not None and (errors := _fall_in_errors(held_out)) > _COLLAPSE_ERRORS:
        start, end = held_out["start"], held_out["end"]
        return f"the held-out score fell from {start:.3g} before training to {end:.3g}, by {errors:.1f} standard errors"
    return _describe_fall_below_start(rows) or _describe_fall_below_best(rows)


def _describe_fall_below_start(rows: Sequence[Metrics]) -> str | None:
    scored = [row for row in rows if "reward/stderr" in row]
    if len(scored) < _FIRST_COMPARISON:
        return None
    count = max(2, min(_RECENT_STEPS, len(scored) // 2))
    last = scored[-count:]
    # A policy that collapses early has few good steps. Averaging them with later steps would hide the fall.
    for first in (scored[:number] for number in range(1, min(_RECENT_STEPS, len(scored) - count) + 1)):
        change = _reward_change(first, last)
        groups = sum(row.get("groups/issued", 0.0) for row in first)
        if (
            groups < _FEWEST_GROUPS
            or change["end"] > 0.5 * change["start"]
            or _fall_in_errors(change) <= _COLLAPSE_ERRORS
        ):
            continue
        updates = sum(row.get("policy/updates", 0.0) for row in scored[:-count])
        early = "; a fall this early is usually caused by a high optimizer.learning_rate"
        cause = early if updates <= _EARLY_UPDATES else ""
        return (
            f"the reward fell from {change['start']:.3g} ({_format_steps(first)}) to {change['end']:.3g} "
            f"({_format_steps(last)}), by {_fall_in_errors(change):.1f} standard errors, after {updates:.0f} "
            f"update{'s' * (updates != 1)}{cause}"
        )
    return None


def _describe_fall_below_best(rows: Sequence[Metrics]) -> str | None:
    values = _values_of(rows, "reward/mean")
    if len(values) < _PAST_STEPS + _RECENT_STEPS:
        return None
    means = [statistics.fmean(values[end - _RECENT_STEPS : end]) for end in range(_RECENT_STEPS, len(values) + 1)]
    best, lowest, now = max(means[:-_RECENT_STEPS]), min(values), means[-1]
    # Standard error of the difference of two means.
    noise = max(_values_of(rows, "reward/stderr"), default=0.0) * (2 / _RECENT_STEPS) ** 0.5
    if best - now <= 5 * noise or best - now <= 0.5 * (best - lowest) or best == lowest:
        return None
    return f"the reward fell from {best:.3g} to {now:.3g} (means of {_RECENT_STEPS} steps)"


@_register_rule(
    metrics=("rollout/ended/{ending}",),
    when="more than half of the rollouts of 5 steps ended with a void turn",
    advice="raise rollout.max_turn_tokens, or start from a policy that was trained on the protocol (agentrl coldstart)",
    symptom_of=("reward_collapse",),
)
def void_share(rows: Sequence[Metrics]) -> str | None:
    return _endings_above_half(rows, ("rollout/ended/void_turn",), "{0:.0%} of the rollouts ended with a void turn")


@_register_rule(
    metrics=("rollout/ended/{ending}",),
    when="more than half of the rollouts of 5 steps ended at a limit of turns, tokens or time",
    advice="raise rollout.max_response_tokens or environment.max_turns, or set reward.overlong_buffer",
    symptom_of=("reward_collapse",),
)
def truncated_share(rows: Sequence[Metrics]) -> str | None:
    limits = ("rollout/ended/turn_limit", "rollout/ended/token_limit", "rollout/ended/deadline")
    return _endings_above_half(rows, limits, "{0:.0%} of the rollouts ended at a limit of turns, tokens or time")


@_register_rule(
    metrics=("rollout/tool_outcome/{outcome}",),
    when="more than half of the tool calls of 5 steps failed, and more than twice the share of the first 5 steps",
    advice="read what the failing programs print; raise environment.execution_timeout if they time out",
    symptom_of=("reward_collapse",),
)
def tool_failures(rows: Sequence[Metrics]) -> str | None:
    prefix = "rollout/tool_outcome/"
    counts = [{key: value for key, value in row.items() if key.startswith(prefix)} for row in rows]
    shares = [1 - row.get(f"{prefix}ok", 0.0) / calls for row in counts if (calls := sum(row.values()))]
    if len(shares) < 2 * _RECENT_STEPS:
        return None
    first, last = statistics.fmean(shares[:_RECENT_STEPS]), statistics.fmean(shares[-_RECENT_STEPS:])
    return None if last <= max(0.5, 2 * first) else f"{last:.0%} of the tool calls fail (first steps: {first:.0%})"


@_register_rule(
    metrics=("reward/mean", "rollout/verdict/{verdict}"),
    when="from step 3 on: all rewards since the first step are equal and at most 0, and no verdict was correct",
    advice="train longer before RL (coldstart.steps, docs/how-to/data.md), start from a stronger model.path, or begin "
    "with easier problems; check in the trajectories that the reward accepts a correct answer",
)
def never_correct(rows: Sequence[Metrics]) -> str | None:
    played = [row for row in rows if row.get("reward/count")]
    if len(played) < _FIRST_COMPARISON or any(row.get("rollout/verdict/correct") for row in played):
        return None
    if _reward_if_all_equal(played) is None or played[0]["reward/mean"] > 0:
        return None
    return f"no rollout of {_format_steps(played)} was correct: all have the reward {played[0]['reward/mean']:.3g}"


@_register_rule(
    metrics=("reward/mean", "reward/stderr"),
    when="all rollouts of 5 steps have the same reward, which is above 0 or comes with a correct verdict",
    advice="if the problems are solved, stop the run or use harder problems; otherwise test the reward on a correct "
    "and a wrong answer, because it does not distinguish rollouts",
    symptom_of=("reward_collapse",),
)
def constant_reward(rows: Sequence[Metrics]) -> str | None:
    recent = rows[-_RECENT_STEPS:]
    value = _reward_if_all_equal(recent)
    if len(recent) < _RECENT_STEPS or value is None:
        return None
    if value <= 0 and not any(row.get("rollout/verdict/correct") for row in recent):
        return None  # the rule no_signal covers rare successes
    when = "since the first step" if _reward_if_all_equal(rows) is not None else f"of the last {_RECENT_STEPS} steps"
    return f"every rollout {when} has the reward {value:.3g}"


@_register_rule(
    metrics=("reward/mean", "reward/problem_share"),
    when="less than 5 % of the variance of rewards is between problems (40 steps, by 2 standard errors), and "
    "`reward/mean` over the last 20 steps is within 2.5 standard errors of the first 20",
    advice="test the reward on a correct and a wrong answer to one problem, and check that each rollout is graded by "
    "the answer that it contains; if the reward is right, raise optimizer.learning_rate",
)
def random_reward(rows: Sequence[Metrics]) -> str | None:
    # Rewards of equally hard problems also vary little between problems, until training improves the reward.
    shares = _values_of(rows, "reward/problem_share")[-2 * _PAST_STEPS :]
    values = _values_of(rows, "reward/mean")
    change = _distance_in_errors(values)
    if len(shares) < 2 * _PAST_STEPS or change is None or change >= 2.5:
        return None
    share = statistics.fmean(shares)
    if share + 2 * statistics.stdev(shares) / len(shares) ** 0.5 >= 0.05:
        return None
    first, last = statistics.fmean(values[:_PAST_STEPS]), statistics.fmean(values[-_PAST_STEPS:])
    return (
        f"the reward appears to be random: {max(share, 0.0):.0%} of its variance is between problems, and training "
        f"does not change it ({first:.3g} in the first steps, {last:.3g} now)"
    )


@_register_rule(
    metrics=("rollout/sampled_entropy", "reward/mean"),
    when="5-step mean of `rollout/sampled_entropy` below 0.01 nats and below a twentieth of the mean of the first 5 "
    "steps, while the 5-step mean of `reward/mean` is below 0.9",
    advice="lower optimizer.learning_rate, raise algorithm.clip_high, or set algorithm.entropy_coefficient",
)
def entropy_collapse(rows: Sequence[Metrics]) -> str | None:
    # A policy that solves nearly every problem also has low entropy: healthy runs end below 0.01 nats at a reward of
    # 0.97. `policy/entropy` cannot be used, because steps without a group to train on, as after a collapse, do not
    # record it.
    first, last = _first_and_last_means(rows, "rollout/sampled_entropy")
    if last is None or first is None or last >= 0.05 * first or last >= 0.01:
        return None
    _, reward = _first_and_last_means(rows, "reward/mean")
    if reward is not None and reward >= 0.9:
        return None
    return f"entropy fell from {first:.3g} to {last:.3g} nats per token"


@_register_rule(
    metrics=("policy/gradient_norm",),
    when="5-step median of `policy/gradient_norm` above 10 times the median of the 20 steps before, and above every "
    "earlier value",
    advice="run agentrl explain to inspect the tokens with the largest share of the step's gradient; lower "
    "optimizer.gradient_clip",
    symptom_of=("reward_collapse",),
)
def gradient_spike(rows: Sequence[Metrics]) -> str | None:
    # Norms of single steps are heavy-tailed, and return to their early values when few groups have a signal.
    values = _values_of(rows, "policy/gradient_norm")
    if len(values) < _PAST_STEPS + _RECENT_STEPS:
        return None
    usual, now = (
        statistics.median(values[-_PAST_STEPS - _RECENT_STEPS : -_RECENT_STEPS]),
        statistics.median(values[-_RECENT_STEPS:]),
    )
    if usual == 0 or now <= 10 * usual or now <= max(values[:-_RECENT_STEPS]):
        return None
    return f"the gradient norm rose from {usual:.3g} to {now:.3g} (medians of {_PAST_STEPS} and {_RECENT_STEPS} steps)"


@_register_rule(
    metrics=("rollout/model_tokens_mean",),
    when="5-step mean of `rollout/model_tokens_mean` above 3 times the mean of the first 5 steps",
    advice="read the longest trajectories; set reward.overlong_buffer or algorithm.aggregation=token_mean",
    symptom_of=("reward_collapse",),
)
def length_explosion(rows: Sequence[Metrics]) -> str | None:
    first, last = _first_and_last_means(rows, "rollout/model_tokens_mean")
    if last is None or first is None or last <= 3 * first:
        return None
    return f"rollouts grew from {first:.0f} to {last:.0f} model tokens"


@_register_rule(
    metrics=("groups/trained",),
    when="5 consecutive steps without a group to train on",
    advice="mix in easier or harder problems, raise rollout.group_size, or set rollout.max_extra_rounds",
    symptom_of=(
        "reward_collapse",
        "never_correct",
        "constant_reward",
    ),
)
def no_signal(rows: Sequence[Metrics]) -> str | None:
    recent = rows[-_RECENT_STEPS:]
    if len(recent) < _RECENT_STEPS or any(row.get("groups/trained", 1) for row in recent):
        return None
    return f"no group had a training signal in the last {_RECENT_STEPS} steps"


@_register_rule(
    metrics=("reward/mean", "policy/entropy"),
    when="from step 100 on: `reward/mean` and `policy/entropy` over the last 20 steps are within 2.5 standard errors "
    "of the first 20",
    advice="raise optimizer.learning_rate; check that groups are trained on (groups/trained) and that their tokens "
    "have advantages",
    symptom_of=(
        "never_correct",
        "constant_reward",
        "random_reward",
        "no_signal",
    ),
)
def standstill(rows: Sequence[Metrics]) -> str | None:
    if len(rows) < 5 * _PAST_STEPS:
        return None
    moved = [_distance_in_errors(_values_of(rows, key)) for key in ("reward/mean", "policy/entropy")]
    if any(change is None or change >= 2.5 for change in moved):
        return None
    return f"reward and entropy have not changed since the first {_PAST_STEPS} steps"


@_register_rule(
    metrics=(DISK_FREE,),
    when="less than 1 GiB is free on the disk of the run directory, or the disk will be full within 20 steps at the "
    "pace of the last 20",
    advice="lower checkpoint.keep; raise telemetry.trajectories_every and telemetry.tokens_every; free space",
)
def disk(rows: Sequence[Metrics]) -> str | None:
    free = _values_of(rows, DISK_FREE)
    if not free:
        return None
    if free[-1] < _GIB:
        return f"the disk of the run directory has only {free[-1] / _GIB:.2f} GiB left"
    pace = (free[-_PAST_STEPS - 1] - free[-1]) / _PAST_STEPS if len(free) > _PAST_STEPS else 0.0
    if pace <= 0 or free[-1] > _PAST_STEPS * pace:
        return None
    return f"the disk of the run directory will be full in {free[-1] / pace:.0f} steps ({free[-1] / _GIB:.2f} GiB left)"


@_register_rule(
    metrics=(MEMORY_FREE,),
    when="5-step mean of the free memory of rank 0's machine (or its control group) below 5 %",
    advice="lower rollout.concurrency or training.micro_batch_tokens; lower rollout.kv_cache_tokens",
)
def memory(rows: Sequence[Metrics]) -> str | None:
    free = _values_of(rows[-_RECENT_STEPS:], MEMORY_FREE)
    if len(free) < _RECENT_STEPS or statistics.fmean(free) >= 0.05:
        return None
    return f"only {statistics.fmean(free):.1%} of the memory of rank 0's machine is free"


MACHINE_METRICS = (DISK_FREE, MEMORY_FREE)
"""Metrics of :func:`agentrl.telemetry.machine.measure_free_resources`, read by rules only. No file contains them."""

ALERT_NAMES = tuple(rule.name for rule in RULES)


def _values_of(rows: Sequence[Metrics], key: str) -> list[float]:
    return [row[key] for row in rows if key in row]


def _first_and_last_means(rows: Sequence[Metrics], key: str) -> tuple[float | None, float | None]:
    """Return the means of the first and the last five values, or None for both if there are fewer than ten values."""
    values = _values_of(rows, key)
    if len(values) < 2 * _RECENT_STEPS:
        return None, None
    return statistics.fmean(values[:_RECENT_STEPS]), statistics.fmean(values[-_RECENT_STEPS:])


def _reward_if_all_equal(rows: Sequence[Metrics]) -> float | None:
    """Return the reward of all rollouts of the rows if their rewards are equal, otherwise None."""
    values = {row.get("reward/mean") for row in rows}
    alike = len(values) == 1 and all(row.get("reward/stderr") == 0 for row in rows)
    return values.pop() if alike else None


def _reward_change(first: Sequence[Metrics], last: Sequence[Metrics]) -> ChangeRecord:
    """Compare the mean reward of the first and last rows.

    If the variance of the first rows is smaller, it is raised to the variance of the last rows, because the means of a
    few groups may be equal by chance. The variance of the last rows is never raised, because rewards no longer vary
    after a collapse, and a larger variance would hide it.
    """
    start, end = (statistics.fmean(row["reward/mean"] for row in part) for part in (first, last))
    noises = [statistics.fmean(row["reward/stderr"] ** 2 for row in part) for part in (first, last)]
    error = math.sqrt(max(noises) / len(first) + noises[1] / len(last))
    return _change_record(start, end, error)


def _change_record(start: float, end: float, error: float) -> ChangeRecord:
    return {"start": start, "end": end, "standard_errors": (end - start) / error if error else None}


def _fall_in_errors(change: ChangeRecord) -> float:
    """Return the fall from start to end in standard errors."""
    if change["standard_errors"] is None:
        return math.inf if change["end"] < change["start"] else 0.0
    return -change["standard_errors"]


def _format_steps(rows: Sequence[Metrics]) -> str:
    first, last = (int(row["step"]) for row in (rows[0], rows[-1]))
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _distance_in_errors(values: Sequence[float]) -> float | None:
    """Return the distance between the means of the first and last 20 values in standard errors.

    Returns None for fewer than 40 values.
    """
    if len(values) < 2 * _PAST_STEPS:
        return None
    first, last = values[:_PAST_STEPS], values[-_PAST_STEPS:]
    difference = abs(statistics.fmean(last) - statistics.fmean(first))
    error = ((statistics.variance(first) + statistics.variance(last)) / _PAST_STEPS) ** 0.5
    if error == 0:
        return math.inf if difference else 0.0
    return difference / error


def _mean_above(rows: Sequence[Metrics], key: str, limit: float, message: str) -> str | None:
    values = _values_of(rows[-_RECENT_STEPS:], key)
    if len(values) < _RECENT_STEPS or statistics.fmean(values) <= limit:
        return None
    return message.format(statistics.fmean(values))


def _endings_above_half(rows: Sequence[Metrics], names: Sequence[str], message: str) -> str | None:
    recent = rows[-_RECENT_STEPS:]
    whole = sum(value for row in recent for key, value in row.items() if key.startswith("rollout/ended/"))
    part = sum(row.get(name, 0.0) for row in recent for name in names)
    return message.format(part / whole) if len(recent) == _RECENT_STEPS and whole and part > 0.5 * whole else None
