"""Metrics of ``metrics.jsonl``: registration of custom metrics, and the catalogue of the built-in metrics.

Console, plots, viewer and docs/reference/metrics.md use the names, units, meanings and healthy ranges in this module.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypeVar

from agentrl_envs.registry import Registry, describe_error

logger = logging.getLogger(__name__)
Measure = TypeVar("Measure", bound="Callable[[Sequence[Any]], float | None]")

EVERY_STEP = ""
"""Value of ``when`` for metrics of every training row."""


@dataclass(frozen=True)
class Metric:
    """A metric in ``metrics.jsonl``, or a family of metrics. In the name, ``{...}`` matches any text."""

    name: str
    unit: str
    meaning: str  # one sentence or a formula
    healthy: str = ""
    when: str = EVERY_STEP  # condition under which a training row has the metric
    label: str = ""  # short name for legends
    console: str = ""  # format in the progress line, such as "turns {:.1f}"

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Regular expression that matches the metric's keys."""
        parts = re.split(r"(\{\w+\})", self.name)
        return re.compile("".join(".+" if part.startswith("{") else re.escape(part) for part in parts))


@dataclass(frozen=True, kw_only=True)
class UserMetric:
    """A metric of a plug-in, computed from a step's trajectories except greedy and excluded trajectories."""

    metric: Metric
    measure: Callable[[Sequence[Any]], float | None]
    plot: bool


USER_METRICS: Registry[UserMetric] = Registry("metric")
_FAILED: set[str] = set()  # metrics whose failure has been reported


def register_metric(
    name: str, *, unit: str, meaning: str, healthy: str = "", console: str = "", plot: bool = True
) -> Callable[[Measure], Measure]:
    """Register a metric that each training step computes from its trajectories (`agentrl.trajectory.Trajectory`).

    ``name`` consists of a group and a name, such as ``search/calls_mean``. The decorated function returns None if there
    is no value. ``console`` formats the value in the progress line (``"searches {:.1f}"``), and ``plot`` draws it into
    ``plots/``. If the function raises or returns a value that is not finite, a warning is logged once and the row has
    no value.
    """
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)+", name):
        raise ValueError(f"metric {name!r}: the name must contain a group and a slash, such as search/calls_mean")
    _check_console_format(name, console)

    def add(measure: Measure) -> Measure:
        metric = Metric(name, unit, meaning, healthy, console=console)
        USER_METRICS.add(name, UserMetric(metric=metric, measure=measure, plot=plot))
        return measure

    return add


def compute_user_metrics(trajectories: Sequence[object], reserved_names: Container[str]) -> dict[str, float]:
    """Compute the metrics of plug-ins over a step's trajectories, except metrics with a name in ``reserved_names``."""
    values = {}
    for name in USER_METRICS.names():
        try:
            if name in reserved_names:
                raise ValueError("this name is already in use: register the metric under a different name")
            value = USER_METRICS[name].measure(trajectories)
            if value is None:
                continue
            if not math.isfinite(value):
                raise ValueError(f"the value must be finite; got {value!r}")
            values[name] = float(value)
        except Exception as error:  # noqa: BLE001 - user code: a missing value must not end a run
            if name not in _FAILED:
                logger.warning(
                    "metric %r failed; its value is omitted from this row, and further failures are not logged: %s",
                    name,
                    describe_error(error),
                )
            _FAILED.add(name)
    return values


def _check_console_format(metric: str, template: str) -> None:
    try:
        shown = template.format(0.5) if template else "0.5"
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"metric {metric!r}: console={template!r} cannot format a number ({error})") from error
    if not any(sign.isdigit() for sign in shown):
        raise ValueError(f"metric {metric!r}: console={template!r} displays no number; example: 'turns {{:.1f}}'")


_TRAINED = "at least one group was trained on"
_DATA = "at least one rollout is not excluded"
_CORRECTION = "`correction` is set"
_ROUTES = "`correction.route_replay=rollout`"
_CRITIC = "the estimator has a critic"
_AGENTS = "agent programs"
_FORKS = "`rollout.branching.width`"
_VLLM = "the engine reports its cache (vLLM)"
_AHEAD = "`rollout.schedule` is `overlapped` or `asynchronous`"
_HEAD_EXACT = "`algorithm.head_exact_every`"
_EVALUATED = "rows of evaluations"
_CLIPPING = "the loss clips"
_ZERO = "0"

