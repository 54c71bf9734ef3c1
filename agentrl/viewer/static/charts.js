// Charts as SVG. A line is one path and a stack is one path per part. Both are reduced to at most a few values per pixel,
// so the cost of drawing does not depend on the length of a run. Charts with the same Link share the range and the cursor
// of their x axis.
//
// A chart is described by:
//   series: [{ name, x, y, low, high, color, dash, width, points, held, custom, last, unnamed }]
//           x ascends; gaps in y are null. `low` and `high` draw a band. `points` draws points without a line. `held`
//           draws steps: each value holds until the next. `custom[i]` is passed to `onpoint`. `last` is the newest value,
//           for the legend, if y holds means. `unnamed` leaves the series out of the legend.
//   stacked, share: stack the series as bars, in absolute values or in shares. `left` and `right` of the first series
//           are the edges of bars that are not centred on x.
//   x, y:   { title, log, ticks, zero, whole }; `extent`: [least, most] of x if other charts share it
//   marks:  x of dotted vertical lines;  link, height, onpoint(custom, x)

import { el, number } from "./dom.js";

const FEW = 60; // lines with fewer points also mark every point
const FONT = 6.4; // pixels of a digit
const MARGIN = { top: 16, right: 10, bottom: 32 };
export const LINE_STYLES = 16; // lines that can be distinguished: as many as /palette.css defines

// Colour and dashes of the n-th line, as in plots (agentrl/telemetry/plots.py).
export function lineStyle(index) {
  const number = (index % LINE_STYLES) + 1;
  return { color: `var(--line-${number})`, dash: `var(--dash-${number})` };
}

// Draws a short line for legends.
export function lineMark({ color, dash = "" }) {
  const line = styled(svg("path", { d: "M0 6H30" }), { stroke: color, strokeWidth: 2.4, strokeDasharray: dash });
  return svg("svg", { class: "line-mark", width: 30, height: 12, "aria-hidden": "true" }, line);
}

// Returns at most `most` of `items`, in order: all items that `kept` accepts, and the first of the other items.
export function drawable(items, kept, most = LINE_STYLES) {
  const others = items.filter((item) => !kept(item)).slice(0, Math.max(0, most - items.filter(kept).length));
  return items.filter((item) => kept(item) || others.includes(item));
}

// The x range and cursor that charts share.
export class Link {
  constructor(range = null, onzoom = () => {}) {
    this.range = range;
    this.onzoom = onzoom;
    this.charts = new Set();
  }

  // Shows a range of x in every chart, or the full range for null.
  zoom(range) {
    if (range === this.range) return;
    this.range = range;
    this.onzoom(range);
    this.each((chart) => chart.render());
  }

  showValuesAt(x) {
    this.each((chart) => chart.showValuesAt(x));
  }

  each(act) {
    for (const chart of this.charts) chart.element.isConnected ? act(chart) : this.charts.delete(chart);
  }
}

const drawn = new WeakMap();
const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => drawn.get(target).resized()));

// Draws or redraws a chart in `element`. An element outside the page is drawn when it is added.
export function draw(element, spec) {
  if (!drawn.has(element)) {
    drawn.set(element, new Chart(element));
    sizes.observe(element);
  }
  drawn.get(element).show(spec);
}

class Chart {
  constructor(element) {
    this.element = element;
    this.hidden = new Set(); // names of series
    this.defaultLink = new Link();
    this.width = 0;
    this.legend = el("div", { class: "legend" });
    this.svg = svg("svg", {});
    this.svg.addEventListener("pointerdown", (event) => (this.from = event.pointerType === "mouse" ? this.at(event) : null));
    this.svg.addEventListener("pointermove", (event) => this.moved(event));
    this.svg.addEventListener("pointerleave", () => ((this.from = null), this.select(null), this.link.showValuesAt(null)));
    this.svg.addEventListener("pointerup", (event) => this.released(event));
    this.svg.addEventListener("dblclick", () => this.link.zoom(null));
    element.replaceChildren(this.legend, this.svg);
  }

