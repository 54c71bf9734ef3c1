// The stored group with another estimator, computed on the viewer's machine: curves next to the curves of training, and
// values for the tokens of the open trajectory.

import { draw, drawable, lineStyle, LINE_STYLES, Link } from "./charts.js";
import { ask, isExported } from "./data.js";
import { choice, el, notices, number, withOptions, section, table, words } from "./dom.js";

const CURVES = [
  ["baselines", "baseline"],
  ["advantages", "advantage"],
];

const TRAINED = lineStyle(2).dash; // dots

// `onfound` is called with the values of the trajectory's tokens by field, named as in TOKEN_FIELDS.
export function whatIf(page, { id, step, number: trajectory }, onfound) {
  if (!page.fields.advantages || isExported) return null;
  const body = el("div", {}, el("p", { class: "hint" }, "The first computation takes several seconds, because it loads torch and the run's plug-ins."));
  const button = el("button", { class: "act", type: "button", onclick: () => open() }, "Choose an estimator");
  body.append(button);

  async function open() {
    button.disabled = true;
    try {
      const { estimators, warnings } = await ask(`/runs/${id}/estimators`);
      body.replaceChildren(...notices(warnings), formOf(estimators));
    } catch (error) {
      body.replaceChildren(...notices([error.message]), button);
      button.disabled = false;
    }
  }

  function formOf(estimators) {
    const size = new Set(page.siblings.filter((sibling) => sibling.curves).map((sibling) => sibling.sample)).size;
    const options = el("div", { class: "bar" });
    const result = el("div", { "aria-live": "polite" });
    const pick = (name) => options.replaceChildren(...estimators[name].map((form) => inputOf(form, page.facts.estimator_options[form.name])));
    const first = page.facts.estimator in estimators ? page.facts.estimator : Object.keys(estimators)[0];
    const estimator = choice("Estimator", Object.keys(estimators).map((name) => [name, name]), first, { onchange: pick });
    const sizes = [...Array(size).keys()].map((index) => [String(size - index), String(size - index)]);
    const rollouts = choice("N: rollouts of the group", sizes, String(size));
    pick(first);
    const submit = async (event) => {
      event.preventDefault();
      result.replaceChildren(el("p", { class: "quiet" }, "Computing…"));
      try {
        const name = estimator.querySelector("select").value;
        const query = { estimator: name, options: JSON.stringify(valuesOf(options)), size: rollouts.querySelector("select").value };
        const answer = await ask(`/runs/${id}/steps/${step}/${trajectory}/what_if`, query);
        result.replaceChildren(...shown(page, answer, trajectory));
        onfound(answer.fields);
      } catch (error) {
        result.replaceChildren(...notices([error.message]));
      }
    };
    return el("form", { onsubmit: submit }, el("div", { class: "bar" }, estimator, rollouts), options, el("button", { class: "act", type: "submit" }, "Compute"), result);
  }

  return section("What if: the group with another estimator", body);
}

function inputOf({ name, default: standard, choices }, ofRun) {
  const value = ofRun === undefined ? standard : ofRun;
  if (choices.length) return choice(words(name), choices.map((each) => [JSON.stringify(each), words(each ?? "none")]), JSON.stringify(value), { name });
  return el("label", { class: "field" }, el("span", {}, words(name)), el("input", { name, value: JSON.stringify(value), size: 8 }));
}

function valuesOf(options) {
  const values = {};
  for (const input of options.querySelectorAll("[name]")) {
    try {
      values[input.name] = JSON.parse(input.value);
    } catch {
      values[input.name] = input.value;
    }
  }
  return values;
}

function shown(page, answer, trajectory) {
  const before = new Map(page.siblings.map((sibling) => [sibling.number, sibling]));
  const drawn = drawable(answer.siblings, (sibling) => sibling.number === Number(trajectory), LINE_STYLES / 2); // the other half is dotted, for training
  const fewer = drawn.length < answer.siblings.length ? ` ${drawn.length} of ${answer.siblings.length} trajectories are shown, because more lines cannot be distinguished.` : "";
  const link = new Link();
  const charts = CURVES.map(([name, title], row) => {
    const chart = el("div", { class: "chart", role: "img", "aria-label": `${title} under the other estimator and in training` });
    const series = drawn.flatMap((sibling, at) => {
      const style = { color: lineStyle(at).color, width: sibling.number === Number(trajectory) ? 2.6 : 1.1, held: true };
      const trained = before.get(sibling.number);
      return [
        { name: String(sibling.number), unnamed: true, x: trained.index, y: trained.curves[name], ...style, dash: TRAINED },
        { name: String(sibling.number), x: sibling.index, y: sibling[name], ...style },
      ];
    });
    draw(chart, { series, link, height: 180, x: { title: row === CURVES.length - 1 ? "model token" : "", whole: true }, y: { title } });
    return chart;
  });
  const columns = [
    { title: "Trajectory", number: true, value: (sibling) => sibling.number },
    { title: "Reward", number: true, value: (sibling) => before.get(sibling.number).reward },
    { title: "Mean advantage in training", number: true, fraction: true, value: (sibling) => before.get(sibling.number).mean_advantage },
    { title: `Mean advantage by ${answer.estimator}`, number: true, fraction: true, value: (sibling) => sibling.mean },
  ];
  const power = `Gradient power of these trajectories: ${number(answer.power)}, in training ${number(answer.power_before)} (diagonal proxy of the variance). Solid: ${withOptions(answer.estimator, answer.options)}; dotted: training.${fewer}`;
  return [el("p", { class: "hint", "data-power": answer.power }, power), ...charts, table(columns, answer.siblings, { caption: "The group with both estimators" }).element];
}
