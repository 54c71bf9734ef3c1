"""Files of a measurement: its settings, and one line per problem with its moments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from agentrl.errors import SettingsError
from agentrl.lab.measure import GradientMoments, ProblemMoments
from agentrl.telemetry.files import (
    append_line,
    atomic_write,
    encode_json_line,
    os_errors_as_world_errors,
    repair_torn_line,
)
from agentrl.trajectory import Group

SETTINGS, PROBLEMS = "settings.json", "problems.jsonl"
COLUMNS = tuple(GradientMoments.__dataclass_fields__)
_PATHS = ("model", "behaviour")  # policies may be moved: their weights are compared, not their paths


class ProblemLine(TypedDict):
    """Results of one problem. ``moments`` is None if the problem could not be measured."""

    number: int  # index among the problems
    problem: str
    outcome: str
    turns: float  # mean number of turns
    tokens: float  # mean number of model tokens
    reward: float  # mean reward
    moments: dict[str, dict[str, list[float | None]]] | None  # by group size and estimator, in the order of COLUMNS


MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class MeasuredProblem:
    """Moments of one problem, read from a file."""

    line: ProblemLine
    moments: ProblemMoments


def make_problem_line(group: Group, outcome: str, moments: ProblemMoments | None) -> ProblemLine:
    """Build the line of one problem. Numbers are rounded to six significant digits."""
    count = max(1, len(group.trajectories))

    def mean(values: Iterable[float]) -> float:
        return _round_to_six_digits(sum(values) / count)

    return ProblemLine(
        number=group.index,
        problem=group.problem.id,
        outcome=outcome,
        turns=mean(item.turns for item in group.trajectories),
        tokens=mean(item.model_tokens for item in group.trajectories),
        reward=mean(item.reward for item in group.trajectories),
        moments=None
        if moments is None
        else {
            str(size): {
                label: [value if value is None else _round_to_six_digits(value) for value in vars(item).values()]
                for label, item in by_label.items()
            }
            for size, by_label in moments.items()
        },
    )


def _round_to_six_digits(value: float) -> float:
    return float(f"{value:.6g}")


class MeasurementFiles:
    """Directory of a measurement, which a later call can continue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start_or_continue(self, settings: Mapping[str, object]) -> list[ProblemLine]:
        """Start or continue a measurement. Returns the stored lines, after removing an incomplete last line.

        Raises SettingsError if the stored measurement has different ``settings``.
        """
        file = self.folder / SETTINGS
        asked: dict[str, object] = json.loads(json.dumps(settings))
        if file.is_file():
            before = self.read_settings()
            for name, value in asked.items():
                if name not in _PATHS and before.get(name) != value:
                    raise SettingsError(
                        f"--output {self.folder} contains a measurement with {name}={_shortened(before.get(name))}, "
                        f"but {name} is now {_shortened(value)}: use another --output, or the same settings to continue"
                    )
        else:
            with os_errors_as_world_errors(self.folder, "create"):
                self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asked, indent=1, ensure_ascii=False) + "\n"
            atomic_write(file, lambda out: out.write(text.encode()))
        repair_torn_line(self.folder / PROBLEMS)
        return self.read_lines()

    def read_settings(self) -> dict[str, object]:
        """Return the settings of the measurement. Raises SettingsError if the directory contains no measurement."""
        return _read_json_object(self.folder / SETTINGS)

    def read_lines(self) -> list[ProblemLine]:
        """Return the lines of all problems sampled so far, ordered by number."""
        path = self.folder / PROBLEMS
        if not path.is_file():
            return []
        with os_errors_as_world_errors(path, "read"):
            lines: list[ProblemLine] = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        return sorted(lines, key=lambda line: line["number"])

    def append(self, line: ProblemLine) -> None:
        """Append one problem's line, and flush it to disk before returning."""
        append_line(self.folder / PROBLEMS, encode_json_line(line))


def measured_problems(lines: Sequence[ProblemLine]) -> list[MeasuredProblem]:
    """Return the measured problems with their moments."""
    measured = []
    for line in lines:
        if line["moments"] is not None:
            moments = {
                int(size): {
                    label: GradientMoments(**dict(zip(COLUMNS, values, strict=True)))  # type: ignore[arg-type]
                    for label, values in by_label.items()
                }
                for size, by_label in line["moments"].items()
            }
            measured.append(MeasuredProblem(line=line, moments=moments))
    return measured


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path.parent} contains no measurement: cannot read {path.name} ({error})") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path.parent} contains no measurement: {path.name} is not a JSON object")
    return content


def _shortened(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:120] + " ..."
