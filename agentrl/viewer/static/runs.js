// The page of all runs: overlaid curves, a table, the evaluations, and the settings in which the shown runs differ.

import { draw, lineMark, lineStyle, LINE_STYLES } from "./charts.js";
import { ask, every, loadCatalogue, meanings, Series, unitOf } from "./data.js";
import { choice, duration, el, interval, notices, number, section, table, visible, words } from "./dom.js";
import { axisTitle, curveChoices, curveState, metricLine, metricsOf, progress, resultText, stateTag } from "./run.js";

const FIRST = "reward/mean";
const SHOWN_AT_FIRST = 8; // the number of colours
const REFRESH = 5; // seconds
const STORED_STYLES = "line styles of runs";

export async function runsScreen({ query, signal, remember }) {
  await loadCatalogue();
  const state = { ...curveState(query), search: query.get("search") ?? "" };
  state.metric ||= FIRST;
  const asked = query.get("runs")?.split("~").slice(0, LINE_STYLES);
  const chosen = new Set(asked); // in order of selection, so that earlier runs keep their colours
  const styles = storedStyles();
  const series = new Map();
  const [runs, rows, evaluations] = [[], [], []];
  const chart = el("div", { class: "chart", role: "img", "aria-label": "Curves of the chosen runs" });
  const [metrics, about, differing, warnings, scores] = [el("div"), el("div"), el("div"), el("div"), el("div")];
  const style = (run) => lineStyle(styles.get(run.id));
  const shown = () => [...chosen].map((id) => runs.find((run) => run.id === id)).filter(Boolean);
  const full = () => shown().length >= LINE_STYLES;
  const toggle = (run) => (event) => {
    if (event.target.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    state.picked = true;
    remember({ runs: [...chosen].join("~") });
    assignStyles(styles, shown());
    list();
    settings();
    return curves();
  };
  const columns = [
    { title: "Curve", value: (run) => chosen.has(run.id), cell: (run) => el("input", { type: "checkbox", checked: chosen.has(run.id), disabled: full() && !chosen.has(run.id), "aria-label": `Show ${run.name}`, onchange: toggle(run) }) },
    { title: "Run", value: (run) => run.name, class: "name", cell: (run) => [lineMark(chosen.has(run.id) ? style(run) : { color: "transparent" }), el("a", { href: `#/run/${run.id}` }, run.name), run.notes ? el("div", { class: "hint" }, visible(run.notes.split("\n")[0])) : null].filter(Boolean) },
    { title: "Result", number: true, value: (run) => run.result?.value, cell: resultText },
    { title: "State", value: (run) => run.state, class: "brief", cell: (run) => [stateTag(run), alertMark(run)].filter(Boolean) },
    { title: "Step", number: true, value: (run) => run.step, cell: progress },
    { title: "Duration", number: true, value: (run) => run.seconds, cell: (run) => duration(run.seconds) },
    { title: "Estimator", value: (run) => run.settings["algorithm.estimator"] },
    { title: "Environment", value: (run) => run.settings.env },
    { title: "Seed", value: (run) => run.settings.seed },
    { title: "Last change", value: (run) => run.modified, cell: (run) => new Date(run.modified * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) },
  ];
  const runTable = table(columns, rows, { caption: "All runs", mark: (run) => (run.collapsed ? "troubled" : "") });

  // Reads the list of runs. Returns true if it has changed.
  async function read() {
    const before = JSON.stringify([runs, evaluations]);
    const answer = await ask("/library");
    runs.splice(0, Infinity, ...answer.runs.filter((run) => !run.error));
    evaluations.splice(0, Infinity, ...answer.evaluations);
    runs.filter((run) => !series.has(run.id)).forEach((run) => series.set(run.id, new Series(run.id)));
    if (!asked && !state.picked) {
      const newest = [...runs].sort((a, b) => b.modified - a.modified).slice(0, SHOWN_AT_FIRST).map((run) => run.id);
      [...chosen].filter((id) => !newest.includes(id)).forEach((id) => chosen.delete(id));
      newest.sort().forEach((id) => chosen.add(id));
    }
    assignStyles(styles, shown());
    warnings.replaceChildren(...notices([...answer.runs, ...answer.evaluations].flatMap((one) => [one.error, ...(one.warnings ?? [])].filter(Boolean).map((text) => `${one.name}: ${text}`))));
    return JSON.stringify([runs, evaluations]) !== before;
  }

  async function curves(fresh = () => false) {
    const lines = shown();
    const wanted = (names) => names.filter((name) => metricsOf(state.metric).includes(name));
    await Promise.all(lines.filter((run) => !(state.metric in series.get(run.id).curves) || fresh(run)).map((run) => series.get(run.id).refresh(wanted)));
    const names = [...new Set(lines.flatMap((run) => series.get(run.id).names))].sort();
    const pick = (value) => ((state.metric = value), remember({ metric: value === FIRST ? null : value }), curves());
    if (!metrics.contains(document.activeElement)) metrics.replaceChildren(choice("Metric", names.map((name) => [name, name]), state.metric, { onchange: pick }));
    about.replaceChildren(...[meanings([state.metric])].filter(Boolean));
    const drawn = lines.filter((run) => state.metric in series.get(run.id).curves).map((run) => ({ name: run.name, ...metricLine(state.metric, series.get(run.id), state), ...style(run) }));
    draw(chart, { series: drawn, height: 250, x: { title: axisTitle(state), whole: state.axis === "step" }, y: { title: unitOf([state.metric]) } });
  }

  function list() {
    rows.splice(0, Infinity, ...runs.filter((run) => `${run.name}\n${run.notes}`.toLowerCase().includes(state.search.toLowerCase())));
    runTable.element.querySelector("caption").textContent = `${rows.length} of ${runs.length} runs${full() ? `. At most ${LINE_STYLES} curves are shown, because more cannot be distinguished: remove one to add another` : ""}`;
    runTable.fill();
  }

  function settings() {
    const some = shown();
    const keys = [...new Set(some.flatMap((run) => Object.keys(run.settings)))].sort();
    const text = (run, key) => (typeof run.settings[key] === "string" ? run.settings[key] : JSON.stringify(run.settings[key])); // undefined: a setting of another environment or version
    const differ = keys.filter((key) => key !== "name" && new Set(some.map((run) => text(run, key)).filter((value) => value !== undefined)).size > 1);
    if (some.length < 2) return differing.replaceChildren();
    const heads = [{ title: "Setting", value: (key) => key }, ...some.map((run) => ({ title: run.name, value: (key) => text(run, key), class: "brief" }))];
    const content = differ.length ? table(heads, differ, { label: "Settings that differ" }).element : el("p", { class: "quiet" }, "The chosen runs have the same settings.");
    return differing.replaceChildren(section("Settings that differ", content));
  }

  const scored = () => scores.replaceChildren(...(evaluations.length ? [section("Evaluations", evaluationTable(evaluations.filter((one) => !one.error)))] : []));
  const fill = () => (list(), settings(), scored());
  await read();
  fill();
  await curves();
  every(REFRESH, signal, async () => {
    const seen = new Map(runs.map((run) => [run.id, run.modified]));
    if (!(await read())) return;
    fill();
    await curves((run) => run.modified !== seen.get(run.id));
  });
  const search = (event) => ((state.search = event.target.value), remember({ search: state.search }), list());
  const controls = el(
    "div",
    { class: "bar" },
    metrics,
    ...curveChoices(state, remember, () => curves()),
  );
  const find = el("label", { class: "field" }, el("span", {}, "Search runs"), el("input", { type: "search", value: state.search, oninput: search }));
  const all = el("section", { class: "card" }, el("div", { class: "bar" }, find), runTable.element);
  const card = el("section", { class: "card", "aria-label": "Curves" }, controls, chart, about);
  return { title: "Runs", content: [el("h1", {}, "Runs"), warnings, card, all, scores, differing] };
}

// Assigns a line style to every run in `shown`. A run keeps its style unless an earlier run has it, and otherwise gets the
// first free one, so up to eight runs have different colours.
function assignStyles(styles, shown) {
  const taken = new Set();
  const most = Math.max(SHOWN_AT_FIRST, shown.length);
  const keeps = (run) => styles.get(run.id) < most && !taken.has(styles.get(run.id)) && taken.add(styles.get(run.id));
  for (const run of shown.filter((each) => !keeps(each))) {
    let index = 0;
    while (taken.has(index)) index++;
    styles.set(run.id, index);
    taken.add(index);
  }
  try {
    localStorage.setItem(STORED_STYLES, JSON.stringify([...styles]));
  } catch {
    // Without storage, colours are assigned again at the next visit.
  }
}

function storedStyles() {
  try {
    return new Map(JSON.parse(localStorage.getItem(STORED_STYLES)) ?? []);
  } catch {
    return new Map();
  }
}

// A mark with the newest collapse or, without a collapse, the newest alert, and the number of further alerts.
function alertMark({ alerts }) {
  if (!alerts.length) return null;
  const worst = alerts.find(({ alert }) => alert.endsWith("_collapse")) ?? alerts[0];
  const messages = alerts.map(({ alert, step, message }) => `step ${step}: ${words(alert)}: ${message}`).join("\n");
  return el("span", { class: "tag bad", title: messages }, `⚠ ${words(worst.alert)}${alerts.length > 1 ? ` +${alerts.length - 1}` : ""}`);
}

function evaluationTable(evaluations) {
  const names = [...new Set(evaluations.flatMap((one) => Object.keys(one.benchmarks ?? {})))].sort();
  const score = (one, name) => one.benchmarks?.[name];
  const columns = [
    { title: "Evaluation", value: (one) => one.name, class: "name", cell: (one) => el("a", { href: `#/evaluation/${one.id}` }, one.name) },
    ...names.map((name) => ({
      title: name,
      number: true,
      value: (one) => score(one, name)?.mean,
      cell: (one) => (score(one, name) ? [number(score(one, name).mean, [0.5]), el("div", { class: "hint" }, interval(score(one, name).problems_like_these))] : "–"),
    })),
    { title: "Model", value: (one) => one.model, class: "text" },
  ];
  return table(columns, evaluations, { caption: "Mean score with its 95 % interval for problems like these" }).element;
}
