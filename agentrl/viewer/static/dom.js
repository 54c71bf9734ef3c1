// Elements, numbers and tables. Content is always inserted as text nodes and never parsed as markup.

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// A choice among [value, label] pairs. With a `name`, it is a field of the form that contains it.
export function choice(label, options, value, { onchange, name } = {}) {
  const items = options.map(([option, shown]) => el("option", { value: option, selected: option === value }, shown));
  const select = el("select", { name, onchange: onchange && ((event) => onchange(event.target.value)) }, items);
  return el("label", { class: "field" }, el("span", {}, label), select);
}

export function section(title, ...children) {
  return el("section", { class: "card" }, el("h2", {}, title), ...children);
}

export function notices(texts) {
  return texts.map((text) => el("p", { class: "notice", role: "status" }, text));
}

// [term, description] pairs in a line.
export function factList(pairs) {
  return el("dl", { class: "facts" }, pairs.map(([term, text]) => el("div", {}, el("dt", {}, term), el("dd", {}, text))));
}

const counts = new Intl.NumberFormat("en");
const decimals = new Intl.NumberFormat("en", { minimumFractionDigits: 3, maximumFractionDigits: 3 });

// Formats a number with three decimals, or none if all of `among`, the adjacent numbers, are integers. Very small and very
// large numbers are written with an exponent. Tooltips show exact values.
export function number(value, among = [value]) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 5e-4)) return value.toExponential(2);
  return (among.every((each) => typeof each !== "number" || Number.isInteger(each)) ? counts : decimals).format(value);
}

// Formats both ends of an interval.
export const interval = ({ low, high }) => `${number(low, [low, high])} to ${number(high, [low, high])}`;

// Formats seconds as 45 s, 12 min 5 s, 3 h 20 min or 2 d 4 h.
export function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  const whole = Math.round(seconds);
  for (const [size, unit, smaller, name] of [[86_400, "d", 3_600, "h"], [3_600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (whole < size) continue;
    const rest = Math.floor((whole % size) / smaller);
    return `${Math.floor(whole / size)} ${unit}${rest ? ` ${rest} ${name}` : ""}`;
  }
  return `${whole} s`;
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

// Formats a name with its options, such as "tir_otb, tail=3".
export const withOptions = (name, options) => [name, ...Object.entries(options).map(([key, value]) => `${key}=${value ?? "none"}`)].join(", ");

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const code = (character) => `‹U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;

// Replaces invisible characters, such as controls and direction marks, by their code points.
export const visible = (text) => text.replace(CONTROLS, code);

const SHOWN = 250; // number of rows drawn initially and added by each "Show more"

// A table that can be sorted by its columns: { title, value(row), cell(row), class, number, fraction }. Columns with
// `number` are right-aligned, and those with `fraction` always have decimals. `fill` redraws the rows.
export function table(columns, rows, { caption, label, order = null, mark } = {}) {
  const body = el("tbody");
  let sorted = order;
  let most = SHOWN;
  const more = el("button", { class: "act", type: "button", onclick: () => ((most += SHOWN), fill()) });
  const heads = columns.map((column, index) => {
    const sort = () => {
      sorted = { index, down: sorted?.index === index ? !sorted.down : Boolean(column.number) };
      fill();
    };
    return el("th", { scope: "col", class: column.number ? "number" : (column.class ?? "") }, el("button", { type: "button", onclick: sort }, column.title));
  });
  function fill() {
    heads.forEach((head, index) =>
      head.setAttribute("aria-sort", sorted?.index !== index ? "none" : sorted.down ? "descending" : "ascending"),
    );
    const shown = [...rows];
    if (sorted) {
      const { value } = columns[sorted.index];
      shown.sort((a, b) => compare(value(a), value(b)) * (sorted.down ? -1 : 1));
    }
    more.hidden = shown.length <= most;
    more.textContent = `Show more: ${Math.min(most, shown.length)} of ${shown.length} rows are shown`;
    const cells = columns.map((column) => cellsOf(column, rows));
    body.replaceChildren(...shown.slice(0, most).map((row) => el("tr", { class: mark?.(row) ?? "" }, cells.map((cell) => cell(row)))));
  }
  fill();
  const head = el("thead", {}, el("tr", {}, heads));
  const whole = el("table", {}, caption ? el("caption", {}, caption) : null, head, body);
  return { element: el("div", { class: "wide", tabIndex: 0, role: "region", "aria-label": caption ?? label }, whole, more), fill };
}

// Returns a function from a row to its cell in a column. All numbers of a column have the same number of decimals.
function cellsOf(column, rows) {
  const style = column.number ? "number" : (column.class ?? "");
  if (column.cell) return (row) => el("td", { class: style }, column.cell(row));
  const among = column.fraction ? [0.5] : rows.map(column.value);
  return (row) => {
    const value = column.value(row);
    const exact = typeof value === "number" ? !Number.isInteger(value) : style === "line";
    return el("td", { class: style, title: exact ? visible(String(value)) : "" }, visible(number(value, among)));
  };
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}
