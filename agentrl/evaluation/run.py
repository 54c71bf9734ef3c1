"""``agentrl eval``: sample the rollouts of all problems, store each rollout when it ends, and report the results."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.benchmarks import (
    ProblemSet,
    build_problem_records,
    load_problem_sets,
)
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.endpoint import TextEngine
from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.evaluation.plots import draw_results
from agentrl.evaluation.provenance import build_configured_engine_record, build_provenance
from agentrl.evaluation.results import RolloutIndex, build_result_tables, default_pass_ks, make_results
from agentrl.evaluation.settings import EvaluationOptions, EvaluationSections, with_evaluation_limits
from agentrl.evaluation.transcripts import RolloutLog, Transcript
from agentrl.telemetry.console import Console
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.tracker_threads import LONGEST_CONVERSATION, Trackers
from agentrl.telemetry.trackers import Cell, SampleTable, check_trackers
from agentrl_envs.adapters.falsified import FalsifiedObservationsEnvironment
from agentrl_envs.episode import Environment
from agentrl_envs.grading import Grader
from agentrl_envs.types import Ended, Verdict

if TYPE_CHECKING:
    from agentrl.evaluation.samplers import Sampler

_TRACKED_COLUMNS = (
    *("benchmark", "problem", "sample", "reward", "ended", "verdict", "answer", "turns", "model tokens"),
    "conversation",
)
_EVALUATION_STEP = 0  # an evaluation has no steps
_DISPLAY_EVERY = (1.0, 15.0)  # seconds between updates of a live display, and between plain lines
_MOST_CONSECUTIVE_FAILURES = 100
_MOST_NAMED_PROBLEMS = 3  # maximum number of problems named in a warning


WriteReport = Callable[[Path, Path], None]
"""Function that writes the page of the evaluation in a directory to a file, such as `export_evaluation_page`."""


def evaluate_command(settings: EvaluationSections, request: EvaluationOptions, *, write_report: WriteReport) -> Results:
    """Run an evaluation, print its tables and return its results. After Ctrl-C, the same command continues it."""
    n = settings.evaluation.samples
    for k in request.ks:
        if k > n:
            raise SettingsError(f"--k={k} exceeds --n={n}, but pass@k needs k samples per problem; valid: 1 to {n}")
    settings = with_evaluation_limits(settings)
    check_trackers(settings.telemetry.trackers)
    console = Console(settings.telemetry)
    with asyncio.Runner() as runner, _open_configured_endpoint(settings, runner) as endpoint:
        sets = load_problem_sets(settings, request.benchmarks, request.data_dir)
        output = request.output or default_output_directory(settings, sets)
        try:
            directory = runner.run(sample_rollouts_of_sets(settings, sets, output, console, endpoint=endpoint))
        except KeyboardInterrupt:
            console.note(f"stopped: {output} contains the finished rollouts; run the same command to continue")
            raise
    return write_results(directory, settings, sets, request, console, write_report)


@contextmanager
def _open_configured_endpoint(settings: EvaluationSections, runner: asyncio.Runner) -> Iterator[TextEngine | None]:
    """Open the configured endpoint, if any, before problems are read and heavy libraries are imported."""
    if settings.evaluation.endpoint.url is None:
        yield None
        return
    engine = TextEngine(settings.evaluation.endpoint)
    try:
        runner.run(engine.choose_and_test_model())
        yield engine
    finally:
        runner.run(engine.close())


async def sample_rollouts_of_sets(
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    output: Path,
    console: Console,
    *,
    endpoint: TextEngine | None = None,
    sampler: Sampler | None = None,
    environment: Environment | None = None,
) -> EvaluationDirectory:
    """Sample the missing rollouts. Returns the complete, closed directory.

    ``settings`` must contain the limits of evaluation. The caller opens and closes ``endpoint``, ``sampler`` and
    ``environment``. Without ``endpoint`` and ``sampler``, the engine of the settings is opened.
    """
    # Import this module only after the problems are checked, because it imports heavy libraries.
    from agentrl.evaluation.samplers import EndpointSampler, build_evaluation_environment, open_sampler

    async with AsyncExitStack() as stack:
        if environment is None:
            environment = build_evaluation_environment(settings)
            stack.push_async_callback(environment.close)
            await environment.open()
        if endpoint is not None:
            sampler = EndpointSampler(engine=endpoint, settings=settings)
        elif sampler is None:
            sampler = await open_sampler(settings, output)
            stack.push_async_callback(sampler.close)
        prompts = await _build_prompts(sets, environment)
        too_long = sampler.prompts_too_long(prompts)
        record = build_provenance(
            settings,
            sets,
            model=sampler.model_record(),
            engine=sampler.engine_record(),
            environment=environment.describe(),
        )
        directory = EvaluationDirectory.create_or_resume(output, record, build_problem_records(sets, prompts))
        stack.callback(directory.close)
        for line in (*environment.describe(), f"rollouts are written to {directory.path}"):
            console.note(line)
        log = stack.enter_context(RolloutLog(directory.rollouts))
        if log.repaired:
            console.note(f"{log.path}: removed {log.repaired} bytes of an incomplete last rollout")
        index = RolloutIndex(directory.transcripts())
        if too_long:
            _record_unsampled_as_truncated(too_long, settings, sets, console, log, index)
        await _sample_missing_rollouts(sampler, environment, settings, sets, console, log, index)
    return directory


def _record_unsampled_as_truncated(
    prompt_lengths: Mapping[tuple[str, str], int],
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    console: Console,
    log: RolloutLog,
    index: RolloutIndex,
) -> None:
    """Record the samples of the problems in ``prompt_lengths`` as truncated before their first token."""
    for sample in index.samples_to_run(sets, settings.evaluation.samples):
        tokens = prompt_lengths.get((sample.benchmark, sample.problem.id))
        if tokens is None:
            continue
        transcript = Transcript(
            benchmark=sample.benchmark,
            problem=sample.problem.id,
            sample=sample.number,
            attempt=sample.attempt,
            turns=(),
            ended=Ended.TOKEN_LIMIT,
            prompt_tokens=tokens,
        )
        log.append(transcript)
        index.add(transcript)
    names = [problem for _, problem in prompt_lengths]
    named = ", ".join([*names[:_MOST_NAMED_PROBLEMS], *(["..."] if len(names) > _MOST_NAMED_PROBLEMS else [])])
    console.warning(
        f"{len(prompt_lengths)} problems ({named}) have prompts of up to {max(prompt_lengths.values())} tokens, which "
        f"leave no room for a response of {settings.rollout.max_response_tokens} tokens "
        "(evaluation.max_response_tokens): their rollouts are not sampled and count as truncated and wrong"
    )


async def _sample_missing_rollouts(
    sampler: Sampler,
    environment: Environment,
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    console: Console,
    log: RolloutLog,
    index: RolloutIndex,
) -> None:
    """Sample the missing rollouts, and retry infrastructure failures up to ``rollout.retries`` times.

    Raises WorldError after many consecutive failures, because the sandbox or engine is probably down.
    """
    n = settings.evaluation.samples
    # The limit exceeds the concurrency, because one server failure can end all rollouts in flight.
    most_failures = max(_MOST_CONSECUTIVE_FAILURES, 2 * sampler.concurrency)
    failures = 0
    falsified = {one.name for one in sets if one.falsified}
    with _ProgressDisplay(console, index, n * sum(len(one.problems) for one in sets)) as display:
        for attempt in range(settings.rollout.retries + 1):
            missing = index.samples_to_run(sets, n)
            if attempt and missing:
                # Wait for a failed sandbox or server to recover.
                await asyncio.sleep(min(2.0 ** (attempt - 1), 30.0))
            # Falsified problems need a different environment, so they are sampled separately.
            for falsify in (False, True):
                part = [sample for sample in missing if (sample.benchmark in falsified) is falsify]
                if not part:
                    continue
                shown = FalsifiedObservationsEnvironment(environment, settings.seed) if falsify else environment
                async with aclosing(sampler.sample_rollouts(shown, part)) as transcripts:
                    async for transcript in transcripts:
                        log.append(transcript)
                        index.add(transcript)
                        display.update(transcript)
                        failures = failures + 1 if transcript.ended is Ended.INFRASTRUCTURE_FAILURE else 0
                        if failures >= most_failures:
                            raise WorldError(
                                f"{failures} consecutive rollouts failed for reasons outside the policy, the last "
                                "because of: "
                                f"{transcript.failure or 'a failure of the sandbox or grader, see the log above'}. "
                                f"Finished rollouts are kept in {log.path}; run the same command to continue"
                            )


class _ProgressDisplay:
    """Progress display of an evaluation, updated at intervals."""

    def __init__(self, console: Console, index: RolloutIndex, total: int) -> None:
        self._index = index
        self._total = total
        self._every = _DISPLAY_EVERY[0] if console.live else _DISPLAY_EVERY[1]
        self._progress = console.progress(total, index.finished_count, unit="rollout")
        self._began = self._shown = time.monotonic()
        self._tokens = 0
        self._done = index.finished_count

    def __enter__(self) -> _ProgressDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.close()

    def update(self, transcript: Transcript) -> None:
        self._tokens += transcript.model_tokens
        self._done += transcript.ended is not Ended.INFRASTRUCTURE_FAILURE
        now = time.monotonic()
        if now - self._shown < self._every and self._done < self._total:
            return
        self._shown = now
        figures: dict[str, float] = {"tokens_per_s": self._tokens / max(now - self._began, 1e-9)}
        if counted := self._index.counted_rollouts():
            figures["eval/correct"] = sum(rollout.correct for rollout in counted) / len(counted)
            figures["rollout/turns_mean"] = sum(rollout.model_turns for rollout in counted) / len(counted)
        self._progress.update(self._done, figures)


def write_results(
    directory: EvaluationDirectory,
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    request: EvaluationOptions,
    console: Console,
    write_report: WriteReport,
) -> Results:
    """Compute, write and print the results of a complete evaluation."""
    index = RolloutIndex(directory.transcripts())
    ks = request.ks or default_pass_ks(settings.evaluation.samples)
    results = asyncio.run(_compute_results(directory, settings, sets, index, ks))
    directory.write_json("results.json", results)
    tables = build_result_tables(results)
    directory.write_text("table.md", "\n".join(table.markdown() for table in tables))
    if settings.telemetry.plots:
        draw_results(results, directory.plots)
    write_report(directory.path, directory.report)
    for table in tables:
        console.table(f"{table.title} ({results['provenance']['model']['name']})", table.columns, table.rows)
    _warn_of_unparsable_references(results, console)
    plots = "plots/, " if settings.telemetry.plots else ""
    log_results_to_trackers(directory, results, settings.telemetry, console)
    console.note(f"results are in {directory.path}: results.json, table.md, report.html, {plots}rollouts.jsonl.zst")
    return results


def _warn_of_unparsable_references(results: Results, console: Console) -> None:
    for name, one in results["benchmarks"].items():
        unreadable = one["excluded"].get(Verdict.UNPARSABLE_GOLD.value, 0)
        if unreadable:
            console.warning(
                f"{name}: {unreadable} rollouts are excluded because their reference answers cannot be parsed. "
                "This is an error in the data: list the answers with agentrl eval --check-data"
            )


async def _compute_results(
    directory: EvaluationDirectory,
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    index: RolloutIndex,
    ks: Sequence[int],
) -> Results:
    grader = Grader(settings.grader)
    try:
        return await make_results(directory.provenance(), sets, index, ks, grader)
    finally:
        await grader.close()


def default_output_directory(settings: EvaluationSections, sets: Sequence[ProblemSet]) -> Path:
    """Return ``evaluations/MODEL-DIGEST`` with a digest of everything that affects the results.

    The same command therefore continues in the same directory, and a different command uses a new directory.
    """
    endpoint = settings.evaluation.endpoint
    named = endpoint.model or "endpoint" if endpoint.url is not None else str(settings.model.path)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(Path(named).parts[-2:])).strip("-.")
    content = repr(
        build_provenance(
            settings, sets, model={"name": named}, engine=build_configured_engine_record(settings), environment=()
        )
    )
    return Path("evaluations") / f"{stem}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


async def _build_prompts(sets: Sequence[ProblemSet], environment: Environment) -> dict[tuple[str, str], str]:
    prompts = {}
    for one in sets:
        for problem in one.problems:
            episode = environment.episode(problem)
            try:
                prompts[one.name, problem.id] = await episode.start()
            finally:
                await episode.close()
    return prompts


def log_results_to_trackers(
    directory: EvaluationDirectory, results: Results, telemetry: TelemetrySettings, console: Console
) -> None:
    """Log provenance, scores, a sample of rollouts and the plots to every tracker, as a separate run.

    Finishing the same evaluation again updates the same run.
    """
    if not telemetry.trackers:
        return
    trackers = Trackers(telemetry, RunDirectory(directory.path), notify=console.note, warn=console.warning)
    trackers.start(dict(results["provenance"]), step=_EVALUATION_STEP, resumed=True)
    trackers.log_metrics({"step": _EVALUATION_STEP, **results_as_tracked_metrics(results)})
    sample = itertools.islice(directory.transcripts(), telemetry.tracker_rows)
    trackers.log_samples(
        SampleTable(step=_EVALUATION_STEP, columns=_TRACKED_COLUMNS, rows=[_table_row(one) for one in sample])
    )
    trackers.log_plots()
    trackers.close()


def results_as_tracked_metrics(results: Results) -> dict[str, float]:
    """Return the figures of every benchmark as metrics named ``eval/BENCHMARK/FIGURE``."""
    metrics: dict[str, float] = {}
    for benchmark, one in results["benchmarks"].items():
        name = re.sub(r"[^\w.-]", "_", benchmark)  # trackers accept few other characters in names
        metrics |= {f"eval/{name}/{figure}": value for figure, value in _tracked_figures(one)}
    return metrics


def _tracked_figures(one: BenchmarkResults) -> Iterator[tuple[str, float]]:
    interval = one["avg"]["problems_like_these"]
    yield from (("avg", one["avg"]["mean"]), ("low", interval["low"]), ("high", interval["high"]))
    yield from ((f"pass_at_{k}", record["value"]) for k, record in one["pass"].items() if record is not None)
    if one["maj"] is not None:
        yield "maj", one["maj"]
    yield from (("turns_mean", one["turns"]), ("model_tokens_mean", one["tokens"]["model_mean"]))
    yield from (("truncated_share", one["truncated"]["share"]), ("void_share", one["void_share"]))
    yield "excluded", one["excluded"]["total"]


def _table_row(one: Transcript) -> tuple[Cell, ...]:
    conversation = "\n".join(f"--- {turn.origin}\n{turn.text}" for turn in one.turns)
    verdict = None if one.verdict is None else one.verdict.value
    return (
        *(one.benchmark, one.problem, one.sample, one.reward, one.ended.value, verdict, one.answer),
        *(one.model_turns, sum(turn.tokens for turn in one.turns if turn.origin == "model")),
        conversation[:LONGEST_CONVERSATION],
    )
