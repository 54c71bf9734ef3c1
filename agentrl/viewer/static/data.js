// Data of the pages: requests to the viewer's server or to the answers in an exported page, curves, and metrics.

import { el } from "./dom.js";

const token = new URLSearchParams(location.search).get("token") ?? "";
const storedAnswers = new Map([...document.querySelectorAll("script[data-answer]")].map((script) => [script.dataset.answer, script]));

export const isExported = storedAnswers.size > 0;

// Returns true if `ask` can answer requests for this path. An exported page may contain only some of the rollouts.
export const isAvailable = (path) => !isExported || storedAnswers.has(path);

export async function ask(path, query = {}) {
  if (isExported) return answerFromPage(path, query);
  const pairs = Object.entries(query).flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((each) => [name, each]));
  const present = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = present.length ? `?${new URLSearchParams(present)}` : "";
  let answer;
  try {
    answer = await fetch(`/api${path}${tail}`, { headers: { Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("The viewer does not respond: start `agentrl view` again.");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

const connectionNotice = document.getElementById("trouble");

// Repeats a task until the user leaves its screen. If the task fails, shows the error and the time of the last success, and
// retries. Waits at least ten times as long as the task took, so that a slow disk is not read continuously.
export function every(seconds, signal, task) {
  if (isExported) return;
  let lastSuccess = new Date();
  let timer = setTimeout(once, seconds * 1000);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    connectionNotice.hidden = true;
  });
  async function once() {
    const began = performance.now();
    try {
      if (!document.hidden) {
        await task();
        lastSuccess = new Date();
        if (!signal.aborted) connectionNotice.hidden = true;
      }
    } catch (error) {
      if (signal.aborted) return;
      connectionNotice.textContent = `${error.message} This page shows data from ${lastSuccess.toLocaleTimeString()}.`;
      connectionNotice.hidden = false;
    }
    if (!signal.aborted) timer = setTimeout(once, Math.max(seconds * 1000, 10 * (performance.now() - began)));
  }
}

async function answerFromPage(path, query) {
  if (path.endsWith("/search")) return searchRollouts(path.slice(0, -"/search".length), query.text.toLowerCase());
  const answer = await unpackAnswer(path);
  if (!path.endsWith("/trajectories")) return answer;
  const rows = answer.rows.filter((row) => accepts(row, query));
  return { ...answer, rows: query.text ? await rowsWithText(path, rows, query.text.toLowerCase()) : rows };
}

async function unpackAnswer(path) {
  const script = storedAnswers.get(path);
  if (!script) throw new Error("The exported page does not contain these data.");
  const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// Applies the same conditions as the server's search (agentrl/viewer/trajectories.py).
function accepts(row, query) {
  const isSet = (name) => query[name] !== undefined && query[name] !== "";
  const within = (value, low, high) => {
    if (value === null) return !isSet(low) && !isSet(high);
    return (!isSet(low) || value >= Number(query[low])) && (!isSet(high) || value <= Number(query[high]));
  };
  return (
    row.problem.toLowerCase().includes((query.problem ?? "").toLowerCase()) &&
    ["ended", "verdict", "dropped"].every((name) => !isSet(name) || row[name] === query[name]) &&
    (!isSet("tool") || query.tool in row.tools) &&
    (!isSet("group") || row.group === Number(query.group)) &&
    within(row.step, "first", "last") &&
    within(row.reward, "least_reward", "most_reward") &&
    within(row.turns, "least_turns", "most_turns") &&
    within(row.staleness, "least_staleness")
  );
}

// Searches the conversations in the page like the server (search_rollouts in agentrl/viewer/evaluations.py).
async function searchRollouts(evaluation, text) {
  const matching = [];
  for (const { index } of (await unpackAnswer(evaluation)).rollouts) {
    if (!storedAnswers.has(`${evaluation}/${index}`)) continue;
    const { rollout, problem } = await unpackAnswer(`${evaluation}/${index}`);
    const texts = [problem.id, problem.statement, problem.answer, JSON.stringify(problem.info ?? ""), rollout.answer, ...rollout.turns.map((turn) => turn.text)];
    if (texts.join("\n").toLowerCase().includes(text)) matching.push(index);
  }
  return matching;
}

async function rowsWithText(path, rows, text) {
  const kept = [];
  for (const row of rows) {
    const page = await unpackAnswer(path.replace("/trajectories", `/steps/${row.step}/${row.number}`));
    const texts = [row.problem, page.problem.statement, JSON.stringify(page.problem.answer), ...page.segments.map((segment) => segment.text)];
    if (texts.join("\n").toLowerCase().includes(text)) kept.push(row);
  }
  return kept;
}

const POINTS = 1000; // points of a curve; for longer runs, they are means of consecutive steps
const ALL_POINTS = 10_000; // points of a curve after zooming in

// The curves of a run over steps, tokens or hours, as the server reduces them (MetricsColumns.series).
export class Series {
  constructor(id) {
    this.id = id;
    this.version = "";
    this.points = POINTS;
    this.names = [];
    this.axes = [];
    this.curves = {};
  }

  // Reads the curves of the metrics that `wanted` selects from all names. Returns true if there are new values.
  async refresh(wanted) {
    if (!this.names.length) this.names = (await this.ask({ names: ["step"], points: 2 })).names;
    const names = wanted(this.names);
    if (!names.length) return false;
    const answer = await this.ask({ names, points: this.points, since: names.every((name) => name in this.curves) ? this.version : "" });
    if (!answer.changed) return false;
    Object.assign(this, { version: answer.version, rows: answer.rows, names: answer.names, axes: answer.axes, curves: answer.series });
    return true;
  }

  ask(query) {
    return ask(`/runs/${this.id}/series`, query);
  }

  // Reads the curves again with up to ALL_POINTS points. Returns true if this adds points.
  async refine(wanted) {
    if (this.points === ALL_POINTS || !(this.rows > POINTS)) return false;
    this.points = ALL_POINTS;
    this.version = "";
    return this.refresh(wanted);
  }

  // Returns a curve: x, y, steps and the newest value, and for means of several steps their minima and maxima. The curve
  // is smoothed over `window` steps. The metrics in `less` are subtracted.
  line(name, kind = "step", window = 1, less = []) {
    const { axis, value, low, high, last } = this.curves[name];
    const xs = this.axes[axis];
    const parts = less.map((part) => this.valuesAt(part, axis));
    const rest = value.map((whole, index) => (whole === null ? null : parts.reduce((sum, part) => sum - (part[index] ?? 0), whole)));
    const each = low ? this.rows / value.length : 1; // steps per value
    const spread = low && window === 1 && !less.length;
    return { x: xs[kind], y: smooth(rest, Math.round(window / each)), steps: xs.step, low: spread ? low : null, high: spread ? high : null, last: less.length ? rest.at(-1) : last };
  }

  // Returns the values of a metric at the steps of an axis, undefined at steps without a value.
  valuesAt(name, axis) {
    const curve = this.curves[name];
    if (!curve) return [];
    if (curve.axis === axis) return curve.value;
    const byStep = new Map(curve.value.map((value, index) => [this.axes[curve.axis].step[index], value]));
    return this.axes[axis].step.map((step) => byStep.get(step));
  }

  // Returns the least and greatest x of all curves.
  extent(kind) {
    const ends = this.axes.filter((axis) => axis.step.length).map((axis) => [axis[kind][0], axis[kind].at(-1)]);
    return ends.length ? [Math.min(...ends.map(([first]) => first)), Math.max(...ends.map(([, last]) => last))] : null;
  }

  // Returns the positions of alerts on an axis.
  positionsOf(alerts, kind) {
    const longest = this.axes.reduce((best, axis) => (axis.step.length > (best?.step.length ?? 0) ? axis : best), null);
    const at = (step) => (kind === "step" ? step : longest?.[kind][longest.step.findIndex((each) => each >= step)]);
    return [...new Set(alerts.map((alert) => at(alert.step)))].filter((position) => position !== undefined);
  }
}

// Computes the moving average over `window` values, or fewer at the ends. Nulls are ignored.
function smooth(values, window) {
  const half = Math.floor(window / 2);
  if (half === 0) return values;
  const [sums, counts] = [[0], [0]];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value !== null));
  }
  return values.map((_, index) => {
    const [low, high] = [Math.max(0, index - half), Math.min(values.length, index + half + 1)];
    const count = counts[high] - counts[low];
    return count ? (sums[high] - sums[low]) / count : null;
  });
}

