// Trajectories of one or more steps: filters, full-text search, a histogram of rewards, and a table.

import { draw, lineStyle } from "./charts.js";
import { ask } from "./data.js";
import { choice, el, notices, section, table, words } from "./dom.js";

const FIELDS = [
  ["text", "Text in the conversation", "search"],
  ["first", "From step", "number"],
  ["last", "To step", "number"],
  ["problem", "Problem", "search"],
  ["ended", "Ended", ["answered", "stopped", "void_turn", "turn_limit", "token_limit", "deadline", "forked", "cancelled", "infrastructure_failure"]],
  ["verdict", "Verdict", ["correct", "incorrect", "no_answer", "unparsable_answer", "answer_timeout", "unparsable_gold", "grader_timeout"]],
  ["tool", "Tool outcome", ["ok", "error", "timeout", "memory_limit", "output_limit", "killed", "infrastructure_failure", "malformed"]],
  ["dropped", "Not trained because", ["excluded", "void turn", "equal rewards", "filtered"]],
  ["least_reward", "Reward from", "number"],
  ["most_reward", "Reward to", "number"],
  ["least_turns", "Turns from", "number"],
  ["most_turns", "Turns to", "number"],
  ["least_staleness", "Staleness from", "number"],
  ["group", "Group", "number"],
];

const ALWAYS = 3; // fields that are shown before "More filters"

export async function trajectoriesScreen({ parts: [id], query }) {
  const facts = await ask(`/runs/${id}`);
  const asked = Object.fromEntries([...query].filter(([name]) => FIELDS.some(([field]) => field === name)));
  const rows = [];
  const warnings = el("div");
  const chart = el("div", { class: "chart", role: "img", "aria-label": "Histogram of rewards" });
  const shown = table(columnsOf(id), rows, { label: "Trajectories" });
  const status = el("p", { class: "hint", role: "status" });
  const more = el("button", { class: "act", type: "button", onclick: () => next() }, "Continue search");
  let after = "";
  const problemSection = section("This problem over the steps", el("div", { class: "chart", role: "img", "aria-label": "Reward of this problem over the steps" }));
  problemSection.hidden = true;

  async function next() {
    const answer = await ask(`/runs/${id}/trajectories`, { ...asked, after });
    rows.push(...answer.rows);
    after = answer.next ?? "";
    warnings.append(...notices(answer.warnings));
    more.hidden = !after;
    status.textContent = `${rows.length} trajectories${after ? `, so far: searched up to step ${after.split(":")[0]}` : ""}`;
    shown.fill();
    draw(chart, histogram(rows.map((row) => row.reward), ([low, high]) => openSearch(id, { ...asked, least_reward: low, most_reward: high })));
    drawProblemOverSteps();
  }

  // Draws the rewards of one problem over the steps.
  function drawProblemOverSteps() {
    if (!asked.problem || new Set(rows.map((row) => row.problem)).size !== 1) return;
    const ordered = rows.filter((row) => row.ended !== "forked").sort((a, b) => a.step - b.step);
    const steps = [...new Set(ordered.map((row) => row.step))];
    const mean = (step) => {
      const rewards = ordered.filter((row) => row.step === step).map((row) => row.reward);
      return rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    };
    const points = { name: "trajectories", points: true, color: lineStyle(0).color, x: ordered.map((row) => row.step), y: ordered.map((row) => row.reward), custom: ordered.map((row) => `${row.step}/${row.number}`) };
    const line = { name: "mean", color: lineStyle(1).color, x: steps, y: steps.map(mean) };
    const posteriorCurve = posterior(ordered, steps, facts.settings["data.posterior_decay"] ?? 1);
    problemSection.hidden = false;
    draw(problemSection.querySelector(".chart"), { series: [points, line, posteriorCurve], x: { title: "step", whole: true }, y: { title: "reward" }, onpoint: (trajectory) => (location.hash = `#/run/${id}/${trajectory}`) });
  }

  await next();
  const steps = asked.first && asked.first === asked.last ? `Step ${asked.first}` : "Trajectories";
  const name = facts.path.split("/").at(-1);
  const results = el("section", { class: "card" }, el("div", { class: "results" }, el("div", {}, status, more), chart), shown.element);
  const heading = el("div", { class: "heading" }, el("h1", {}, `${steps} of ${name}`), neighbours(id, asked, facts.trajectory_steps));
  return { title: steps, trail: [["Runs", "#/"], [name, `#/run/${id}`]], content: [heading, filters(id, asked), warnings, problemSection, results] };
}

// The posterior of a problem's success after each step, as a line with a band of one standard deviation: a Beta distribution
// over the stored rollouts. After each step, all earlier rollouts count `decay` times as much (docs/reference/formulas.md 9).
function posterior(rows, steps, decay) {
  let [wins, losses, before] = [0, 0, steps[0]];
  const curve = { name: "posterior of success", color: lineStyle(2).color, dash: lineStyle(2).dash, x: steps, y: [], low: [], high: [] };
  for (const step of steps) {
    const left = decay ** (step - before);
    [wins, losses, before] = [wins * left, losses * left, step];
    for (const row of rows) {
      if (row.step !== step || row.dropped === "excluded") continue;
      const [weight, won] = [row.path_weight ?? 1, Math.min(1, Math.max(0, row.reward))];
      wins += weight * won;
      losses += weight * (1 - won);
    }
    const [alpha, beta] = [wins + 1, losses + 1];
    const mean = alpha / (alpha + beta);
    const deviation = Math.sqrt((mean * (1 - mean)) / (alpha + beta + 1));
    curve.y.push(mean);
    curve.low.push(mean - deviation);
    curve.high.push(mean + deviation);
  }
  return curve;
}

