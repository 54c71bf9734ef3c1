// The scores of an evaluation: means with intervals, pass@k, how rollouts ended, averages per rollout.

import { draw, palette } from "./charts.js";
import { el, section, short, words } from "./dom.js";
import { table } from "./table.js";

export function scoreSections(results) {
  const rows = Object.entries(results);
  if (!rows.length) return [section("Scores", el("p", { class: "quiet" }, "The evaluation has not finished."))];
  return [section("Scores", means(rows)), section("pass@k", ...passes(rows)), section("Rollouts of each benchmark", conduct(rows), kinds(rows))];
}

function means(rows) {
  const interval = ({ low, high }) => `${short(low)} to ${short(high)}`;
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "Mean", number: true, value: ([, one]) => one.avg.mean },
    { title: "95 %, problems like these", number: true, value: ([, one]) => one.avg.problems_like_these.low, cell: ([, one]) => interval(one.avg.problems_like_these) },
    { title: "95 %, this benchmark", number: true, value: ([, one]) => one.avg.this_benchmark.low, cell: ([, one]) => interval(one.avg.this_benchmark) },
    { title: "Majority vote", number: true, value: ([, one]) => one.maj },
    { title: "Problems", number: true, value: ([, one]) => one.avg.problems },
    { title: "Samples", number: true, value: ([, one]) => one.avg.samples },
  ];
  return table(columns, rows, { caption: "Mean: the share of correct rollouts, averaged over problems" }).element;
}

function passes(rows) {
  const chart = el("div", { class: "chart", role: "img", "aria-label": "pass@k" });
  const lines = palette();
  const traces = rows.map(([name, one], place) => {
    const points = Object.entries(one.pass).filter(([, value]) => value);
    return { name, x: points.map(([k]) => Number(k)), y: points.map(([, value]) => value.value), mode: "lines+markers", line: { color: lines[place % lines.length] } };
  });
  const ks = [...new Set(rows.flatMap(([, one]) => Object.keys(one.pass)))].sort((a, b) => a - b);
  const layout = { showlegend: rows.length > 1, xaxis: { type: "log", title: { text: "k" }, tickvals: ks.map(Number) }, yaxis: { title: { text: "pass@k, unbiased" }, rangemode: "tozero" } };
  if (ks.length > 1) draw(chart, traces, { layout });
  const columns = [{ title: "Benchmark", value: ([name]) => name }, ...ks.map((k) => ({ title: `pass@${k}`, number: true, value: ([, one]) => one.pass[k]?.value }))];
  return [...(ks.length > 1 ? [chart] : []), table(columns, rows, { caption: "The chance that at least one of k samples is correct" }).element];
}

function conduct(rows) {
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "Turns", number: true, value: ([, one]) => one.turns },
    { title: "Tool calls", number: true, value: ([, one]) => one.tool_calls.mean },
    { title: "Tokens of the model", number: true, value: ([, one]) => one.tokens.model_mean },
    { title: "Truncated", number: true, value: ([, one]) => one.truncated.share },
    { title: "Void", number: true, value: ([, one]) => one.void_share },
    { title: "Seconds", number: true, value: ([, one]) => one.seconds.mean },
    { title: "Failed outside the policy", number: true, value: ([, one]) => one.no_data.total },
  ];
  return table(columns, rows, { caption: "Averages per rollout, and shares" }).element;
}

function kinds(rows) {
  const names = [...new Set(rows.flatMap(([, one]) => Object.keys(one.kinds)))];
  const columns = [{ title: "Benchmark", value: ([name]) => name }, ...names.map((kind) => ({ title: words(kind), number: true, value: ([, one]) => one.kinds[kind] }))];
  return table(columns, rows, { caption: "Outcomes of rollouts: all except correct and no data count as wrong" }).element;
}
