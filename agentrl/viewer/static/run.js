// The page of a run: state, alerts and curves. A click on a point opens the trajectories of its step.

import { draw, lineStyle, Link } from "./charts.js";
import { ask, AXES, every, labelOf, loadCatalogue, meanings, Series, unitOf } from "./data.js";
import { choice, duration, el, factList, interval, notices, number, section, table, visible, words } from "./dom.js";

const REFRESH = 3; // seconds
const FIRST_ALERTS = 4; // the others are collapsed
const USUAL = ["rollout/ended/answered", "rollout/tool_outcome/ok"]; // drawn first
const PASSES = ["time/forward_s", "time/backward_s", "time/update_s"];

// For each metric with a 95 % interval: the metrics that determine the interval, and a function that computes its ends.
const INTERVALS = {
  "reward/mean": [["reward/stderr"], (mean, error = 0) => [mean - 1.96 * error, mean + 1.96 * error]],
  "eval/avg_at_k": [["eval/low", "eval/high"], (score, low = score, high = score) => [low, high]],
};

// `lines`: [metric, metrics to subtract, label of the rest]; `prefix`: draw all metrics with this prefix. Labels and units
// come from the catalogue; `unit` overrides the unit.
const PANELS = [
  { title: "Reward", lines: [["reward/mean"]] },
  { title: "Held-out score", lines: [["eval/avg_at_k"]] },
  { title: "Entropy", lines: [["policy/entropy"]] },
  { title: "Gradient norm", lines: [["policy/gradient_norm"]] },
  {
    title: "Variance diagnostics",
    log: true,
    lines: [
      ["variance/total_power"],
      ["variance/signal_strength"],
      ["variance/pure_noise"],
      ["variance/head_exact_total_power"],
      ["variance/head_exact_signal_strength"],
      ["variance/head_exact_pure_noise"],
    ],
  },
  { title: "Length", unit: "tokens per trajectory", lines: [["rollout/response_tokens_mean"], ["rollout/model_tokens_mean"]] },
  { title: "Turns and tool calls", unit: "per trajectory", lines: [["rollout/turns_mean"], ["rollout/tool_calls_mean"]] },
  { title: "How trajectories ended", unit: "share", lines: [], prefix: "rollout/ended/", stacked: true, share: true },
  { title: "Tool outcomes", lines: [], prefix: "rollout/tool_outcome/", stacked: true },
  { title: "Engine against trainer", log: true, lines: [["policy/engine_abs_diff"], ["policy/kl_engine_k3"]] },
  { title: "Staleness", zero: true, lines: [["staleness/mean"], ["staleness/max"]] },
  {
    title: "Time per step",
    stacked: true,
    lines: [["time/train_idle_s"], ...PASSES.map((pass) => [pass]), ["time/train_s", PASSES, "rest of training"], ["time/transfer_s"]],
  },
];

const HINT = "Click a point to open the trajectories of its step. Drag to zoom all charts; double-click to show all steps again.";
const PREFIXES = PANELS.map((panel) => panel.prefix).filter(Boolean);
const drawnMetrics = new Set([...PANELS.flatMap((panel) => panel.lines.flatMap(([name, less = []]) => [name, ...less])), ...Object.values(INTERVALS).flatMap(([names]) => names)]);

