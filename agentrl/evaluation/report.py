"""``report.html``: one file that needs no network access. It contains model output only as data, never as markup.

Conversations are embedded as compressed JSON, which the page's script renders as text nodes and a fixed set of
elements. The content security policy forbids every other script and every external resource.
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
from functools import lru_cache
from importlib import resources
from pathlib import Path
from xml.etree.ElementTree import Element

from agentrl.evaluation.benchmarks import ProblemSet
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.formats import JSONObject, Provenance, Results
from agentrl.evaluation.results import Table, result_tables
from agentrl.evaluation.transcripts import KINDS
from agentrl.telemetry.plots import palette_css
from agentrl_envs.types import Problem

FORMULA = re.compile(r"\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$([^$\n]+)\$")
"""TeX between ``$$``, ``\\[``, ``\\(`` or ``$``. The report's script searches for the same delimiters."""

_FENCE = re.compile(r"```[^\n`]*\n[\s\S]*?(?:\n {0,3}```|$)")
_LONGEST = 1000  # maximum length of a formula in characters


def formulas_of(texts: Iterable[str]) -> dict[str, list[object]]:
    """Return TeX -> tree for each formula outside code fences. Formulas that cannot be parsed are left out.

    >>> formulas_of(["Add $x$ to $x$."])
    {'x': ['math', {}, ['mrow', {}, ['mi', {}, 'x']]]}
    """
    trees = {}
    for text in texts:
        for match in FORMULA.finditer(_FENCE.sub("\n", text)):
            tex = next(part for part in match.groups() if part is not None).strip()
            tree = _tree_of(tex)
            if tree is not None:
                trees[tex] = tree
    return trees


@lru_cache(maxsize=65_536)
def _tree_of(tex: str) -> list[object] | None:
    from latex2mathml.converter import convert_to_element

    if not tex or len(tex) > _LONGEST:
        return None
    try:
        return _tree(convert_to_element(tex))
    except Exception:  # noqa: BLE001  # for text of a model, the library raises many kinds of errors, also IndexError
        return None


def _tree(element: Element) -> list[object]:
    """``[tag, attributes, children ...]``; a child is text or a tree."""
    attributes = {name: value for name, value in element.attrib.items() if name not in ("xmlns", "display")}
    children: list[object] = [html.unescape(element.text)] if element.text else []  # the library returns entities
    return [element.tag, attributes, *children, *map(_tree, element)]


_EXCERPT = 120  # characters of a statement in the list of problems
_COLUMN = 2_000  # characters of a problem's column; problems.jsonl has the complete text
_MOST = 9_500_000  # bytes of conversations if their number is not set, so that the page opens quickly
_PLOTS = ("scores.png", "pass_at_k.png", "problems.png", "endings.png")


def write_report(directory: EvaluationDirectory, results: Results, *, conversations: int | None) -> None:
    """Write ``report.html`` with at most ``conversations`` per problem, alternating right and wrong ones.

    None stands for all conversations, or as many per problem as fit into a page of 10 MB.
    """
    sets = directory.problem_sets()
    kinds = _kinds(directory)
    problems = [(one, problem) for one in sets for problem in one.problems]
    count, chosen, packed = _fitting(directory, problems, kinds, conversations)
    script = _file("report_page.js")
    provenance = results["provenance"]
    values = {
        "TITLE": html.escape(f"Evaluation of {provenance['model']['name']}"),
        "SUBTITLE": html.escape(_subtitle(provenance)),
        "PALETTE": palette_css(),
        "TABLES": "".join(_table(table) for table in result_tables(results)),
        "PLOTS": "".join(_plots(directory)),
        "SHOWN": html.escape(_shown(count, kinds)),
        "PROVENANCE": html.escape(json.dumps(provenance, indent=1, ensure_ascii=False)),
        "INDEX": _inert(_index(problems, kinds, chosen)),
        "CONVERSATIONS": "".join(packed),
        "SCRIPT": script,
        "SCRIPT_HASH": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    # One pass, so that placeholders in inserted text are not replaced.
    page = re.sub(r"\{\{([A-Z_]+)\}\}", lambda match: values[match[1]], _file("report_page.html"))
    directory.write_text("report.html", page)


def _fitting(
    directory: EvaluationDirectory,
    problems: Sequence[tuple[ProblemSet, Problem]],
    kinds: Mapping[tuple[str, str], Mapping[int, str]],
    conversations: int | None,
) -> tuple[int, dict[tuple[str, str], list[int]], list[str]]:
    """Number of conversations per problem, the chosen ones, and all of them packed."""
    most = max((len(part) for part in kinds.values()), default=0)
    count = most if conversations is None else min(most, conversations)
    if conversations is None:
        # A first estimate from the size of the compressed file, to avoid packing more than can fit.
        count = min(count, max(1, count * 4 * _MOST // max(1, directory.rollouts_bytes())))
    while True:
        chosen = {key: choose(part, count) for key, part in kinds.items()}
        packed = list(_packed_problems(directory, problems, chosen))
        size = sum(map(len, packed))
        if conversations is not None or size <= _MOST or count <= 1:
            return count, chosen, packed
        count = max(1, min(count - 1, count * _MOST // size))


def _shown(count: int, kinds: Mapping[tuple[str, str], Mapping[int, str]]) -> str:
    if all(len(part) <= count for part in kinds.values()):
        return "Click a cell to open its conversation."
    return (
        f"Click a cell with a dot to open its conversation: at most {count} per problem, alternating correct and "
        "incorrect ones (--conversations). rollouts.jsonl.zst contains all conversations."
    )


def choose(kinds: Mapping[int, str], count: int) -> list[int]:
    """Choose ``count`` samples: the first correct one, the first incorrect one, the second correct one, and so on.

    >>> choose({0: "correct", 1: "correct", 2: "correct", 3: "void", 4: "incorrect"}, 4)
    [0, 1, 3, 4]
    """
    right = [sample for sample, kind in sorted(kinds.items()) if kind == "correct"]
    other = [sample for sample, kind in sorted(kinds.items()) if kind != "correct"]
    fair = min(len(right), max((count + 1) // 2, count - len(other)))
    return sorted(right[:fair] + other[: count - fair])


def _kinds(directory: EvaluationDirectory) -> dict[tuple[str, str], dict[int, str]]:
    kinds: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for transcript in directory.transcripts():
        kinds[transcript.benchmark, transcript.problem][transcript.sample] = transcript.kind
    return kinds


def _chosen(
    directory: EvaluationDirectory, chosen: Mapping[tuple[str, str], Sequence[int]]
) -> dict[tuple[str, str], list[JSONObject]]:
    """Displayed data of the chosen rollouts, from the last attempt of each."""
    chosen_data: dict[tuple[str, str], dict[int, JSONObject]] = defaultdict(dict)
    for transcript in directory.transcripts():
        key = (transcript.benchmark, transcript.problem)
        if transcript.sample in chosen[key]:
            chosen_data[key][transcript.sample] = {
                "sample": transcript.sample,
                "kind": transcript.kind,
                "ended": transcript.ended.value,
                "verdict": None if transcript.verdict is None else transcript.verdict.value,
                "answer": transcript.answer,
                "tokens": transcript.tokens,
                "seconds": transcript.seconds,
                "calls": transcript.outcomes,
                "failure": transcript.failure,
                "turns": [[turn.origin, turn.text] for turn in transcript.turns],
            }
    return {key: [part[sample] for sample in sorted(part)] for key, part in chosen_data.items()}


def _index(
    problems: Iterable[tuple[ProblemSet, Problem]],
    kinds: Mapping[tuple[str, str], Mapping[int, str]],
    chosen: Mapping[tuple[str, str], Sequence[int]],
) -> JSONObject:
    rows = []
    for one, problem in problems:
        key = (one.name, problem.id)
        samples = kinds.get(key, {})
        data = [kind for kind in samples.values() if kind != "no_data"]
        share = f"{data.count('correct')}/{len(data)}"
        numbers = range(max(samples, default=-1) + 1)
        row = {"benchmark": one.name, "id": problem.id, "statement": problem.statement[:_EXCERPT], "share": share}
        rows.append(
            row | {"kinds": [samples.get(number, "no_data") for number in numbers], "open": chosen.get(key, [])}
        )
    counts = Counter(kind for part in kinds.values() for kind in part.values())
    return {"kinds": KINDS, "counts": counts, "problems": rows}


def _packed_problems(
    directory: EvaluationDirectory,
    problems: Sequence[tuple[ProblemSet, Problem]],
    chosen: Mapping[tuple[str, str], Sequence[int]],
) -> Iterable[str]:
    texts = _chosen(directory, chosen)
    prompts = directory.prompts()
    for index, (one, problem) in enumerate(problems):
        key = (one.name, problem.id)
        yield _packed(index, problem, prompts[key], texts.get(key, []))


def _packed(index: int, problem: Problem, prompt: str, rollouts: Sequence[JSONObject]) -> str:
    shown = [text for rollout in rollouts for _, text in rollout["turns"]]
    formulas = formulas_of([problem.statement, prompt, *shown])
    content: JSONObject = {"prompt": prompt, "statement": problem.statement, "answer": problem.answer}
    content |= {"rollouts": rollouts, "formulas": formulas, "columns": _columns(problem)}
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    # Without a time stamp, equal conversations give equal bytes.
    packed = base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
    return f'<script type="text/plain" id="c{index}">{packed}</script>\n'


def _columns(problem: Problem) -> str:
    """A problem's additional columns, one per line.

    >>> print(_columns(Problem(id="a", statement="?", answer=None, source="s", info={"db": "shop", "rows": [1, 2]})))
    db: shop
    rows: [1, 2]
    """
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in problem.info.items()
    }
    return "\n".join(
        f"{name}: {text if len(text) <= _COLUMN else text[:_COLUMN] + ' …'}" for name, text in texts.items()
    )


def _inert(value: JSONObject) -> str:
    """Serialize to JSON that cannot close its enclosing script element."""
    return json.dumps(value).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<table><caption>{html.escape(table.title)}</caption>{row(table.columns, 'th')}{body}</table>"


def _plots(directory: EvaluationDirectory) -> Iterable[str]:
    for name in _PLOTS:
        stem = name.removesuffix(".png")
        files = [directory.plots / name, directory.plots / f"{stem}-dark.png"]
        if all(file.is_file() for file in files):
            light, dark = map(_data, files)
            yield (
                f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
                f'<img alt="{stem}" src="{light}"></picture>'
            )


def _data(image: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.read_bytes()).decode()}"


def _subtitle(provenance: Provenance) -> str:
    sampling, limits, protocol = provenance["sampling"], provenance["limits"], provenance["protocol"]
    turns = f", {protocol['max_turns']} turns" if "max_turns" in protocol else ""
    return (
        f"fingerprint {provenance['model']['fingerprint']} · {protocol['env']}{turns} · "
        f"n {sampling['n']}, temperature {sampling['temperature']:g}, top_p {sampling['top_p']:g} · "
        f"{limits['max_turn_tokens']} tokens per turn, {limits['max_response_tokens']} in total · "
        f"seed {provenance['seed']}"
    )


def _file(name: str) -> str:
    return (resources.files("agentrl.evaluation") / name).read_text(encoding="utf-8")
