// The metrics of a run: read piece by piece, as columns over steps, tokens or hours.

import { ask } from "./api.js";

export class Series {
  constructor(id) {
    this.id = id;
    this.rows = [];
    this.position = "";
  }

  // Reads what is new. True if anything is.
  async refresh() {
    const found = await ask(`/runs/${this.id}/metrics`, { position: this.position });
    if (found.whole) this.rows = [];
    this.rows.push(...found.rows);
    this.position = found.position;
    return found.rows.length > 0 || found.whole;
  }

  names() {
    return [...new Set(this.rows.flatMap((row) => Object.keys(row)))].filter((name) => name !== "step").sort();
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

// The mean of each value and its neighbours, `window` in all, fewer at the ends.
export function smoothed(values, window) {
  const half = Math.floor(window / 2);
  if (half === 0) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, place) => {
    const low = Math.max(0, place - half);
    const high = Math.min(values.length, place + half + 1);
    return (sums[high] - sums[low]) / (high - low);
  });
}
