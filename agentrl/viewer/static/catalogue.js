// What every metric is: label, unit, meaning and healthy range, as the program defines them.

import { ask } from "./api.js";
import { el } from "./dom.js";

let answer;
let metrics = [];

// Reads the definitions, once.
export async function loadCatalogue() {
  answer ??= ask("/metrics");
  try {
    metrics = await answer;
  } catch (error) {
    answer = undefined;
    throw error;
  }
}

// The definition of a metric; of a plug-in's, which is not known here, its name alone.
export function metricOf(name) {
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
