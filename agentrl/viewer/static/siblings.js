// The trajectories of a group: energy, baseline and advantage along the model's tokens, and their texts side by side.

import { draw, palette } from "./charts.js";
import { el, short, visible, words } from "./dom.js";

const ROWS = [
  ["realized_energy", "realized energy"],
  ["baselines", "baseline"],
  ["advantages", "advantage"],
];

export function siblingChart(page, number) {
  const trained = page.siblings.filter((sibling) => sibling.curves);
  if (!trained.length) return el("p", { class: "quiet" }, "No trajectory of the group has statistics of its tokens.");
  const chart = el("div", { class: "chart", role: "img", "aria-label": "Energy, baseline and advantage of the siblings" });
  const lines = palette();
  const traces = ROWS.flatMap(([name], row) =>
    trained.map((sibling, place) => ({
      x: sibling.index,
      y: sibling.curves[name],
      name: `${sibling.number}: reward ${short(sibling.reward)}`,
      legendgroup: String(sibling.number),
      showlegend: row === 0,
      mode: "lines",
      yaxis: row === 0 ? "y" : `y${row + 1}`,
      line: { color: lines[place % lines.length], width: sibling.number === Number(number) ? 3 : 1.2, shape: "hv" },
    })),
  );
  const axes = Object.fromEntries(ROWS.map(([, title], row) => [row === 0 ? "yaxis" : `yaxis${row + 1}`, { title: { text: title }, domain: [1 - (row + 1) / 3 + 0.03, 1 - row / 3 - 0.02] }]));
  const layout = { height: 520, xaxis: { title: { text: "token of the model" }, anchor: "y3" }, ...axes };
  draw(chart, traces, { layout });
  return chart;
}

export function siblingCards(page, id, step, number) {
  const cards = page.siblings.map((sibling) => {
    const here = sibling.number === Number(number);
    const title = el("a", { href: `#/run/${id}/${step}/${sibling.number}`, "aria-current": here ? "true" : null }, `Trajectory ${sibling.number}`);
    const facts = `reward ${short(sibling.reward)} · ${words(sibling.ended)} · ${sibling.tokens} tokens${sibling.dropped ? ` · not trained: ${sibling.dropped}` : ""}`;
    return el("article", { class: here ? "here" : "" }, title, el("div", { class: "hint" }, facts), el("pre", {}, visible(sibling.text)));
  });
  return el("div", { class: "siblings", tabIndex: 0, role: "group", "aria-label": "The group" }, cards);
}