export const AXES = [
  ["step", "step"],
  ["tokens", "trained tokens"],
  ["hours", "hours"],
];

let definitions;
let metrics = [];

// Loads the metric catalogue once: label, unit, meaning and healthy range of each metric.
export async function loadCatalogue() {
  definitions ??= ask("/metrics");
  try {
    metrics = await definitions;
  } catch (error) {
    definitions = undefined;
    throw error;
  }
}

// Returns the definition of a metric, or only the name if the catalogue lacks it, as for metrics of plug-ins.
function metricOf(name) {
  const family = (metric) => metric.name.includes("{") && name.startsWith(metric.name.split("{")[0]);
  return metrics.find((metric) => metric.name === name) ?? metrics.find(family) ?? { name, unit: "", meaning: "", healthy: "", label: "" };
}

export const labelOf = (name) => metricOf(name).label || name;

// Returns the unit that all these metrics share, or an empty string if their units differ.
export function unitOf(names) {
  const units = new Set(names.map((name) => metricOf(name).unit));
  return units.size === 1 ? [...units][0] : "";
}

// Returns a collapsed list of the definitions of metrics, or null if no definition is known.
export function meanings(names) {
  const known = [...new Map(names.map(metricOf).filter((metric) => metric.meaning).map((metric) => [metric.name, metric])).values()];
  if (!known.length) return null;
  const lines = known.map(({ name, meaning, healthy }) => el("p", { class: "hint" }, el("code", {}, name), ` ${plain(meaning)}${healthy ? ` Healthy: ${plain(healthy)}.` : ""}`));
  return el("details", {}, el("summary", {}, "Definition"), ...lines);
}

// Removes the markup of code and links from Markdown.
const plain = (text) => text.replace(/\[([^\]]+)\]\([^)]+\)/g, "$1").replaceAll("`", "");
