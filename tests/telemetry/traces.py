"""Reader of traces that follows Perfetto's rules, and a check that slices are nested."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

Slices = list[dict[str, Any]]


def read_trace(path: Path) -> dict[tuple[str, str], Slices]:
    """Return the slices of each lane in order, by the names of group and lane. The array need not be closed."""
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    named = {(row["name"], row["pid"], row["tid"]): row["args"]["name"] for row in events if row["ph"] == "M"}
    slices = [row for row in events if row["ph"] == "X"]
    order = sorted(slices, key=lambda row: (row["pid"], row["tid"], row["ts"], -row["dur"]))
    lanes = groupby(order, key=lambda row: (row["pid"], row["tid"]))
    return {(named["process_name", pid, 0], named["thread_name", pid, tid]): list(rows) for (pid, tid), rows in lanes}


def check_nested(lanes: dict[tuple[str, str], Slices]) -> None:
    """Check that any two slices of a lane are nested or disjoint."""
    for lane, slices in lanes.items():
        around: list[int] = []  # the ends of the slices that are open
        for row in slices:
            while around and around[-1] <= row["ts"]:
                around.pop()
            end = row["ts"] + row["dur"]
            assert not around or end <= around[-1], (lane, row)
            around.append(end)
