// Evaluations: scores, problems with their rollouts, one conversation, and two evaluations paired by problem. An exported
// evaluation (report.html) consists of these screens.

import { draw, lineStyle } from "./charts.js";
import { ask, isAvailable } from "./data.js";
import { choice, el, factList, interval, notices, number, section, table, visible, words } from "./dom.js";
import { prose } from "./prose.js";
import { verdict } from "./trajectories.js";

export async function evaluationScreen({ parts: [id], query }) {
  const page = await ask(`/evaluations/${id}`);
  const [text, kind, benchmark] = ["text", "kind", "benchmark"].map((name) => query.get(name) ?? "");
  const matching = text ? new Set(await ask(`/evaluations/${id}/search`, { text })) : null;
  const accepted = (row) => (!kind || row.kind === kind) && (!benchmark || row.benchmark === benchmark) && (!matching || matching.has(row.index));
  const rows = page.rollouts.filter(accepted);
  const name = page.path.split("/").at(-1);
  const caption = `${rows.length} of ${page.rollouts.length} rollouts`;
  const content = [
    el("h1", {}, name),
    factList(provenanceFacts(page.provenance)),
    el("div", { class: "bar" }, await comparing(id)),
    ...scoreSections(page.results, page.kinds),
    section("Problems and rollouts", searchForm(id, page, { text, kind, benchmark }), problemTable(id, page, rows, caption), rolloutTable(id, page, rows, caption)),
    el("details", { class: "card" }, el("summary", {}, "Provenance: all settings, versions and hashes"), el("pre", { class: "source" }, JSON.stringify(page.provenance, null, 1))),
  ];
  return { title: name, trail: [["Runs", "#/"]], content };
}

function provenanceFacts({ model = {}, protocol = {}, sampling = {}, limits = {}, seed }) {
  return [
    ["Model", model.name],
    ["Fingerprint", model.fingerprint],
    ["Environment", protocol.max_turns ? `${protocol.env}, ${protocol.max_turns} turns` : protocol.env],
    ["Samples per problem", sampling.n],
    ["Temperature", sampling.temperature],
    ["top_p", sampling.top_p],
    ["Tokens per turn", limits.max_turn_tokens],
    ["Tokens in total", limits.max_response_tokens],
    ["Seed", seed],
  ].filter(([, value]) => value !== undefined).map(([term, value]) => [term, visible(String(value))]);
}

// Search form for rollouts. Its conditions are stored in the address.
function searchForm(id, page, { text, kind, benchmark }) {
  const search = (event) => {
    event.preventDefault();
    const parts = [...new FormData(event.target)].filter(([, value]) => value);
    location.hash = `#/evaluation/${id}?${new URLSearchParams(parts)}`;
  };
  const counts = Object.keys(page.kinds).map((name) => [name, page.rollouts.filter((row) => row.kind === name).length]).filter(([, count]) => count);
  const benchmarks = [...new Set(page.rollouts.map((row) => row.benchmark))];
  const legend = counts.map(([name, count]) => el("span", {}, el("span", { class: `cell ${name}` }), ` ${page.kinds[name]} ${count}`));
  const form = el(
    "form",
    { class: "bar", role: "search", onsubmit: search },
    choice("Outcome", [["", "any"], ...counts.map(([name]) => [name, page.kinds[name]])], kind, { name: "kind" }),
    benchmarks.length > 1 ? choice("Benchmark", [["", "all"], ...benchmarks.map((each) => [each, each])], benchmark, { name: "benchmark" }) : null,
    el("label", { class: "field grow" }, el("span", {}, "Text in problem, answer or conversation"), el("input", { name: "text", type: "search", value: text })),
    el("button", { class: "act", type: "submit" }, "Search"),
  );
  return el("div", {}, form, el("p", { class: "hint cells" }, legend));
}

// A square in the colour of a rollout's outcome. The square is a link if the page contains the conversation.
function cell(id, page, row, chosen) {
  const properties = { class: `cell ${row.kind}${row === chosen ? " chosen" : ""}`, title: `sample ${row.sample}: ${page.kinds[row.kind]}, answer ${visible(row.answer ?? "none")}` };
  if (!isAvailable(`/evaluations/${id}/${row.index}`)) return el("span", properties);
  return el("a", { ...properties, href: `#/evaluation/${id}/${row.index}`, "aria-label": properties.title });
}

const keyOf = (benchmark, problem) => JSON.stringify([benchmark, problem]);