export async function runScreen({ parts: [id], query, signal, remember }) {
  await loadCatalogue();
  let facts = await ask(`/runs/${id}`);
  const series = new Series(id);
  const state = curveState(query);
  const wanted = (names) => names.filter((name) => name === state.metric || drawnMetrics.has(name) || PREFIXES.some((prefix) => name.startsWith(prefix)));
  await series.refresh(wanted);
  if (state.range) await series.refine(wanted);
  const charts = el("div", { class: "grid" });
  const alerts = el("div");
  const head = el("div");
  const status = el("p", { class: "hint", "aria-live": "polite" });
  const hint = el("p", { class: "hint" });
  const whole = el("button", { class: "act", type: "button", onclick: () => link.zoom(null) }, "Show all steps");
  const link = new Link(state.range, (range) => {
    state.range = range;
    whole.hidden = !range;
    remember({ range: range && range.map((x) => Number(x.toPrecision(6))).join("~") });
    if (range) refine();
  });
  const refine = async () => (await series.refine(wanted)) && show();
  whole.hidden = !state.range;

  const open = (step) => {
    const stored = facts.trajectory_steps;
    if (!stored.length) return;
    const nearest = stored.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
    location.hash = `#/run/${id}/trajectories?first=${nearest}&last=${nearest}`;
  };

  function show() {
    head.replaceChildren(summary(facts, id));
    alerts.replaceChildren(...alertList(facts.alerts, id));
    const panels = [...PANELS, ...(state.metric ? [{ title: state.metric, lines: [[state.metric]] }] : [])].filter((panel) => linesOf(panel, series).length);
    while (charts.children.length > panels.length) charts.lastChild.remove();
    const ends = series.extent(state.axis);
    const extent = ends && state.axis === "step" ? [ends[0] - 0.5, ends[1] + 0.5] : ends; // bars are a step wide
    hint.textContent = panels.length ? HINT : "No step is complete yet.";
    const shared = { link, extent, marks: series.positionsOf(facts.alerts, state.axis), onpoint: open };
    for (const [index, panel] of panels.entries()) {
      if (!charts.children[index]) charts.append(section("", el("div", { class: "chart" })));
      const card = charts.children[index];
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
    const grown = await series.refresh(wanted);
    facts = await ask(`/runs/${id}`);
    if (!grown && JSON.stringify(facts) === before) return;
    show();
    if (grown) status.textContent = `Updated to step ${facts.step}.`;
  });
  const more = async (value) => {
    state.metric = value;
    remember({ metric: value });
    await series.refresh(wanted);
    show();
  };
  const names = [["", "none"], ...series.names.map((name) => [name, name])];
  const controls = el(
    "div",
    { class: "bar" },
    ...curveChoices(state, remember, () => (link.zoom(null), show())),
    choice("Additional metric", names, state.metric, { onchange: more }),
    whole,
  );
  const name = facts.path.split("/").at(-1);
  const notes = facts.notes ? el("p", { class: "notes" }, visible(facts.notes)) : null;
  const content = [el("h1", {}, name), head, notes, ...notices(facts.warnings ?? []), alerts, controls, hint, charts, status, settingsOf(facts)];
  return { title: name, trail: [["Runs", "#/"]], content };
}

// Reads the user's choices for curves from the address: axis, smoothing, a metric and a range of the axis.
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
  return [choice("Over", AXES, state.axis, { onchange: axis }), choice("Smoothing", windows, String(state.window), { onchange: smooth })];
}

export const axisTitle = (state) => AXES.find(([kind]) => kind === state.axis)[1];

// Returns a metric of a run as a line of a chart, with its 95 % interval or, if points are means of steps, with the least
// and greatest values of these steps. Smoothed lines have no band.
export function metricLine(metric, series, { axis, window }, less = []) {
  const line = { ...series.line(metric, axis, window, less) };
  const [names, ends] = INTERVALS[metric] ?? [];
  if (names && window === 1 && !line.low) {
    const others = names.map((name) => series.valuesAt(name, series.curves[metric].axis));
    const both = line.y.map((value, index) => (value === null ? [null, null] : ends(value, ...others.map((values) => values[index] ?? undefined))));
    [line.low, line.high] = [both.map(([low]) => low), both.map(([, high]) => high)];
  }
  return { ...line, custom: line.steps };
}

// Returns the metrics that the line of `metric` requires.
export const metricsOf = (metric) => [metric, ...(INTERVALS[metric]?.[0] ?? [])];

