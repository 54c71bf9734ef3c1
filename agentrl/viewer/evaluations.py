"""An evaluation: its scores, its problems with their rollouts, one conversation, and the comparison of two."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import cast

import zstandard

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.compare import compare, comparison_notes
from agentrl.evaluation.formats import JSONObject, Results
from agentrl.telemetry.files import contained, wrong_shape
from agentrl.viewer.metrics_file import json_lines

_LONGEST_LINE = 1 << 26  # bytes of one rollout


def evaluation_summary(path: Path) -> dict[str, object]:
    """An evaluation in the table of evaluations; ``benchmarks`` is empty while it goes on."""
    results = read_object(path / "results.json")
    provenance = read_object(path / "provenance.json")
    return {
        "model": provenance.get("model", {}).get("name", ""),
        "benchmarks": {name: one["avg"] for name, one in results.get("benchmarks", {}).items()},
        "finished": bool(results),
    }


def evaluation_page(path: Path) -> dict[str, object]:
    """Results, provenance and one row per rollout, in the order written."""
    results = read_object(path / "results.json")
    gold = {(row["benchmark"], row["id"]): row.get("answer") for row in json_lines(path / "problems.jsonl", path)}
    rows = [_row(place, record, gold) for place, record in enumerate(_records(path))]
    return {
        "path": str(path),
        "results": results.get("benchmarks", {}),
        "provenance": read_object(path / "provenance.json"),
        "rollouts": rows,
    }


def rollout_page(path: Path, place: int) -> dict[str, object]:
    """One rollout with its problem. Raises SettingsError if there is none at ``place``."""
    for found, record in enumerate(_records(path)):
        if found == place:
            problems = json_lines(path / "problems.jsonl", path)
            key = (record["benchmark"], record["problem"])
            problem = next((row for row in problems if (row["benchmark"], row["id"]) == key), {})
            return {"rollout": record, "problem": problem}
    raise SettingsError(f"{path} has no rollout {place}")


def comparison_page(first: Path, second: Path) -> dict[str, object]:
    """B, the second, against A, paired by problem. Raises SettingsError where the two cannot be compared."""
    before, after = (_finished(path) for path in (first, second))
    found = compare(before, after)
    return {
        "paths": [str(first), str(second)],
        "models": [results["provenance"]["model"]["name"] for results in (before, after)],
        "notes": comparison_notes(before, after),
        "differences": {name: asdict(one) for name, one in found.items()},
        "scores": {name: [results["benchmarks"][name]["avg"]["mean"] for results in (before, after)] for name in found},
        "problems": [row for name in found for row in _paired(name, before, after)],
    }


def _finished(path: Path) -> Results:
    results = read_object(path / "results.json")
    if not results:
        raise SettingsError(f"{path} is not finished: the command that began it continues it")
    return cast(Results, results)


def _paired(name: str, before: Results, after: Results) -> Iterator[dict[str, object]]:
    """The problems of a benchmark with their counts in both."""
    ours, theirs = (results["benchmarks"][name]["per_problem"] for results in (before, after))
    for problem, first in ours.items():
        yield {"benchmark": name, "problem": problem, "first": first, "second": theirs[problem]}


def read_object(path: Path) -> JSONObject:
    """Return the object in a JSON file of an evaluation, or {} if the file is missing. Raises WorldError if damaged."""
    try:
        value = json.loads(contained(path, path.parent).read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise WorldError(f"{path}: damaged, no JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _row(place: int, record: JSONObject, gold: Mapping[tuple[object, object], object]) -> dict[str, object]:
    names = ("benchmark", "problem", "sample", "attempt", "ended", "verdict", "answer", "reward")
    turns = record["turns"]
    model = [turn for turn in turns if turn["origin"] == "model"]
    said = {name: record.get(name) for name in names}
    said["gold"] = gold.get((record["benchmark"], record["problem"]))
    return {"place": place, **said, "turns": len(model), "tokens": sum(turn["tokens"] for turn in model)}


def _records(path: Path) -> Iterator[JSONObject]:
    """Every rollout that is whole; one that is being written ends the list."""
    file = contained(path / "rollouts.jsonl.zst", path)
    if not file.is_file():
        return
    with file.open("rb") as packed:
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        rest = b""
        try:
            while piece := reader.read(1 << 20):
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > _LONGEST_LINE:
                    raise WorldError(f"{file}: damaged, a line over {_LONGEST_LINE >> 20} MB")
                with wrong_shape(str(file)):
                    yield from (json.loads(line) for line in lines)
        except zstandard.ZstdError:
            return
