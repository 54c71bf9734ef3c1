// Charts by plotly, in the page's colours.

let library;

function loaded() {
  library ??= new Promise((resolve, reject) => {
    if (window.Plotly) return resolve(window.Plotly); // an exported page holds it
    const script = document.createElement("script");
    script.src = "/plotly.min.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("plotly.min.js could not be loaded"));
    return document.head.append(script);
  });
  return library;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const palette = () => [1, 2, 3, 4, 5, 6, 7, 8].map((place) => colour(`--line-${place}`));

// What is to be drawn once its element is about to be seen; only the newest of several.
const waiting = new WeakMap();
const seen = new WeakSet();
const watch = new IntersectionObserver(
  (entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      watch.unobserve(target);
      seen.add(target);
      drawNow(target, ...waiting.get(target));
    }
  },
  { rootMargin: "300px" },
);

// Draws `traces` into `element`, or draws them anew; as soon as it is on the page and near what is seen of it. `onpoint`
// gets the x of a point that was clicked.
export function draw(element, traces, options = {}) {
  if (seen.has(element)) return drawNow(element, traces, options);
  waiting.set(element, [traces, options]);
  return watch.observe(element);
}

function drawNow(element, traces, options) {
  drawn(element, traces, options).catch((error) => element.replaceChildren(error.message));
}

async function drawn(element, traces, { layout = {}, onpoint }) {
  const plotly = await loaded();
  if (!element.isConnected) return;
  const axis = { gridcolor: colour("--rule"), zerolinecolor: colour("--rule"), linecolor: colour("--rule"), automargin: true, exponentformat: "power" };
  const axes = Object.fromEntries(
    ["xaxis", "yaxis", ...Object.keys(layout).filter((name) => /^[xy]axis\d?$/.test(name))].map((name) => [
      name,
      { ...axis, ...(layout[name] ?? {}) },
    ]),
  );
  const whole = {
    height: 240,
    margin: { l: 48, r: 12, t: 8, b: 36 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { family: "inherit", size: 12, color: colour("--quiet") },
    colorway: palette(),
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 }, traceorder: "normal" },
    hovermode: "closest",
    ...layout,
    ...axes,
  };
  await plotly.react(element, traces, whole, { displayModeBar: false, responsive: true });
  element.removeAllListeners("plotly_click");
  if (onpoint) element.on("plotly_click", (event) => onpoint(event.points[0].x, event.points[0]));
}

// Traces of a line with a 95 % band between `low` and `high`, where they are given.
export function lineWithBand({ name, x, y, low, high, color, custom, hidden = false }) {
  const band = low && {
    x: [...x, ...[...x].reverse()],
    y: [...high, ...[...low].reverse()],
    fill: "toself",
    mode: "lines",
    line: { width: 0 },
    fillcolor: color,
    opacity: 0.15,
    hoverinfo: "skip",
    showlegend: false,
  };
  const mode = x.length < 60 ? "lines+markers" : "lines";
  const line = { name, x, y, mode, line: { color, width: 1.8 }, marker: { size: 4 }, customdata: custom, showlegend: !hidden };
  return band ? [band, line] : [line];
}
