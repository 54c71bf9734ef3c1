"""``report.html``: one file that needs no network. Every text of a model is data in it, never markup.

Tables and settings are escaped where they are written; conversations lie in it as compressed JSON, which its script
turns into text nodes. Its content security policy forbids every other script and everything from outside.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.kinds import KINDS, kind_of
from agentrl.evaluation.problem_sets import ProblemSet
from agentrl.evaluation.tables import Table, result_tables
from agentrl_envs.types import Problem

_EXCERPT = 120  # characters of a statement in the list of problems
_PLACES = ("scores.png", "pass_at_k.png", "problems.png", "endings.png")


def write_report(directory: EvaluationDirectory, results: Mapping[str, Any], *, conversations: int) -> None:
    """Write ``report.html`` with at most ``conversations`` of each problem, right and wrong ones in turn."""
    sets = directory.problem_sets()
    kinds = _kinds(directory)
    chosen = {key: choose(part, conversations) for key, part in kinds.items()}
    texts = _chosen(directory, chosen)
    prompts = directory.prompts()
    problems = [(one, problem) for one in sets for problem in one.problems]
    script = _file("report_page.js")
    provenance = results["provenance"]
    values = {
        "TITLE": html.escape(f"Evaluation of {provenance['model']['name']}"),
        "SUBTITLE": html.escape(_subtitle(provenance)),
        "TABLES": "".join(_table(table) for table in result_tables(results)),
        "PLOTS": "".join(_plots(directory)),
        "SHOWN": html.escape(f"at most {conversations} of each problem, right and wrong ones in turn"),
        "PROVENANCE": html.escape(json.dumps(provenance, indent=1, ensure_ascii=False)),
        "INDEX": _inert(_index(problems, kinds, chosen)),
        "CONVERSATIONS": "".join(
            _packed(place, problem, prompts[one.name, problem.id], texts.get((one.name, problem.id), []))
            for place, (one, problem) in enumerate(problems)
        ),
        "SCRIPT": script,
        "SCRIPT_HASH": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # One pass: what is put in is not looked at again.
    page = re.sub(r"\{\{([A-Z_]+)\}\}", lambda place: values[place[1]], _file("report_page.html"))
    directory.write_text("report.html", page)


def choose(kinds: Mapping[int, str], count: int) -> list[int]:
    """``count`` samples: the first correct one, the first other one, the second correct one, and so on.

    >>> choose({0: "correct", 1: "correct", 2: "correct", 3: "void", 4: "incorrect"}, 4)
    [0, 1, 3, 4]
    """
    right = [sample for sample, kind in sorted(kinds.items()) if kind == "correct"]
    other = [sample for sample, kind in sorted(kinds.items()) if kind != "correct"]
    fair = min(len(right), max((count + 1) // 2, count - len(other)))
    return sorted(right[:fair] + other[: count - fair])


def _kinds(directory: EvaluationDirectory) -> dict[tuple[str, str], dict[int, str]]:
    found: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for transcript in directory.transcripts():
        found[transcript.benchmark, transcript.problem][transcript.sample] = kind_of(transcript)
    return found


def _chosen(
    directory: EvaluationDirectory, chosen: Mapping[tuple[str, str], Sequence[int]]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What is shown of the chosen rollouts; the last attempt of each."""
    found: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for transcript in directory.transcripts():
        key = (transcript.benchmark, transcript.problem)
        if transcript.sample in chosen[key]:
            found[key][transcript.sample] = {
                "sample": transcript.sample,
                "kind": kind_of(transcript),
                "ended": transcript.ended.value,
                "verdict": None if transcript.verdict is None else transcript.verdict.value,
                "answer": transcript.answer,
                "tokens": transcript.tokens,
                "seconds": transcript.seconds,
                "calls": [call.outcome for call in transcript.tool_calls],
                "failure": transcript.failure,
                "turns": [[turn.origin, turn.text] for turn in transcript.turns],
            }
    return {key: [part[sample] for sample in sorted(part)] for key, part in found.items()}


def _index(
    problems: Iterable[tuple[ProblemSet, Problem]],
    kinds: Mapping[tuple[str, str], Mapping[int, str]],
    chosen: Mapping[tuple[str, str], Sequence[int]],
) -> dict[str, Any]:
    rows = []
    for one, problem in problems:
        key = (one.name, problem.id)
        samples = kinds.get(key, {})
        data = [kind for kind in samples.values() if kind != "no_data"]
        share = f"{data.count('correct')}/{len(data)}"
        places = range(max(samples, default=-1) + 1)
        row = {"benchmark": one.name, "id": problem.id, "statement": problem.statement[:_EXCERPT], "share": share}
        rows.append(row | {"kinds": [samples.get(place, "no_data") for place in places], "open": chosen.get(key, [])})
    counts = Counter(kind for part in kinds.values() for kind in part.values())
    return {"kinds": KINDS, "counts": counts, "problems": rows}


def _packed(place: int, problem: Problem, prompt: str, rollouts: Sequence[Mapping[str, Any]]) -> str:
    data = json.dumps({"prompt": prompt, "answer": problem.answer, "rollouts": rollouts}).encode()
    packed = base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
    return f'<script type="text/plain" id="c{place}">{packed}</script>\n'


def _inert(value: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table><caption>{html.escape(table.title)}</caption>{row(table.columns, 'th')}{body}</table>"


def _plots(directory: EvaluationDirectory) -> Iterable[str]:
    for name in _PLACES:
        path = directory.plots / name
        if path.is_file():
            data = base64.b64encode(path.read_bytes()).decode()
            yield f'<img alt="{name.removesuffix(".png")}" src="data:image/png;base64,{data}">'


def _subtitle(provenance: Mapping[str, Any]) -> str:
    sampling, limits, protocol = provenance["sampling"], provenance["limits"], provenance["protocol"]
    turns = f", {protocol['max_turns']} turns" if "max_turns" in protocol else ""
    return (
        f"fingerprint {provenance['model']['fingerprint']} · {protocol['env']}{turns} · "
        f"n {sampling['n']}, temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g} · "
        f"{limits['max_turn_tokens']} tokens a turn, {limits['max_response_tokens']} in all · seed {provenance['seed']}"
    )


def _file(name: str) -> str:
    return (resources.files("agentrl.evaluation") / name).read_text(encoding="utf-8")
