// One trajectory: the conversation with its tokens, what training made of each, and the siblings of its group.

import { ask } from "./api.js";
import { choice, el, notices, said, section, short, visible, words } from "./dom.js";
import { isExported } from "./exported.js";
import { siblingCards, siblingChart } from "./siblings.js";
import { fieldName, TOKEN_FIELDS } from "./token_fields.js";
import { TokenView } from "./token_view.js";
import { verdict } from "./trajectories.js";
import { whatIf } from "./what_if.js";

export async function trajectoryScreen([id, step, number]) {
  const page = await ask(`/runs/${id}/steps/${step}/${number}`);
  const { row, fields } = page;
  const known = () => Object.keys(TOKEN_FIELDS).filter((name) => name in fields);
  const names = known();
  const state = { field: names[0], rank: 0, down: true };
  const panel = el("aside", { class: "card panel", "aria-live": "off" }, el("p", { class: "quiet" }, "Point at a token, or move with the arrow keys."));
  const legend = el("div", { class: "scale" });
  const explain = explainer(page, `/runs/${id}/steps/${step}/${number}`);
  const view = new TokenView((index, token) => describe(panel, page, state, index, token, explain));
  const conversation = conversationOf(page, view);

  const colour = (name) => {
    state.field = name;
    state.rank = 0;
    scaleLegend(legend, view.colour(fields[name]));
    if (view.current >= 0) view.choose(view.current);
  };
  const jump = (down) => {
    const order = fields[state.field].map((value, index) => [value, index]).filter(([value]) => value !== null);
    order.sort(([a], [b]) => (down ? b - a : a - b));
    state.rank = down === state.down ? state.rank % order.length : 0;
    state.down = down;
    if (order.length) view.choose(order[state.rank++][1], true);
  };
  const button = (label, down) => el("button", { class: "act", type: "button", onclick: () => jump(down) }, label);
  const fieldChoice = choice("Colour by", names.map((name) => [name, fieldName(name)]), state.field, colour);
  const take = (found) => {
    Object.assign(fields, found);
    const options = known().map((name) => el("option", { value: name }, fieldName(name)));
    fieldChoice.querySelector("select").replaceChildren(...options);
    fieldChoice.querySelector("select").value = "what_if_advantages";
    colour("what_if_advantages");
  };
  const controls = el("div", { class: "bar" }, fieldChoice, button("Largest", true), button("Smallest", false), legend);
  colour(state.field);

  const untold = page.tokenizer ? [] : ["The run's tokenizer is not here: tokens are shown by their ids."];
  const without = page.fields.advantages || page.problems.length ? [] : [reasonFor(row)];
  const title = `${step} / ${number}`;
  const content = [
    el("h1", {}, `Trajectory ${number} of step ${step}`),
    aboutTrajectory(page, id),
    ...notices([...page.problems, ...untold, ...without]),
    el("div", { class: "reading" }, section("Conversation", controls, conversation), panel),
    section("Siblings along their tokens", siblingChart(page, number)),
    whatIf(page, { id, step, number }, take),
    section("The group side by side", siblingCards(page, id, step, number)),
  ];
  return { title, trail: [["Runs", "#/"], [page.run, `#/run/${id}`], [`Step ${step}`, `#/run/${id}/trajectories?first=${step}&last=${step}`]], content };
}

function reasonFor(row) {
  if (row.dropped) return `The step did not train on this trajectory: ${row.dropped}.`;
  return "The step has no statistics of this trajectory's tokens (telemetry.tokens_every).";
}

