// The answers that an exported page holds itself, packed, in place of a server's.

const held = new Map([...document.querySelectorAll("script[data-answer]")].map((script) => [script.dataset.answer, script]));

export const isExported = held.size > 0;

export async function answerFromPage(path, query) {
  const found = await unpacked(path);
  if (path.endsWith("/metrics") && query.position) return { rows: [], position: query.position, whole: false };
  if (!path.endsWith("/trajectories")) return found;
  const rows = found.rows.filter((row) => accepts(row, query));
  return { ...found, rows: query.text ? await withText(path, rows, query.text.toLowerCase()) : rows };
}

async function unpacked(path) {
  const script = held.get(path);
  if (!script) throw new Error("This page was exported without what it should show here.");
  const bytes = Uint8Array.from(atob(script.textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

// As the server's search (agentrl/viewer/step_table.py).
function accepts(row, query) {
  const given = (name) => query[name] !== undefined && query[name] !== "";
  const within = (value, low, high) => {
    if (value === null) return !given(low) && !given(high);
    return (!given(low) || value >= Number(query[low])) && (!given(high) || value <= Number(query[high]));
  };
  return (
    row.problem.toLowerCase().includes((query.problem ?? "").toLowerCase()) &&
    ["ended", "verdict", "dropped"].every((name) => !given(name) || row[name] === query[name]) &&
    (!given("tool") || query.tool in row.tools) &&
    (!given("group") || row.group === Number(query.group)) &&
    within(row.step, "first", "last") &&
    within(row.reward, "least_reward", "most_reward") &&
    within(row.turns, "least_turns", "most_turns") &&
    within(row.staleness, "least_staleness", "most_staleness")
  );
}

async function withText(path, rows, text) {
  const kept = [];
  for (const row of rows) {
    const page = await unpacked(path.replace("/trajectories", `/steps/${row.step}/${row.number}`));
    const said = [row.problem, page.problem.statement, JSON.stringify(page.problem.answer), ...page.segments.map((segment) => segment.text)];
    if (said.join("\n").toLowerCase().includes(text)) kept.push(row);
  }
  return kept;
}
