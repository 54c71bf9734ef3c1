// One run: its curves, where the seconds of a step went, its alerts. A click on a point opens the step's trajectories.

import { ask } from "./api.js";
import { labelOf, loadCatalogue, meanings, unitOf } from "./catalogue.js";
import { draw, lineWithBand, palette } from "./charts.js";
import { choice, el, short, visible, words } from "./dom.js";
import { PANELS } from "./panels.js";
import { smoothing } from "./runs.js";
import { AXES, Series, smoothed } from "./series.js";
import { table } from "./table.js";
import { every } from "./timer.js";

const REFRESH = 3; // seconds

export async function runScreen([id], _query, signal) {
  await loadCatalogue();
  let facts = await ask(`/runs/${id}`);
  const series = new Series(id);
  await series.refresh();
  const state = { axis: "step", window: 1, metric: "" };
  const charts = el("div", { class: "grid" });
  const alerts = el("div");
  const head = el("div");
  const status = el("p", { class: "hint", "aria-live": "polite" });

  const open = (step) => {
    const stored = facts.trajectory_steps;
    if (!stored.length) return;
    const nearest = stored.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best));
    location.hash = `#/run/${id}/trajectories?first=${nearest}&last=${nearest}`;
  };

  async function show() {
    head.replaceChildren(summary(facts, series));
    alerts.replaceChildren(...alertList(facts.alerts, id));
    const panels = [...PANELS.filter((panel) => linesOf(panel, series).length), ...(state.metric ? [{ title: state.metric, lines: [[state.metric]] }] : [])];
    while (charts.children.length > panels.length) charts.lastChild.remove();
    for (const [place, panel] of panels.entries()) {
      charts.children[place] ?? charts.append(el("section", { class: "card" }, el("h2", {}, ""), el("div", { class: "chart" })));
      const [title, chart] = charts.children[place].children;
      if (title.textContent !== panel.title) charts.children[place].replaceChildren(title, chart, ...[meanings(linesOf(panel, series).map(([name]) => name))].filter(Boolean));
      title.textContent = panel.title;
      chart.setAttribute("role", "img");
      chart.setAttribute("aria-label", `${panel.title}. ${latest(panel, series)}`);
      draw(chart, tracesOf(panel, series, state), {
        layout: layoutOf(panel, series, series.places(facts.alerts, state.axis), state),
        onpoint: (_x, point) => open(point.customdata),
      });
    }
  }

  await show();
  every(REFRESH, signal, async () => {
    if (!(await series.refresh())) return;
    facts = await ask(`/runs/${id}`);
    await show();
    status.textContent = `Step ${series.rows.at(-1)?.step ?? 0} came in.`;
  });
  const names = [["", "none"], ...series.names().map((name) => [name, name])];
  const controls = el(
    "div",
    { class: "bar" },
    choice("Over", AXES, state.axis, (value) => ((state.axis = value), show())),
    smoothing(state, show),
    choice("One more metric", names, state.metric, (value) => ((state.metric = value), show())),
  );
  const hint = el("p", { class: "hint" }, "A click on a point opens the trajectories of its step.");
  const name = facts.path.split("/").at(-1);
  const notes = facts.notes ? el("p", { class: "notes" }, visible(facts.notes)) : null;
  const content = [el("h1", {}, name), head, notes, alerts, controls, charts, hint, status, settingsOf(facts)];
  return { title: name, trail: [["Runs", "#/"]], content };
}

function summary(facts, series) {
  const last = series.rows.findLast((row) => "reward/mean" in row) ?? {};
  const steps = facts.trajectory_steps;
  const state = facts.live ? "going on" : facts.finished ? "finished" : "stopped";
  const pairs = [["State", state], ["Last step", last.step ?? "–"], ["Estimator", facts.settings["algorithm.estimator"] ?? "–"]];
  const links = steps.length ? el("a", { href: `${location.hash}/trajectories?first=${steps.at(-1)}&last=${steps.at(-1)}` }, "newest step") : "none stored";
  const all = steps.length > 1 ? [" · ", el("a", { href: `${location.hash}/trajectories` }, `all ${steps.length} steps`)] : [];
  const list = pairs.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, String(value))));
  return el("dl", { class: "facts" }, list, el("div", {}, el("dt", {}, "Trajectories"), el("dd", {}, links, ...all)));
}

