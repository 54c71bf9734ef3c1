"use strict";
const index = JSON.parse(document.getElementById("index").textContent);
const KINDS = index.kinds;
const MATHML = "http://www.w3.org/1998/Math/MathML";
const MATH_TAGS = new Set("math mrow mi mn mo ms mtext mspace msup msub msubsup munder mover munderover mfrac msqrt mroot mtable mtr mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts merror".split(" "));
const MATH_ATTRIBUTES = new Set("mathvariant stretchy fence form separator accent accentunder linethickness columnalign columnspacing rowspacing columnlines rowlines displaystyle scriptlevel movablelimits minsize maxsize lspace rspace width height depth notation largeop symmetric".split(" "));
const FENCE = /```[^\n`]*\n[\s\S]*?(?:\n {0,3}```|$)/g;
const INLINE = /\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$([^$\n]+)\$|`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;
const shown = new Set(Object.keys(KINDS));
const unpacked = new Map();
let plain = false;
let matches = null; // by problem: null (all), or the set of samples whose conversation holds what is searched for
let searches = 0;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function conversations(place) {
  if (!unpacked.has(place)) {
    const packed = Uint8Array.from(atob(document.getElementById("c" + place).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(place, new Response(stream).json());
  }
  return unpacked.get(place);
}

// Text of a model: elements are made by name, everything else is text.

function mathematics(tree) {
  const [tag, attributes, ...children] = tree;
  const made = document.createElementNS(MATHML, MATH_TAGS.has(tag) ? tag : "mrow");
  for (const [name, value] of Object.entries(attributes)) if (MATH_ATTRIBUTES.has(name)) made.setAttribute(name, value);
  for (const child of children) made.append(typeof child === "string" ? child : mathematics(child));
  return made;
}

function formula(source, tex, block, formulas) {
  const tree = Object.hasOwn(formulas, tex) ? formulas[tex] : null;
  if (tree === null) return element("code", "", source);
  const made = mathematics(tree);
  if (block) made.setAttribute("display", "block");
  const holder = element("span");
  holder.title = tex;
  holder.append(made);
  return holder;
}

function inline(parent, text, formulas) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    parent.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [source, dollars, brackets, parentheses, dollar, code, bold, italic] = found;
    const tex = dollars ?? brackets ?? parentheses ?? dollar;
    if (tex !== undefined) parent.append(formula(source, tex.trim(), (dollars ?? brackets) !== undefined, formulas));
    else if (code !== undefined) parent.append(element("code", "", code));
    else inline(parent.appendChild(element(bold !== undefined ? "strong" : "em")), bold ?? italic, formulas);
  }
  parent.append(text.slice(end));
}

function prose(parent, text, formulas) {
  let list = null;
  // A formula of several lines is one piece.
  const pieces = text.replace(/\$\$[^$]+\$\$|\\\[[\s\S]+?\\\]/g, (one) => one.replaceAll("\n", " ")).split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.join("").trim()) inline(parent.appendChild(element("p")), paragraph.join("\n"), formulas);
    paragraph = [];
  };
  for (const line of pieces) {
    const heading = line.match(/^ {0,3}#{1,6}\s+(.*)$/);
    const item = line.match(/^\s*(?:([-*+])|(\d{1,4})[.)])\s+(.*)$/);
    if (!item) list = null;
    if (heading || item || !line.trim()) flush();
    if (heading) inline(parent.appendChild(element("h4")), heading[1], formulas);
    else if (item) {
      const tag = item[1] ? "ul" : "ol";
      if (!list || list.localName !== tag) {
        list = parent.appendChild(element(tag));
        if (item[2]) list.start = Number(item[2]);
      }
      inline(list.appendChild(element("li")), item[3], formulas);
    } else if (line.trim()) paragraph.push(line);
  }
  flush();
}

function written(text, formulas) {
  if (plain) return element("pre", "", text);
  const turn = element("div", "text");
  let end = 0;
  for (const block of text.matchAll(FENCE)) {
    prose(turn, text.slice(end, block.index), formulas);
    turn.append(element("pre", "code", block[0]));
    end = block.index + block[0].length;
  }
  prose(turn, text.slice(end), formulas);
  return turn;
}

