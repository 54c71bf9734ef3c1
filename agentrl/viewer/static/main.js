// Shows the screen that the address's end names, and lets go of the one before.

import { comparisonScreen } from "./comparison.js";
import { el } from "./dom.js";
import { evaluationScreen, rolloutScreen } from "./evaluations.js";
import { runScreen } from "./run.js";
import { runsScreen } from "./runs.js";
import { trajectoriesScreen } from "./trajectories.js";
import { trajectoryScreen } from "./trajectory.js";

const screens = [
  [/^\/$/, runsScreen],
  [/^\/run\/(\w+)$/, runScreen],
  [/^\/run\/(\w+)\/trajectories$/, trajectoriesScreen],
  [/^\/run\/(\w+)\/(\d+)\/(\d+)$/, trajectoryScreen],
  [/^\/evaluation\/(\w+)$/, evaluationScreen],
  [/^\/evaluation\/(\w+)\/(\d+)$/, rolloutScreen],
  [/^\/comparison\/(\w+)\/(\w+)$/, comparisonScreen],
];

let current = new AbortController();

async function show(event) {
  current.abort();
  const mine = (current = new AbortController());
  const [path, query = ""] = (location.hash.slice(1) || "/").split("?");
  const [pattern, screen] = screens.find(([each]) => each.test(path)) ?? screens[0];
  const parts = (pattern.exec(path) ?? []).slice(1);
  const page = document.getElementById("page");
  try {
    const { title, trail = [], content } = await screen(parts, new URLSearchParams(query), mine.signal);
    if (mine.signal.aborted) return;
    document.title = `${title} · agentrl`;
    const links = trail.map(([text, address]) => el("a", { href: address }, text));
    document.getElementById("trail").replaceChildren(...links, el("span", { "aria-current": "page" }, title));
    page.replaceChildren(...content.filter(Boolean));
    window.scrollTo(0, 0);
    if (event) page.focus({ preventScroll: true }); // keys and screen readers go on in the new screen
  } catch (error) {
    if (mine.signal.aborted) return;
    document.getElementById("trail").replaceChildren(el("a", { href: "#/" }, "Runs"));
    page.replaceChildren(el("p", { class: "notice", role: "alert" }, error.message));
  }
  page.dataset.ready = location.hash;
}

window.addEventListener("hashchange", show); // calls it with its event
show();
