"""Every metric of ``metrics.jsonl``: name, unit, meaning, healthy range. Console, plots and documentation read it here.

``docs/metrics.md`` is generated from this module.
"""

from __future__ import annotations

from dataclasses import asdict

from agentrl.telemetry.metrics.definitions import USER_METRICS, Metric

_TRAINED = "a group was trained"
_DATA = "a rollout is data"
_CORRECTION = "`correction` is set"
_CRITIC = "the estimator has a critic"
_AGENTS = "agent programs"
_VLLM = "the engine reports its cache (vLLM)"
_AHEAD = "`rollout.schedule` is `overlapped` or `asynchronous`"
_HEAD_EXACT = "`algorithm.head_exact_every`"
_EVALUATED = "an evaluation, in a row of its own"
_CLIPPING = "the loss clips"
_ZERO = "0"

_GENERAL = (
    Metric("step", "steps", "Training steps done; an evaluation's row has the step that it follows."),
    Metric("tokens_per_s", "tokens/s", "`rollout/model_tokens / time/step_s`."),
)
_REWARD = (
    Metric("reward/mean", "reward", "Mean reward of the step's rollouts; greedy ones and those without data excluded.",
           "rises", _DATA, "reward"),
    Metric("reward/stderr", "reward", "Standard error of `reward/mean` with groups as clusters.", "", "two groups"),
    Metric("reward/problem_share", "share", "Share of the rewards' variance that lies between problems (intraclass "
           "correlation); near 0 if the reward does not depend on the problem.", "", "two groups of unequal rewards"),
    Metric("reward/count", "rollouts", "Rollouts behind `reward/mean`.", "problems x group size"),
    Metric("reward/greedy_mean", "reward", "Mean reward of the greedy rollouts.", "", "the estimator plays them"),
    Metric("reward/overlong_penalty", "reward", "Mean penalty for long responses.", "near 0",
           "`reward.overlong_buffer`"),
    Metric("reward/overlong_share", "share", "Share of the trajectories with a penalty for length.", "small",
           "`reward.overlong_buffer`"),
    Metric("rewards/{function}", "reward", "Mean of one reward function of `reward.functions`, without its weight.", "",
           "`reward.functions`"),
)  # fmt: skip
_POLICY = (
    Metric("policy/entropy", "nats/token", "Mean entropy of the next-token distribution, over model tokens.",
           "falls slowly", _TRAINED, "entropy", "entropy {:.3f}"),
    Metric("policy/gradient_norm", "", "Norm of the gradient before clipping, mean of the step's updates.",
           "steady; single steps are heavy-tailed", _TRAINED, "gradient norm before clipping"),
    Metric("policy/loss", "", "The step's loss, summed over its updates.", "no trend to read", _TRAINED),
    Metric("policy/updates", "updates", "Optimizer steps of this step.", "`algorithm.updates_per_step`"),
    Metric("policy/tokens", "tokens", "Model tokens that the step trained on.", "above 0"),
    Metric("policy/sum_pi_squared", "", "Mean of `sum_v p(v)^2`, the probability that two samples agree.", "below 1",
           _TRAINED),
    Metric("policy/energy", "",
           "Mean of `w = 1 - 2 p + sum p^2`, the squared gradient norm with respect to the logits.",
           "falls with entropy", _TRAINED),
    Metric("policy/engine_abs_diff", "nats/token", "Mean `|log p_trainer - log p_engine|` over tokens sampled by the "
           "trained version; the run stops above 1e-3 (float32) and 3e-2 (bfloat16).", "below the bound of the dtype",
           _TRAINED, "mean |log-prob difference|"),
    Metric("policy/engine_abs_diff_max", "nats/token",
           "The same, mean over the trajectory with the largest difference.", "below 1e-3 in float32", _TRAINED),
    Metric("policy/kl_engine_k1", "nats/token", "Mean `log p_engine - log p_trainer`.", "near 0", _TRAINED),
    Metric("policy/kl_engine_k3", "nats/token", "Mean `rho - log rho - 1`, `rho = p_trainer / p_engine`.", "near 0",
           _TRAINED, "KL, k3 estimate"),
    Metric("policy/log_ppl_gap", "nats/token", "Mean over trajectories of the gap between the log-perplexities of "
           "trainer and engine.", "near 0", _TRAINED),
    Metric("policy/ratio_mean", "", "Mean ratio `p_now / p_old`.", "near 1; 1 with one update a step", _TRAINED),
    Metric("policy/ratio_max", "", "Largest ratio.", "1 with one update a step", _TRAINED),
    Metric("policy/ratio_min", "", "Smallest ratio.", "1 with one update a step", _TRAINED),
    Metric("policy/approx_kl", "nats/token", "Mean `ratio - 1 - log ratio`: how far the updates moved the policy.",
           "small", _TRAINED),
    Metric("policy/clip_fraction_low", "share", "Tokens whose ratio is cut at the lower bound.", "small", _CLIPPING),
    Metric("policy/clip_fraction_high", "share", "Tokens whose ratio is cut at the upper bound.", "small", _CLIPPING),
    Metric("policy/clip_fraction", "share", "Tokens that the divergence mask leaves out.", "small",
           "a divergence loss"),
    Metric("policy/dual_clip_fraction", "share", "Tokens cut by `algorithm.dual_clip`.", "near 0", "a dual-clip loss"),
    Metric("policy/selected_fraction", "share", "Tokens selected by their covariance.", "the loss's setting",
           "`clip_cov` and `kl_cov`"),
)  # fmt: skip
_ROLLOUT = (
    Metric("rollout/turns_mean", "turns", "Mean turns of a rollout.", "", _DATA, "turns", "turns {:.1f}"),
    Metric("rollout/tool_calls_mean", "calls", "Mean tool calls of a rollout.", "", _DATA, "tool calls"),
    Metric("rollout/response_tokens_mean", "tokens", "Mean tokens of a rollout behind its prompt.",
           "below the limit", _DATA, "with observations"),
    Metric("rollout/model_tokens_mean", "tokens", "Mean sampled tokens of a rollout.", "", _DATA, "the model's own"),
    Metric("rollout/sampled_entropy", "nats/token", "Mean `-log p_engine` of the sampled tokens: an estimate of the "
           "entropy that exists also in steps that train no group.", "falls slowly", _DATA),
    Metric("rollout/model_tokens", "tokens", "Sampled tokens of the step.", "", _DATA),
    Metric("rollout/seconds_max", "s", "Seconds of the slowest rollout.", "", _DATA),
    Metric("rollout/ended/{ending}", "rollouts", "Rollouts that ended so ([endings](environments.md)).",
           "mostly answered", "one ended so"),
    Metric("rollout/verdict/{verdict}", "rollouts", "Answers with this verdict of the grader.", "",
           "an answer is graded"),
    Metric("rollout/tool_outcome/{outcome}", "calls", "Tool calls that ended so.", "mostly ok", "a tool is called"),
    Metric("rollout/greedy", "rollouts", "Greedy rollouts, for a baseline.", "", "the estimator plays them"),
    Metric("rollout/concurrency_limit", "trajectories", "Trajectories that may be in flight at the engine.", "", _VLLM),
    Metric("rollout/concurrency_limit_min", "trajectories", "The lowest limit since the last step.", "", _VLLM),
    Metric("rollout/kv_use_max", "share", "Largest use of the engine's key-value cache.",
           "below `rollout.kv_high_watermark`", _VLLM),
    Metric("rollout/preemptions", "requests", "Requests that the engine put back for lack of cache.", _ZERO, _VLLM),
)  # fmt: skip
_GROUPS = (
    Metric("groups/issued", "groups", "Groups played for this step."),
    Metric("groups/trained", "groups", "Groups that the step trained on.", "`rollout.problems_per_step`"),
    Metric("groups/surplus", "groups", "Groups with a signal beyond those needed.", "small"),
    Metric("groups/extra_rounds", "rounds", "Further rounds played because filters left too few groups.", _ZERO),
    Metric("groups/skipped_long_prompt", "problems", "Problems whose prompt is over `rollout.max_prompt_tokens`.",
           _ZERO),
    Metric("groups/infrastructure_failures", "rollouts", "Rollouts that failed for reasons outside the policy.", _ZERO),
    Metric("groups/no_data", "trajectories", "Trajectories excluded from data, without greedy ones.", _ZERO),
    Metric("groups/void", "trajectories", "Trajectories with a void turn.", "few"),
    Metric("groups/dropped_empty", "groups", "Groups without a trajectory to train.", _ZERO),
    Metric("groups/dropped_no_greedy", "groups", "Groups whose greedy rollout failed.", _ZERO),
    Metric("groups/dropped_accuracy", "groups", "Groups outside `algorithm.accuracy_range`."),
    Metric("groups/dropped_zero_variance", "groups", "Groups with equal rewards (`algorithm.drop_zero_variance`).",
           "under half of those issued"),
)  # fmt: skip
_STALENESS = (
    Metric("staleness/mean", "steps", "Mean age of the model tokens.",
           "0 if synchronous; at most about 1 if overlapped", _DATA, "mean"),
    Metric("staleness/max", "steps", "Age of the oldest token.", "at most `rollout.max_staleness`", _DATA, "largest"),
    Metric("staleness/mixed_share", "share", "Trajectories sampled by several policy versions.",
           "0 unless asynchronous", _DATA),
    Metric("queue/finished_groups", "groups", "Finished groups that wait for the trainer.", "", _AHEAD),
    Metric("queue/running_groups", "groups", "Groups that are being played.", "", _AHEAD),
)  # fmt: skip
_VARIANCE = (
    Metric("variance/total_power", "",
           "Total power (OTB paper, Eq. 65): mean over trajectories of `sum_t w_t A_t^2`, or `W A^2` if all tokens of "
           "a trajectory have one advantage. `w` is the energy of `policy/energy`, a norm with respect to the logits.",
           "falls or stays", _TRAINED, "total power"),
    Metric("variance/signal_strength", "",
           "Signal strength (OTB paper, Eq. 66): squared norm of the mean gradient, the square of "
           "`policy/gradient_norm`. A norm with respect to the parameters and on the scale of the loss, so its size is "
           "not comparable with `variance/total_power`.", "steady", _TRAINED, "signal strength"),
    Metric("variance/pure_noise", "",
           "Pure noise (OTB paper, Eq. 67): `(total_power - signal_strength) / (N - 1)` for N trajectories. The "
           "published formula subtracts norms from two spaces, so it may be negative and only its trend is meaningful. "
           "`variance/head_exact_pure_noise` uses one space.", "falls or stays", "two trajectories were trained",
           "pure noise"),
    Metric("variance/head_exact_total_power", "",
           "Total power P of the head's weight, exact and per group: mean squared norm of a group's gradient "
           "([formulas.md](formulas.md)).", "", _HEAD_EXACT, "head exact: total power"),
    Metric("variance/head_exact_signal_strength", "", "Signal strength S of the head's weight, exact: squared norm of "
           "the mean gradient over groups.", "not far below P", _HEAD_EXACT, "head exact: signal strength"),
    Metric("variance/head_exact_pure_noise", "", "Pure noise of the head's weight, exact: `(P - S) / (groups - 1)`, "
           "the variance of the mean gradient.", "much less than S", _HEAD_EXACT, "head exact: pure noise"),
)  # fmt: skip
_CORRECTIONS = (
    Metric("correction/mean_abs_difference", "nats/token", "Mean `|log rho|`, `rho = p_trainer / p_engine`, over all "
           "model tokens.", "small", _CORRECTION),
    Metric("correction/max_abs_difference", "nats", "Largest `|log rho|` of a token.", "", _CORRECTION),
    Metric("correction/kl_k1", "nats/token", "Mean `-log rho`.", "near 0", _CORRECTION),
    Metric("correction/kl_k3", "nats/token", "Mean `rho - log rho - 1`.", "near 0", _CORRECTION),
    Metric("correction/chi2", "", "Mean `rho^2`, minus 1.", "near 0", _CORRECTION),
    Metric("correction/ess", "share", "Effective sample size `(sum rho)^2 / (n sum rho^2)`.", "near 1", _CORRECTION),
    Metric("correction/log_ppl_gap", "nats/token", "As `policy/log_ppl_gap`.", "near 0", _CORRECTION),
    Metric("correction/train_perplexity", "", "Mean perplexity of a trajectory for the trainer.", "", _CORRECTION),
    Metric("correction/rollout_perplexity", "", "Mean perplexity of a trajectory for the engine.", "as the trainer's",
           _CORRECTION),
    Metric("correction/rho_min", "", "Smallest `rho` of a token.", "near 1", _CORRECTION),
    Metric("correction/rho_max", "", "Largest `rho` of a token.", "near 1", _CORRECTION),
    Metric("correction/truncated_fraction", "share", "Tokens whose weight is cut.", "small", _CORRECTION),
    Metric("correction/masked_fraction", "share", "Tokens that the correction rejects.", "small", _CORRECTION),
    Metric("correction/weight_mean", "", "Mean weight of the tokens left, before normalisation.", "near 1",
           _CORRECTION),
)  # fmt: skip
_CRITICS = (
    Metric("critic/loss", "", "Half of the mean squared error, clipped if `critic.clip` is set.", "falls", _CRITIC),
    Metric("critic/squared_error", "reward²", "Mean `(value - return)^2`.", "falls", _CRITIC),
    Metric("critic/explained_variance", "share", "`1 - Var(return - value) / Var(return)`.",
           "above 0, rises towards 1", _CRITIC),
    Metric("critic/value_mean", "reward", "Mean value of a token.", "near `critic/return_mean`", _CRITIC),
    Metric("critic/return_mean", "reward", "Mean return of a token.", "", _CRITIC),
    Metric("critic/return_square_mean", "reward²", "Mean squared return of a token.", "", _CRITIC),
    Metric("critic/value_clip_fraction", "share", "Tokens whose value may not move further.", "small", _CRITIC),
    Metric("critic/gradient_norm", "", "Norm of the critic's gradient before clipping.", "steady", _CRITIC),
)  # fmt: skip
_KL = (
    Metric("kl/mean", "nats/token", "Mean divergence from the reference policy, by `kl.estimator`.", "grows slowly",
           "`kl.coefficient` is set"),
    Metric("kl/coefficient", "", "The weight of the penalty, which `kl.controller=adaptive` changes.", "",
           "`kl.coefficient` is set"),
)  # fmt: skip
_GATEWAY = (
    Metric("gateway/branches_mean", "sequences", "Mean token sequences of a rollout; 1: its history only grew.",
           "near 1", _AGENTS),
    Metric("gateway/generations_mean", "requests", "Mean replies sampled for a rollout.", "", _AGENTS),
    Metric("gateway/undelivered", "replies", "Replies that no client received.", _ZERO, _AGENTS),
    Metric("gateway/not_trained_share", "share", "Sampled tokens that train nothing.", "near 0", _AGENTS),
    Metric("gateway/replayed", "requests", "Repeated requests answered with the reply of the first.", _ZERO, _AGENTS),
    Metric("gateway/miss_{cause}", "requests", "Requests that did not continue the last reply, by cause "
           "([agents.md](agents.md)).", _ZERO, _AGENTS),
)  # fmt: skip
_TIME = (
    Metric("time/step_s", "s", "Seconds of the whole step."),
    Metric("time/train_idle_s", "s", "Seconds in which the trainer waited for its batch.",
           "small if `rollout.schedule` runs ahead", label="waiting for rollouts"),
    Metric("time/train_s", "s", "Seconds of the passes and updates.", label="training"),
    Metric("time/forward_s", "s", "Of these, rank 0's forwards of policy and critic.", label="forward"),
    Metric("time/backward_s", "s", "Of these, rank 0's backwards, with what they recompute.", label="backward"),
    Metric("time/update_s", "s", "Of these, rank 0's optimizer.", label="optimizer"),
    Metric("time/transfer_s", "s", "Seconds until the engine held the new weights.", "small",
           label="weights to the engine"),
    Metric("time/rollout_s", "s", "Seconds in which the worker collected the step's groups."),
    Metric("time/rollout_idle_s", "s", "Seconds in which nothing was being played."),
    Metric("optimizer/learning_rate", "", "Learning rate of the next update.", "the schedule's"),
)  # fmt: skip
_EVALUATION = (
    Metric("eval/avg_at_k", "share", "Mean share of correct answers on the held-out problems.", "rises", _EVALUATED,
           "held-out score"),
    Metric("eval/low", "share", "Lower end of its 95 % interval for these problems.", "", _EVALUATED),
    Metric("eval/high", "share", "Upper end of the interval.", "", _EVALUATED),
    Metric("eval/k", "rollouts", "Rollouts of each problem.", "`evaluation.samples`", _EVALUATED),
    Metric("eval/problems", "problems", "Problems behind the score.", "", _EVALUATED),
    Metric("eval/no_data", "rollouts", "Rollouts that failed for reasons outside the policy.", _ZERO, _EVALUATED),
    Metric("eval/family/{family}", "share", "The score of one family or source of problems.", "", _EVALUATED),
    Metric("eval_falsified/{figure}", "", "As `eval/...`, with falsified observations: a policy that reads them fails.",
           "a low score", _EVALUATED),
)  # fmt: skip

