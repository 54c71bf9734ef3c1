// Asks the viewer's server, or the page itself where it was exported. The token stands in the page's own address.

import { answerFromPage, isExported } from "./exported.js";

const token = new URLSearchParams(location.search).get("token") ?? "";

export async function ask(path, query = {}) {
  if (isExported) return answerFromPage(path, query);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const tail = given.length ? `?${new URLSearchParams(given)}` : "";
  let answer;
  try {
    answer = await fetch(`/api${path}${tail}`, { headers: { Authorization: `Bearer ${token}` } });
  } catch {
    throw new Error("The viewer does not answer: its command has ended.");
  }
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}
