// An evaluation: its scores, its rollouts with answers and verdicts, and one conversation.

import { ask } from "./api.js";
import { choice, el, section, short, visible, words } from "./dom.js";
import { scoreSections } from "./scores.js";
import { table } from "./table.js";
import { verdict } from "./trajectories.js";

export async function evaluationScreen([id], query) {
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
    { title: "Gold answer", value: (row) => row.gold, class: "brief" },
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