SECTIONS: dict[str, tuple[Metric, ...]] = {
    "Of every row": _GENERAL,
    "Reward": _REWARD,
    "Policy": _POLICY,
    "Rollouts": _ROLLOUT,
    "Groups": _GROUPS,
    "Age of tokens": _STALENESS,
    "Variance of the gradient": _VARIANCE,
    "Rollout correction": _CORRECTIONS,
    "Critic": _CRITICS,
    "Reference policy": _KL,
    "Agent programs": _GATEWAY,
    "Time": _TIME,
    "Evaluation": _EVALUATION,
}
METRICS: dict[str, Metric] = {metric.name: metric for section in SECTIONS.values() for metric in section}
_FAMILIES = tuple(metric for metric in METRICS.values() if "{" in metric.name)


def metric_of(key: str) -> Metric | None:
    """The metric behind a key of ``metrics.jsonl``, plug-ins' included; None for one of another program.

    >>> metric_of("rollout/ended/answered").unit
    'rollouts'
    """
    if key in METRICS:
        return METRICS[key]
    if key in USER_METRICS.names():
        return USER_METRICS[key].metric
    return next((family for family in _FAMILIES if family.pattern.fullmatch(key)), None)


def defined_metrics() -> list[dict[str, str]]:
    """Every metric of this program by its fields, for the viewer."""
    return [asdict(metric) for metric in METRICS.values()]
