// What the pages read: the viewer's server, or in an exported page the answers inside it; the metrics of runs.

import { el } from "./dom.js";

const token = new URLSearchParams(location.search).get("token") ?? "";
const held = new Map([...document.querySelectorAll("script[data-answer]")].map((script) => [script.dataset.answer, script]));

export const isExported = held.size > 0;

export async function ask(path, query = {}) {
  if (isExported) return answerFromPage(path, query);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = given.length ? `?${new URLSearchParams(given)}` : "";
  let answer;
  try {
    answer = await fetch(`/api${path}${tail}`, { headers: { Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("The viewer does not answer: its command has ended.");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

const trouble = document.getElementById("trouble");

// Repeats a task until its screen is left. While it fails, the page says why and since when, and the task is tried again.
// Between two tries is ten times what the task takes at least, so that a slow disk is not read all the time.
export function every(seconds, signal, task) {
  if (isExported) return;
  let good = new Date();
  let timer = setTimeout(once, seconds * 1000);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    trouble.hidden = true;
  });
  async function once() {
    const began = performance.now();
    try {
      if (!document.hidden) {
        await task();
        good = new Date();
        if (!signal.aborted) trouble.hidden = true;
      }
    } catch (error) {
      if (signal.aborted) return;
      trouble.textContent = `${error.message} This page shows the state of ${good.toLocaleTimeString()}.`;
      trouble.hidden = false;
    }
    if (!signal.aborted) timer = setTimeout(once, Math.max(seconds * 1000, 10 * (performance.now() - began)));
  }
}

async function answerFromPage(path, query) {
  const found = await unpacked(path);
  if (path.endsWith("/metrics") && query.position) return { rows: [], position: query.position, whole: false };
  if (!path.endsWith("/trajectories")) return found;
  const rows = found.rows.filter((row) => accepts(row, query));
  return { ...found, rows: query.text ? await withText(path, rows, query.text.toLowerCase()) : rows };
}

async function unpacked(path) {
  const script = held.get(path);
  if (!script) throw new Error("This page was exported without what it should show here.");
  const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// As the server's search (agentrl/viewer/step_table.py).
function accepts(row, query) {
  const given = (name) => query[name] !== undefined && query[name] !== "";
  const within = (value, low, high) => {
    if (value === null) return !given(low) && !given(high);
    return (!given(low) || value >= Number(query[low])) && (!given(high) || value <= Number(query[high]));
  };
  return (
    row.problem.toLowerCase().includes((query.problem ?? "").toLowerCase()) &&
    ["ended", "verdict", "dropped"].every((name) => !given(name) || row[name] === query[name]) &&
    (!given("tool") || query.tool in row.tools) &&
    (!given("group") || row.group === Number(query.group)) &&
    within(row.step, "first", "last") &&
    within(row.reward, "least_reward", "most_reward") &&
    within(row.turns, "least_turns", "most_turns") &&
    within(row.staleness, "least_staleness", "most_staleness")
  );
}

async function withText(path, rows, text) {
  const kept = [];
  for (const row of rows) {
    const page = await unpacked(path.replace("/trajectories", `/steps/${row.step}/${row.number}`));
    const said = [row.problem, page.problem.statement, JSON.stringify(page.problem.answer), ...page.segments.map((segment) => segment.text)];
    if (said.join("\n").toLowerCase().includes(text)) kept.push(row);
  }
  return kept;
}

// The metrics of a run: read piece by piece, as columns over steps, tokens or hours.
export class Series {
  constructor(id) {
    this.id = id;
    this.rows = [];
    this.known = new Set();
    this.position = "";
  }

  // Reads what is new. True if anything is.
  async refresh() {
    const found = await ask(`/runs/${this.id}/metrics`, { position: this.position });
    if (found.whole) this.rows = [];
    for (const row of found.rows) {
      this.rows.push(row);
      for (const name in row) this.known.add(name);
    }
    this.position = found.position;
    return found.rows.length > 0 || found.whole;
  }

  names() {
    return [...this.known].filter((name) => name !== "step").sort();
  }

  // x, y and steps of the rows that have `name`, less the metrics `less` of the same row.
  line(name, axis = "step", less = []) {
    const places = this.axis(axis);
    const x = [];
    const y = [];
    const steps = [];
    const rows = [];
    this.rows.forEach((row, place) => {
      if (typeof row[name] !== "number") return;
      x.push(places[place]);
      y.push(less.reduce((rest, part) => rest - (row[part] ?? 0), row[name]));
      steps.push(row.step);
      rows.push(row);
    });
    return { x, y, steps, rows };
  }

  // Where alerts lie on an axis.
  places(alerts, kind) {
    const at = new Map(this.axis(kind).map((place, row) => [this.rows[row].step, place]));
    return [...new Set(alerts.map((alert) => at.get(alert.step)))].filter((place) => place !== undefined);
  }

  axis(kind) {
    if (kind === "step") return this.rows.map((row) => row.step);
    const [name, scale] = kind === "hours" ? ["time/step_s", 3600] : ["policy/tokens", 1];
    let sum = 0;
    return this.rows.map((row) => (sum += (row[name] ?? 0) / scale));
  }
}

export const AXES = [
  ["step", "step"],
  ["tokens", "trained tokens"],
  ["hours", "hours"],
];

let definitions;
let metrics = [];

// Reads what every metric is, once: label, unit, meaning and healthy range, as the program defines them.
export async function loadCatalogue() {
  definitions ??= ask("/metrics");
  try {
    metrics = await definitions;
  } catch (error) {
    definitions = undefined;
    throw error;
  }
}

// The definition of a metric; of a plug-in's, which is not known here, its name alone.
function metricOf(name) {
  const family = (metric) => metric.name.includes("{") && name.startsWith(metric.name.split("{")[0]);
  return metrics.find((metric) => metric.name === name) ?? metrics.find(family) ?? { name, unit: "", meaning: "", healthy: "", label: "" };
}

export const labelOf = (name) => metricOf(name).label || name;

// The unit that all these metrics share, or none.
export function unitOf(names) {
  const units = new Set(names.map((name) => metricOf(name).unit));
  return units.size === 1 ? [...units][0] : "";
}

// The definitions of metrics, to unfold; nothing where none is known.
export function meanings(names) {
  const known = [...new Map(names.map(metricOf).filter((metric) => metric.meaning).map((metric) => [metric.name, metric])).values()];
  if (!known.length) return null;
  const lines = known.map(({ name, meaning, healthy }) => el("p", { class: "hint" }, el("code", {}, name), ` ${plain(meaning)}${healthy ? ` Healthy: ${plain(healthy)}.` : ""}`));
  return el("details", {}, el("summary", {}, "What it shows"), ...lines);
}

// Markdown's code and links as plain text.
const plain = (text) => text.replace(/\[([^\]]+)\]\([^)]+\)/g, "$1").replaceAll("`", "");