function problemTable(id, page, rows, caption) {
  const byProblem = Map.groupBy(rows, (row) => keyOf(row.benchmark, row.problem));
  const rolloutsOf = (problem) => byProblem.get(keyOf(problem.benchmark, problem.id)) ?? [];
  const problems = page.problems.filter((problem) => rolloutsOf(problem).length);
  const counted = (problem) => rolloutsOf(problem).filter((row) => row.kind !== "excluded");
  const correct = (problem) => counted(problem).filter((row) => row.kind === "correct").length;
  const share = (problem) => (counted(problem).length ? correct(problem) / counted(problem).length : null);
  const columns = [
    ...benchmarkColumn(page, (problem) => problem.benchmark),
    { title: "Problem", value: (problem) => problem.id, class: "text", cell: (problem) => [el("b", {}, visible(problem.id)), ` ${visible(problem.statement)}`] },
    { title: "Correct", number: true, value: share, cell: (problem) => `${correct(problem)} of ${counted(problem).length}` },
    { title: "Rollouts", value: share, class: "cells", cell: (problem) => rolloutsOf(problem).map((row) => cell(id, page, row)) },
  ];
  return el("div", { class: "problem-table" }, table(columns, problems, { caption: `${problems.length} problems, ${caption}` }).element);
}

function rolloutTable(id, page, rows, caption) {
  const answers = new Map(page.problems.map((problem) => [keyOf(problem.benchmark, problem.id), problem.answer]));
  const reference = (row) => answers.get(keyOf(row.benchmark, row.problem));
  const name = (row) => `${row.problem} / ${row.sample}`;
  const columns = [
    ...benchmarkColumn(page, (row) => row.benchmark),
    { title: "Rollout", value: name, cell: (row) => (isAvailable(`/evaluations/${id}/${row.index}`) ? el("a", { href: `#/evaluation/${id}/${row.index}` }, visible(name(row))) : visible(name(row))) },
    { title: "Outcome", value: (row) => row.kind, cell: (row) => outcome(row.kind, page.kinds) },
    { title: "Extracted answer", value: (row) => row.answer, class: "brief" },
    { title: "Reference answer", value: reference, class: "brief" },
    { title: "Ended", value: (row) => row.ended, cell: (row) => words(row.ended) },
    { title: "Turns", number: true, value: (row) => row.turns },
    { title: "Tokens", number: true, value: (row) => row.tokens },
  ];
  return el("details", {}, el("summary", {}, "Table of the rollouts"), table(columns, rows, { caption }).element);
}

const benchmarkColumn = ({ results, problems }, value) => (new Set([...Object.keys(results), ...problems.map((problem) => problem.benchmark)]).size > 1 ? [{ title: "Benchmark", value }] : []);

const outcome = (kind, kinds) => el("span", { class: kind === "correct" ? "tag good" : kind === "excluded" ? "tag" : "tag bad" }, kinds[kind]);

// Returns a choice of evaluations to compare with, or null if there is no other evaluation.
async function comparing(id) {
  const { evaluations } = await ask("/library");
  const others = evaluations.filter((one) => one.id !== id && one.finished);
  if (!others.length) return null;
  const options = [["", "choose"], ...others.map((one) => [one.id, one.name])];
  return choice("Compare with", options, "", { onchange: (other) => other && (location.hash = `#/comparison/${id}/${other}`) });
}

export async function rolloutScreen({ parts: [id, index], query, remember }) {
  const [{ rollout, problem, formulas }, page] = await Promise.all([ask(`/evaluations/${id}/${index}`), ask(`/evaluations/${id}`)]);
  const row = page.rollouts.find((each) => each.index === Number(index));
  const siblings = page.rollouts.filter((each) => each.benchmark === rollout.benchmark && each.problem === rollout.problem);
  const conversation = el("div", {});
  const fill = (source) => conversation.replaceChildren(...conversationOf(rollout, problem, source ? null : formulas));
  const toggle = el("input", { type: "checkbox", checked: query.get("source") === "1", onchange: ({ target }) => (fill(target.checked), remember({ source: target.checked ? "1" : null })) });
  fill(toggle.checked);
  const pairs = [
    ["Outcome", row ? outcome(row.kind, page.kinds) : "–"],
    ["Extracted answer", visible(String(rollout.answer ?? "–"))],
    ["Reference answer", visible(String(problem.answer ?? "–"))],
    ["Ended", words(rollout.ended)],
    ["Verdict", verdict(rollout)],
    ["Reward", number(rollout.reward)],
    ["Tokens", number(rollout.turns.reduce((sum, turn) => sum + turn.tokens, 0))],
    ["Seconds", number(rollout.seconds)],
    ...(rollout.tool_calls.length ? [["Programs", rollout.tool_calls.map((call) => words(call.outcome)).join(", ")]] : []),
  ];
  const title = `${rollout.problem}, sample ${rollout.sample}`;
  const content = [
    el("h1", {}, title),
    factList(pairs),
    ...notices(rollout.failure ? [rollout.failure] : []),
    el("p", { class: "hint cells" }, el("span", {}, "Samples of this problem"), siblings.map((each) => cell(id, page, each, row))),
    section("Conversation", el("p", { class: "hint" }, el("label", {}, toggle, " Show Markdown and formulas as source")), conversation),
    columnsOf(problem),
  ];
  return { title, trail: [["Runs", "#/"], [page.path.split("/").at(-1), `#/evaluation/${id}`]], content };
}

