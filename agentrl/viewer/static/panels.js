// What the page of a run draws. `lines`: [metric, label, metrics to take off]; `prefix`: every metric that begins so, stacked.

const score = (row) => [row["eval/low"] ?? row["eval/avg_at_k"], row["eval/high"] ?? row["eval/avg_at_k"]];
const reward = (row, mean) => [mean - 1.96 * (row["reward/stderr"] ?? 0), mean + 1.96 * (row["reward/stderr"] ?? 0)];

export const PANELS = [
  { title: "Reward", lines: [["reward/mean", ""]], interval: { "reward/mean": reward } },
  { title: "Held-out score", lines: [["eval/avg_at_k", ""]], interval: { "eval/avg_at_k": score } },
  { title: "Entropy", unit: "nats per token", lines: [["policy/entropy", ""]] },
  { title: "Gradient norm", lines: [["policy/gradient_norm", ""]] },
  {
    title: "Variance diagnostics",
    logarithmic: true,
    lines: [
      ["variance/diagonal_proxy", "diagonal proxy"],
      ["variance/head_exact_P", "head exact: power"],
      ["variance/head_exact_S", "head exact: signal"],
      ["variance/head_exact_var", "head exact: variance"],
    ],
  },
  {
    title: "Length",
    unit: "tokens per trajectory",
    lines: [
      ["rollout/response_tokens_mean", "with observations"],
      ["rollout/model_tokens_mean", "the model's own"],
    ],
  },
  {
    title: "Turns and tool calls",
    unit: "per trajectory",
    lines: [
      ["rollout/turns_mean", "turns"],
      ["rollout/tool_calls_mean", "tool calls"],
    ],
  },
  { title: "How trajectories ended", unit: "share", lines: [], prefix: "rollout/ended/", stacked: true, share: true },
  { title: "Tool outcomes", unit: "calls", lines: [], prefix: "rollout/tool_outcome/", stacked: true },
  {
    title: "Engine against trainer",
    logarithmic: true,
    lines: [
      ["policy/engine_abs_diff", "mean |log-prob difference|"],
      ["policy/kl_engine_k3", "KL, k3 estimate"],
    ],
  },
  {
    title: "Staleness",
    fromZero: true,
    unit: "policy versions",
    lines: [
      ["staleness/mean", "mean"],
      ["staleness/max", "largest"],
    ],
  },
  {
    title: "Where the seconds of a step went",
    unit: "seconds",
    stacked: true,
    lines: [
      ["time/train_idle_s", "waiting for rollouts"],
      ["time/forward_s", "forward"],
      ["time/backward_s", "backward"],
      ["time/update_s", "optimizer"],
      ["time/train_s", "rest of training", ["time/forward_s", "time/backward_s", "time/update_s"]],
      ["time/transfer_s", "weights to the engine"],
    ],
  },
];
