"""Tables of a study in Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from agentrl.lab.study.curves import RunCurve, StudyRecord
from agentrl.lab.study.statistics import Estimated, interquartile_mean, over_seeds, paired_differences


def markdown(record: StudyRecord) -> str:
    """Render the report: scores, cost of reaching a score, collapses, paired differences and unfinished runs."""
    study = record.study
    lines = [f"# {study.name}", "", _what(record), "", *_scores(record)]
    if study.target is not None:
        lines += ["", *_costs(record, study.target)]
    lines += ["", *_differences(record, "Final score", lambda run: run.final)]
    lines += ["", *_differences(record, "Area", lambda run: run.area)]
    left = [run for run in record.runs if run.status != "finished"]
    if left:
        lines += ["", "## Not finished", "", "| run | seed | state | why |", "|---|---|---|---|"]
        lines += [f"| {run.variant} | {run.seed} | {run.status} | {_one_line(run.message)} |" for run in left]
    return "\n".join(lines) + "\n"


def by_variant(record: StudyRecord) -> dict[str, list[RunCurve]]:
    """Runs of each variant, in the order of the study."""
    return {name: [run for run in record.runs if run.variant == name] for name in record.study.all_variants()}


def _what(record: StudyRecord) -> str:
    study = record.study
    shared = ", ".join(f"`{key}={value}`" for key, value in study.settings.items())
    done = sum(run.status == "finished" for run in record.runs)
    return (
        f"{done} of {len(record.runs)} runs finished, seeds {', '.join(map(str, study.seeds))}, agentrl "
        f"{record.agentrl}. Every run: `agentrl train --env {study.env}"
        + (f" --config {study.config}`" if study.config else "`")
        + (f" with {shared}." if shared else ".")
    )


def _scores(record: StudyRecord) -> list[str]:
    lines = [
        "## Scores",
        "",
        "Held-out score after training, and its mean over all steps (area). Brackets are 95 % intervals over seeds: "
        "Student's t for means, Tukey and McLaughlin's for the interquartile mean.",
        "",
        "| variant | seeds | at the start | final | final, interquartile mean | area | collapsed | failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for variant, runs in by_variant(record).items():
        done = [run for run in runs if run.status == "finished"]
        failed = sum(run.status == "failed" for run in runs)
        starts = [run.scores[0].mean for run in runs if run.final is not None]
        finals = [run.final for run in runs if run.final is not None]
        areas = [run.area for run in runs if run.area is not None]
        collapsed = sum(run.collapsed(record.study.collapse) for run in done)
        cells = [
            variant,
            str(len(finals)),
            _cell(starts, over_seeds),
            _cell(finals, over_seeds),
            _cell(finals, interquartile_mean),
            _cell(areas, over_seeds),
            f"{collapsed} of {len(done)}",
            str(failed),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _costs(record: StudyRecord, target: float) -> list[str]:
    lines = [
        f"## Cost of a held-out score of {target:g}",
        "",
        "Median over the runs that reached it, up to the first evaluation with this score.",
        "",
        "| variant | reached | sampled tokens | trajectories |",
        "|---|---|---|---|",
    ]
    for variant, runs in by_variant(record).items():
        done = [run for run in runs if run.status == "finished"]
        tokens = [run.spent_until(target, run.model_tokens) for run in done]
        trajectories = [run.spent_until(target, run.trajectories) for run in done]
        reached = sum(value is not None for value in tokens)
        lines.append(f"| {variant} | {reached} of {len(done)} | {_median(tokens)} | {_median(trajectories)} |")
    return lines


def _differences(record: StudyRecord, what: str, of: Callable[[RunCurve], float | None]) -> list[str]:
    values = {
        variant: {run.seed: value for run in runs if (value := of(run)) is not None}
        for variant, runs in by_variant(record).items()
    }
    differences = paired_differences(values, record.study.compared_with)
    lines = [
        f"## {what} minus that of {record.study.compared_with}, seed by seed",
        "",
        "Intervals: 95 %, Student's t. p: sign-flip test, exact up to 20 seeds; adjusted by Holm's method over the "
        "rows of this table.",
        "",
        "| variant | seeds | difference | p | adjusted p |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {item.variant} | {item.difference.seeds} | {item.difference.value:+.3f} "
        f"[{item.difference.low:+.3f}, {item.difference.high:+.3f}] | {item.p:.3f} "
        f"| {item.adjusted_p:.3f} |"
        for item in differences
    ]
    return lines if differences else [*lines[:2], "No other variant has two finished seeds in common with it."]


def _cell(values: Sequence[float], summary: Callable[..., Estimated]) -> str:
    if not values:
        return "-"
    estimate = summary(values)
    ends = "" if math.isnan(estimate.low) else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{ends}"


def _median(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):,.0f}" if known else "-"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