const FIRST_ALERTS = 4; // the others are folded away

function alertList(alerts, id) {
  const shown = alerts.map((alert) => {
    const text = `${words(alert.alert)}: ${alert.message}`;
    const link = el("a", { href: `#/run/${id}/trajectories?first=${alert.step}&last=${alert.step}` }, `step ${alert.step}`);
    return el("p", { class: "notice" }, link, ` ${text}`, el("span", { class: "hint" }, ` ${alert.advice}`));
  });
  if (shown.length <= FIRST_ALERTS + 1) return shown;
  const more = shown.splice(0, shown.length - FIRST_ALERTS);
  return [...shown, el("details", { class: "card" }, el("summary", {}, `${more.length} earlier alerts`), ...more)];
}

const USUAL = ["rollout/ended/answered", "rollout/tool_outcome/ok"]; // drawn first

// The lines of a panel that the run has: [metric, label, metrics to take off].
function linesOf(panel, series) {
  const names = new Set(series.names());
  if (panel.prefix) return [...names].filter((name) => name.startsWith(panel.prefix)).sort((a, b) => USUAL.includes(b) - USUAL.includes(a)).map((name) => [name, words(name.slice(panel.prefix.length)), []]);
  return panel.lines.filter(([name]) => names.has(name)).map(([name, less = [], rest]) => [name, rest ?? labelOf(name), less]);
}

// The newest values of a panel, in words.
function latest(panel, series) {
  const newest = ([name, label, less]) => {
    const { y, steps } = series.line(name, "step", less);
    return `${label}: ${short(y.at(-1))} at step ${steps.at(-1)}`;
  };
  return linesOf(panel, series).map(newest).join("; ");
}

function tracesOf(panel, series, state) {
  const lines = palette();
  const found = linesOf(panel, series);
  const traces = found.map(([name, label, less], place) => ({ name, label, color: lines[place % lines.length], ...series.line(name, state.axis, less) }));
  if (panel.stacked) {
    // Over hours, a bar lies where its step lay: from the end of the step before to its own end.
    const lasted = (trace) => trace.rows.map((row) => (row["time/step_s"] ?? 0) / 3600);
    const timeline = (trace) => (state.axis === "hours" ? { width: lasted(trace), offset: lasted(trace).map((hours) => -hours) } : {});
    return traces.map((trace) => ({ name: trace.label, x: trace.x, y: trace.y, customdata: trace.steps, type: "bar", marker: { color: trace.color }, ...timeline(trace) }));
  }
  return traces.flatMap(({ name, label, color, x, y, rows, steps }) => {
    const means = smoothed(y, state.window);
    const bounds = panel.interval?.[name];
    const around = bounds && state.window === 1 ? rows.map((row, place) => bounds(row, means[place])) : null;
    const low = around?.map(([value]) => value);
    const high = around?.map(([, value]) => value);
    return lineWithBand({ name: label, x, y: means, low, high, color, custom: steps, hidden: panel.lines.length === 1 });
  });
}

function layoutOf(panel, series, alerts, state) {
  const shapes = alerts.map((place) => ({ type: "line", x0: place, x1: place, yref: "paper", y0: 0, y1: 1, line: { dash: "dot", width: 1.5, color: "#d0453a" } }));
  const title = AXES.find(([kind]) => kind === state.axis)[1];
  const stacked = panel.stacked ? { barmode: "stack", barnorm: panel.share ? "fraction" : "", bargap: 0.1 } : {};
  const yaxis = { title: { text: panel.unit ?? unitOf(linesOf(panel, series).map(([name]) => name)), standoff: 6 }, type: panel.logarithmic ? "log" : "-", rangemode: panel.fromZero ? "tozero" : "normal" };
  return { shapes, xaxis: { title: { text: title, standoff: 4 } }, yaxis, ...stacked };
}

function settingsOf(facts) {
  const columns = [
    { title: "Setting", value: ([key]) => key },
    { title: "Value", value: ([, value]) => JSON.stringify(value), class: "text" },
  ];
  return el("details", { class: "card" }, el("summary", {}, "Settings"), table(columns, Object.entries(facts.settings)).element);
}