function summary(facts, id) {
  const steps = facts.trajectory_steps;
  const at = `#/run/${id}/trajectories`;
  const newest = steps.length ? el("a", { href: `${at}?first=${steps.at(-1)}&last=${steps.at(-1)}` }, "newest step") : "none stored";
  const all = steps.length > 1 ? [" · ", el("a", { href: at }, `all ${number(steps.length)} steps`)] : [];
  return factList([
    ["State", [stateTag(facts), ...(facts.collapsed ? [el("span", { class: "tag bad" }, "collapsed")] : [])]],
    ["Last step", progress(facts)],
    ["Duration", duration(facts.seconds)],
    [labelOf(facts.result?.metric ?? "reward/mean"), resultText(facts)],
    ["Estimator", facts.settings["algorithm.estimator"] ?? "–"],
    ["Trajectories", [newest, ...all]],
  ]);
}

export const progress = ({ step, steps }) => `${number(step)}${steps ? ` / ${number(steps)}` : ""}`;

// Formats the result of a run with its interval.
export function resultText({ result }) {
  if (!result) return "–";
  const known = typeof result.low === "number" && typeof result.high === "number";
  return [number(result.value, [0.5]), ...(known ? [el("span", { class: "quiet" }, ` (${interval(result)})`)] : [])];
}

export const stateTag = ({ state }) => el("span", { class: state === "running" ? "tag good" : "tag" }, state);

// Renders the alerts with their messages and advice.
function alertList(alerts, id) {
  const shown = alerts.map((alert) => {
    const link = el("a", { href: `#/run/${id}/trajectories?first=${alert.step}&last=${alert.step}` }, `step ${alert.step}`);
    const what = el("p", {}, el("strong", {}, words(alert.alert)), " · ", link, el("br"), visible(alert.message));
    const advice = alert.advice ? el("p", { class: "advice" }, el("b", {}, "Advice"), ` ${visible(alert.advice)}`) : null; // empty if another alert is the cause
    return el("div", { class: "alert", role: "listitem" }, what, advice);
  });
  if (shown.length <= FIRST_ALERTS + 1) return shown;
  const more = shown.splice(0, shown.length - FIRST_ALERTS);
  return [...shown, el("details", { class: "card" }, el("summary", {}, `${more.length} earlier alerts`), ...more)];
}

// Returns the lines of a panel for the run's metrics: [metric, label, metrics to subtract].
function linesOf(panel, series) {
  if (panel.prefix) {
    const names = series.names.filter((name) => name.startsWith(panel.prefix) && name in series.curves);
    return names.sort((a, b) => USUAL.includes(b) - USUAL.includes(a)).map((name) => [name, words(name.slice(panel.prefix.length)), []]);
  }
  return panel.lines.filter(([name]) => name in series.curves).map(([name, less = [], rest]) => [name, rest ?? labelOf(name), less]);
}

// Describes the newest values of a panel.
function latest(panel, series) {
  const newest = ([name, label, less]) => {
    const { last, steps } = series.line(name, "step", 1, less);
    return `${label}: ${number(last)} at step ${steps.at(-1)}`;
  };
  return linesOf(panel, series).map(newest).join("; ");
}

function chartOf(panel, series, state) {
  const lines = linesOf(panel, series);
  const curves = lines.map(([name, label, less], index) => {
    const line = metricLine(name, series, panel.stacked ? { ...state, window: 1 } : state, less);
    // Over hours, a bar extends from the end of the previous step to the end of its step.
    const edges = panel.stacked && state.axis === "hours" ? { left: [0, ...line.x.slice(0, -1)], right: line.x } : {};
    return { name: label, ...line, ...edges, color: lineStyle(index).color, dash: panel.stacked ? "" : lineStyle(index).dash };
  });
  const y = { title: panel.unit ?? unitOf(lines.map(([name]) => name)), log: panel.log, zero: panel.zero };
  return { series: curves, stacked: panel.stacked, share: panel.share, x: { title: axisTitle(state), whole: state.axis === "step" }, y };
}

function settingsOf(facts) {
  const columns = [
    { title: "Setting", value: ([key]) => key },
    { title: "Value", value: ([, value]) => JSON.stringify(value), class: "text" },
  ];
  return el("details", { class: "card" }, el("summary", {}, "Settings"), table(columns, Object.entries(facts.settings), { label: "Settings" }).element);
}
