// The model's tokens as elements: coloured by a field, chosen by pointer or keys.

import { el, visible } from "./dom.js";
import { scaleOf } from "./token_fields.js";

function shown(piece, id) {
  if (piece === null) return `⟨${id}⟩ `;
  if (piece === "") return "◌"; // the first bytes of a character
  const text = visible(piece).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  return /^ +$/.test(text) ? text.replaceAll(" ", "·") : text;
}

export class TokenView {
  // `onchoose` gets the index of the token that is pointed at or moved to.
  constructor(onchoose) {
    this.items = [];
    this.onchoose = onchoose;
    this.current = -1;
  }

  // The tokens of one segment; they continue the indices of those before.
  segment({ pieces, token_ids: ids, special, text }) {
    const specials = new Set(special);
    const whole = pieces.every((piece) => piece !== null) && pieces.join("").startsWith(text);
    const box = el("div", { class: "said tokens", tabIndex: 0, role: "group", "aria-label": "Tokens of the model; arrow keys move from one to the next" });
    let length = 0;
    pieces.forEach((piece, place) => {
      const past = whole && length >= text.length && piece !== "";
      const kind = specials.has(place) ? "special" : past ? "past" : "";
      length += (piece ?? "").length;
      const item = document.createElement("i");
      item.textContent = shown(piece, ids[place]);
      if (kind) item.className = kind;
      item.dataset.index = this.items.length;
      this.items.push({ item, piece, id: ids[place], past, special: specials.has(place) });
      box.append(item);
    });
    const first = this.items.length - pieces.length;
    const of = (event) => event.target.closest?.("i[data-index]");
    box.addEventListener("pointerover", (event) => of(event) && this.choose(Number(of(event).dataset.index)));
    box.addEventListener("click", (event) => of(event) && this.choose(Number(of(event).dataset.index)));
    box.addEventListener("focus", () => this.current < 0 && this.choose(first));
    box.addEventListener("keydown", (event) => {
      const all = this.items.length;
      const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -all, End: all }[event.key];
      if (!move) return;
      event.preventDefault();
      this.choose(Math.min(this.items.length - 1, Math.max(0, this.current + move)), true);
    });
    return box;
  }

  choose(index, scroll = false) {
    if (!this.items[index]) return;
    this.items[this.current]?.item.classList.remove("current");
    this.current = index;
    const { item } = this.items[index];
    item.classList.add("current");
    if (scroll) item.scrollIntoView({ block: "nearest" });
    this.onchoose(index, this.items[index]);
  }

  // Colours every token by its value; returns the scale.
  colour(values) {
    const scale = scaleOf(values);
    this.items.forEach(({ item }, index) => {
      const value = values[index];
      item.style.backgroundColor = value === null || value === undefined ? "" : scale.shade(Number(value));
    });
    return scale;
  }
}