// Renders the turns as Markdown, or as source if `formulas` is null.
function conversationOf(rollout, problem, formulas) {
  const shown = (text) => (formulas ? prose(text, formulas) : el("pre", { class: "source" }, visible(text)));
  const prompt = el("article", { class: "segment prompt" }, el("h3", {}, "prompt"), shown(problem.prompt ?? problem.statement ?? ""));
  let turn = 0;
  const turns = rollout.turns.map(({ origin, text, tokens, reasoning }) => {
    const thought = reasoning ? [el("pre", { class: "source quiet" }, visible(reasoning))] : [];
    const heading = origin === "model" ? `model, turn ${turn++}` : origin;
    const body = origin === "model" ? shown(text) : el("pre", { class: "source" }, visible(text.replace(/^\n+|\n+$/g, "")));
    return el("article", { class: `segment ${origin}` }, el("h3", {}, `${heading} · ${number(tokens)} tokens`), ...thought, body);
  });
  return [prompt, ...turns];
}

// Returns the problem's additional columns, or null.
function columnsOf({ info = {} }) {
  const names = Object.keys(info);
  if (!names.length) return null;
  const lines = names.map((name) => `${name}: ${typeof info[name] === "string" ? info[name] : JSON.stringify(info[name])}`);
  return el("details", { class: "card" }, el("summary", {}, "Additional columns of the problem"), el("pre", { class: "source" }, visible(lines.join("\n"))));
}

function scoreSections(results, outcomes) {
  const rows = Object.entries(results);
  if (!rows.length) return [section("Scores", el("p", { class: "quiet" }, "The evaluation is not finished."))];
  return [section("Scores", means(rows)), section("pass@k", ...passes(rows)), section("Rollouts of each benchmark", conduct(rows), kinds(rows, outcomes))];
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
  const series = rows.map(([name, one], index) => {
    const points = Object.entries(one.pass).filter(([, value]) => value).map(([k, { value }]) => [Number(k), value]).sort(([a], [b]) => a - b);
    return { name, x: points.map(([k]) => k), y: points.map(([, value]) => value), ...lineStyle(index) };
  });
  if (ks.length > 1) draw(chart, { series, x: { title: "k", log: true, ticks: ks.map(Number) }, y: { title: "pass@k, unbiased", zero: true } });
  const columns = [{ title: "Benchmark", value: ([name]) => name }, ...ks.map((k) => ({ title: `pass@${k}`, number: true, fraction: true, value: ([, one]) => one.pass[k]?.value }))];
  return [...(ks.length > 1 ? [chart] : []), table(columns, rows, { caption: "Probability that at least one of k samples is correct" }).element];
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
    { title: "Failed outside the policy", number: true, value: ([, one]) => one.excluded.total },
  ];
  return table(columns, rows, { caption: "Means per rollout and shares of rollouts" }).element;
}

function kinds(rows, outcomes) {
  const names = [...new Set(rows.flatMap(([, one]) => Object.keys(one.kinds)))];
  const columns = [{ title: "Benchmark", value: ([name]) => name }, ...names.map((kind) => ({ title: outcomes[kind] ?? words(kind), number: true, value: ([, one]) => one.kinds[kind] }))];
  return table(columns, rows, { caption: "Outcomes of rollouts; all except correct and excluded count as wrong" }).element;
}

export async function comparisonScreen({ parts: [first, second] }) {
  const page = await ask(`/comparisons/${first}/${second}`);
  const names = page.paths.map((path) => path.split("/").at(-1));
  const sides = ["A", "B"].map((letter, index) => el("div", {}, el("dt", {}, letter), el("dd", {}, el("a", { href: `#/evaluation/${[first, second][index]}` }, names[index]), ` ${visible(page.models[index])}`)));
  const other = el("a", { href: `#/comparison/${second}/${first}` }, "swap A and B");
  const content = [
    el("h1", {}, `${names[1]} against ${names[0]}`),
    el("dl", { class: "facts" }, sides, other),
    ...notices(page.notes),
    section("Differences, paired by problem", differenceTable(page)),
    section("Problems", pairedTable(page, first, second)),
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

function pairedTable({ problems }, first, second) {
  const share = ({ samples, correct }) => (samples ? correct / samples : null);
  const gain = (row) => (share(row.first) === null || share(row.second) === null ? null : share(row.second) - share(row.first));
  const link = (id, row, counts) => el("a", { href: `#/evaluation/${id}?${new URLSearchParams({ text: row.problem })}` }, `${counts.correct} of ${counts.samples}`);
  const columns = [
    { title: "Benchmark", value: (row) => row.benchmark },
    { title: "Problem", value: (row) => row.problem },
    { title: "A correct", number: true, value: (row) => share(row.first), cell: (row) => link(first, row, row.first) },
    { title: "B correct", number: true, value: (row) => share(row.second), cell: (row) => link(second, row, row.second) },
    { title: "B − A", number: true, value: gain, cell: (row) => (gain(row) === null ? "–" : signed(gain(row))) },
  ];
  return table(columns, problems, { caption: `${problems.length} problems`, order: { index: 4, down: false } }).element;
}
