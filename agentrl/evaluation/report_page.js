"use strict";
const index = JSON.parse(document.getElementById("index").textContent);
const KINDS = index.kinds;
const shown = new Set(Object.keys(KINDS));
const unpacked = new Map();

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

async function conversations(place) {
  if (!unpacked.has(place)) {
    const packed = Uint8Array.from(atob(document.getElementById("c" + place).textContent), (c) => c.charCodeAt(0));
    const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(place, await new Response(plain).json());
  }
  return unpacked.get(place);
}

function appendText(parent, text, className) {
  if (text.trim()) parent.append(element("pre", className, text.replace(/^\n+|\n+$/g, "")));
}

function modelTurn(text) {
  const turn = element("div");
  const fence = /```[^\n`]*\n[\s\S]*?(?:\n[ ]{0,3}```|$)/g;
  let end = 0;
  for (const block of text.matchAll(fence)) {
    appendText(turn, text.slice(end, block.index), "");
    appendText(turn, block[0], "code");
    end = block.index + block[0].length;
  }
  appendText(turn, text.slice(end), "");
  return turn;
}

function labelled(kind, label, body) {
  const turn = element("div", "turn " + kind);
  turn.append(element("div", "label", label), body);
  return turn;
}

function render(problem, rollout) {
  const box = element("div", "conversation");
  const head = element("div");
  head.append(element("span", "verdict", `sample ${rollout.sample}: ${KINDS[rollout.kind]}`));
  const facts = [`ended ${rollout.ended.replaceAll("_", " ")}`, `verdict ${(rollout.verdict || "none").replaceAll("_", " ")}`];
  facts.push(`${rollout.tokens} tokens`, `${rollout.seconds.toFixed(1)} s`);
  if (rollout.calls.length) facts.push(`programs: ${rollout.calls.join(", ")}`);
  if (rollout.failure) facts.push(rollout.failure);
  head.append(element("span", "soft", "  " + facts.join(" · ")));
  const answer = element("div");
  answer.append(element("span", "label", "extracted answer "), element("code", "", rollout.answer === null ? "none" : rollout.answer));
  answer.append(element("span", "label", "  gold answer "), element("code", "", problem.answer));
  box.append(head, answer, labelled("prompt", "prompt", element("pre", "", problem.prompt)));
  let number = 0;
  for (const [origin, text] of rollout.turns) {
    if (origin === "model") box.append(labelled("model", `turn ${++number}`, modelTurn(text)));
    else box.append(labelled("observation", "shown to the model", element("pre", "output", text.replace(/^\n+|\n+$/g, ""))));
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
  const name = element("span", "name", `${problem.benchmark} · ${problem.statement}`);
  name.title = `${problem.id}: ${problem.statement}`;
  const bar = element("div", "bar");
  const letters = [...problem.kinds];
  letters.forEach((kind, sample) => {
    const can = problem.open.includes(sample);
    const cell = element(can ? "button" : "span", `cell ${kind}${can ? " open" : ""}`);
    cell.dataset.kind = kind;
    cell.title = `sample ${sample}: ${KINDS[kind]}`;
    if (can) cell.addEventListener("click", () => open(row, place, cell, sample));
    cell.id = `p${place}s${sample}`;
    bar.append(cell);
  });
  row.append(name, element("span", "share", problem.share), bar);
  return row;
}

function filter() {
  for (const row of document.querySelectorAll(".problem")) {
    let any = false;
    for (const cell of row.querySelectorAll(".cell")) {
      const on = shown.has(cell.dataset.kind);
      cell.classList.toggle("off", !on);
      any = any || on;
    }
    if (row.querySelector(".chosen.off")) close(row);
    row.style.display = any ? "" : "none";
  }
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

Object.keys(KINDS).forEach((kind) => document.getElementById("chips").append(chip(kind)));
index.problems.forEach((problem, place) => document.getElementById("problems").append(drawProblem(problem, place)));
const wanted = document.getElementById(location.hash.slice(1));
if (wanted && wanted.classList.contains("open")) { wanted.click(); wanted.scrollIntoView(); }