function labelled(kind, label, body) {
  const turn = element("div", "turn " + kind);
  turn.append(element("div", "label", label), body);
  return turn;
}

function render(problem, rollout) {
  const box = element("div", "conversation");
  const toggle = element("button", "plain", plain ? "show rendered" : "show source");
  toggle.addEventListener("click", () => { plain = !plain; box.replaceWith(render(problem, rollout)); });
  const head = element("div");
  head.append(toggle, element("span", "verdict", `sample ${rollout.sample}: ${KINDS[rollout.kind]}`));
  const facts = [`ended: ${rollout.ended.replaceAll("_", " ")}`, `verdict: ${(rollout.verdict || "none").replaceAll("_", " ")}`];
  facts.push(`${rollout.tokens} tokens`, `${rollout.seconds.toFixed(1)} s`);
  if (rollout.calls.length) facts.push(`programs: ${rollout.calls.join(", ")}`);
  if (rollout.failure) facts.push(rollout.failure);
  head.append(element("span", "soft", "  " + facts.join(" · ")));
  const answer = element("div", "facts");
  answer.append(element("span", "label", "extracted answer "), element("code", "", rollout.answer === null ? "none" : rollout.answer));
  answer.append(element("span", "label", "  gold answer "), element("code", "", problem.answer === null ? "none" : problem.answer));
  box.append(head, answer);
  if (problem.columns) {
    const columns = element("details");
    columns.open = problem.columns.length <= 500;
    columns.append(element("summary", "label", "columns of the problem"), element("pre", "output", problem.columns));
    box.append(columns);
  }
  box.append(labelled("prompt", "prompt", written(problem.prompt, problem.formulas)));
  let number = 0;
  for (const [origin, text] of rollout.turns) {
    if (origin === "model") box.append(labelled("model", `turn ${++number}`, written(text, problem.formulas)));
    else box.append(labelled("observation", "observation", element("pre", "output", text.replace(/^\n+|\n+$/g, ""))));
  }
  return box;
}

function close(row) {
  row.querySelectorAll(".conversation").forEach((old) => old.remove());
  row.querySelectorAll(".chosen").forEach((old) => old.classList.remove("chosen"));
}

async function open(row, place, cell, sample) {
  const was = cell.classList.contains("chosen");
  close(row);
  if (was) return;
  cell.classList.add("chosen");
  const found = await conversations(place);
  const rollout = found.rollouts.find((one) => one.sample === sample);
  if (cell.classList.contains("chosen")) row.append(render(found, rollout));
}

function drawProblem(problem, place) {
  const row = element("div", "problem");
  row.dataset.place = place;
  const name = element("span", "name", `${problem.benchmark} · ${problem.statement}`);
  name.title = `${problem.id}: ${problem.statement}`;
  const bar = element("div", "bar");
  const can = new Set(problem.open);
  problem.kinds.forEach((kind, sample) => {
    const cell = element(can.has(sample) ? "button" : "span", `cell ${kind}${can.has(sample) ? " open" : ""}`);
    cell.dataset.kind = kind;
    cell.dataset.sample = sample;
    cell.title = `sample ${sample}: ${KINDS[kind]}`;
    cell.id = `p${place}s${sample}`;
    bar.append(cell);
  });
  bar.addEventListener("click", ({ target }) => {
    if (target.classList.contains("open")) open(row, place, target, Number(target.dataset.sample));
  });
  row.append(name, element("span", "share", problem.share), bar);
  return row;
}

// What is shown: kinds, one benchmark, and what is searched for; and in which order.

function filter() {
  const benchmark = document.getElementById("benchmark").value;
  let problems = 0;
  let rollouts = 0;
  for (const row of rows) {
    const problem = index.problems[row.dataset.place];
    const samples = matches === null ? null : matches.get(Number(row.dataset.place));
    const here = (benchmark === "" || problem.benchmark === benchmark) && samples !== undefined;
    let on = 0;
    for (const cell of row.querySelectorAll(".cell")) {
      const fits = here && shown.has(cell.dataset.kind) && (samples === null || samples.has(Number(cell.dataset.sample)));
      cell.classList.toggle("off", !fits);
      on += fits;
    }
    if (row.querySelector(".chosen.off")) close(row);
    row.style.display = on ? "" : "none";
    problems += on > 0;
    rollouts += on;
  }
  document.getElementById("found").textContent = `${problems} problems, ${rollouts} rollouts`;
}

