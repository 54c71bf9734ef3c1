// The tree of a rollout with branches: one line per branch, with its values in training. A click opens its tokens.

import { svg } from "./charts.js";
import { el, number, words } from "./dom.js";
import { scaleOf } from "./tokens.js";

const [COLUMN, ROW, LABEL, REST] = [230, 46, 17, 170]; // pixels of a branch, between leaves, above a line, and after the last

// Returns the tree of the rollout of `page`, or [] without branches. `address` is the page of the step.
export function rolloutTree(page, address) {
  const branches = page.siblings.filter((item) => item.sample === page.row.sample);
  if (branches.length < 2) return [];
  const positions = placeBranches(branches);
  const scale = scaleOf("advantages", branches.map((item) => item.mean_advantage));
  const levels = Math.max(...[...positions.values()].map(({ level }) => level)) + 1;
  const leaves = Math.max(...[...positions.values()].map(({ row }) => row)) + 1;
  const drawn = branches.map((item) => branchElement(item, positions, scale, item.number === page.row.number, address));
  const picture = svg("svg", { class: "tree", width: levels * COLUMN + REST, height: leaves * ROW + 14, role: "group", "aria-label": "Branches of the rollout" }, drawn);
  const hint = "G: return from the first token of the branch. b: mean baseline. W: energy of the branch's tokens. The colour shows the mean advantage. A click opens the tokens.";
  return [el("p", { class: "hint" }, hint), el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": "Tree" }, picture)];
}

// Returns the level of each branch and its row: leaves have consecutive rows, and forks the mean row of their branches.
function placeBranches(branches) {
  const positions = new Map();
  let leaves = 0;
  const visit = (item, level) => {
    const below = branches.filter((other) => other.parent === item.branch).map((child) => visit(child, level + 1));
    const row = below.length ? below.reduce((sum, each) => sum + each, 0) / below.length : leaves++;
    positions.set(item.branch, { level, row });
    return row;
  };
  const known = new Set(branches.map((item) => item.branch));
  branches.filter((item) => !known.has(item.parent)).forEach((root) => visit(root, 0));
  return positions;
}

function branchElement(item, positions, scale, here, address) {
  const { level, row } = positions.get(item.branch);
  const [x, y] = [level * COLUMN + 6, row * ROW + LABEL + 8];
  const from = positions.get(item.parent);
  const start = from ? from.row * ROW + LABEL + 8 : y;
  const values = item.edge ? `G ${number(item.edge.return, [0.5])} · b ${number(item.edge.baseline, [0.5])} · W ${number(item.edge.energy, [0.5])}` : item.dropped || "no token statistics";
  const weight = item.path_weight === null || item.path_weight === 1 ? "" : `, weight ${number(item.path_weight, [0.5])}`;
  const ended = item.ended === "forked" ? "" : `, ${words(item.ended)}, reward ${number(item.reward)}`;
  const tint = svg("rect", { x: x + 8, y: y - LABEL - 2, width: COLUMN - 22, height: LABEL, rx: 3 });
  tint.style.fill = item.edge ? scale.shade(item.mean_advantage) || "transparent" : "transparent";
  return svg(
    "a",
    { href: `${address}/${item.number}`, class: here ? "here" : "", "aria-label": `Branch ${item.branch}: ${values}${ended}` },
    tint,
    svg("path", { d: `M${x} ${start}V${y}H${x + COLUMN - 8}` }),
    svg("text", { x: x + 12, y: y - 6 }, values),
    svg("text", { x: x + 12, y: y + 14, class: "quiet" }, `${item.tokens} tokens${weight}${ended}`),
  );
}