  get link() {
    return this.spec.link ?? this.defaultLink;
  }

  show(spec) {
    this.spec = spec;
    this.link.charts.add(this);
    this.height = spec.height ?? 190;
    this.svg.setAttribute("height", this.height);
    if (this.width) this.render();
  }

  resized() {
    const width = this.element.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    this.render();
  }

  render() {
    const { spec, width, height } = this;
    const { x = {}, y = {} } = spec;
    const shown = spec.series.filter((series) => !this.hidden.has(series.name));
    const all = spec.extent ?? extent(spec.series.flatMap((series) => [...(series.left ?? []), ...(series.right ?? []), ...series.x]));
    this.range = this.link.range ?? all ?? [0, 1];
    if (this.range[0] === this.range[1]) this.range = [this.range[0] - 0.5, this.range[1] + 0.5];
    const plot = width - MARGIN.right;
    // Reduced to the full width, because the width of the y labels depends on the reduced values.
    const parts = spec.stacked ? stackSeries(shown, this.range, plot, spec.share) : shown.map((series) => reduceSeries(series, this.range, plot, y.log));
    const scaleY = axis(valuesOf(parts, spec), { ...y, zero: y.zero || spec.stacked }, height - MARGIN.bottom, MARGIN.top, Math.max(2, Math.floor(height / 42)));
    const left = Math.max(24, 10 + FONT * Math.max(...scaleY.ticks.map(([, text]) => text.length), 1));
    const scaleX = axis(this.range, { ...x, tight: true }, left, width - MARGIN.right, Math.max(2, Math.floor(width / 90)));
    Object.assign(this, { left, scaleX, scaleY, shown });
    const bottom = height - MARGIN.bottom;
    const clip = `clip-${(this.name ??= Math.random().toString(36).slice(2))}`;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(
      svg("clipPath", { id: clip }, svg("rect", { x: left - 2, y: MARGIN.top - 4, width: width - left, height: bottom - MARGIN.top + 8 })),
      svg("path", { class: "rule", d: scaleY.ticks.map(([at]) => `M${left} ${at}H${width - MARGIN.right}`).join("") }),
      ...scaleY.ticks.map(([at, text]) => svg("text", { x: left - 5, y: at + 4, "text-anchor": "end" }, text)),
      ...scaleX.ticks.map(([at, text]) => svg("text", { x: Math.min(at, width - (FONT * text.length) / 2), y: bottom + 14, "text-anchor": "middle" }, text)),
      svg("text", { class: "unit", x: 0, y: 10 }, y.title ?? ""),
      svg("text", { class: "unit", x: width - MARGIN.right, y: height - 3, "text-anchor": "end" }, x.title ?? ""),
      svg("g", { "clip-path": `url(#${clip})` }, parts.flatMap((part) => this.paths(part)), svg("path", { class: "mark", d: (spec.marks ?? []).map((at) => `M${scaleX.at(at)} ${MARGIN.top}V${bottom}`).join("") })),
      (this.cursor = svg("path", { class: "cursor" })),
      (this.selection = svg("rect", { class: "selection", y: MARGIN.top, height: bottom - MARGIN.top, width: 0 })),
      svg("rect", { class: "plot", x: left, y: 0, width: Math.max(0, width - left - MARGIN.right), height: bottom }),
    );
    this.drawLegend();
    this.showValuesAt(null);
  }

