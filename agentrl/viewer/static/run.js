// One run: its state, its alerts and its curves. A click on a point opens the trajectories of its step.

import { draw, lineStyle, Link, smoothed } from "./charts.js";
import { ask, AXES, every, labelOf, loadCatalogue, meanings, Series, unitOf } from "./data.js";
import { choice, duration, el, factList, number, section, table, visible, words } from "./dom.js";

const REFRESH = 3; // seconds
const FIRST_ALERTS = 4; // the others are folded away
const USUAL = ["rollout/ended/answered", "rollout/tool_outcome/ok"]; // drawn first
const PASSES = ["time/forward_s", "time/backward_s", "time/update_s"];

// 95 % intervals of metrics that have one: from a row and its (smoothed) value to both ends.
export const INTERVALS = {
  "reward/mean": (row, mean) => [mean - 1.96 * (row["reward/stderr"] ?? 0), mean + 1.96 * (row["reward/stderr"] ?? 0)],
  "eval/avg_at_k": (row) => [row["eval/low"] ?? row["eval/avg_at_k"], row["eval/high"] ?? row["eval/avg_at_k"]],
};

// `lines`: [metric, metrics to take off, what is left then]; `prefix`: every metric that begins so. Labels and units are
// the catalogue's; `unit` is given where the panel draws something else.
const PANELS = [
  { title: "Reward", lines: [["reward/mean"]] },
  { title: "Held-out score", lines: [["eval/avg_at_k"]] },
  { title: "Entropy", lines: [["policy/entropy"]] },
  { title: "Gradient norm", lines: [["policy/gradient_norm"]] },
  {
    title: "Variance diagnostics",
    log: true,
    lines: [["variance/diagonal_proxy"], ["variance/head_exact_P"], ["variance/head_exact_S"], ["variance/head_exact_var"]],
  },
  { title: "Length", unit: "tokens per trajectory", lines: [["rollout/response_tokens_mean"], ["rollout/model_tokens_mean"]] },
  { title: "Turns and tool calls", unit: "per trajectory", lines: [["rollout/turns_mean"], ["rollout/tool_calls_mean"]] },
  { title: "How trajectories ended", unit: "share", lines: [], prefix: "rollout/ended/", stacked: true, share: true },
  { title: "Tool outcomes", lines: [], prefix: "rollout/tool_outcome/", stacked: true },
  { title: "Engine against trainer", log: true, lines: [["policy/engine_abs_diff"], ["policy/kl_engine_k3"]] },
  { title: "Staleness", zero: true, lines: [["staleness/mean"], ["staleness/max"]] },
  {
    title: "Where the seconds of a step went",
    stacked: true,
    lines: [["time/train_idle_s"], ...PASSES.map((pass) => [pass]), ["time/train_s", PASSES, "rest of training"], ["time/transfer_s"]],
  },
];

