// All runs side by side: a table, overlaid curves, and the settings in which they differ; below, the evaluations.

import { ask } from "./api.js";
import { loadCatalogue, meanings, metricOf } from "./catalogue.js";
import { draw, lineWithBand, palette } from "./charts.js";
import { choice, el, notices, section, short } from "./dom.js";
import { AXES, Series, smoothed } from "./series.js";
import { every } from "./timer.js";
import { table } from "./table.js";

const FIRST = "reward/mean";
const SHOWN_AT_FIRST = 8;
const INTERVALS = { "reward/mean": "reward/stderr" };

export async function runsScreen(_parts, _query, signal) {
  await loadCatalogue();
  const { runs, evaluations } = await ask("/places");
  const readable = runs.filter((run) => !run.problem);
  const state = { metric: FIRST, axis: "step", window: 1, search: "", chosen: new Set() };
  const newest = [...readable].sort((a, b) => b.modified - a.modified).slice(0, SHOWN_AT_FIRST);
  newest.forEach((run) => state.chosen.add(run.id));
  const series = new Map(readable.map((run) => [run.id, new Series(run.id)]));
  const colours = new Map(readable.map((run, place) => [run.id, place]));
  const chart = el("div", { class: "chart", role: "img", "aria-label": "Curves of the chosen runs" });
  const metrics = el("div");
  const about = el("div");
  const runTable = el("div");
  const differing = el("div");

  async function curves() {
    const shown = readable.filter((run) => state.chosen.has(run.id));
    await Promise.all(shown.filter((run) => !series.get(run.id).position).map((run) => series.get(run.id).refresh()));
    const names = [...new Set(shown.flatMap((run) => series.get(run.id).names()))].sort();
    const pick = (value) => ((state.metric = value), curves());
    metrics.replaceChildren(choice("Metric", names.map((name) => [name, name]), state.metric, pick));
    const lines = palette();
    const traces = shown.flatMap((run) => {
      const { x, y, rows } = series.get(run.id).line(state.metric, state.axis);
      const error = INTERVALS[state.metric];
      const means = smoothed(y, state.window);
      const half = rows.map((row) => 1.96 * (row[error] ?? 0));
      const band = error && state.window === 1;
      const low = band ? means.map((mean, place) => mean - half[place]) : null;
      const high = band ? means.map((mean, place) => mean + half[place]) : null;
      return lineWithBand({ name: run.name, x, y: means, low, high, color: lines[colours.get(run.id) % lines.length] });
    });
    const title = AXES.find(([kind]) => kind === state.axis)[1];
    about.replaceChildren(...[meanings([state.metric])].filter(Boolean));
    draw(chart, traces, { layout: { height: 340, showlegend: true, xaxis: { title: { text: title } }, yaxis: { title: { text: metricOf(state.metric).unit } } } });
  }

  function list() {
    const lines = palette();
    const rows = readable.filter((run) => `${run.name}\n${run.notes}`.toLowerCase().includes(state.search.toLowerCase()));
    const toggle = (run) => (event) => {
      if (event.target.checked) state.chosen.add(run.id);
      else state.chosen.delete(run.id);
      curves();
      settings();
    };
    const columns = [
      {
        title: "Curve",
        value: (run) => state.chosen.has(run.id),
        cell: (run) => el("input", { type: "checkbox", checked: state.chosen.has(run.id), "aria-label": `Show ${run.name}`, onchange: toggle(run) }),
      },
      { title: "Run", value: (run) => run.name, cell: (run) => [swatch(lines[colours.get(run.id) % lines.length]), el("a", { href: `#/run/${run.id}` }, run.name)] },
      { title: "State", value: stateOf, cell: (run) => el("span", { class: run.live ? "tag good" : "tag" }, stateOf(run)) },
      ...(readable.some((run) => run.notes) ? [{ title: "Notes", value: (run) => run.notes.split("\n")[0], class: "text" }] : []),
      { title: "Estimator", value: (run) => run.settings["algorithm.estimator"] },
      { title: "Environment", value: (run) => run.settings.env },
      { title: "Seed", number: true, value: (run) => run.settings.seed },
      { title: "Stored steps", number: true, value: (run) => run.stored_steps },
      { title: "Last change", value: (run) => run.modified, cell: (run) => new Date(run.modified * 1000).toLocaleString() },
    ];
    runTable.replaceChildren(table(columns, rows, { caption: `${rows.length} of ${runs.length} runs` }).element);
  }

  function settings() {
    const shown = readable.filter((run) => state.chosen.has(run.id));
    const keys = [...new Set(shown.flatMap((run) => Object.keys(run.settings)))].sort();
    const text = (run, key) => JSON.stringify(run.settings[key] ?? null);
    const rows = keys.filter((key) => key !== "name" && new Set(shown.map((run) => text(run, key))).size > 1);
    if (shown.length < 2) return differing.replaceChildren();
    const columns = [{ title: "Setting", value: (key) => key }];
    shown.forEach((run) => columns.push({ title: run.name, value: (key) => text(run, key), class: "brief" }));
    const content = rows.length ? table(columns, rows, {}).element : el("p", { class: "quiet" }, "The chosen runs have the same settings.");
    return differing.replaceChildren(section("Settings that differ", content));
  }

  list();
  settings();
  await curves();
  every(5, signal, async () => {
    const live = readable.filter((run) => run.live && state.chosen.has(run.id));
    const changed = await Promise.all(live.map((run) => series.get(run.id).refresh()));
    if (changed.some(Boolean)) await curves();
  });
  const controls = el(
    "div",
    { class: "bar" },
    metrics,
    choice("Over", AXES, state.axis, (value) => ((state.axis = value), curves())),
    smoothing(state, curves),
    el("label", { class: "field grow" }, el("span", {}, "Search runs"), el("input", { type: "search", oninput: (event) => ((state.search = event.target.value), list()) })),
  );
  const problems = notices(runs.filter((run) => run.problem).map((run) => `${run.name}: ${run.problem}`));
  const page = [...problems];
  if (runs.length) page.push(section("Runs", controls, chart, about, runTable), differing);
  if (evaluations.length) page.push(section("Evaluations", evaluationTable(evaluations)));
  return { title: "Runs", content: page };
}

export function smoothing(state, redraw) {
  const windows = [[1, "off"], [5, "5 steps"], [15, "15 steps"], [51, "51 steps"]].map(([value, label]) => [String(value), label]);
  return choice("Smoothing", windows, String(state.window), (value) => ((state.window = Number(value)), redraw()));
}

const stateOf = (run) => (run.live ? "going on" : run.finished ? "finished" : "stopped");
const swatch = (color) => {
  const mark = el("span", { class: "swatch" });
  mark.style.backgroundColor = color;
  return mark;
};

function evaluationTable(evaluations) {
  const names = [...new Set(evaluations.flatMap((one) => Object.keys(one.benchmarks ?? {})))].sort();
  const score = (one, name) => one.benchmarks?.[name];
  const columns = [
    { title: "Evaluation", value: (one) => one.name, cell: (one) => el("a", { href: `#/evaluation/${one.id}` }, one.name) },
    { title: "Model", value: (one) => one.model },
  ];
  for (const name of names) {
    const interval = ({ low, high }) => ` (${short(low)} to ${short(high)})`;
    const cell = (one) => (score(one, name) ? `${short(score(one, name).mean)}${interval(score(one, name).problems_like_these)}` : "–");
    columns.push({ title: name, number: true, value: (one) => score(one, name)?.mean, cell });
  }
  return table(columns, evaluations, { caption: "Mean score with its 95 % interval for problems like these" }).element;
}
