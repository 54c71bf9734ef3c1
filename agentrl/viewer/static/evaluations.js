// Evaluations: scores, rollouts with answers and verdicts, one conversation, and two evaluations paired by problem.

import { draw, lineStyle } from "./charts.js";
import { ask } from "./data.js";
import { choice, el, factList, interval, notices, number, section, table, visible, words } from "./dom.js";
import { verdict } from "./trajectories.js";

export async function evaluationScreen({ parts: [id], query }) {
  const page = await ask(`/evaluations/${id}`);
  const search = query.get("problem") ?? "";
  const graded = query.get("verdict") ?? "";
  const fits = (row) => row.problem.toLowerCase().includes(search.toLowerCase()) && ["", row.verdict].includes(graded);
  const rows = page.rollouts.filter(fits);
  const verdicts = [...new Set(page.rollouts.map((row) => row.verdict).filter(Boolean))].sort();
  const columns = [
    { title: "Rollout", number: true, value: (row) => row.place, cell: (row) => el("a", { href: `#/evaluation/${id}/${row.place}` }, String(row.place)) },
    { title: "Benchmark", value: (row) => row.benchmark },
    { title: "Problem", value: (row) => row.problem },
    { title: "Sample", number: true, value: (row) => row.sample },
    { title: "Verdict", value: (row) => row.verdict, cell: verdict },
    { title: "Extracted answer", value: (row) => row.answer, class: "brief" },
    { title: "Reference answer", value: (row) => row.gold, class: "brief" },
    { title: "Ended", value: (row) => row.ended, cell: (row) => words(row.ended) },
    { title: "Turns", number: true, value: (row) => row.turns },
    { title: "Tokens", number: true, value: (row) => row.tokens },
  ];
  const find = (event) => {
    event.preventDefault();
    location.hash = `#/evaluation/${id}?${new URLSearchParams(new FormData(event.target))}`;
  };
  const grade = el("select", { name: "verdict" }, [["", "any"], ...verdicts.map((each) => [each, words(each)])].map(([given, text]) => el("option", { value: given, selected: given === graded }, text)));
  const byVerdict = el("label", { class: "field" }, el("span", {}, "Verdict"), grade);
  const form = el("form", { class: "bar", role: "search", onsubmit: find }, byVerdict, el("label", { class: "field grow" }, el("span", {}, "Problem"), el("input", { name: "problem", type: "search", value: search })), el("button", { class: "act", type: "submit" }, "Search"));
  const name = page.path.split("/").at(-1);
  const content = [
    el("h1", {}, name),
    el("div", { class: "bar" }, await comparing(id)),
    ...scoreSections(page.results),
    section("Rollouts", form, table(columns, rows, { caption: `${rows.length} of ${page.rollouts.length} rollouts` }).element),
    el("details", { class: "card" }, el("summary", {}, "Provenance"), el("pre", { class: "said" }, JSON.stringify(page.provenance, null, 1))),
  ];
  return { title: name, trail: [["Runs", "#/"]], content };
}

// A choice of another evaluation to compare with; nothing where there is none.
async function comparing(id) {
  const { evaluations } = await ask("/places");
  const others = evaluations.filter((one) => one.id !== id && one.finished);
  if (!others.length) return null;
  const options = [["", "choose"], ...others.map((one) => [one.id, one.name])];
  return choice("Compare with", options, "", (other) => other && (location.hash = `#/comparison/${id}/${other}`));
}

export async function rolloutScreen({ parts: [id, place] }) {
  const { rollout, problem } = await ask(`/evaluations/${id}/${place}`);
  const turns = rollout.turns.map((turn) => {
    const thought = turn.reasoning ? [el("pre", { class: "said quiet" }, visible(turn.reasoning))] : [];
    return el("article", { class: `segment ${turn.origin}` }, el("h3", {}, `${turn.origin} · ${number(turn.tokens)} tokens`), ...thought, el("pre", { class: "said" }, visible(turn.text)));
  });
  const pairs = [
    ["Problem", rollout.problem],
    ["Sample", rollout.sample],
    ["Reference answer", visible(String(problem.answer ?? "–"))],
    ["Answer", visible(String(rollout.answer ?? "–"))],
    ["Verdict", verdict(rollout)],
    ["Reward", number(rollout.reward)],
    ["Ended", words(rollout.ended)],
  ];
  const prompt = el("article", { class: "segment prompt" }, el("h3", {}, "prompt"), el("pre", { class: "said" }, visible(problem.prompt ?? problem.statement ?? "")));
  const title = `Rollout ${place}`;
  return { title, trail: [["Runs", "#/"], ["Evaluation", `#/evaluation/${id}`]], content: [el("h1", {}, title), factList(pairs), section("Conversation", prompt, ...turns)] };
}

