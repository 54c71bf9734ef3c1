// One trajectory: the conversation with its tokens, their values in training, and the siblings of the group.

import { draw, drawable, lineStyle, Link } from "./charts.js";
import { ask, isExported } from "./data.js";
import { choice, el, factList, notices, number, withOptions, section, visible, words } from "./dom.js";
import { gradientOf, isConstant, TOKEN_FIELDS, TokenView } from "./tokens.js";
import { rolloutTree } from "./tree.js";
import { verdict } from "./trajectories.js";
import { whatIf } from "./what_if.js";

const fieldName = (name) => TOKEN_FIELDS[name]?.[0] ?? name;

export async function trajectoryScreen({ parts: [id, step, trajectory], query, remember }) {
  const page = await ask(`/runs/${id}/steps/${step}/${trajectory}`);
  const { row, fields } = page;
  const known = () => Object.keys(TOKEN_FIELDS).filter((name) => name in fields);
  const label = (name) => `${fieldName(name)}${isConstant(fields[name]) ? " (constant)" : ""}`;
  const asked = known().find((name) => name === query.get("field"));
  const state = { field: asked ?? known().find((name) => !isConstant(fields[name])) ?? known()[0], rank: 0, down: true };
  const panel = el("aside", { class: "card panel idle", "aria-live": "off" }, el("p", { class: "quiet" }, "Point at a token, or move between tokens with the arrow keys."));
  const legend = el("div", { class: "scale" });
  const explain = explainer(page, `/runs/${id}/steps/${step}/${trajectory}`);
  const view = new TokenView((index, token, passing) => {
    describe(panel, page, state, index, token, explain);
    if (!passing) remember({ token: index });
  });
  const conversation = conversationOf(page, view);

  const colorBy = (name) => {
    state.field = name;
    state.rank = 0;
    scaleLegend(legend, view.color(name, fields[name]), isConstant(fields[name]));
    if (view.current >= 0) view.choose(view.current, { passing: true });
  };
  const jump = (down) => {
    const order = fields[state.field].map((value, index) => [value, index]).filter(([value]) => value !== null);
    order.sort(([a], [b]) => (down ? b - a : a - b));
    state.rank = down === state.down ? state.rank % order.length : 0;
    state.down = down;
    if (order.length) view.choose(order[state.rank++][1], { scroll: "center" });
  };
  const button = (text, down) => el("button", { class: "act", type: "button", onclick: () => jump(down) }, text);
  const fieldChoice = choice("Color by", known().map((name) => [name, label(name)]), state.field, { onchange: (name) => (colorBy(name), remember({ field: name })) });
  const take = (values) => {
    Object.assign(fields, values);
    const options = known().map((name) => el("option", { value: name }, label(name)));
    fieldChoice.querySelector("select").replaceChildren(...options);
    fieldChoice.querySelector("select").value = "what_if_advantages";
    colorBy("what_if_advantages");
  };
  const controls = el("div", { class: "bar" }, fieldChoice, button("Largest", true), button("Smallest", false), legend);
  if (state.field) colorBy(state.field);

  const unknown = page.tokenizer ? [] : ["The run has no tokenizer, so token ids are shown instead of text."];
  const without = page.fields.advantages || page.warnings.length ? [] : [reasonFor(row)];
  const title = `${step} / ${trajectory}`;
  const tree = rolloutTree(page, `#/run/${id}/${step}`);
  const content = [
    el("h1", {}, `Trajectory ${trajectory} of step ${step}`),
    aboutTrajectory(page, id),
    ...notices([...page.warnings, ...unknown, ...without]),
    ...(tree.length ? [section("Tree of the rollout", ...tree)] : []),
    el("div", { class: "reading" }, section("Conversation", controls, conversation), panel),
    section("Siblings, token by token", ...siblingCharts(page, trajectory)),
    whatIf(page, { id, step, number: trajectory }, take),
    section("Trajectories of the group", siblingCards(page, id, step, trajectory)),
  ];
  const ready = () => query.get("token") && view.choose(Number(query.get("token")), { scroll: "center" });
  return { title, trail: [["Runs", "#/"], [page.run, `#/run/${id}`], [`Step ${step}`, `#/run/${id}/trajectories?first=${step}&last=${step}`]], content, ready };
}

function reasonFor(row) {
  if (row.dropped) return `The step did not train on this trajectory: ${row.dropped}.`;
  return "The step has no token statistics of this trajectory (telemetry.tokens_every).";
}

function aboutTrajectory({ row, problem, reward_parts: parts, facts }, id) {
  const pairs = [
    ["Problem", el("a", { href: `#/run/${id}/trajectories?${new URLSearchParams({ problem: row.problem })}` }, row.problem)],
    ["Reference answer", visible(String(problem.answer ?? "–"))],
    ["Answer", visible(String(row.answer ?? "–"))],
    ["Verdict", verdict(row)],
    ["Reward", number(row.reward)],
    ...Object.entries(parts).map(([name, value]) => [`Reward function ${name}`, `${number(value)} before its weight`]),
    ["Ended", words(row.ended)],
    ["Turns", row.turns],
    ["Seconds", number(row.seconds)],
    ["Estimator", facts ? withOptions(facts.estimator, facts.estimator_options) : "–"],
  ];
  return factList(pairs);
}

function conversationOf(page, view) {
  const segments = [page.prompt, ...page.segments];
  const calls = [...page.tool_calls];
  let turn = 0;
  return segments.map((segment) => {
    const heading = segment.origin === "model" ? `model, turn ${turn++}` : segment.origin;
    const count = `${number(segment.token_ids.length)} tokens`;
    const call = segment.origin === "observation" ? calls.shift() : undefined;
    const tool = call ? [" · ", el("span", { class: call.outcome === "ok" ? "tag good" : "tag bad" }, words(call.outcome)), ` ${number(call.seconds)} s${exitStatus(call.exit_code)}${call.truncated ? ", truncated" : ""}`] : [];
    const body = segment.origin === "model" ? view.segment(segment) : el("pre", { class: "source" }, visible(textOf(segment)));
    return el("article", { class: `segment ${segment.origin}` }, el("h3", {}, `${heading} · ${count}`, ...tool), body);
  });
}

