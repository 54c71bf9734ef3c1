// The trajectories of a step or of many: filters, full-text search, a histogram of rewards, a table.

import { ask } from "./api.js";
import { draw } from "./charts.js";
import { el, notices, section, words } from "./dom.js";
import { table } from "./table.js";

const FIELDS = [
  ["first", "From step", "number"],
  ["last", "To step", "number"],
  ["text", "Text in the conversation", "search"],
  ["problem", "Problem", "search"],
  ["ended", "Ended", ["answered", "stopped", "void_turn", "turn_limit", "token_limit", "deadline", "cancelled", "infrastructure_failure"]],
  ["verdict", "Verdict", ["correct", "incorrect", "no_answer", "unparsable_answer", "answer_timeout", "unparsable_gold", "grader_timeout"]],
  ["tool", "Tool outcome", ["ok", "error", "timeout", "memory_limit", "output_limit", "killed", "infrastructure_failure", "malformed"]],
  ["dropped", "Not trained: why", ["no data", "void turn", "equal rewards", "filtered"]],
  ["least_reward", "Reward from", "number"],
  ["most_reward", "Reward to", "number"],
  ["least_turns", "Turns from", "number"],
  ["most_turns", "Turns to", "number"],
  ["least_staleness", "Staleness from", "number"],
  ["group", "Group", "number"],
];

const ALWAYS = 4; // fields that are shown before "More filters"

export async function trajectoriesScreen([id], query) {
  const facts = await ask(`/runs/${id}`);
  const asked = Object.fromEntries(query);
  const rows = [];
  const problems = el("div");
  const chart = el("div", { class: "chart", role: "img", "aria-label": "Histogram of rewards" });
  const shown = table(columnsOf(id), rows, { caption: "Trajectories" });
  const status = el("p", { class: "hint", role: "status" });
  const more = el("button", { class: "act", type: "button", onclick: () => next() }, "Search on");
  let after = "";
  const course = section("This problem over the steps", el("div", { class: "chart", role: "img", "aria-label": "Reward of this problem over the steps" }));
  course.hidden = true;

  async function next() {
    const found = await ask(`/runs/${id}/trajectories`, { ...asked, after });
    rows.push(...found.rows);
    after = found.next ?? "";
    problems.append(...notices(found.problems));
    more.hidden = !after;
    status.textContent = `${rows.length} trajectories${after ? `, so far: searched up to step ${after.split(":")[0]}` : ""}`;
    shown.fill();
    await histogram();
    await overSteps();
  }

  async function histogram() {
    const rewards = rows.map((row) => row.reward);
    const bar = { type: "histogram", x: rewards, nbinsx: 20, marker: { color: "#5b8fd0" } };
    const onpoint = (x, point) => {
      const inside = point.pointNumbers.map((place) => rewards[place]);
      go(id, { ...asked, least_reward: Math.min(...inside), most_reward: Math.max(...inside) });
    };
    const layout = { height: 140, bargap: 0.05, xaxis: { title: { text: "reward", standoff: 2 } }, showlegend: false };
    draw(chart, rewards.length ? [bar] : [], { layout, onpoint });
  }

  // The rewards of one problem along the steps.
  async function overSteps() {
    if (!asked.problem || new Set(rows.map((row) => row.problem)).size !== 1) return;
    const byStep = grouped(rows);
    const steps = [...byStep.keys()].sort((a, b) => a - b);
    const means = steps.map((step) => byStep.get(step).reduce((sum, row) => sum + row.reward, 0) / byStep.get(step).length);
    const points = { name: "trajectory", x: rows.map((row) => row.step), y: rows.map((row) => row.reward), customdata: rows.map((row) => row.number), mode: "markers", marker: { size: 7, opacity: 0.35 } };
    const line = { name: "mean", x: steps, y: means, mode: "lines+markers" };
    const onpoint = (step, { customdata }) => (location.hash = customdata === undefined ? `#/run/${id}/trajectories?${new URLSearchParams({ ...asked, first: step, last: step })}` : `#/run/${id}/${step}/${customdata}`);
    course.hidden = false;
    draw(course.querySelector(".chart"), [points, line], { layout: { height: 200, showlegend: true, xaxis: { title: { text: "step" } }, yaxis: { title: { text: "reward" } } }, onpoint });
  }

  await next();
  const steps = asked.first && asked.first === asked.last ? `Step ${asked.first}` : "Trajectories";
  const name = facts.path.split("/").at(-1);
  const hint = el("p", { class: "hint" }, "A click on a bar shows its trajectories alone.");
  const content = [el("h1", {}, `${steps} of ${name}`), neighbours(id, asked, facts.trajectory_steps), filters(id, asked), problems, course, section("Rewards", chart, hint), section("Found", shown.element, status, more)];
  return { title: steps, trail: [["Runs", "#/"], [name, `#/run/${id}`]], content };
}