  paths({ series, x, y, low, high, right, base }) {
    const across = x.map((value) => round(this.scaleX.at(value)));
    const up = (values) => values.map((value) => (value === null ? null : round(this.scaleY.at(value))));
    const tops = up(y);
    if (right) {
      const ends = right.map((value) => round(this.scaleX.at(value)));
      const feet = up(base);
      const bars = across.map((from, index) => (tops[index] === feet[index] ? "" : `M${from} ${feet[index]}V${tops[index]}H${ends[index]}V${feet[index]}Z`));
      return [styled(svg("path", { class: "bars", d: bars.join("") }), { fill: series.color })];
    }
    const made = [];
    if (low) {
      const [upper, lower] = [up(high), up(low)];
      const edge = across.map((at, index) => `${at} ${upper[index]}`).concat(across.map((at, index) => `${at} ${lower[index]}`).reverse());
      made.push(styled(svg("path", { class: "band", d: edge.length ? `M${edge.join("L")}Z` : "" }), { fill: series.color, fillOpacity: Math.min(0.15, 0.5 / this.shown.length) }));
    }
    const line = [];
    across.forEach((at, index) => {
      if (tops[index] === null) return;
      const before = index > 0 && tops[index - 1] !== null;
      line.push(!before ? `M${at} ${tops[index]}` : series.held ? `H${at}V${tops[index]}` : `L${at} ${tops[index]}`);
    });
    const stroke = { stroke: series.color, strokeWidth: series.width ?? 1.8, strokeDasharray: series.dash ?? "" };
    if (!series.points) made.push(styled(svg("path", { class: "line", d: line.join("") }), stroke));
    if (series.points || (x.length < FEW && !series.held)) {
      const dots = across.map((at, index) => (tops[index] === null ? "" : `M${at} ${tops[index]}h0`)).join("");
      made.push(styled(svg("path", { class: "dots", d: dots }), { stroke: series.color, strokeWidth: series.points ? 8 : 4.5, strokeOpacity: series.points ? 0.4 : 1 }));
    }
    return made;
  }

  // Draws the legend: names of the series with their values at the cursor. A click hides or shows a series.
  drawLegend() {
    this.values = new Map();
    const whole = this.spec.series.every((series) => series.y.every((value) => value === null || Number.isInteger(value)));
    this.among = [whole ? 0 : 0.5]; // all values of a chart have the same decimals
    const entries = this.spec.series.filter((series) => series.name && !series.unnamed).map((series) => {
      const value = el("b", {});
      this.values.set(series, value);
      const square = () => svg("svg", { width: 18, height: 12, "aria-hidden": "true" }, styled(svg("rect", { width: 10, height: 10, x: 4, y: 1, rx: 2 }), { fill: series.color }));
      const mark = this.spec.stacked || series.points ? square() : lineMark(series);
      const toggle = () => {
        if (!this.hidden.delete(series.name)) this.hidden.add(series.name);
        this.render();
      };
      return el("button", { type: "button", "aria-pressed": String(!this.hidden.has(series.name)), onclick: toggle }, mark, `${series.name} `, value);
    });
    this.where = el("span", { class: "where" });
    this.legend.replaceChildren(...(entries.length ? [...entries, this.where] : []));
  }

  // Shows the values at `x` in the legend, or the last values for null.
  showValuesAt(x) {
    if (!this.scaleX) return;
    for (const [series, shown] of this.values) {
      const index = x === null ? series.x.length - 1 : nearest(series.x, x);
      shown.textContent = series.points ? "" : number((x === null ? series.last : undefined) ?? series.y[index], this.among);
    }
    const nearestX = x === null ? null : this.nearestX(x);
    this.cursor.setAttribute("d", nearestX === null ? "" : `M${round(this.scaleX.at(nearestX))} ${MARGIN.top}V${this.height - MARGIN.bottom}`);
    this.where.textContent = nearestX === null ? "" : `${this.spec.x?.title ?? ""} ${number(nearestX)}`;
  }

  // Returns the x of the nearest value.
  nearestX(x) {
    const candidates = this.shown.filter((series) => series.x.length).map((series) => series.x[nearest(series.x, x)]);
    return candidates.reduce((best, value) => (best === null || Math.abs(value - x) < Math.abs(best - x) ? value : best), null);
  }

  at(event) {
    return this.scaleX.from(event.clientX - this.svg.getBoundingClientRect().left);
  }

  moved(event) {
    const x = this.at(event);
    this.select(this.from === null || this.from === undefined ? null : [this.from, x]);
    this.link.showValuesAt(x);
  }