function exitStatus(code) {
  if (!code) return "";
  return code < 0 ? `, killed by signal ${-code}` : `, exit status ${code}`;
}

function textOf({ text, pieces, token_ids: ids }) {
  if (pieces.every((piece) => piece !== null)) return pieces.join("");
  return text || ids.map((token) => `⟨${token}⟩`).join(" ");
}

// Returns a function from the index of a model token to a button that explains the token's gradient.
function explainer(page, address) {
  const positions = [];
  let position = 0;
  for (const { origin, token_ids: ids } of page.segments) {
    if (origin === "model") ids.forEach((_, offset) => positions.push(position + offset));
    position += ids.length;
  }
  return (index) => {
    const output = el("div", { "aria-live": "polite" });
    const show = async (event) => {
      event.target.disabled = true;
      try {
        const lines = await ask(`${address}/tokens/${positions[index]}`);
        output.replaceChildren(el("pre", { class: "source" }, visible(lines.join("\n"))));
      } catch (error) {
        output.replaceChildren(...notices([error.message]));
      }
    };
    return el("div", {}, el("button", { class: "act", type: "button", onclick: show }, "Explain the gradient"), output);
  };
}

// Shows the fields of one token. Tooltips show exact values.
function describe(panel, page, state, index, token, explain) {
  const rows = Object.keys(TOKEN_FIELDS).filter((name) => name in page.fields).map((name) => {
    const value = page.fields[name][index];
    const label = el("th", { scope: "row", title: TOKEN_FIELDS[name][1] }, fieldName(name));
    const text = value === null ? "not finite" : typeof value === "number" ? number(value, TOKEN_FIELDS[name][2] === "least" ? [value] : [0.5]) : String(value);
    return el("tr", { class: name === state.field ? "chosen" : "", "data-field": name }, label, el("td", { class: "number", title: String(value) }, text));
  });
  const kind = token.special ? "special token" : token.past ? "token after the stop" : "token";
  const title = el("h2", {}, `${kind} ${index}: `, el("code", {}, JSON.stringify(visible(token.piece ?? ""))));
  const close = el("button", { class: "close", type: "button", "aria-label": "Close", onclick: () => panel.classList.add("idle") }, "×");
  const formula = el("p", { class: "hint" }, `${fieldName(state.field)}: ${TOKEN_FIELDS[state.field]?.[1] ?? ""}`);
  panel.classList.remove("idle");
  panel.replaceChildren(el("div", { class: "top" }, title, close), el("p", { class: "hint" }, `id ${token.id}`), el("table", {}, el("tbody", {}, rows)), formula, ...(page.fields.advantages && !isExported ? [explain(index)] : []));
}

function scaleLegend(legend, scale, constant) {
  const bar = el("b");
  bar.style.background = gradientOf(scale);
  const ends = [scale.low, scale.high];
  legend.replaceChildren(el("span", {}, number(scale.low, ends)), bar, el("span", {}, number(scale.high, ends)), ...(constant ? [el("span", {}, "equal for all tokens")] : []));
}

const CURVES = [
  ["realized_energy", "realized energy"],
  ["baselines", "baseline"],
  ["advantages", "advantage"],
];

// Charts of energy, baseline and advantage over the model tokens, for the trajectories of the group.
function siblingCharts(page, trajectory) {
  const trained = page.siblings.filter((sibling) => sibling.curves);
  if (!trained.length) return [el("p", { class: "quiet" }, "No trajectory of the group has token statistics.")];
  const link = new Link();
  const most = Math.max(...trained.map((sibling) => sibling.index.at(-1) ?? 0));
  const drawn = drawable(trained, (sibling) => sibling.number === Number(trajectory));
  const fewer = drawn.length < trained.length ? [el("p", { class: "hint" }, `${drawn.length} of ${trained.length} trajectories are shown, because more lines cannot be distinguished.`)] : [];
  const charts = CURVES.map(([name, title], row) => {
    const chart = el("div", { class: "chart", role: "img", "aria-label": `${title} of the siblings` });
    const series = drawn.map((sibling, at) => ({
      name: `${sibling.number}: reward ${number(sibling.reward)}`,
      x: sibling.index,
      y: sibling.curves[name],
      held: true,
      width: sibling.number === Number(trajectory) ? 3 : 1.2,
      ...lineStyle(at),
    }));
    draw(chart, { series, link, extent: [0, most], height: 150, x: { title: row === CURVES.length - 1 ? "model token" : "", whole: true }, y: { title } });
    return chart;
  });
  return [...fewer, ...charts];
}

function siblingCards(page, id, step, trajectory) {
  const cards = page.siblings.map((sibling) => {
    const here = sibling.number === Number(trajectory);
    const title = el("a", { href: `#/run/${id}/${step}/${sibling.number}`, "aria-current": here ? "true" : null }, `Trajectory ${sibling.number}`);
    const facts = `reward ${number(sibling.reward)} · ${words(sibling.ended)} · ${sibling.tokens} tokens${sibling.dropped ? ` · not trained: ${sibling.dropped}` : ""}`;
    return el("article", { class: here ? "here" : "" }, title, el("div", { class: "hint" }, facts), el("pre", {}, visible(sibling.text)));
  });
  return el("div", { class: "siblings", tabIndex: 0, role: "group", "aria-label": "The group" }, cards);
}