SECTIONS: dict[str, tuple[Metric, ...]] = {}
"""Built-in metrics by section of docs/reference/metrics.md."""

SECTIONS["General"] = (
    Metric("step", "steps", "Number of completed training steps; for an evaluation, the steps before it."),
    Metric("tokens_per_s", "tokens/s", "`rollout/model_tokens / time/step_s`."),
)
SECTIONS["Reward"] = (
    Metric("reward/mean", "reward", "Mean reward of the step's rollouts, except greedy and excluded rollouts.",
           "rises", _DATA, "reward"),
    Metric("reward/stderr", "reward", "Standard error of `reward/mean` with groups as clusters.", "", "two groups"),
    Metric("reward/problem_share", "share", "Fraction of the rewards' variance that lies between problems "
           "(intraclass correlation); near 0 if the reward does not depend on the problem.", "",
           "two groups of unequal rewards"),
    Metric("reward/count", "rollouts", "Number of rollouts in `reward/mean`.", "problems x group size"),
    Metric("reward/greedy_mean", "reward", "Mean reward of the greedy rollouts.", "", "with greedy rollouts"),
    Metric("reward/overlong_penalty", "reward", "Mean penalty for long responses.", "near 0",
           "`reward.overlong_buffer`"),
    Metric("reward/overlong_share", "share", "Fraction of trajectories with a length penalty.", "small",
           "`reward.overlong_buffer`"),
    Metric("rewards/{function}", "reward", "Mean of one reward function of `reward.functions`, without its weight.", "",
           "`reward.functions`"),
)  # fmt: skip
SECTIONS["Policy"] = (
    Metric("policy/entropy", "nats/token", "Mean entropy of the next-token distribution, over model tokens.",
           "falls slowly", _TRAINED, "entropy", "entropy {:.3f}"),
    Metric("policy/gradient_norm", "", "Gradient norm before clipping, averaged over the step's updates.",
           "steady; single steps are heavy-tailed", _TRAINED, "gradient norm before clipping"),
    Metric("policy/loss", "", "Loss of the step, summed over its updates.", "has no meaningful trend", _TRAINED),
    Metric("policy/updates", "updates", "Number of optimizer updates in this step.", "`algorithm.updates_per_step`"),
    Metric("policy/tokens", "tokens", "Number of model tokens that the step trained on.", "above 0"),
    Metric("policy/prefix_sharing", "ratio", "Tokens of the trained trajectories with their prompts, divided by the "
           "tokens that a forward computes; 1 without shared prefixes.", "above 1",
           "at least one group was trained on, with packed rows (`model.rows`)"),
    Metric("policy/sum_pi_squared", "", "Mean of `sum_v p(v)^2`, the probability that two samples are equal.",
           "below 1", _TRAINED),
    Metric("policy/energy", "",
           "Mean of `w = 1 - 2 p + sum p^2`, the squared gradient norm with respect to the logits.",
           "falls with entropy", _TRAINED),
    Metric("policy/engine_abs_diff", "nats/token", "Mean `|log p_trainer - log p_engine|` over tokens sampled by the "
           "trained version; the run stops above four times the difference measured at the start, limited to 0.001 to "
           "0.01 (float32) or 0.03 to 0.15 (bfloat16), or above `algorithm.fidelity_bound`.", "well below the bound",
           _TRAINED, "mean |log-prob difference|"),
    Metric("policy/engine_abs_diff_max", "nats/token",
           "Mean `|log p_trainer - log p_engine|` of the trajectory with the largest mean; in float32, the run stops "
           "above the bound of `policy/engine_abs_diff`.", "well below the bound in float32", _TRAINED),
    Metric("policy/engine_abs_diff_own_routes", "nats/token",
           "Mean `|log p_trainer - log p_engine|` of the step's first micro-batch, computed without "
           "route replay.", "above `policy/engine_abs_diff`", _ROUTES),
    Metric("policy/other_routes", "share", "Fraction of replayed routes (one per token and layer) for which the "
           "trainer's router would select other experts.", "small", _ROUTES),
    Metric("policy/kl_engine_k1", "nats/token", "Mean `log p_engine - log p_trainer`.", "near 0", _TRAINED),
    Metric("policy/kl_engine_k3", "nats/token", "Mean `rho - log rho - 1`, `rho = p_trainer / p_engine`.", "near 0",
           _TRAINED, "KL, k3 estimate"),
    Metric("policy/log_ppl_gap", "nats/token", "Mean over trajectories of the difference between the log-perplexities "
           "of trainer and engine.", "near 0", _TRAINED),
    Metric("policy/ratio_mean", "", "Mean ratio `p_now / p_old`.", "near 1; 1 with one update per step", _TRAINED),
    Metric("policy/ratio_max", "", "Largest ratio `p_now / p_old`.", "1 with one update per step", _TRAINED),
    Metric("policy/ratio_min", "", "Smallest ratio `p_now / p_old`.", "1 with one update per step", _TRAINED),
    Metric("policy/approx_kl", "nats/token",
           "Mean `ratio - 1 - log ratio`, a measure of how far the updates moved the policy.",
           "small", _TRAINED),
    Metric("policy/clip_fraction_low", "share", "Fraction of tokens whose ratio is clipped at the lower bound.",
           "small",
           _CLIPPING),
    Metric("policy/clip_fraction_high", "share", "Fraction of tokens whose ratio is clipped at the upper bound.",
           "small",
           _CLIPPING),
    Metric("policy/clip_fraction", "share", "Fraction of tokens that the divergence mask excludes.", "small",
           "a divergence loss"),
    Metric("policy/dual_clip_fraction", "share", "Fraction of tokens clipped by `algorithm.dual_clip`.", "near 0",
           "a dual-clip loss"),
    Metric("policy/selected_fraction", "share", "Fraction of tokens selected by their covariance.",
           "the loss's setting",
           "`clip_cov` and `kl_cov`"),
)  # fmt: skip
SECTIONS["Rollouts"] = (
    Metric("rollout/turns_mean", "turns", "Mean number of turns per rollout.", "", _DATA, "turns", "turns {:.1f}"),
    Metric("rollout/turns_max", "turns", "Largest number of turns of a trajectory.", "", _DATA),
    Metric(
        "rollout/tool_calls_mean",
        "calls",
        "Mean number of tool calls per rollout that the environment executes. An agent program executes its calls "
        "itself, so they are not counted.",
        "",
        _DATA,
        "tool calls",
    ),
    Metric("rollout/response_tokens_mean", "tokens", "Mean number of tokens per rollout after the prompt.",
           "below the limit", _DATA, "with observations"),
    Metric("rollout/model_tokens_mean", "tokens", "Mean number of sampled tokens per rollout.", "",
           _DATA, "model tokens"),
    Metric("rollout/sampled_entropy", "nats/token", "Mean `-log p_engine` of the sampled tokens, an estimate of the "
           "entropy that is also available in steps that train on no group.", "falls slowly", _DATA),
    Metric("rollout/forked", "rollouts", "Number of rollouts that forked.", "", _FORKS),
    Metric("rollout/leaves_mean", "branches", "Mean number of ends of a forked rollout.", "", _FORKS),
    Metric("rollout/fork_width_mean", "branches", "Mean number of branches of a fork.", "", _FORKS),
    Metric("rollout/fork_sharing", "ratio", "Tokens on the paths of forked rollouts, divided by the tokens that were "
           "sampled or appended for them; 1 without sharing.", "above 1", _FORKS),
    Metric("rollout/model_tokens", "tokens", "Number of tokens sampled for the step.", "", _DATA),
    Metric("rollout/seconds_max", "s", "Duration of the slowest rollout.", "", _DATA),
    Metric("rollout/ended/{ending}", "rollouts",
           "Number of rollouts with this [ending](../concepts/exclusion.md#how-a-trajectory-ends).",
           "mostly answered", "a rollout has this ending"),
    Metric("rollout/verdict/{verdict}", "rollouts", "Number of answers with this verdict of the grader.", "",
           "an answer is graded"),
    Metric("rollout/tool_outcome/{outcome}", "calls", "Number of tool calls with this outcome.", "mostly ok",
           "a tool is called"),
    Metric("rollout/greedy", "rollouts", "Number of greedy rollouts for a baseline.", "", "with greedy rollouts"),
    Metric("rollout/concurrency_limit", "trajectories", "Maximum number of concurrent trajectories at the engine.", "",
           _VLLM),
    Metric("rollout/concurrency_limit_min", "trajectories",
           "Minimum of `rollout/concurrency_limit` since the last step.", "", _VLLM),
    Metric("rollout/kv_use_max", "share", "Maximum used fraction of the engine's key-value cache.",
           "below `rollout.kv_high_watermark`", _VLLM),
    Metric("rollout/preemptions", "requests", "Requests that the engine preempted because its cache was full.", _ZERO,
           _VLLM),
)  # fmt: skip
SECTIONS["Groups"] = (
    Metric("groups/issued", "groups", "Groups sampled for this step."),
    Metric("groups/trained", "groups", "Groups that the step trained on.", "`rollout.problems_per_step`"),
    Metric("groups/surplus", "groups", "Groups with a training signal that the step did not need.", "small"),
    Metric("groups/extra_rounds", "rounds", "Additional rollout rounds because filters left too few groups.", _ZERO),
    Metric("groups/skipped_long_prompt", "problems", "Problems whose prompt exceeds `rollout.max_prompt_tokens`.",
           _ZERO),
    Metric("groups/infrastructure_failures", "rollouts", "Rollouts that failed for reasons outside the policy.", _ZERO),
    Metric("groups/excluded", "trajectories", "Excluded trajectories, without greedy trajectories.", _ZERO),
    Metric("groups/void", "trajectories", "Rollouts with a void turn, unless `algorithm.void_turns=train`.", "few"),
    Metric("groups/truncated", "trajectories", "Rollouts that `algorithm.truncated` masks or excludes.", "few"),
    Metric("groups/dropped_empty", "groups", "Groups without a trajectory to train on.", _ZERO),
    Metric("groups/dropped_no_greedy", "groups", "Groups whose greedy rollout failed.", _ZERO),
    Metric("groups/dropped_accuracy", "groups", "Groups outside `algorithm.accuracy_range`."),
    Metric("groups/dropped_zero_variance", "groups", "Groups with equal rewards (`algorithm.drop_zero_variance`).",
           "less than half of `groups/issued`"),
)  # fmt: skip
_LEARNS = "`rollout.budget` or `data.curriculum`"
SECTIONS["Budgets"] = (
    Metric("budget/rollouts_min", "rollouts", "Smallest number of rollouts of a problem, without greedy rollouts.", "",
           _LEARNS),
    Metric("budget/rollouts_max", "rollouts", "Largest number of rollouts of a problem.", "", _LEARNS),
    Metric("budget/variance_ratio", "",
           "Estimated variance of the gradient with this allocation of rollouts, relative to equal numbers.",
           "below 1 with `rollout.budget=neyman`", _LEARNS),
    Metric("posterior/known_share", "share", "Fraction of problems with rollouts in earlier steps.", "", _LEARNS),
    Metric("posterior/success", "probability", "Mean estimated probability of success of the step's problems.", "",
           _LEARNS),
    Metric("posterior/success_error", "probability",
           "Mean distance between a problem's estimated probability of success and its fraction of successes.", "falls",
           _LEARNS),
)  # fmt: skip
SECTIONS["Staleness"] = (
    Metric("staleness/mean", "steps", "Mean age of the model tokens.",
           "0 if synchronous; at most about 1 if overlapped", _DATA, "mean"),
    Metric("staleness/max", "steps", "Age of the oldest model token.", "at most `rollout.max_staleness`",
           _DATA, "largest"),
    Metric("staleness/mixed_share", "share", "Fraction of trajectories sampled by several policy versions.",
           "0 unless asynchronous", _DATA),
    Metric("queue/finished_groups", "groups", "Finished groups waiting for the trainer.", "", _AHEAD),
    Metric("queue/running_groups", "groups", "Groups being sampled.", "", _AHEAD),
)  # fmt: skip
SECTIONS["Variance of the gradient"] = (
    Metric("variance/total_power", "",
           "Total power (OTB paper, Eq. 65): mean over rollouts of `sum_t w_t A_t^2`, or `W A^2` if all tokens of a "
           "rollout have the same advantage. `w` is `policy/energy`, a norm with respect to the logits. In a "
           "[forked rollout](formulas.md#10-forked-rollouts), `A_t` includes the weight of the token's edge.",
           "falls or stays", _TRAINED, "total power"),
    Metric("variance/signal_strength", "",
           "Signal strength (OTB paper, Eq. 66): squared norm of the mean gradient, the square of "
           "`policy/gradient_norm`. A norm with respect to the parameters, on the scale of the loss, so its size is "
           "not comparable with `variance/total_power`.", "steady", _TRAINED, "signal strength"),
    Metric("variance/pure_noise", "",
           "Pure noise (OTB paper, Eq. 67): `(total_power - signal_strength) / (N - 1)` for N rollouts. The "
           "published formula subtracts norms from two spaces, so it may be negative and only its trend is meaningful. "
           "`variance/head_exact_pure_noise` uses one space.", "falls or stays", "two trajectories were trained on",
           "pure noise"),
    Metric("variance/head_exact_total_power", "",
           "Total power P of the head's weight, exact and per group: mean squared norm of a group's gradient "
           "([formulas.md](formulas.md)).", "", _HEAD_EXACT, "head exact: total power"),
    Metric("variance/head_exact_signal_strength", "", "Signal strength S of the head's weight, exact: squared norm of "
           "the mean gradient over groups.", "not far below P", _HEAD_EXACT, "head exact: signal strength"),
    Metric("variance/head_exact_pure_noise", "", "Pure noise of the head's weight, exact: `(P - S) / (groups - 1)`, "
           "the variance of the mean gradient.", "much less than S", _HEAD_EXACT, "head exact: pure noise"),
)  # fmt: skip
SECTIONS["Rollout correction"] = (
    Metric("correction/mean_abs_difference", "nats/token", "Mean `|log rho|`, `rho = p_trainer / p_engine`, over all "
           "model tokens.", "small", _CORRECTION),
    Metric("correction/kl_k1", "nats/token", "Mean `-log rho`.", "near 0", _CORRECTION),
    Metric("correction/kl_k3", "nats/token", "Mean `rho - log rho - 1`.", "near 0", _CORRECTION),
    Metric("correction/chi2", "", "Mean `rho^2`, minus 1.", "near 0", _CORRECTION),
    Metric("correction/ess", "share", "Effective sample size `(sum rho)^2 / (n sum rho^2)`.", "near 1", _CORRECTION),
    Metric("correction/train_perplexity", "", "Mean perplexity of a trajectory under the trainer's policy.", "",
           _CORRECTION),
    Metric("correction/rollout_perplexity", "", "Mean perplexity of a trajectory under the engine's policy.",
           "near `correction/train_perplexity`",
           _CORRECTION),
    Metric("correction/rho_min", "", "Smallest `rho` of a token.", "near 1", _CORRECTION),
    Metric("correction/rho_max", "", "Largest `rho` of a token.", "near 1", _CORRECTION),
    Metric("correction/truncated_fraction", "share", "Fraction of tokens whose weight is truncated.", "small",
           _CORRECTION),
    Metric("correction/masked_fraction", "share", "Fraction of tokens that the correction rejects.", "small",
           _CORRECTION),
    Metric("correction/weight_mean", "", "Mean weight of the remaining tokens, before normalization.", "near 1",
           _CORRECTION),
)  # fmt: skip
SECTIONS["Critic"] = (
    Metric("critic/loss", "", "Half of the mean squared error, clipped if `critic.clip` is set.", "falls", _CRITIC),
    Metric("critic/squared_error", "reward²", "Mean `(value - return)^2`.", "falls", _CRITIC),
    Metric("critic/explained_variance", "share", "`1 - Var(return - value) / Var(return)`.",
           "above 0, rises towards 1", _CRITIC),
    Metric("critic/value_mean", "reward", "Mean value of a token.", "near `critic/return_mean`", _CRITIC),
    Metric("critic/return_mean", "reward", "Mean return of a token.", "", _CRITIC),
    Metric("critic/return_square_mean", "reward²", "Mean squared return of a token.", "", _CRITIC),
    Metric("critic/value_clip_fraction", "share", "Fraction of tokens whose change in value is clipped.", "small",
           _CRITIC),
    Metric("critic/gradient_norm", "", "Norm of the critic's gradient before clipping.", "steady", _CRITIC),
)  # fmt: skip
SECTIONS["Reference policy"] = (
    Metric("kl/mean", "nats/token", "Mean divergence from the reference policy, by `kl.estimator`.", "grows slowly",
           "`kl.coefficient` is set"),
    Metric("kl/coefficient", "", "Weight of the penalty, which `kl.controller=adaptive` changes.", "",
           "`kl.coefficient` is set"),
)  # fmt: skip
SECTIONS["Teacher"] = (
    Metric("teacher/divergence", "nats/token", "Mean divergence from the teacher, by `teacher.objective`.", "falls",
           "with a teacher"),
    Metric("teacher/divergence/{source}", "nats/token", "`teacher/divergence` over the problems of one source.",
           "falls", "with `teacher.by_source`"),
    Metric("teacher/coefficient", "", "Weight of the divergence in the loss.", "", "with a teacher"),
)  # fmt: skip
SECTIONS["Agent programs"] = (
    Metric("gateway/branches_mean", "trajectories", "Mean number of trajectories per rollout; 1 if no rollout "
           "branches.", "near 1", _AGENTS),
    Metric("gateway/generations_mean", "requests", "Mean number of replies sampled per rollout.", "", _AGENTS),
    Metric("gateway/undelivered", "replies", "Number of replies that no client received.", _ZERO, _AGENTS),
    Metric("gateway/not_trained_share", "share", "Fraction of sampled tokens that are not trained on.", "near 0",
           _AGENTS),
    Metric("gateway/replayed", "requests", "Number of repeated requests that received the first reply.",
           _ZERO, _AGENTS),
    Metric("gateway/miss_{cause}", "requests", "Number of requests that did not continue the last reply, by "
           "cause ([agents.md](../how-to/agents.md#what-is-trained)).", _ZERO, _AGENTS),
)  # fmt: skip
SECTIONS["Time"] = (
    Metric("time/step_s", "s", "Duration of the whole step."),
    Metric("time/train_idle_s", "s", "Time for which the trainer waited for its batch.",
           "small if `rollout.schedule` runs ahead", label="waiting for rollouts"),
    Metric("time/train_s", "s", "Duration of the forward and backward passes and the updates.", label="training"),
    Metric("time/forward_s", "s", "Part of `time/train_s`: forward passes of policy and critic on rank 0.",
           label="forward"),
    Metric("time/backward_s", "s", "Part of `time/train_s`: backward passes on rank 0, including recomputation.",
           label="backward"),
    Metric("time/update_s", "s", "Part of `time/train_s`: optimizer updates on rank 0.", label="optimizer"),
    Metric("time/transfer_s", "s", "Time until the engine had the new weights.", "small",
           label="weights to the engine"),
    Metric("time/rollout_s", "s", "Time for which the worker collected the step's groups."),
    Metric("time/rollout_idle_s", "s", "Time without any rollout in progress."),
    Metric("optimizer/learning_rate", "", "Learning rate of the next update.", "follows `optimizer.schedule`"),
)  # fmt: skip
SECTIONS["Evaluation"] = (
    Metric("eval/avg_at_k", "share", "Mean fraction of correct answers on the held-out problems.", "rises", _EVALUATED,
           "held-out score"),
    Metric("eval/low", "share", "Lower end of the 95 % interval of `eval/avg_at_k` for the same problems.", "",
           _EVALUATED),
    Metric("eval/high", "share", "Upper end of the 95 % interval of `eval/avg_at_k` for the same problems.", "",
           _EVALUATED),
    Metric("eval/k", "rollouts", "Number of rollouts per problem.", "`evaluation.samples`", _EVALUATED),
    Metric("eval/problems", "problems", "Number of problems in the score.", "", _EVALUATED),
    Metric("eval/excluded", "rollouts", "Rollouts that failed for reasons outside the policy.", _ZERO, _EVALUATED),
    Metric("eval/family/{family}", "share", "Score of one family or source of problems.", "", _EVALUATED),
    Metric("eval_falsified/{figure}", "", "The metric `eval/{figure}` with falsified observations. A policy that "
           "uses its observations fails.",
           "a low score", _EVALUATED),
)  # fmt: skip

METRICS: dict[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}
_FAMILIES = tuple(metric for metric in METRICS.values() if "{" in metric.name)


def find_metric(key: str) -> Metric | None:
    """Return the built-in or custom metric of a key in ``metrics.jsonl``, or None for an unknown key.

    >>> find_metric("rollout/ended/answered").unit
    'rollouts'
    """
    if key in METRICS:
        return METRICS[key]
    if key in USER_METRICS.names():
        return USER_METRICS[key].metric
    return next((family for family in _FAMILIES if family.pattern.fullmatch(key)), None)


def describe_built_in_metrics() -> list[dict[str, str]]:
    """Return the fields of every built-in metric, for the viewer."""
    return [asdict(metric) for metric in METRICS.values()]