async function search() {
  const wanted = document.getElementById("search").value.trim().toLowerCase();
  const mine = ++searches;
  if (!wanted) { matches = null; filter(); return; }
  const found = new Map();
  for (const [place, problem] of index.problems.entries()) {
    const content = await conversations(place);
    if (mine !== searches) return; // something else is searched for by now
    const holds = (text) => text !== null && text.toLowerCase().includes(wanted);
    if ([problem.id, content.statement, content.answer, content.columns].some(holds)) found.set(place, new Set(problem.kinds.keys()));
    else {
      const samples = content.rollouts.filter((one) => holds(one.answer) || one.turns.some(([, text]) => holds(text)));
      if (samples.length) found.set(place, new Set(samples.map((one) => one.sample)));
    }
  }
  matches = found;
  filter();
}

const share = (problem) => { const [right, all] = problem.share.split("/").map(Number); return all ? right / all : -1; };
const ORDERS = {
  "benchmark order": () => 0,
  "hardest first": (one, other) => share(one) - share(other),
  "easiest first": (one, other) => share(other) - share(one),
  "closest to 50 % first": (one, other) => Math.abs(share(one) - 0.5) - Math.abs(share(other) - 0.5),
};

function sort() {
  const order = ORDERS[document.getElementById("sort").value];
  rows.sort((one, other) => order(index.problems[one.dataset.place], index.problems[other.dataset.place]) || one.dataset.place - other.dataset.place);
  document.getElementById("problems").append(...rows);
}

function chip(kind) {
  const made = element("button", "chip");
  made.append(element("span", "dot " + kind), element("span", "", `${KINDS[kind]} ${index.counts[kind] || 0}`));
  made.setAttribute("aria-pressed", "true");
  made.addEventListener("click", (event) => {
    if (event.altKey || shown.size === Object.keys(KINDS).length) { shown.clear(); shown.add(kind); }
    else if (shown.has(kind)) shown.delete(kind);
    else shown.add(kind);
    if (shown.size === 0) Object.keys(KINDS).forEach((one) => shown.add(one));
    document.querySelectorAll(".chip").forEach((one, place) => one.setAttribute("aria-pressed", String(shown.has(Object.keys(KINDS)[place]))));
    filter();
  });
  return made;
}

function choices(id, names, changed) {
  const select = document.getElementById(id);
  for (const [value, name] of names) { const option = element("option", "", name); option.value = value; select.append(option); }
  select.addEventListener("change", changed);
  return select;
}

Object.keys(KINDS).forEach((kind) => document.getElementById("chips").append(chip(kind)));
const rows = index.problems.map(drawProblem);
document.getElementById("problems").append(...rows);
const benchmarks = [...new Set(index.problems.map((problem) => problem.benchmark))];
choices("benchmark", [["", "all benchmarks"], ...benchmarks.map((name) => [name, name])], filter).hidden = benchmarks.length < 2;
choices("sort", Object.keys(ORDERS).map((name) => [name, name]), sort);
document.getElementById("search").addEventListener("input", search);
// A view can be linked to: report.html?search=...&sort=hardest%20first&benchmark=...
for (const [name, value] of new URLSearchParams(location.search)) {
  if (["search", "sort", "benchmark"].includes(name)) document.getElementById(name).value = value;
}
if (!ORDERS[document.getElementById("sort").value]) document.getElementById("sort").selectedIndex = 0;
if (document.getElementById("benchmark").selectedIndex < 0) document.getElementById("benchmark").selectedIndex = 0;
sort();
search();
const wanted = document.getElementById(location.hash.slice(1));
if (wanted && wanted.classList.contains("open")) { wanted.click(); wanted.scrollIntoView(); }