  select(range) {
    const [from, to] = (range ?? [0, 0]).map((x) => this.scaleX.at(x)).sort((a, b) => a - b);
    this.selection.setAttribute("x", from);
    this.selection.setAttribute("width", range ? to - from : 0);
  }

  released(event) {
    const x = this.at(event);
    const from = this.from ?? x;
    this.from = null;
    this.select(null);
    const dragged = Math.abs(this.scaleX.at(from) - this.scaleX.at(x)) > 6;
    if (dragged) return this.link.zoom([Math.max(this.range[0], Math.min(from, x)), Math.min(this.range[1], Math.max(from, x))]);
    const point = this.spec.onpoint ? this.nearestValue(x, event.clientY - this.svg.getBoundingClientRect().top) : null;
    if (point) this.spec.onpoint(point.custom, point.x);
  }

  // Returns the value nearest to the pointer, by x and then by y.
  nearestValue(x, down) {
    const x0 = this.nearestX(x);
    let best = null;
    for (const series of this.shown) {
      series.x.forEach((value, index) => {
        if (value !== x0 || series.y[index] === null || !series.custom) return;
        const far = Math.abs(this.scaleY.at(series.y[index]) - down);
        if (!best || far < best.far) best = { far, x: value, custom: series.custom[index] };
      });
    }
    return best;
  }
}

// Reduces a series to a range of x, with at most three values per pixel: the least, the greatest and the last.
function reduceSeries(series, [from, to], pixels, log) {
  const { low: lows, high: highs } = series;
  const start = Math.max(0, firstIndexFrom(series.x, from) - 1);
  const end = Math.min(series.x.length, firstIndexFrom(series.x, to) + 2);
  const value = (values, index) => (values[index] === null || (log && !(values[index] > 0)) ? null : values[index]);
  const made = { series, x: [], y: [], ...(lows ? { low: [], high: [] } : {}) };
  const keep = (index, low, high) => {
    made.x.push(series.x[index]);
    made.y.push(value(series.y, index));
    if (lows) made.low.push(low), made.high.push(high);
  };
  if (end - start <= 2 * pixels) {
    for (let index = start; index < end; index++) keep(index, lows?.[index], highs?.[index]);
    return made;
  }
  const column = (index) => Math.floor(((series.x[index] - from) / (to - from)) * pixels);
  for (let index = start; index < end; ) {
    const here = column(index);
    let [least, most, last, low, high] = [index, index, index, Infinity, -Infinity];
    for (; index < end && column(index) === here; last = index++) {
      if (series.y[index] < series.y[least]) least = index;
      if (series.y[index] > series.y[most]) most = index;
      if (lows) (low = Math.min(low, lows[index])), (high = Math.max(high, highs[index]));
    }
    const kept = [...new Set([last, least, most])].sort((a, b) => a - b);
    for (const each of kept) keep(each, low, high);
  }
  return made;
}

// Stacks series as bars. Bars narrower than two pixels are merged with their neighbours into a bar of their mean.
function stackSeries(shown, [from, to], pixels, share) {
  const byX = new Map();
  shown.forEach((series, part) => {
    series.x.forEach((x, index) => {
      if (!byX.has(x)) byX.set(x, { x, left: series.left?.[index], right: series.right?.[index], values: shown.map(() => 0) });
      byX.get(x).values[part] = series.y[index] ?? 0;
    });
  });
  const bars = [...byX.values()].sort((a, b) => a.x - b.x);
  const gap = bars.length > 1 ? Math.min(...bars.slice(1).map((bar, index) => bar.x - bars[index].x).filter((width) => width > 0)) : 1;
  for (const bar of bars) {
    bar.left ??= bar.x - 0.45 * gap;
    bar.right ??= bar.x + 0.45 * gap;
  }
  const inside = bars.filter((bar) => bar.right >= from && bar.left <= to);
  const together = Math.max(1, Math.ceil((2 * inside.length) / pixels));
  const parts = shown.map((series) => ({ series, x: [], right: [], y: [], base: [] }));
  for (let index = 0; index < inside.length; index += together) {
    const some = inside.slice(index, index + together);
    const sums = shown.map((_, part) => some.reduce((sum, bar) => sum + bar.values[part], 0) / some.length);
    const whole = share ? sums.reduce((sum, value) => sum + value, 0) || 1 : 1;
    let foot = 0;
    parts.forEach((part, index) => {
      part.x.push(some[0].left);
      part.right.push(some.at(-1).right);
      part.base.push(foot);
      part.y.push((foot += sums[index] / whole));
    });
  }
  return parts;
}

