"""Report of a measurement from its stored moments: a table, a JSON record and plots."""

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
    """Print and write the results of the first ``lab.problems`` measured problems.

    Raises WorldError if fewer than two problems were measured.
    """
    lines = _counted(results.lines(), lab, console)
    problems = measured_of(lines)
    labels = list(next(iter(problems[0].moments.values())))
    baseline = lab.baseline or (_BASELINE if _BASELINE in labels else None)
    summary = summarise([item.moments for item in problems], resamples=lab.bootstrap, seed=seed, baseline=baseline)
    messages = verdicts(summary)
    _show(console, summary, messages, baseline)
    energies = [item.line["energies"] for item in problems if item.line["energies"] is not None]
    record = {
        "settings": results.settings(),
        "baseline": baseline,
        "bootstrap": lab.bootstrap,
        "played": len(lines),
        "measured": len(problems),
        "lines": as_records(summary),
        "energy_correlations": energy_correlations(energies) if energies else None,
        "verdicts": messages,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False).encode()
    atomic_write(results.folder / "variance.json", lambda out: out.writelines([text]))
    for path in draw_all(results.folder, summary, [item.line for item in problems]):
        console.note(f"plot: {path}")
    return summary


def _counted(lines: Sequence[ProblemLine], lab: LabSettings, console: Console) -> list[ProblemLine]:
    """Lines up to the last requested problem. Prints how many were measured and why others were left out."""
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
            f"only {measured} of {len(kept)} problems could be measured{left_out}; at least 2 are needed: use another "
            "model, other problems or more samples"
        )
    console.note(f"measured: {measured} of {len(kept)} problems{left_out}")
    return kept


def _show(console: Console, lines: Sequence[Line], messages: Sequence[str], baseline: str | None) -> None:
    columns: dict[str, Callable[[Line], str]] = {
        "N": lambda line: str(line.group_size),
        "estimator": lambda line: line.estimator,
        "noise": lambda line: str(line.noise),
        f"to {baseline}": lambda line: _text(line.to_baseline),
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
    rows = [[column(line) for column in columns.values()] for line in lines]
    console.table("Gradient of one group, least noise first; 95 % intervals over problems", list(columns), rows)
    for line in messages:
        console.note(line)


def _text(value: IntervalEstimate | None) -> str:
    return "" if value is None else str(value)
