"""Data of evaluations for the viewer: scores, problems, rollouts, and the comparison of two evaluations."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from xml.etree.ElementTree import Element

import zstandard

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.compare import compare_results, list_comparison_notes
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.formats import BenchmarkResults, JSONObject, ProblemRow, Results
from agentrl.evaluation.transcripts import RESULT_KINDS, Transcript
from agentrl.telemetry.files import malformed_as_world_error, resolve_path_inside

_LONGEST_LINE = 1 << 26  # bytes of one rollout
_EXCERPT_LENGTH = 120  # characters of a statement in the list of problems
_LONGEST_FORMULA = 1000  # maximum number of characters

FORMULA = re.compile(r"\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$([^$\n]+)\$")
"""TeX between ``$$``, ``\\[``, ``\\(`` or ``$``. ``static/prose.js`` searches for the same delimiters."""

_FENCE = re.compile(r"```[^\n`]*\n[\s\S]*?(?:\n {0,3}```|$)")


def read_evaluation_summary(path: Path) -> dict[str, object]:
    """Return an evaluation's row in the table of evaluations. Unfinished evaluations have no ``benchmarks``."""
    directory = EvaluationDirectory(path)
    return {
        "model": directory.provenance()["model"]["name"],
        "benchmarks": {name: one["avg"] for name, one in _benchmark_results(directory).items()},
        "finished": directory.is_finished,
    }


def read_evaluation_page(path: Path) -> dict[str, object]:
    """Return results, provenance, problems, and the rollouts without conversations (:func:`read_rollout_rows`)."""
    directory = EvaluationDirectory(path)
    problems = [
        {"benchmark": row["benchmark"], "id": row["id"], "answer": row["answer"], "statement": _excerpt(row)}
        for row in directory.problem_rows()
    ]
    return {
        "path": str(path),
        "results": _benchmark_results(directory),
        "provenance": directory.provenance(),
        "kinds": RESULT_KINDS,
        "problems": problems,
        "rollouts": read_rollout_rows(path),
    }


def _benchmark_results(directory: EvaluationDirectory) -> Mapping[str, BenchmarkResults]:
    return directory.results()["benchmarks"] if directory.is_finished else {}


def read_rollout_rows(path: Path) -> list[JSONObject]:
    """Return one row per sample, from its last attempt. ``index`` is the position in the file of rollouts."""
    file = path / "rollouts.jsonl.zst"
    if not file.is_file():
        return []
    about = file.stat()
    return _cached_rows(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=4)  # every page of a rollout needs the rows of its problem
def _cached_rows(path: Path, _changed: int, _size: int) -> list[JSONObject]:
    rows: dict[tuple[str, str, int], JSONObject] = {}
    for index, record in enumerate(read_rollout_records(path)):
        with malformed_as_world_error(f"{path / 'rollouts.jsonl.zst'}, rollout {index}"):
            one = Transcript.from_record(record)
        rows[one.key] = {
            "index": index,
            "benchmark": one.benchmark,
            "problem": one.problem,
            "sample": one.sample,
            "kind": one.result_kind,
            "ended": one.ended.value,
            "verdict": None if one.verdict is None else one.verdict.value,
            "answer": one.answer,
            "turns": one.model_turns,
            "tokens": one.model_tokens,
        }
    return list(rows.values())


def read_rollout_page(path: Path, index: int) -> dict[str, object]:
    """Return a rollout, its problem, and the formulas in both. Raises SettingsError if ``index`` does not exist."""
    for position, record in enumerate(read_rollout_records(path)):
        if position == index:
            return build_rollout_page(path, record, read_problems_by_key(path))
    raise SettingsError(f"{path} has no rollout {index}")


def read_problems_by_key(path: Path) -> dict[tuple[str, str], ProblemRow]:
    """Return the rows of ``problems.jsonl`` by benchmark and id."""
    with malformed_as_world_error(f"{path / 'problems.jsonl'}"):
        return {(row["benchmark"], row["id"]): row for row in EvaluationDirectory(path).problem_rows()}


def build_rollout_page(
    path: Path, record: JSONObject, problems: Mapping[tuple[str, str], ProblemRow]
) -> dict[str, object]:
    """Build the content of a rollout's page from its record. Raises WorldError if the record or problem is damaged."""
    with malformed_as_world_error(f"{path}: a rollout or its problem"):
        problem = problems[record["benchmark"], record["problem"]]
        texts = [problem["prompt"], *(turn["text"] for turn in record["turns"] if turn["origin"] == "model")]
        return {"rollout": record, "problem": problem, "formulas": parse_formulas_to_mathml(texts)}


def search_rollouts(path: Path, text: str) -> list[int]:
    """Return the indices of the rollouts whose problem, answer or conversation contains ``text``, ignoring case."""
    wanted = text.casefold()
    problems = read_problems_by_key(path)
    matching = {key for key, row in problems.items() if wanted in _searchable(row).casefold()}
    with malformed_as_world_error(f"{path}: a rollout"):
        return [
            index
            for index, record in enumerate(read_rollout_records(path))
            if (record["benchmark"], record["problem"]) in matching
            or wanted in "\n".join([record["answer"] or "", *(turn["text"] for turn in record["turns"])]).casefold()
        ]


def comparison_page(first: Path, second: Path) -> dict[str, object]:
    """Compare two evaluations, paired by problem. Raises SettingsError if they cannot be compared."""
    before, after = (EvaluationDirectory(path).results() for path in (first, second))
    by_benchmark = compare_results(before, after)
    return {
        "paths": [str(first), str(second)],
        "models": [results["provenance"]["model"]["name"] for results in (before, after)],
        "notes": list_comparison_notes(before, after),
        "differences": {name: asdict(one) for name, one in by_benchmark.items()},
        "scores": {
            name: [results["benchmarks"][name]["avg"]["mean"] for results in (before, after)] for name in by_benchmark
        },
        "problems": [row for name in by_benchmark for row in _paired_problems(name, before, after)],
    }


def parse_formulas_to_mathml(texts: Iterable[str]) -> dict[str, list[object]]:
    """Convert formulas outside code fences to MathML trees, keyed by TeX. Formulas that cannot be parsed are left out.

    >>> parse_formulas_to_mathml(["Add $x$ to $x$."])
    {'x': ['math', {}, ['mrow', {}, ['mi', {}, 'x']]]}
    """
    trees = {}
    for text in texts:
        for match in FORMULA.finditer(_FENCE.sub("\n", text)):
            tex = next(part for part in match.groups() if part is not None).strip()
            tree = _mathml_tree(tex)
            if tree is not None:
                trees[tex] = tree
    return trees


@lru_cache(maxsize=65_536)
def _mathml_tree(tex: str) -> list[object] | None:
    from latex2mathml.converter import convert_to_element

    if not tex or len(tex) > _LONGEST_FORMULA:
        return None
    try:
        return _element_tree(convert_to_element(tex))
    except Exception:  # noqa: BLE001  # for text of a model, the library raises many kinds of errors, also IndexError
        return None


def _element_tree(element: Element) -> list[object]:
    """Convert an element to ``[tag, attributes, children ...]``, where a child is text or a tree."""
    attributes = {name: value for name, value in element.attrib.items() if name not in ("xmlns", "display")}
    children: list[object] = [html.unescape(element.text)] if element.text else []  # text has HTML entities
    return [element.tag, attributes, *children, *map(_element_tree, element)]


def _excerpt(problem: ProblemRow) -> str:
    statement = problem["statement"]
    return statement if len(statement) <= _EXCERPT_LENGTH else f"{statement[:_EXCERPT_LENGTH]} …"


def _searchable(problem: ProblemRow) -> str:
    info = json.dumps(problem["info"], ensure_ascii=False) if problem["info"] else ""
    return "\n".join([problem["id"], problem["statement"], problem["answer"] or "", info])


def _paired_problems(name: str, before: Results, after: Results) -> Iterator[dict[str, object]]:
    """Yield the problems of a benchmark with their counts in both evaluations."""
    counts, others = (results["benchmarks"][name]["per_problem"] for results in (before, after))
    for problem, first in counts.items():
        yield {"benchmark": name, "problem": problem, "first": first, "second": others[problem]}


def read_rollout_records(path: Path) -> Iterator[JSONObject]:
    """Yield the record of every complete rollout in the order written."""
    file = resolve_path_inside(path / "rollouts.jsonl.zst", path)
    if not file.is_file():
        return
    with file.open("rb") as packed:
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        rest = b""
        try:
            while piece := reader.read(1 << 20):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    raise WorldError(f"{file} is damaged: it has a line larger than {_LONGEST_LINE >> 20} MB")
                with malformed_as_world_error(str(file)):
                    yield from (json.loads(line) for line in lines)
        except zstandard.ZstdError:
            return
