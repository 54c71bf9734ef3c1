// Shows the screen in the fragment of the address, `#PATH?VIEW`. VIEW holds the user's choices on the screen and the
// scroll position, so that a shared address opens the same view.

import { ask, every, isExported } from "./data.js";
import { el } from "./dom.js";
import { comparisonScreen, evaluationScreen, rolloutScreen } from "./evaluations.js";
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
const START = document.body.dataset.start ?? "/"; // an exported page starts with its run or evaluation
const ADDRESS_DELAY = 200; // milliseconds without a change before the address is updated: browsers limit the rate of updates
const CHECKED = 10; // seconds between checks that the run of a page without live data still exists

let current = new AbortController();
let remember = () => {};

async function show(event) {
  current.abort();
  remember = () => {};
  const controller = (current = new AbortController());
  const [path, view = ""] = location.hash.replace(/^#?\/?(?=\?|$)/, START).replace("#", "").split("?");
  const query = new URLSearchParams(view);
  const [pattern, screen] = screens.find(([each]) => each.test(path)) ?? screens[0];
  const parts = (pattern.exec(path) ?? []).slice(1);
  const page = document.getElementById("page");
  const writeAddress = addressWriter(path, query, controller.signal, page);
  try {
    const { title, trail = [], content, ready } = await screen({ parts, query: new URLSearchParams(query), signal: controller.signal, remember: writeAddress });
    if (controller.signal.aborted) return;
    document.title = `${title} · agentrl`;
    const links = trail.filter(([, address]) => !isExported || address !== "#/").map(([text, address]) => el("a", { href: address }, text));
    document.getElementById("trail").replaceChildren(...links, el("span", { "aria-current": "page" }, title));
    page.replaceChildren(...content.filter(Boolean));
    await nextFrames(); // wait until charts have their heights
    if (controller.signal.aborted) return;
    window.scrollTo(0, Number(query.get("at") ?? 0));
    if (event) page.focus({ preventScroll: true }); // move keyboard and screen reader to the new screen
    ready?.();
    remember = writeAddress;
    const [, id] = /^\/run\/(\w+)\//.exec(path) ?? [];
    if (id) every(CHECKED, controller.signal, () => ask(`/runs/${id}`));
  } catch (error) {
    if (controller.signal.aborted) return;
    document.getElementById("trail").replaceChildren(el("a", { href: "#/" }, "Runs"));
    page.replaceChildren(el("p", { class: "notice", role: "alert" }, error.message));
  }
  page.dataset.ready = location.hash;
}

// Returns a function that writes values by name into the address, without a new history entry; null removes a name.
function addressWriter(path, query, signal, page) {
  let timer;
  return (values) => {
    for (const [name, value] of Object.entries(values)) value === null || value === "" ? query.delete(name) : query.set(name, value);
    clearTimeout(timer);
    timer = setTimeout(() => {
      const address = `#${path}${String(query) ? `?${query}` : ""}`;
      if (signal.aborted || address === (location.hash || "#/")) return;
      history.replaceState(null, "", address);
      page.dataset.ready = address;
    }, ADDRESS_DELAY);
  };
}

const nextFrames = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));

history.scrollRestoration = "manual";
window.addEventListener("scroll", () => remember({ at: Math.round(window.scrollY) || null }));
window.addEventListener("hashchange", show); // calls `show` with an event
show();
