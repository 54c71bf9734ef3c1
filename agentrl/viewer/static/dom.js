// Elements. Content is always a text node; nothing of a run is ever parsed as markup.

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

// A choice among [value, label] pairs.
export function choice(label, options, value, onchange) {
  const items = options.map(([given, shown]) => el("option", { value: given, selected: given === value }, shown));
  const select = el("select", { onchange: (event) => onchange(event.target.value) }, items);
  return el("label", { class: "field" }, el("span", {}, label), select);
}

export function section(title, ...children) {
  return el("section", { class: "card" }, el("h2", {}, title), ...children);
}

export function notices(problems) {
  return problems.map((text) => el("p", { class: "notice", role: "status" }, text));
}

// A number to read; exact values stand in titles and in the panel of a token.
export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1000 || size < 0.001 ? value.toExponential(2) : value.toPrecision(4).replace(/\.?0+$/, "");
}

export function words(name) {
  return String(name).replaceAll("_", " ");
}

// A name with its options, such as "tir_otb, tail=3".
export const said = (name, options) => [name, ...Object.entries(options).map(([key, value]) => `${key}=${value ?? "none"}`)].join(", ");

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const code = (character) => `‹U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;

// Text with what cannot be seen made visible: marks of direction, controls.
export const visible = (text) => text.replace(CONTROLS, code);