function aboutTrajectory({ row, problem, facts }, id) {
  const pairs = [
    ["Problem", el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ problem: row.problem })}` }, row.problem)],
    ["Gold answer", visible(String(problem.answer ?? "–"))],
    ["Answer", visible(String(row.answer ?? "–"))],
    ["Verdict", verdict(row)],
    ["Reward", short(row.reward)],
    ["Ended", words(row.ended)],
    ["Turns", row.turns],
    ["Seconds", short(row.seconds)],
    ["Estimator", facts ? said(facts.estimator, facts.estimator_options) : "–"],
  ];
  return el("dl", { class: "facts" }, pairs.map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value))));
}

function conversationOf(page, view) {
  const segments = [page.prompt, ...page.segments];
  const calls = [...page.tool_calls];
  let turn = 0;
  return segments.map((segment) => {
    const heading = segment.origin === "model" ? `model, turn ${turn++}` : segment.origin;
    const count = `${segment.token_ids.length} tokens`;
    const call = segment.origin === "observation" ? calls.shift() : undefined;
    const tool = call ? [" · ", el("span", { class: call.outcome === "ok" ? "tag good" : "tag bad" }, words(call.outcome)), ` ${short(call.seconds)} s${exitStatus(call.exit_code)}${call.truncated ? ", trimmed" : ""}`] : [];
    const body = segment.origin === "model" ? view.segment(segment) : el("pre", { class: "said" }, visible(textOf(segment)));
    return el("article", { class: `segment ${segment.origin}` }, el("h3", {}, `${heading} · ${count}`, ...tool), body);
  });
}

function exitStatus(code) {
  if (!code) return "";
  return code < 0 ? `, ended by signal ${-code}` : `, exit status ${code}`;
}

function textOf({ text, pieces, token_ids: ids }) {
  if (pieces.every((piece) => piece !== null)) return pieces.join("");
  return text || ids.map((token) => `⟨${token}⟩`).join(" ");
}

// From the index of a token of the model to a part of the panel that tells how it got its gradient.
function explainer(page, address) {
  const positions = [];
  let position = 0;
  for (const { origin, token_ids: ids } of page.segments) {
    if (origin === "model") ids.forEach((_, place) => positions.push(position + place));
    position += ids.length;
  }
  return (index) => {
    const told = el("div", { "aria-live": "polite" });
    const tell = async (event) => {
      event.target.disabled = true;
      try {
        const lines = await ask(`${address}/tokens/${positions[index]}`);
        told.replaceChildren(el("pre", { class: "said" }, visible(lines.join("\n"))));
      } catch (error) {
        told.replaceChildren(...notices([error.message]));
      }
    };
    return el("div", {}, el("button", { class: "act", type: "button", onclick: tell }, "Explain its gradient"), told);
  };
}

function describe(panel, page, state, index, token, explain) {
  const exact = (value) => (value === null ? "not finite" : String(value));
  const rows = Object.keys(TOKEN_FIELDS).filter((name) => name in page.fields).map((name) => {
    const label = el("th", { scope: "row", title: TOKEN_FIELDS[name][1] }, fieldName(name));
    return el("tr", { class: name === state.field ? "chosen" : "", "data-field": name }, label, el("td", { class: "number" }, exact(page.fields[name][index])));
  });
  const kind = token.special ? "special token" : token.past ? "token past the stop" : "token";
  const title = el("h2", {}, `${kind} ${index}: `, el("code", {}, JSON.stringify(visible(token.piece ?? ""))));
  const formula = el("p", { class: "hint" }, `${fieldName(state.field)}: ${TOKEN_FIELDS[state.field][1]}`);
  panel.replaceChildren(title, el("p", { class: "hint" }, `id ${token.id}`), el("table", {}, el("tbody", {}, rows)), formula, ...(page.fields.advantages && !isExported ? [explain(index)] : []));
}

function scaleLegend(legend, { low, high, signed, below }) {
  const bar = el("b");
  const strong = (name) => `rgb(var(${name}) / .75)`;
  const colours = below ? [strong("--down"), "transparent"] : ["transparent", strong("--up")];
  if (signed) colours.unshift(strong("--down"));
  bar.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
  legend.replaceChildren(el("span", {}, short(low)), bar, el("span", {}, short(high)));
}