export async function runScreen({ parts: [id], query, signal, remember }) {
  await loadCatalogue();
  let facts = await ask(`/runs/${id}`);
  const series = new Series(id);
  await series.refresh();
  const state = curveState(query);
  const charts = el("div", { class: "grid" });
  const alerts = el("div");
  const head = el("div");
  const status = el("p", { class: "hint", "aria-live": "polite" });
  const whole = el("button", { class: "act", type: "button", onclick: () => link.zoom(null) }, "Show all steps");
  const link = new Link(state.range, (range) => {
    state.range = range;
    whole.hidden = !range;
    remember({ range: range && range.map((x) => Number(x.toPrecision(6))).join("~") });
  });
  whole.hidden = !state.range;

  const open = (step) => {
    const stored = facts.trajectory_steps;
    if (!stored.length) return;
    const nearest = stored.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
    location.hash = `#/run/${id}/trajectories?first=${nearest}&last=${nearest}`;
  };

  function show() {
    head.replaceChildren(summary(facts, series, id));
    alerts.replaceChildren(...alertList(facts.alerts, id));
    const panels = [...PANELS.filter((panel) => linesOf(panel, series).length), ...(state.metric ? [{ title: state.metric, lines: [[state.metric]] }] : [])];
    while (charts.children.length > panels.length) charts.lastChild.remove();
    const places = series.axis(state.axis);
    const shared = { link, extent: places.length ? [places[0], places.at(-1)] : null, marks: series.places(facts.alerts, state.axis), onpoint: open };
    for (const [place, panel] of panels.entries()) {
      if (!charts.children[place]) charts.append(section("", el("div", { class: "chart" })));
      const card = charts.children[place];
      const [title, chart] = card.children;
      if (title.textContent !== panel.title) card.replaceChildren(title, chart, ...[meanings(linesOf(panel, series).map(([name]) => name))].filter(Boolean));
      title.textContent = panel.title;
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", `${panel.title}. ${latest(panel, series)}`);
      draw(chart, { ...chartOf(panel, series, state), ...shared });
    }
  }

  show();
  every(REFRESH, signal, async () => {
    const before = JSON.stringify(facts);
    const grown = await series.refresh();
    facts = await ask(`/runs/${id}`);
    if (!grown && JSON.stringify(facts) === before) return;
    show();
    if (grown) status.textContent = `Step ${series.rows.at(-1)?.step ?? 0} came in.`;
  });
  const names = [["", "none"], ...series.names().map((name) => [name, name])];
  const controls = el(
    "div",
    { class: "bar" },
    ...curveChoices(state, remember, () => (link.zoom(null), show())),
    choice("One more metric", names, state.metric, (value) => ((state.metric = value), remember({ metric: value }), show())),
    whole,
  );
  const hint = el("p", { class: "hint" }, "A click on a point opens the trajectories of its step. Drag over steps to zoom all charts; a double click shows all steps again.");
  const name = facts.path.split("/").at(-1);
  const notes = facts.notes ? el("p", { class: "notes" }, visible(facts.notes)) : null;
  const content = [el("h1", {}, name), head, notes, alerts, controls, charts, hint, status, settingsOf(facts)];
  return { title: name, trail: [["Runs", "#/"]], content };
}

// What the user chose about curves: axis, smoothing, a metric and a range of the axis, as the address holds them.
export function curveState(query) {
  const range = (query.get("range") ?? "").split("~").map(Number);
  return {
    axis: AXES.some(([kind]) => kind === query.get("axis")) ? query.get("axis") : "step",
    window: Number(query.get("smooth")) || 1,
    metric: query.get("metric") ?? "",
    range: range.length === 2 && range.every(Number.isFinite) ? range : null,
  };
}

export function curveChoices(state, remember, redraw) {
  const axis = (value) => ((state.axis = value), remember({ axis: value === "step" ? null : value }), redraw());
  const smooth = (value) => ((state.window = Number(value)), remember({ smooth: value === "1" ? null : value }), redraw());
  const windows = [["1", "off"], ["5", "5 steps"], ["15", "15 steps"], ["51", "51 steps"]];
  return [choice("Over", AXES, state.axis, axis), choice("Smoothing", windows, String(state.window), smooth)];
}

export const axisTitle = (state) => AXES.find(([kind]) => kind === state.axis)[1];

// One metric of a run as a line of a chart, with its interval if it is not smoothed.
export function metricLine(metric, series, state, less = []) {
  const { x, y, rows, steps } = series.line(metric, state.axis, less);
  const values = smoothed(y, state.window);
  const ends = INTERVALS[metric] && state.window === 1 ? rows.map((row, place) => INTERVALS[metric](row, values[place])) : null;
  return { x, y: values, rows, custom: steps, low: ends?.map(([low]) => low), high: ends?.map(([, high]) => high) };
}

