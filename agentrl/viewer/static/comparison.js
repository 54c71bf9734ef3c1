// Two evaluations, paired by problem: differences with intervals, and the problems that one of them does better.

import { ask } from "./api.js";
import { el, notices, section, short, visible } from "./dom.js";
import { table } from "./table.js";

export async function comparisonScreen([first, second]) {
  const page = await ask(`/comparisons/${first}/${second}`);
  const names = page.paths.map((path) => path.split("/").at(-1));
  const said = ["A", "B"].map((letter, place) => el("div", {}, el("dt", {}, letter), el("dd", {}, el("a", { href: `#/evaluation/${[first, second][place]}` }, names[place]), ` ${visible(page.models[place])}`)));
  const other = el("a", { href: `#/comparison/${second}/${first}` }, "swap A and B");
  const content = [
    el("h1", {}, `${names[1]} against ${names[0]}`),
    el("dl", { class: "facts" }, said, other),
    ...notices(page.notes),
    section("Differences, paired by problem", differenceTable(page)),
    section("Problems", problemTable(page, first, second)),
  ];
  return { title: "Comparison", trail: [["Runs", "#/"]], content };
}

const signed = (value) => (value > 0 ? `+${short(value)}` : short(value));
const interval = ({ low, high }) => `${signed(low)} to ${signed(high)}`;

function differenceTable({ differences, scores }) {
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "A", number: true, value: ([name]) => scores[name][0] },
    { title: "B", number: true, value: ([name]) => scores[name][1] },
    { title: "B − A", number: true, value: ([, one]) => one.mean, cell: ([, one]) => signed(one.mean) },
    { title: "95 %, problems like these", number: true, value: ([, one]) => one.problems_like_these.low, cell: ([, one]) => interval(one.problems_like_these) },
    { title: "p", number: true, value: ([, one]) => one.problems_like_these_p },
    { title: "95 %, this benchmark", number: true, value: ([, one]) => one.this_benchmark.low, cell: ([, one]) => interval(one.this_benchmark) },
    { title: "p", number: true, value: ([, one]) => one.this_benchmark_p },
    { title: "B won", number: true, value: ([, one]) => one.won },
    { title: "B lost", number: true, value: ([, one]) => one.lost },
    { title: "Tied", number: true, value: ([, one]) => one.tied },
    { title: "Without data in one", number: true, value: ([, one]) => one.unpaired },
  ];
  return table(columns, Object.entries(differences), { caption: "Mean scores and their difference" }).element;
}

function problemTable({ problems }, first, second) {
  const share = ({ samples, correct }) => (samples ? correct / samples : null);
  const gain = (row) => (share(row.first) === null || share(row.second) === null ? null : share(row.second) - share(row.first));
  const link = (id, row, counts) => el("a", { href: `#/evaluation/${id}?${new URLSearchParams({ problem: row.problem })}` }, `${counts.correct} of ${counts.samples}`);
  const columns = [
    { title: "Benchmark", value: (row) => row.benchmark },
    { title: "Problem", value: (row) => row.problem },
    { title: "A correct", number: true, value: (row) => share(row.first), cell: (row) => link(first, row, row.first) },
    { title: "B correct", number: true, value: (row) => share(row.second), cell: (row) => link(second, row, row.second) },
    { title: "B − A", number: true, value: gain, cell: (row) => (gain(row) === null ? "–" : signed(gain(row))) },
  ];
  return table(columns, problems, { caption: `${problems.length} problems`, order: { place: 4, down: false } }).element;
}
