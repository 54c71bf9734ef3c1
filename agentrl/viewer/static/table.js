// A table whose columns sort. Columns: { title, value(row), cell(row), number }.

import { el, short, visible } from "./dom.js";

const SHOWN = 250; // rows that are drawn at first, and with every "Show more"

export function table(columns, rows, { caption, order = null, mark } = {}) {
  const body = el("tbody");
  let sorted = order;
  let most = SHOWN;
  const more = el("button", { class: "act", type: "button", onclick: () => ((most += SHOWN), fill()) });
  const heads = columns.map((column, place) => {
    const sort = () => {
      sorted = { place, down: sorted?.place === place ? !sorted.down : Boolean(column.number) };
      fill();
    };
    return el("th", { scope: "col", class: column.number ? "number" : "" }, el("button", { type: "button", onclick: sort }, column.title));
  });
  function fill() {
    heads.forEach((head, place) =>
      head.setAttribute("aria-sort", sorted?.place !== place ? "none" : sorted.down ? "descending" : "ascending"),
    );
    const shown = [...rows];
    if (sorted) {
      const { value } = columns[sorted.place];
      shown.sort((a, b) => compare(value(a), value(b)) * (sorted.down ? -1 : 1));
    }
    more.hidden = shown.length <= most;
    more.textContent = `Show more: ${Math.min(most, shown.length)} of ${shown.length} rows are shown`;
    body.replaceChildren(...shown.slice(0, most).map((row) => el("tr", { class: mark?.(row) ?? "" }, columns.map((column) => cell(column, row)))));
  }
  fill();
  const head = el("thead", {}, el("tr", {}, heads));
  const whole = el("table", {}, caption ? el("caption", {}, caption) : null, head, body);
  return { element: el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": caption ?? "Table" }, whole, more), fill };
}

function cell(column, row) {
  const shown = column.cell ? column.cell(row) : visible(short(column.value(row)));
  return el("td", { class: column.number ? "number" : (column.class ?? "") }, shown);
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}
