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

  async function next() {
    const found = await ask(`/runs/${id}/trajectories`, { ...asked, after });
    rows.push(...found.rows);
    after = found.next ?? "";
    problems.append(...notices(found.problems));
    more.hidden = !after;
    status.textContent = `${rows.length} trajectories${after ? `, so far: searched up to step ${after.split(":")[0]}` : ""}`;
    shown.fill();
    await histogram();
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

  await next();
  const steps = asked.first && asked.first === asked.last ? `Step ${asked.first}` : "Trajectories";
  const name = facts.path.split("/").at(-1);
  const hint = el("p", { class: "hint" }, "A click on a bar shows its trajectories alone.");
  const content = [el("h1", {}, `${steps} of ${name}`), neighbours(id, asked, facts.trajectory_steps), filters(id, asked), problems, section("Rewards", chart, hint), section("Found", shown.element, status, more)];
  return { title: steps, trail: [["Runs", "#/"], [name, `#/run/${id}`]], content };
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
  const submit = (event) => {
    event.preventDefault();
    go(id, Object.fromEntries(new FormData(event.target)));
  };
  const buttons = [el("button", { class: "act", type: "submit" }, "Search"), el("a", { href: `#/run/${id}/trajectories` }, "clear")];
  return el("form", { class: "card filters", onsubmit: submit, role: "search" }, inputs, buttons);
}

function columnsOf(id) {
  const tools = (row) => Object.entries(row.tools).map(([outcome, count]) => `${count} ${words(outcome)}`).join(", ");
  return [
    { title: "Trajectory", value: (row) => row.step * 1e6 + row.number, cell: (row) => el("a", { href: `#/run/${id}/${row.step}/${row.number}` }, `${row.step} / ${row.number}`) },
    { title: "Problem", value: (row) => row.problem, cell: (row) => el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ problem: row.problem })}`, title: "This problem over all steps" }, row.problem) },
    { title: "Reward", number: true, value: (row) => row.reward },
    { title: "Ended", value: (row) => row.ended, cell: (row) => words(row.ended) },
    { title: "Verdict", value: (row) => row.verdict, cell: (row) => verdict(row) },
    { title: "Answer", value: (row) => row.answer, class: "text" },
    { title: "Turns", number: true, value: (row) => row.turns },
    { title: "Tokens", number: true, value: (row) => row.tokens },
    { title: "Tools", value: tools, cell: tools },
    { title: "Stale", number: true, value: (row) => row.staleness },
    { title: "Not trained", value: (row) => row.dropped, cell: (row) => row.dropped },
    { title: "Seconds", number: true, value: (row) => row.seconds },
    { title: "Statement", value: (row) => row.statement, class: "text" },
  ];
}

export function verdict(row) {
  if (!row.verdict) return "–";
  return el("span", { class: row.verdict === "correct" ? "tag good" : "tag bad" }, words(row.verdict));
}