function scoreSections(results) {
  const rows = Object.entries(results);
  if (!rows.length) return [section("Scores", el("p", { class: "quiet" }, "The evaluation has not finished."))];
  return [section("Scores", means(rows)), section("pass@k", ...passes(rows)), section("Rollouts of each benchmark", conduct(rows), kinds(rows))];
}

function means(rows) {
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "Mean", number: true, fraction: true, value: ([, one]) => one.avg.mean },
    { title: "95 %, problems like these", number: true, value: ([, one]) => one.avg.problems_like_these.low, cell: ([, one]) => interval(one.avg.problems_like_these) },
    { title: "95 %, this benchmark", number: true, value: ([, one]) => one.avg.this_benchmark.low, cell: ([, one]) => interval(one.avg.this_benchmark) },
    { title: "Majority vote", number: true, fraction: true, value: ([, one]) => one.maj },
    { title: "Problems", number: true, value: ([, one]) => one.avg.problems },
    { title: "Samples", number: true, value: ([, one]) => one.avg.samples },
  ];
  return table(columns, rows, { caption: "Mean: the share of correct rollouts, averaged over problems" }).element;
}

function passes(rows) {
  const ks = [...new Set(rows.flatMap(([, one]) => Object.keys(one.pass)))].sort((a, b) => a - b);
  const chart = el("div", { class: "chart", role: "img", "aria-label": "pass@k" });
  const series = rows.map(([name, one], place) => {
    const points = Object.entries(one.pass).filter(([, value]) => value).map(([k, { value }]) => [Number(k), value]).sort(([a], [b]) => a - b);
    return { name, x: points.map(([k]) => k), y: points.map(([, value]) => value), ...lineStyle(place) };
  });
  if (ks.length > 1) draw(chart, { series, x: { title: "k", log: true, ticks: ks.map(Number) }, y: { title: "pass@k, unbiased", zero: true } });
  const columns = [{ title: "Benchmark", value: ([name]) => name }, ...ks.map((k) => ({ title: `pass@${k}`, number: true, fraction: true, value: ([, one]) => one.pass[k]?.value }))];
  return [...(ks.length > 1 ? [chart] : []), table(columns, rows, { caption: "The chance that at least one of k samples is correct" }).element];
}

function conduct(rows) {
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "Turns", number: true, fraction: true, value: ([, one]) => one.turns },
    { title: "Tool calls", number: true, fraction: true, value: ([, one]) => one.tool_calls.mean },
    { title: "Model tokens", number: true, fraction: true, value: ([, one]) => one.tokens.model_mean },
    { title: "Truncated", number: true, fraction: true, value: ([, one]) => one.truncated.share },
    { title: "Void", number: true, fraction: true, value: ([, one]) => one.void_share },
    { title: "Seconds", number: true, fraction: true, value: ([, one]) => one.seconds.mean },
    { title: "Failed outside the policy", number: true, value: ([, one]) => one.no_data.total },
  ];
  return table(columns, rows, { caption: "Means per rollout, and shares of rollouts" }).element;
}

function kinds(rows) {
  const names = [...new Set(rows.flatMap(([, one]) => Object.keys(one.kinds)))];
  const columns = [{ title: "Benchmark", value: ([name]) => name }, ...names.map((kind) => ({ title: words(kind), number: true, value: ([, one]) => one.kinds[kind] }))];
  return table(columns, rows, { caption: "Outcomes of rollouts; all except correct and excluded count as wrong" }).element;
}

export async function comparisonScreen({ parts: [first, second] }) {
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

const signed = (value) => `${value > 0 ? "+" : ""}${number(value, [0.5])}`;
const signedInterval = ({ low, high }) => `${signed(low)} to ${signed(high)}`;

function differenceTable({ differences, scores }) {
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "A", number: true, fraction: true, value: ([name]) => scores[name][0] },
    { title: "B", number: true, fraction: true, value: ([name]) => scores[name][1] },
    { title: "B − A", number: true, value: ([, one]) => one.mean, cell: ([, one]) => signed(one.mean) },
    { title: "95 %, problems like these", number: true, value: ([, one]) => one.problems_like_these.low, cell: ([, one]) => signedInterval(one.problems_like_these) },
    { title: "p", number: true, fraction: true, value: ([, one]) => one.problems_like_these_p },
    { title: "95 %, this benchmark", number: true, value: ([, one]) => one.this_benchmark.low, cell: ([, one]) => signedInterval(one.this_benchmark) },
    { title: "p", number: true, fraction: true, value: ([, one]) => one.this_benchmark_p },
    { title: "B won", number: true, value: ([, one]) => one.won },
    { title: "B lost", number: true, value: ([, one]) => one.lost },
    { title: "Tied", number: true, value: ([, one]) => one.tied },
    { title: "Excluded in A or B", number: true, value: ([, one]) => one.unpaired },
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
