"""Logging of an evaluation to the experiment trackers in ``telemetry.trackers``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.evaluation.records.directory import EvaluationDirectory
from agentrl.evaluation.records.transcript import Transcript
from agentrl.telemetry.console import Console
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.trackers.reporting import LONGEST_CELL, Trackers
from agentrl.telemetry.trackers.tracker import Cell, SampleTable

COLUMNS = (
    *("benchmark", "problem", "sample", "reward", "ended", "verdict", "answer", "turns", "model tokens"),
    "conversation",
)
_STEP = 0  # an evaluation has no steps


def track_results(
    directory: EvaluationDirectory, results: Results, telemetry: TelemetrySettings, console: Console
) -> None:
    """Log provenance, scores, a sample of rollouts and the plots to every tracker, as a separate run.

    If the same evaluation is finished again, the same run is updated.
    """
    if not telemetry.trackers:
        return
    trackers = Trackers(telemetry, RunDirectory(directory.path), say=console.note, warn=console.warning)
    trackers.begin(dict(results["provenance"]), step=_STEP, resumed=True)
    trackers.row({"step": _STEP, **scores(results)})
    sample = itertools.islice(directory.transcripts(), telemetry.tracker_rows)
    trackers.table(SampleTable(step=_STEP, columns=COLUMNS, rows=[_cells(one) for one in sample]))
    trackers.plots()
    trackers.close()


def scores(results: Results) -> dict[str, float]:
    """Return the figures of every benchmark, named ``eval/BENCHMARK/FIGURE``."""
    metrics: dict[str, float] = {}
    for benchmark, one in results["benchmarks"].items():
        name = re.sub(r"[^\w.-]", "_", benchmark)  # trackers accept few other characters in names
        metrics |= {f"eval/{name}/{figure}": value for figure, value in _figures(one)}
    return metrics


def _figures(one: BenchmarkResults) -> Iterator[tuple[str, float]]:
    interval = one["avg"]["problems_like_these"]
    yield from (("avg", one["avg"]["mean"]), ("low", interval["low"]), ("high", interval["high"]))
    yield from ((f"pass_at_{k}", record["value"]) for k, record in one["pass"].items() if record is not None)
    if one["maj"] is not None:
        yield "maj", one["maj"]
    yield from (("turns_mean", one["turns"]), ("model_tokens_mean", one["tokens"]["model_mean"]))
    yield from (("truncated_share", one["truncated"]["share"]), ("void_share", one["void_share"]))
    yield "no_data", one["no_data"]["total"]


def _cells(one: Transcript) -> tuple[Cell, ...]:
    conversation = "\n".join(f"--- {turn.origin}\n{turn.text}" for turn in one.turns)
    verdict = None if one.verdict is None else one.verdict.value
    return (
        *(one.benchmark, one.problem, one.sample, one.reward, one.ended.value, verdict, one.answer),
        *(one.model_turns, sum(turn.tokens for turn in one.turns if turn.origin == "model")),
        conversation[:LONGEST_CELL],
    )
