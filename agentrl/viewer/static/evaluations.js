// An evaluation: its scores, its rollouts with answers and verdicts, and one conversation.

import { ask } from "./api.js";
import { el, section, short, visible, words } from "./dom.js";
import { table } from "./table.js";
import { verdict } from "./trajectories.js";

export async function evaluationScreen([id], query) {
  const page = await ask(`/evaluations/${id}`);
  const search = query.get("problem") ?? "";
  const rows = page.rollouts.filter((row) => row.problem.toLowerCase().includes(search.toLowerCase()));
  const columns = [
    { title: "Rollout", number: true, value: (row) => row.place, cell: (row) => el("a", { href: `#/evaluation/${id}/${row.place}` }, String(row.place)) },
    { title: "Benchmark", value: (row) => row.benchmark },
    { title: "Problem", value: (row) => row.problem },
    { title: "Sample", number: true, value: (row) => row.sample },
    { title: "Verdict", value: (row) => row.verdict, cell: verdict },
    { title: "Answer", value: (row) => row.answer, class: "text" },
    { title: "Ended", value: (row) => row.ended, cell: (row) => words(row.ended) },
    { title: "Turns", number: true, value: (row) => row.turns },
    { title: "Tokens", number: true, value: (row) => row.tokens },
  ];
  const find = (event) => {
    event.preventDefault();
    location.hash = `#/evaluation/${id}?${new URLSearchParams(new FormData(event.target))}`;
  };
  const form = el("form", { class: "bar", role: "search", onsubmit: find }, el("label", { class: "field grow" }, el("span", {}, "Problem"), el("input", { name: "problem", type: "search", value: search })), el("button", { class: "act", type: "submit" }, "Search"));
  const name = page.path.split("/").at(-1);
  const content = [
    el("h1", {}, name),
    section("Scores", scores(page.results)),
    section("Rollouts", form, table(columns, rows, { caption: `${rows.length} of ${page.rollouts.length} rollouts` }).element),
    el("details", { class: "card" }, el("summary", {}, "Provenance"), el("pre", { class: "said" }, JSON.stringify(page.provenance, null, 1))),
  ];
  return { title: name, trail: [["Runs", "#/"]], content };
}

function scores(results) {
  const rows = Object.entries(results);
  if (!rows.length) return el("p", { class: "quiet" }, "The evaluation has not finished.");
  const columns = [
    { title: "Benchmark", value: ([name]) => name },
    { title: "Mean", number: true, value: ([, one]) => one.avg.mean },
    { title: "95 % from", number: true, value: ([, one]) => one.avg.problems_like_these.low },
    { title: "to", number: true, value: ([, one]) => one.avg.problems_like_these.high },
    { title: "Problems", number: true, value: ([, one]) => one.avg.problems },
    { title: "Samples", number: true, value: ([, one]) => one.avg.samples },
  ];
  return table(columns, rows, { caption: "Intervals are for problems like these" }).element;
}

export async function rolloutScreen([id, place]) {
  const { rollout, problem } = await ask(`/evaluations/${id}/${place}`);
  const turns = rollout.turns.map((turn) => {
    const thought = turn.reasoning ? [el("pre", { class: "said quiet" }, visible(turn.reasoning))] : [];
    return el("article", { class: `segment ${turn.origin}` }, el("h3", {}, `${turn.origin} · ${turn.tokens} tokens`), ...thought, el("pre", { class: "said" }, visible(turn.text)));
  });
  const pairs = [
    ["Problem", rollout.problem],
    ["Sample", rollout.sample],
    ["Gold answer", visible(String(problem.answer ?? "–"))],
    ["Answer", visible(String(rollout.answer ?? "–"))],
    ["Verdict", verdict(rollout)],
    ["Reward", short(rollout.reward)],
    ["Ended", words(rollout.ended)],
  ];
  const facts = el("dl", { class: "facts" }, pairs.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))));
  const prompt = el("article", { class: "segment prompt" }, el("h3", {}, "prompt"), el("pre", { class: "said" }, visible(problem.prompt ?? problem.statement ?? "")));
  const title = `Rollout ${place}`;
  return { title, trail: [["Runs", "#/"], ["Evaluation", `#/evaluation/${id}`]], content: [el("h1", {}, title), facts, section("Conversation", prompt, ...turns)] };
}