// A histogram of rewards with at most twenty bars. `onbar` is called with the least and greatest reward of a clicked bar.
function histogram(rewards, onbar) {
  const least = rewards.reduce((a, b) => Math.min(a, b), Infinity);
  const width = (rewards.reduce((a, b) => Math.max(a, b), -Infinity) - least) / 20 || 1;
  const bins = new Map();
  for (const reward of rewards) {
    const bin = Math.min(19, Math.floor((reward - least) / width));
    bins.set(bin, [...(bins.get(bin) ?? []), reward]);
  }
  const bars = [...bins].sort(([a], [b]) => a - b);
  const at = (offset) => bars.map(([bin]) => least + (bin + offset) * width);
  const ends = bars.map(([, inside]) => [Math.min(...inside), Math.max(...inside)]);
  const series = { color: lineStyle(0).color, x: at(0.5), left: at(0.05), right: at(0.95), y: bars.map(([, inside]) => inside.length), custom: ends };
  return { series: bars.length ? [series] : [], stacked: true, height: 96, x: { title: "reward (click a bar to filter)", ticks: [...new Set([ends[0]?.[0], ends.at(-1)?.[1]])].filter(Number.isFinite) }, y: { whole: true }, onpoint: onbar };
}

function openSearch(id, values) {
  const present = Object.entries(values).filter(([, value]) => value !== "");
  location.hash = `#/run/${id}/trajectories?${new URLSearchParams(present)}`;
}

function neighbours(id, asked, steps) {
  if (!asked.first || asked.first !== asked.last) return null;
  const here = Number(asked.first);
  const link = (step, label) => el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ ...asked, first: step, last: step })}` }, label);
  const before = steps.findLast((step) => step < here);
  const after = steps.find((step) => step > here);
  const links = [before !== undefined ? link(before, `← step ${before}`) : null, after !== undefined ? link(after, `step ${after} →`) : null];
  return el("p", { class: "steps" }, links);
}

function filters(id, asked) {
  const inputs = FIELDS.map(([name, label, kind]) => {
    const value = asked[name] ?? "";
    if (Array.isArray(kind)) return choice(label, [["", "any"], ...kind.map((each) => [each, words(each)])], value, { name });
    const input = el("input", { name, type: kind, value, step: "any", size: kind === "number" ? 6 : 20 });
    return el("label", { class: kind === "search" ? "field grow" : "field" }, el("span", {}, label), input);
  });
  const used = FIELDS.slice(ALWAYS).filter(([name]) => asked[name]).map(([name, label]) => `${label}: ${words(asked[name])}`);
  const more = el("details", { class: "all" }, el("summary", {}, used.length ? `More filters (${used.join(", ")})` : "More filters"), el("div", { class: "filters" }, inputs.slice(ALWAYS)));
  const submit = (event) => {
    event.preventDefault();
    openSearch(id, Object.fromEntries(new FormData(event.target)));
  };
  const buttons = [el("button", { class: "act", type: "submit" }, "Search"), el("a", { href: `#/run/${id}/trajectories` }, "Clear")];
  return el("form", { class: "card search", onsubmit: submit, role: "search" }, el("div", { class: "bar" }, inputs.slice(0, ALWAYS), buttons), more);
}

function columnsOf(id) {
  const tools = (row) => Object.entries(row.tools).map(([outcome, count]) => `${count} ${words(outcome)}`).join(", ");
  return [
    { title: "Trajectory", value: (row) => row.step * 1e6 + row.number, cell: (row) => el("a", { href: `#/run/${id}/${row.step}/${row.number}` }, `${row.step} / ${row.number}`) },
    { title: "Problem", value: (row) => row.problem, cell: (row) => el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ problem: row.problem })}`, title: "This problem over all steps" }, row.problem) },
    { title: "Reward", number: true, value: (row) => row.reward },
    { title: "Ended", value: (row) => row.ended, cell: (row) => words(row.ended) },
    { title: "Verdict", value: (row) => row.verdict, cell: (row) => verdict(row) },
    { title: "Answer", value: (row) => row.answer, class: "brief" },
    { title: "Turns", number: true, value: (row) => row.turns },
    { title: "Tokens", number: true, value: (row) => row.tokens },
    { title: "Tools", value: tools, cell: tools },
    { title: "Staleness", number: true, value: (row) => row.staleness },
    { title: "Not trained", value: (row) => row.dropped, cell: (row) => row.dropped },
    { title: "Share of gradient", number: true, value: (row) => row.gradient_share },
    { title: "Seconds", number: true, value: (row) => row.seconds },
    { title: "Statement", value: (row) => row.statement, class: "line" },
  ];
}

export function verdict(row) {
  if (!row.verdict) return "–";
  return el("span", { class: row.verdict === "correct" ? "tag good" : "tag bad" }, words(row.verdict));
}
