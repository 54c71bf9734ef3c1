"""Files of a measurement: its settings, and one line per problem with the data of tables and plots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

from agentrl.errors import SettingsError
from agentrl.lab.measure import GradientMoments, ProblemMoments, named_moments
from agentrl.lab.sample import ProblemSample
from agentrl.lab.settings import EstimatorChoice, compute_problem_advantages
from agentrl.telemetry.files import append_line, atomic_write, json_line, os_errors_as_world_errors, repair_torn_line
from agentrl.trajectory import Group

SETTINGS, PROBLEMS = "settings.json", "problems.jsonl"
COLUMNS = tuple(GradientMoments.__dataclass_fields__)
_DIGITS = 6
_PATHS = ("model", "behaviour")  # policies may be moved: their weights are compared, not their paths


class Energies(TypedDict):
    """Energies, lengths and returns of the trajectories of one problem, in the same order."""

    exact: list[float]
    logit_proxy: list[float]
    head_exact: list[float]
    length: list[int]
    returns: list[float]


class PlottedTrajectories(TypedDict):
    """Token values of a few trajectories of one problem, for plots."""

    realized: list[list[float]]  # W_k of the first trajectories
    advantages: dict[str, list[list[float]]]  # by estimator: of a rewarded and of an unrewarded trajectory


class ProblemLine(TypedDict):
    """Results of one problem. ``moments``, ``energies`` and ``shown`` are None if it could not be measured."""

    number: int  # index among the problems
    problem: str
    outcome: str
    turns: float  # mean number of turns
    tokens: float  # mean number of model tokens
    reward: float  # mean reward
    moments: dict[str, dict[str, list[float | None]]] | None  # by group size and estimator, in the order of COLUMNS
    energies: Energies | None
    shown: PlottedTrajectories | None


MEASURED = "measured"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Moments of one problem, read from a file."""

    line: ProblemLine
    moments: ProblemMoments


def moments_to_json(moments: ProblemMoments) -> dict[str, dict[str, list[float | None]]]:
    """Convert moments to the JSON format of a problem's line."""
    return {
        str(size): {
            label: [round_for_json(getattr(item, name)) for name in COLUMNS] for label, item in by_label.items()
        }
        for size, by_label in moments.items()
    }


def round_for_json(value: float | None) -> float | None:
    """Round to six significant digits."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def problem_line(
    group: Group,
    outcome: str,
    sample: ProblemSample | None,
    moments: ProblemMoments | None,
    shown: Sequence[EstimatorChoice],
) -> ProblemLine:
    """Build the line of one problem, with token values if ``shown`` contains estimators."""
    count = max(1, len(group.trajectories))

    def mean(values: Iterable[float]) -> float:
        return float(f"{sum(values) / count:.{_DIGITS}g}")

    return ProblemLine(
        number=group.index,
        problem=group.problem.id,
        outcome=outcome,
        turns=mean(item.turns for item in group.trajectories),
        tokens=mean(item.model_tokens for item in group.trajectories),
        reward=mean(item.reward for item in group.trajectories),
        moments=None if moments is None else moments_to_json(moments),
        energies=None if sample is None else _energies(sample),
        shown=_shown(sample, shown) if sample is not None and shown else None,
    )


def _energies(sample: ProblemSample) -> Energies:
    energy = sample.token_energy.double()
    return Energies(
        exact=_numbers(sample.trajectory_energy),
        logit_proxy=_numbers(energy.sum(-1)),
        head_exact=_numbers((energy * sample.hidden_norm_squared).sum(-1)),
        length=sample.lengths.tolist(),
        returns=_numbers(sample.returns),
    )


def _shown(sample: ProblemSample, choices: Sequence[EstimatorChoice]) -> PlottedTrajectories:
    """Collect realized energies of up to 8 trajectories, and advantages of a right and a wrong trajectory.

    The right and the wrong trajectory are the longest of their kind, in a group of up to 8 trajectories.
    """
    order = sample.lengths.argsort(descending=True, stable=True).tolist()
    first = [next(row for row in order if (sample.returns[row] > 0) == right) for right in (True, False)
             if any((sample.returns[row] > 0) == right for row in order)]  # fmt: skip
    rows = torch.tensor([[*first, *(row for row in range(sample.size) if row not in first)][:8]])
    advantages = {}
    for choice in choices if len(first) == 2 else ():
        (values,) = compute_problem_advantages([sample], [rows], choice, drop_zero_variance=True)
        advantages[choice.label] = [
            _numbers(values[0, index][sample.batch.response_mask[row]]) for index, row in enumerate(first)
        ]
    realized = [
        _numbers(sample.token_energy[row][sample.batch.response_mask[row]].cumsum(0))
        for row in range(min(8, sample.size))
    ]
    return PlottedTrajectories(realized=realized, advantages=advantages)


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.4g}") for value in values.tolist()]


class MeasurementFiles:
    """Directory of a measurement, which a later call can continue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, settings: Mapping[str, object]) -> list[ProblemLine]:
        """Start or continue a measurement. Returns the stored lines, after removing an incomplete last line.

        Raises SettingsError if the stored measurement has different ``settings``.
        """
        file = self.folder / SETTINGS
        asked: dict[str, object] = json.loads(json.dumps(settings))
        if file.is_file():
            before = self.settings()
            for name in {**asked, **before}:
                if name not in _PATHS and before.get(name) != asked.get(name):
                    raise SettingsError(
                        f"--output {self.folder} contains a measurement with {name}={_short(before.get(name))}, but "
                        f"{name} is now {_short(asked.get(name))}: use another --output, or the same settings to "
                        "continue"
                    )
        else:
            with os_errors_as_world_errors(self.folder, "create"):
                self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asked, indent=1, ensure_ascii=False) + "\n"
            atomic_write(file, lambda out: out.write(text.encode()))
        repair_torn_line(self.folder / PROBLEMS)
        return self.lines()

    def settings(self) -> dict[str, object]:
        """Return the settings of the measurement. Raises SettingsError if the directory contains no measurement."""
        return _read_object(self.folder / SETTINGS)

    def lines(self) -> list[ProblemLine]:
        """Return the lines of all problems sampled so far, ordered by number."""
        path = self.folder / PROBLEMS
        if not path.is_file():
            return []
        with os_errors_as_world_errors(path, "read"):
            lines: list[ProblemLine] = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        return sorted(lines, key=lambda line: line["number"])

    def add(self, line: ProblemLine) -> None:
        """Append one problem's line, and flush it to disk before returning."""
        append_line(self.folder / PROBLEMS, json_line(line))


def measured_problems(lines: Sequence[ProblemLine]) -> list[Measured]:
    """Return the measured problems with their moments."""
    measured = []
    for line in lines:
        if line["moments"] is not None:
            moments = {
                int(size): {
                    label: named_moments(dict(zip(COLUMNS, values, strict=True))) for label, values in by_label.items()
                }
                for size, by_label in line["moments"].items()
            }
            measured.append(Measured(line=line, moments=moments))
    return measured


def _read_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path.parent} contains no measurement: cannot read {path.name} ({error})") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path.parent} contains no measurement: {path.name} is not a JSON object")
    return content


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:120] + " ..."