function grouped(rows) {
  const found = new Map();
  rows.forEach((row) => found.set(row.step, [...(found.get(row.step) ?? []), row]));
  return found;
}

function go(id, values) {
  const given = Object.entries(values).filter(([, value]) => value !== "");
  location.hash = `#/run/${id}/trajectories?${new URLSearchParams(given)}`;
}

function neighbours(id, asked, steps) {
  if (!asked.first || asked.first !== asked.last) return null;
  const here = Number(asked.first);
  const link = (step, label) => el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ ...asked, first: step, last: step })}` }, label);
  const before = steps.findLast((step) => step < here);
  const after = steps.find((step) => step > here);
  const links = [before !== undefined ? link(before, `← step ${before}`) : null, after !== undefined ? link(after, `step ${after} →`) : null];
  return el("p", { class: "bar" }, links);
}

function filters(id, asked) {
  const inputs = FIELDS.map(([name, label, kind]) => {
    const value = asked[name] ?? "";
    const input = Array.isArray(kind)
      ? el("select", { name }, [["", "any"], ...kind.map((each) => [each, words(each)])].map(([given, text]) => el("option", { value: given, selected: given === value }, text)))
      : el("input", { name, type: kind, value, step: "any", size: kind === "number" ? 6 : 20 });
    return el("label", { class: kind === "search" ? "field grow" : "field" }, el("span", {}, label), input);
  });
  const plain = FIELDS.slice(0, ALWAYS).map(([name]) => name);
  const wide = window.matchMedia("(min-width: 60rem)").matches;
  const open = wide || FIELDS.some(([name]) => !plain.includes(name) && asked[name]);
  const more = el("details", { class: "all", open }, el("summary", {}, "More filters"), el("div", { class: "filters" }, inputs.slice(ALWAYS)));
  const submit = (event) => {
    event.preventDefault();
    go(id, Object.fromEntries(new FormData(event.target)));
  };
  const buttons = [el("button", { class: "act", type: "submit" }, "Search"), el("a", { href: `#/run/${id}/trajectories` }, "clear")];
  return el("form", { class: "card filters", onsubmit: submit, role: "search" }, inputs.slice(0, ALWAYS), more, buttons);
}

function columnsOf(id) {
  const tools = (row) => Object.entries(row.tools).map(([outcome, count]) => `${count} ${words(outcome)}`).join(", ");
  return [
    { title: "Trajectory", value: (row) => row.step * 1e6 + row.number, cell: (row) => el("a", { href: `#/run/${id}/${row.step}/${row.number}` }, `${row.step} / ${row.number}`) },
    { title: "Problem", value: (row) => row.problem, cell: (row) => el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ problem: row.problem })}`, title: "This problem over all steps" }, row.problem) },
    { title: "Reward", number: true, value: (row) => row.reward },
    { title: "Ended", value: (row) => row.ended, cell: (row) => words(row.ended) },
    { title: "Verdict", value: (row) => row.verdict, cell: (row) => verdict(row) },
    { title: "Answer", value: (row) => row.answer, class: "brief" },
    { title: "Turns", number: true, value: (row) => row.turns },
    { title: "Tokens", number: true, value: (row) => row.tokens },
    { title: "Tools", value: tools, cell: tools },
    { title: "Stale", number: true, value: (row) => row.staleness },
    { title: "Not trained", value: (row) => row.dropped, cell: (row) => row.dropped },
    { title: "Share of gradient", number: true, value: (row) => row.gradient_share },
    { title: "Seconds", number: true, value: (row) => row.seconds },
    { title: "Statement", value: (row) => row.statement, class: "text" },
  ];
}

export function verdict(row) {
  if (!row.verdict) return "–";
  return el("span", { class: row.verdict === "correct" ? "tag good" : "tag bad" }, words(row.verdict));
}
