// The fields of a token: what they are called, how they are made, and how a value becomes a colour.

export const TOKEN_FIELDS = {
  advantages: ["Advantage", "A = G − b, as the estimator gives it"],
  baselines: ["Baseline", "b, the estimator's: for token-level optimal baselines Σ W G / Σ W over the siblings"],
  returns: ["Return", "G, the sum of rewards from this token on"],
  rewards: ["Reward", "at the last token of a turn, with penalties"],
  energy: ["Energy", "w = 1 − 2p + Σ p², the squared norm of the gradient with respect to the logits"],
  realized_energy: ["Realized energy", "W, the sum of (weight × mask)² × w up to this token"],
  gradient_share: ["Share of the gradient", "w (loss weight × A × weight)², over its sum in the step (without cross terms)"],
  log_probs: ["Log-prob, trainer", "of the policy before the step's updates"],
  engine_log_probs: ["Log-prob, engine", "of the distribution that the token was sampled from"],
  difference: ["Trainer − engine", "difference of the two log-probabilities"],
  ratio: ["Ratio", "probability under the policy that was updated over that before the step"],
  entropy: ["Entropy", "nats, of the policy before the step's updates"],
  loss_mask: ["Loss mask", "false where a filter or the rollout correction rejects the token"],
  weights: ["Weight", "of the rollout correction"],
  policy_version: ["Policy version", "the number of updates behind the weights that sampled the token"],
  turn: ["Turn", "of the model, from 0"],
  values: ["Value", "the critic's"],
  reference_log_probs: ["Log-prob, reference", "of the reference policy"],
  update_log_probs: ["Log-prob, updated", "of the policy that an update of the step changed"],
  hidden_norm_squared: ["Hidden norm²", "of the head's input, for head-exact energy"],
  loss_weight: ["Loss weight", "the factor of the token in the loss, before the correction's weight"],
  what_if_advantages: ["What if: advantage", "under the estimator chosen below"],
  what_if_baselines: ["What if: baseline", "under the estimator chosen below"],
  what_if_returns: ["What if: return", "under the estimator chosen below"],
  update: ["Update", "which update of the step trained on it"],
};

export const fieldName = (name) => TOKEN_FIELDS[name]?.[0] ?? name;

// From the values of a field to { low, high, signed, below, shade(value) }: blue is more, orange is below zero; the outer two per cent share the end's colour.
export function scaleOf(values) {
  const numbers = values.filter((value) => value !== null).map(Number).sort((a, b) => a - b);
  if (!numbers.length) return { low: 0, high: 0, signed: false, shade: () => "" };
  const at = (share) => numbers[Math.min(numbers.length - 1, Math.floor(share * numbers.length))];
  const [least, most] = [at(0.02), at(0.98)];
  const signed = numbers[0] < 0 && numbers.at(-1) > 0;
  if (signed) {
    const end = Math.max(Math.abs(least), Math.abs(most)) || Math.max(Math.abs(numbers[0]), numbers.at(-1));
    return { low: -end, high: end, signed, shade: (value) => ink(value < 0 ? "--down" : "--up", Math.abs(value) / end) };
  }
  if (numbers[0] < 0) {
    const low = least < 0 ? least : numbers[0];
    return { low, high: 0, below: true, shade: (value) => ink("--down", value / low) };
  }
  const [low, high] = most > least ? [least, most] : [numbers[0], numbers.at(-1)];
  const width = high - low || 1;
  return { low, high, signed, shade: (value) => ink("--up", (value - low) / width) };
}

const ink = (name, strength) => `rgb(var(${name}) / ${(0.75 * Math.min(1, Math.max(0, strength))).toFixed(3)})`;
