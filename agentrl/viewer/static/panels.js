// What the page of a run draws. `lines`: [metric, metrics to take off, what is left then]; `prefix`: every metric that
// begins so, stacked. Labels and units are the catalogue's; `unit` is given where the panel draws something else.

const score = (row) => [row["eval/low"] ?? row["eval/avg_at_k"], row["eval/high"] ?? row["eval/avg_at_k"]];
const reward = (row, mean) => [mean - 1.96 * (row["reward/stderr"] ?? 0), mean + 1.96 * (row["reward/stderr"] ?? 0)];
const PASSES = ["time/forward_s", "time/backward_s", "time/update_s"];

export const PANELS = [
  { title: "Reward", lines: [["reward/mean"]], interval: { "reward/mean": reward } },
  { title: "Held-out score", lines: [["eval/avg_at_k"]], interval: { "eval/avg_at_k": score } },
  { title: "Entropy", lines: [["policy/entropy"]] },
  { title: "Gradient norm", lines: [["policy/gradient_norm"]] },
  {
    title: "Variance diagnostics",
    logarithmic: true,
    lines: [["variance/diagonal_proxy"], ["variance/head_exact_P"], ["variance/head_exact_S"], ["variance/head_exact_var"]],
  },
  { title: "Length", unit: "tokens per trajectory", lines: [["rollout/response_tokens_mean"], ["rollout/model_tokens_mean"]] },
  { title: "Turns and tool calls", unit: "per trajectory", lines: [["rollout/turns_mean"], ["rollout/tool_calls_mean"]] },
  { title: "How trajectories ended", unit: "share", lines: [], prefix: "rollout/ended/", stacked: true, share: true },
  { title: "Tool outcomes", lines: [], prefix: "rollout/tool_outcome/", stacked: true },
  { title: "Engine against trainer", logarithmic: true, lines: [["policy/engine_abs_diff"], ["policy/kl_engine_k3"]] },
  { title: "Staleness", fromZero: true, lines: [["staleness/mean"], ["staleness/max"]] },
  {
    title: "Where the seconds of a step went",
    stacked: true,
    lines: [["time/train_idle_s"], ...PASSES.map((pass) => [pass]), ["time/train_s", PASSES, "rest of training"], ["time/transfer_s"]],
  },
];