function valuesOf(parts, { share, stacked }) {
  if (share) return [0, 1];
  const extents = parts.flatMap((part) => [extent(part.y), part.low && extent(part.low), part.high && extent(part.high)]).filter(Boolean);
  const whole = extent(extents.flat()) ?? [0.1, 1];
  return stacked ? [0, whole[1]] : whole;
}

// Creates a scale from values to pixels, with labelled ticks at round values.
function axis([least, most], { log, ticks, zero, whole, tight }, start, end, count) {
  if (log) least = Math.max(least, Number.MIN_VALUE);
  if (zero && !log) [least, most] = [Math.min(0, least), Math.max(0, most)];
  if (zero && least === 0 && most === 0) most = 1;
  if (least === most) [least, most] = log ? [least / 2, most * 2] : [least - (Math.abs(least) || 1) / 2, most + (Math.abs(most) || 1) / 2];
  let [low, high] = log ? [Math.log10(least), Math.log10(most)] : [least, most];
  if (!tight) {
    const room = 0.05 * (high - low);
    [low, high] = [zero && low === 0 ? 0 : low - room, high + room];
  }
  if (tight && log) [low, high] = [low - 0.05, high + 0.05];
  const at = (value) => start + (((log ? Math.log10(value) : value) - low) / (high - low)) * (end - start);
  const from = (pixel) => {
    const value = low + ((pixel - start) / (end - start)) * (high - low);
    return log ? 10 ** value : value;
  };
  const chosen = ticks ?? (log ? decades(low, high, count) : steps(low, high, count, whole));
  return { at, from, ticks: chosen.map((value) => [round(at(value)), formatTick(value, log ? Math.min(value, (chosen[1] ?? Infinity) - chosen[0]) : (chosen[1] ?? value) - chosen[0])]) };
}

function steps(low, high, count, whole) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(whole ? 1 : 0, power * [1, 2, 5, 10].reduce((best, factor) => (Math.abs(Math.log((factor * power) / rough)) < Math.abs(Math.log((best * power) / rough)) ? factor : best)));
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, index) => (first + index) * step);
}

function decades(low, high, count) {
  const factors = high - low < 1.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((high - low) / count / 1.5));
  const ticks = [];
  for (let power = Math.floor(low); power <= high; power++) for (const factor of factors) if (power % every === 0) ticks.push(factor * 10 ** power);
  const inside = ticks.filter((value) => Math.log10(value) >= low - 1e-9 && Math.log10(value) <= high + 1e-9);
  return inside.length > 1 ? inside : steps(10 ** low, 10 ** high, count); // a narrow range contains fewer than two such numbers
}

// Formats the label of a tick with enough digits to differ from the next tick, which is `step` away.
function formatTick(value, step) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, Math.min(6, Math.ceil(-Math.log10(Math.abs(step) || 1)) + 1)) });
}

function extent(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value === null || value === undefined) continue;
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return least <= most ? [least, most] : null;
}

// Returns the first index whose x is at least `value`.
function firstIndexFrom(x, value) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(x, value) {
  const after = firstIndexFrom(x, value);
  return after > 0 && (after === x.length || value - x[after - 1] <= x[after] - value) ? after - 1 : after;
}

const round = (value) => Math.round(value * 10) / 10;

function styled(element, style) {
  Object.assign(element.style, style);
  return element;
}

export function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.flat());
  return element;
}
