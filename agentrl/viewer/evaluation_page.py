"""An evaluation: its scores, its problems with their rollouts, and one conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import zstandard

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.formats import JSONObject
from agentrl.viewer.metrics_file import read_new_rows


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
    rows = [_row(place, record) for place, record in enumerate(_records(path))]
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
            problems = read_new_rows(path / "problems.jsonl").rows
            key = (record["benchmark"], record["problem"])
            problem = next((row for row in problems if (row["benchmark"], row["id"]) == key), {})
            return {"rollout": record, "problem": problem}
    raise SettingsError(f"{path} has no rollout {place}")


def read_object(path: Path) -> JSONObject:
    """A JSON file, or nothing while it is missing. Raises WorldError where it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise WorldError(f"{path}: damaged, no JSON ({error})") from error
    return value if isinstance(value, dict) else {}


def _row(place: int, record: JSONObject) -> dict[str, object]:
    names = ("benchmark", "problem", "sample", "attempt", "ended", "verdict", "answer", "reward")
    turns = record["turns"]
    model = [turn for turn in turns if turn["origin"] == "model"]
    said = {name: record.get(name) for name in names}
    return {"place": place, **said, "turns": len(model), "tokens": sum(turn["tokens"] for turn in model)}


def _records(path: Path) -> Iterator[JSONObject]:
    """Every rollout that is whole; one that is being written ends the list."""
    file = path / "rollouts.jsonl.zst"
    if not file.is_file():
        return
    with file.open("rb") as packed:
        reader = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        rest = b""
        try:
            while piece := reader.read(1 << 20):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (json.loads(line) for line in lines)
        except zstandard.ZstdError:
            return
