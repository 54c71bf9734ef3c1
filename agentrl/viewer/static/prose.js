// Renders model text as Markdown with formulas. Element names are from fixed sets, and everything else is a text node.

import { el, visible } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MATH_TAGS = new Set("math mrow mi mn mo ms mtext mspace msup msub msubsup munder mover munderover mfrac msqrt mroot mtable mtr mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts merror".split(" "));
const MATH_ATTRIBUTES = new Set("mathvariant stretchy fence form separator accent accentunder linethickness columnalign columnspacing rowspacing columnlines rowlines displaystyle scriptlevel movablelimits minsize maxsize lspace rspace width height depth notation largeop symmetric".split(" "));
const FENCE = /```[^\n`]*\n[\s\S]*?(?:\n {0,3}```|$)/g;
const BLOCK_FORMULA = /\$\$[^$]+\$\$|\\\[[\s\S]+?\\\]/g;
const INLINE = /\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$([^$\n]+)\$|`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*/g;

// Renders text as elements. `formulas` maps TeX to MathML trees. Other TeX is shown as source.
export function prose(text, formulas) {
  const parent = el("div", { class: "prose" });
  let end = 0;
  for (const block of text.matchAll(FENCE)) {
    paragraphs(parent, text.slice(end, block.index), formulas);
    parent.append(el("pre", { class: "source program" }, visible(block[0])));
    end = block.index + block[0].length;
  }
  paragraphs(parent, text.slice(end), formulas);
  return parent;
}

function paragraphs(parent, text, formulas) {
  let list = null;
  let paragraph = [];
  const flush = () => {
    if (paragraph.join("").trim()) inline(parent.appendChild(el("p")), paragraph.join("\n"), formulas);
    paragraph = [];
  };
  // A formula of several lines must not be split into lines.
  for (const line of text.replace(BLOCK_FORMULA, (formula) => formula.replaceAll("\n", " ")).split("\n")) {
    const heading = line.match(/^ {0,3}#{1,6}\s+(.*)$/);
    const item = line.match(/^\s*(?:([-*+])|(\d{1,4})[.)])\s+(.*)$/);
    if (!item) list = null;
    if (heading || item || !line.trim()) flush();
    if (heading) inline(parent.appendChild(el("h4")), heading[1], formulas);
    else if (item) {
      const tag = item[1] ? "ul" : "ol";
      if (!list || list.localName !== tag) list = parent.appendChild(el(tag, item[2] ? { start: Number(item[2]) } : {}));
      inline(list.appendChild(el("li")), item[3], formulas);
    } else if (line.trim()) paragraph.push(line);
  }
  flush();
}

function inline(parent, text, formulas) {
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(visible(text.slice(end, match.index)));
    end = match.index + match[0].length;
    const [source, dollars, brackets, parentheses, dollar, code, bold, italic] = match;
    const tex = dollars ?? brackets ?? parentheses ?? dollar;
    if (tex !== undefined) parent.append(formula(source, tex.trim(), (dollars ?? brackets) !== undefined, formulas));
    else if (code !== undefined) parent.append(el("code", {}, visible(code)));
    else inline(parent.appendChild(el(bold !== undefined ? "strong" : "em")), bold ?? italic, formulas);
  }
  parent.append(visible(text.slice(end)));
}

function formula(source, tex, block, formulas) {
  if (!Object.hasOwn(formulas, tex)) return el("code", {}, visible(source));
  const math = mathematics(formulas[tex]);
  if (block) math.setAttribute("display", "block");
  return el("span", { title: tex }, math);
}

function mathematics([tag, attributes, ...children]) {
  const element = document.createElementNS(MATHML, MATH_TAGS.has(tag) ? tag : "mrow");
  for (const [name, value] of Object.entries(attributes)) if (MATH_ATTRIBUTES.has(name)) element.setAttribute(name, value);
  for (const child of children) element.append(typeof child === "string" ? visible(child) : mathematics(child));
  return element;
}