function summary(facts, series, id) {
  const last = series.rows.findLast((row) => "reward/mean" in row);
  const steps = facts.trajectory_steps;
  const at = `#/run/${id}/trajectories`;
  const newest = steps.length ? el("a", { href: `${at}?first=${steps.at(-1)}&last=${steps.at(-1)}` }, "newest step") : "none stored";
  const all = steps.length > 1 ? [" · ", el("a", { href: at }, `all ${steps.length} steps`)] : [];
  return factList([
    ["State", stateTag(facts)],
    ["Step", progress({ step: last?.step ?? facts.step, steps: facts.steps })],
    ["Duration", duration(facts.seconds)],
    ["Reward", number(last?.["reward/mean"])],
    ["Estimator", facts.settings["algorithm.estimator"] ?? "–"],
    ["Trajectories", [newest, ...all]],
  ]);
}

export const progress = ({ step, steps }) => `${number(step)}${steps ? ` / ${number(steps)}` : ""}`;

export function stateTag({ state }) {
  return el("span", { class: state === "running" ? "tag good" : "tag" }, words(state));
}

// What happened and what to do about it, apart from each other.
function alertList(alerts, id) {
  const shown = alerts.map((alert) => {
    const link = el("a", { href: `#/run/${id}/trajectories?first=${alert.step}&last=${alert.step}` }, `step ${alert.step}`);
    const what = el("p", {}, el("strong", {}, words(alert.alert)), " · ", link, el("br"), visible(alert.message));
    return el("div", { class: "alert", role: "listitem" }, what, el("p", { class: "advice" }, el("b", {}, "Advice"), ` ${visible(alert.advice)}`));
  });
  if (shown.length <= FIRST_ALERTS + 1) return shown;
  const more = shown.splice(0, shown.length - FIRST_ALERTS);
  return [...shown, el("details", { class: "card" }, el("summary", {}, `${more.length} earlier alerts`), ...more)];
}

// The lines of a panel that the run has: [metric, label, metrics to take off].
function linesOf(panel, series) {
  if (panel.prefix) {
    const found = series.names().filter((name) => name.startsWith(panel.prefix));
    return found.sort((a, b) => USUAL.includes(b) - USUAL.includes(a)).map((name) => [name, words(name.slice(panel.prefix.length)), []]);
  }
  return panel.lines.filter(([name]) => series.known.has(name)).map(([name, less = [], rest]) => [name, rest ?? labelOf(name), less]);
}

// The newest values of a panel, in words.
function latest(panel, series) {
  const newest = ([name, label, less]) => {
    const { y, steps } = series.line(name, "step", less);
    return `${label}: ${number(y.at(-1))} at step ${steps.at(-1)}`;
  };
  return linesOf(panel, series).map(newest).join("; ");
}

function chartOf(panel, series, state) {
  const lines = linesOf(panel, series);
  const found = lines.map(([name, label, less], place) => {
    const { rows, ...line } = metricLine(name, series, panel.stacked ? { ...state, window: 1 } : state, less);
    // Over hours, a bar lies where its step lay: from the end of the step before to its own end.
    const lasted = panel.stacked && state.axis === "hours" ? rows.map((row) => (row["time/step_s"] ?? 0) / 3600) : null;
    const edges = lasted ? { left: line.x.map((end, row) => end - lasted[row]), right: line.x } : {};
    return { name: label, ...line, ...edges, color: lineStyle(place).color, dash: panel.stacked ? "" : lineStyle(place).dash };
  });
  const y = { title: panel.unit ?? unitOf(lines.map(([name]) => name)), log: panel.log, zero: panel.zero };
  return { series: found, stacked: panel.stacked, share: panel.share, x: { title: axisTitle(state), whole: state.axis === "step" }, y };
}

function settingsOf(facts) {
  const columns = [
    { title: "Setting", value: ([key]) => key },
    { title: "Value", value: ([, value]) => JSON.stringify(value), class: "text" },
  ];
  return el("details", { class: "card" }, el("summary", {}, "Settings"), table(columns, Object.entries(facts.settings)).element);
}
