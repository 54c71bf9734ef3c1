// Model tokens as elements: their fields, their colours, and selection by pointer or keyboard.

import { el, visible } from "./dom.js";

// Name, description, and the value that gets no color: 0 by default, "least" for counts and indices.
export const TOKEN_FIELDS = {
  advantages: ["Advantage", "A = G − b, from the estimator"],
  baselines: ["Baseline", "b, from the estimator; for token-level optimal baselines Σ W G / Σ W over the siblings"],
  returns: ["Return", "G, the sum of rewards from this token on"],
  gradient_share: ["Share of the gradient", "w (loss weight × A × weight)², divided by its sum over the step (without cross terms)"],
  energy: ["Energy", "w = 1 − 2p + Σ p², the squared norm of the gradient with respect to the logits"],
  realized_energy: ["Realized energy", "W, the sum of (weight × mask)² × w up to this token"],
  rewards: ["Reward", "assigned to the last token of a turn, including penalties"],
  log_probs: ["Log-prob, trainer", "of the policy before the step's updates"],
  engine_log_probs: ["Log-prob, engine", "of the distribution from which the token was sampled"],
  difference: ["Trainer − engine", "difference of the two log-probabilities"],
  ratio: ["Ratio", "probability under the updated policy, divided by the probability before the step", 1],
  entropy: ["Entropy", "nats, of the policy before the step's updates"],
  loss_mask: ["Loss mask", "false where a filter or the rollout correction rejects the token"],
  weights: ["Weight", "from the rollout correction"],
  policy_version: ["Policy version", "the number of updates behind the weights that sampled the token", "least"],
  turn: ["Turn", "index of the model's turn, from 0", "least"],
  values: ["Value", "from the critic"],
  reference_log_probs: ["Log-prob, reference", "of the reference policy"],
  update_log_probs: ["Log-prob, updated", "of the policy during the update that trained on the token"],
  hidden_norm_squared: ["Hidden norm²", "of the head's input, for head-exact energy"],
  loss_weight: ["Loss weight", "factor of the token in the loss, without the weight of the correction"],
  what_if_advantages: ["What if: advantage", "under the estimator chosen below"],
  what_if_baselines: ["What if: baseline", "under the estimator chosen below"],
  what_if_returns: ["What if: return", "under the estimator chosen below"],
  update: ["Update", "index of the step's update that trained on the token", "least"],
};

const numbersOf = (values) => values.filter((value) => value !== null && value !== undefined).map(Number).filter(Number.isFinite);

export function isConstant(values) {
  const first = values.find((value) => value !== null);
  return values.every((value) => value === null || value === first);
}

// The colour scale of a field: { low, high, below, above, shade(value) }. Values above the origin are blue and values below
// are orange, stronger with distance; the farthest two per cent share the strongest colour. Constant fields are coloured
// too.
export function scaleOf(name, values) {
  const numbers = numbersOf(values).sort((a, b) => a - b);
  if (!numbers.length) return { low: 0, high: 0, shade: () => "" };
  const [least, most] = [numbers[0], numbers.at(-1)];
  const anchor = TOKEN_FIELDS[name]?.[2] ?? 0;
  const origin = anchor !== "least" ? anchor : least < most ? least : 0;
  const far = numbers.map((value) => Math.abs(value - origin)).sort((a, b) => a - b);
  const end = far[Math.min(far.length - 1, Math.floor(0.98 * far.length))] || far.at(-1);
  const [below, above] = [least < origin, most > origin];
  const shade = (value) => (end ? colorOf(value < origin ? "--down" : "--up", Math.abs(value - origin) / end) : "");
  return { low: below ? origin - end : origin, high: above ? origin + end : origin, below, above, shade };
}

const STRONGEST_COLOR = 0.75;
const colorOf = (name, strength) => `rgb(var(${name}) / ${(STRONGEST_COLOR * Math.min(1, Math.max(0, strength))).toFixed(3)})`;

// The colours of a scale from low to high, as a CSS background.
export function gradientOf({ below, above }) {
  const colors = [...(below ? [colorOf("--down", 1)] : []), "transparent", ...(above ? [colorOf("--up", 1)] : [])];
  return `linear-gradient(to right, ${colors.length > 1 ? colors : "transparent, transparent"})`;
}

// Renders the text of a token. The style sheet draws marks for white space, so that copied text does not contain them.
function textOf(piece, id) {
  if (piece === null) return [`⟨${id}⟩ `];
  return visible(piece).split(/(\n|\t|^ +$)/).filter(Boolean).map((part) => {
    if (part === "\n") return el("s", { "data-mark": "↵" }, part);
    if (part === "\t") return el("s", { "data-mark": "⇥", class: "over" }, part);
    return /^ +$/.test(piece) ? el("s", { "data-mark": "·".repeat(part.length), class: "over" }, part) : part;
  });
}

export class TokenView {
  // `onchoose` is called with the index of the chosen token, the token, and whether the pointer only passes over it.
  constructor(onchoose) {
    this.items = [];
    this.onchoose = onchoose;
    this.current = -1;
  }

  // Creates the tokens of a segment. Indices continue from the previous segments.
  segment({ pieces, token_ids: ids, special, text }) {
    const specials = new Set(special);
    const whole = pieces.every((piece) => piece !== null) && pieces.join("").startsWith(text);
    const box = el("div", { class: "source tokens", tabIndex: 0, role: "group", "aria-label": "Model tokens; arrow keys move between them" });
    let length = 0;
    pieces.forEach((piece, index) => {
      const past = whole && length >= text.length && piece !== "";
      const kind = specials.has(index) ? "special" : past ? "past" : "";
      length += (piece ?? "").length;
      const item = document.createElement("i");
      item.append(...textOf(piece, ids[index]));
      if (kind) item.className = kind;
      item.dataset.index = this.items.length;
      this.items.push({ item, piece, id: ids[index], past, special: specials.has(index) });
      box.append(item);
    });
    const first = this.items.length - pieces.length;
    const of = (event) => event.target.closest?.("i[data-index]");
    box.addEventListener("pointerover", (event) => event.pointerType === "mouse" && of(event) && this.choose(Number(of(event).dataset.index), { passing: true }));
    box.addEventListener("click", (event) => of(event) && this.choose(Number(of(event).dataset.index), { scroll: event.pointerType === "mouse" ? null : "nearest" })); // on a phone, the panel covers tokens
    const inside = () => this.current >= first && this.current < first + pieces.length;
    box.addEventListener("focus", () => box.matches(":focus-visible") && !inside() && this.choose(first)); // focused by keyboard
    box.addEventListener("keydown", (event) => {
      const all = this.items.length;
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -all, End: all }[event.key];
      if (!move) return;
      event.preventDefault();
      this.choose(Math.min(this.items.length - 1, Math.max(0, this.current + move)), { scroll: "nearest" });
    });
    return box;
  }

  choose(index, { passing = false, scroll = null } = {}) {
    if (!this.items[index]) return;
    this.items[this.current]?.item.classList.remove("current");
    this.current = index;
    const { item } = this.items[index];
    item.classList.add("current");
    if (scroll) item.scrollIntoView({ block: scroll });
    this.onchoose(index, this.items[index], passing);
  }

  // Colours every token by its value of a field. Returns the scale.
  color(name, values) {
    const scale = scaleOf(name, values);
    this.items.forEach(({ item }, index) => {
      const value = values[index];
      item.style.backgroundColor = value === null || value === undefined ? "" : scale.shade(Number(value));
    });
    return scale;
  }
}
