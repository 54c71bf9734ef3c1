"""The report of a measurement: a table, a JSON record and pictures, from the moments that are kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence

from agentrl.errors import WorldError
from agentrl.lab.plots import draw_all
from agentrl.lab.results import MEASURED, MeasurementFiles, ProblemLine, measured_of
from agentrl.lab.settings import LabSettings
from agentrl.lab.summary import IntervalEstimate, Line, as_records, energy_correlations, summarise, verdicts
from agentrl.telemetry.console import Console
from agentrl.telemetry.files import atomic_write

_BASELINE = "rloo"


def report(results: MeasurementFiles, lab: LabSettings, console: Console, *, seed: int) -> list[Line]:
    """Say and write what follows from the first ``lab.problems`` problems measured.

    Raises WorldError for fewer than two.
    """
    lines = _counted(results.lines(), lab, console)
    problems = measured_of(lines)
    labels = list(next(iter(problems[0].moments.values())))
    baseline = lab.baseline or (_BASELINE if _BASELINE in labels else None)
    found = summarise([item.moments for item in problems], resamples=lab.bootstrap, seed=seed, baseline=baseline)
    said = verdicts(found)
    _show(console, found, said, baseline)
    energies = [item.line["energies"] for item in problems if item.line["energies"] is not None]
    record = {
        "settings": results.settings(),
        "baseline": baseline,
        "bootstrap": lab.bootstrap,
        "played": len(lines),
        "measured": len(problems),
        "lines": as_records(found),
        "energy_correlations": energy_correlations(energies) if energies else None,
        "verdicts": said,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False).encode()
    atomic_write(results.folder / "variance.json", lambda out: out.writelines([text]))
    for path in draw_all(results.folder, found, [item.line for item in problems]):
        console.note(f"drawn: {path}")
    return found


def _counted(lines: Sequence[ProblemLine], lab: LabSettings, console: Console) -> list[ProblemLine]:
    """The problems up to the last one asked for; says how many were measured, and why the others were not."""
    kept: list[ProblemLine] = []
    for line in lines:
        if sum(item["outcome"] == MEASURED for item in kept) < lab.problems:
            kept.append(line)
    outcomes = Counter(line["outcome"] for line in kept)
    measured = outcomes.pop(MEASURED, 0)
    reasons = [f"{count} with {name}" for name, count in sorted(outcomes.items())]
    left_out = f"; left out: {', '.join(reasons)}" if reasons else ""
    if measured < 2:
        raise WorldError(
            f"only {measured} of {len(kept)} problems can be measured{left_out}; two are the least: take another "
            "model, other problems or more samples"
        )
    console.note(f"measured: {measured} of {len(kept)} problems{left_out}")
    return kept


def _show(console: Console, lines: Sequence[Line], said: Sequence[str], baseline: str | None) -> None:
    columns: dict[str, Callable[[Line], str]] = {
        "N": lambda line: str(line.group_size),
        "estimator": lambda line: line.estimator,
        "noise": lambda line: str(line.noise),
        f"to {baseline}": lambda line: _said(line.to_baseline),
        "to the best": lambda line: str(line.to_best),
        "directional": lambda line: str(line.directional),
        "scale": lambda line: str(line.scale),
        "cosine": lambda line: f"{line.cosine.value:.3f}",
        "bias": lambda line: f"{line.bias.value:.3f}",
        "head": lambda line: "" if line.head_variance is None else f"{line.head_variance:.3g}",
    }
    if baseline is None:
        del columns[f"to {baseline}"]
    if all(line.head_variance is None for line in lines):
        del columns["head"]
    rows = [[say(line) for say in columns.values()] for line in lines]
    console.table("Gradient of one group, least noise first; 95 % intervals over problems", list(columns), rows)
    for line in said:
        console.note(line)


def _said(value: IntervalEstimate | None) -> str:
    return "" if value is None else str(value)
