"""``agentrl eval``: sample the rollouts of all problems, store each rollout when it ends, and report the results."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.benchmarks import FalsifiedEnvironment, ProblemSet, problem_records, problem_sets
from agentrl.evaluation.directory import EvaluationDirectory
from agentrl.evaluation.endpoint import TextEngine
from agentrl.evaluation.formats import BenchmarkResults, Results
from agentrl.evaluation.plots import draw_results
from agentrl.evaluation.provenance import build_provenance, configured_engine_record
from agentrl.evaluation.results import RolloutIndex, default_pass_ks, make_results, result_tables
from agentrl.evaluation.settings import EvaluationRequest, EvaluationSections, evaluation_settings
from agentrl.evaluation.transcripts import RolloutLog, Transcript
from agentrl.telemetry.console import Console
from agentrl.telemetry.reporting import LONGEST_CELL, Trackers
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.settings import TelemetrySettings
from agentrl.telemetry.trackers import Cell, SampleTable, check_trackers
from agentrl_envs.episode import Environment
from agentrl_envs.grading import Grader
from agentrl_envs.types import Ended, Verdict

if TYPE_CHECKING:
    from agentrl.evaluation.engines import OpenedEngine, RolloutRunner

_TRACKED_COLUMNS = (
    *("benchmark", "problem", "sample", "reward", "ended", "verdict", "answer", "turns", "model tokens"),
    "conversation",
)
_STEP = 0  # an evaluation has no steps
_DISPLAY_EVERY = (1.0, 15.0)  # seconds between updates of a live display, and between plain lines
_FAILURES_IN_A_ROW = 100
_NAMED = 3  # maximum number of problems named in a warning


class WriteReport(Protocol):
    """Function that writes the page of an evaluation, such as :func:`agentrl.viewer.export.export_evaluation`."""

    def __call__(self, path: Path, out: Path, *, conversations: int | None) -> None: ...


def evaluate_command(settings: EvaluationSections, request: EvaluationRequest, *, write_report: WriteReport) -> Results:
    """Run an evaluation, print its tables and return its results. After Ctrl-C, the same command continues it."""
    n = settings.evaluation.samples
    for k in request.ks:
        if k > n:
            raise SettingsError(f"--k={k} exceeds --n={n}, but pass@k needs k samples per problem; valid: 1 to {n}")
    settings = evaluation_settings(settings)
    check_trackers(settings.telemetry.trackers)
    console = Console(settings.telemetry)
    with asyncio.Runner() as runner, _endpoint(settings, runner) as endpoint:
        sets = problem_sets(settings, request.benchmarks, request.data_dir)
        output = request.output or default_output(settings, sets)
        try:
            directory = runner.run(Evaluation(settings, sets, request, output, console, engine=endpoint).run_rollouts())
        except KeyboardInterrupt:
            console.note(f"stopped: {output} contains the finished rollouts; run the same command to continue")
            raise
    return write_results(directory, settings, sets, request, console, write_report)


@contextmanager
def _endpoint(settings: EvaluationSections, runner: asyncio.Runner) -> Iterator[OpenedEndpoint | None]:
    """Open the configured endpoint, if any, before problems are read and heavy libraries are imported."""
    if settings.evaluation.endpoint.url is None:
        yield None
        return
    engine = TextEngine(settings.evaluation.endpoint)
    try:
        runner.run(engine.open())
        yield OpenedEndpoint(engine=engine, settings=settings)
    finally:
        runner.run(engine.close())


@dataclass(frozen=True, kw_only=True)
class OpenedEndpoint:
    """An `OpenedEngine` that samples from an endpoint, without a local model."""

    engine: TextEngine
    settings: EvaluationSections

    @property
    def concurrency(self) -> int:
        return self.settings.evaluation.endpoint.concurrency

    def model(self) -> Mapping[str, object]:
        return {"name": self.engine.model, "fingerprint": self.engine.fingerprint()}

    def sampler(self) -> Mapping[str, object]:
        return configured_engine_record(self.settings)

    def rollout_runner(self, environment: Environment) -> RolloutRunner:
        from agentrl.evaluation.engines import TextRolloutRunner  # heavy

        return TextRolloutRunner(
            environment=environment,
            engine=self.engine,
            settings=self.settings.rollout,
            seed=self.settings.seed,
            concurrency=self.concurrency,
        )

    def prompts_too_long(self, prompts: Mapping[tuple[str, str], str]) -> Mapping[tuple[str, str], int]:
        """Return an empty mapping, because the endpoint itself rejects prompts that are too long."""
        return {}

    async def close(self) -> None:
        await self.engine.close()


@dataclass(frozen=True)
class Evaluation:
    """One evaluation. ``settings`` contains its limits. The caller closes ``engine`` and ``environment``."""

    settings: EvaluationSections
    sets: Sequence[ProblemSet]
    request: EvaluationRequest
    output: Path
    console: Console
    _: KW_ONLY
    engine: OpenedEngine | None = None
    environment: Environment | None = None

    async def run_rollouts(self) -> EvaluationDirectory:
        """Sample the missing rollouts. Returns the complete, closed directory."""
        async with AsyncExitStack() as stack:
            environment = await self._open_environment(stack)
            engine = await self._open_engine(stack)
            prompts = await _prompts(self.sets, environment)
            unfit = engine.prompts_too_long(prompts)
            record = build_provenance(
                self.settings,
                self.sets,
                model=engine.model(),
                engine=engine.sampler(),
                environment=environment.describe(),
            )
            directory = EvaluationDirectory.create_or_resume(self.output, record, problem_records(self.sets, prompts))
            stack.callback(directory.close)
            for line in (*environment.describe(), f"rollouts are written to {directory.path}"):
                self.console.note(line)
            log = stack.enter_context(RolloutLog(directory.rollouts))
            if log.repaired:
                self.console.note(f"{log.path}: removed {log.repaired} bytes of an incomplete last rollout")
            index = RolloutIndex()
            for transcript in directory.transcripts():
                index.add(transcript)
            self._end_without_room(unfit, log, index)
            await self._play_missing(engine, environment, log, index)
        return directory

    def _end_without_room(self, unfit: Mapping[tuple[str, str], int], log: RolloutLog, index: RolloutIndex) -> None:
        """Record the samples of problems in ``unfit`` as truncated before their first token."""
        if not unfit:
            return
        for sample in index.samples_to_run(self.sets, self.settings.evaluation.samples):
            tokens = unfit.get((sample.benchmark, sample.problem.id))
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
        self.console.warning(
            f"{len(unfit)} problems ({_first_named(unfit)}) have prompts of up to {max(unfit.values())} tokens, which "
            f"leave no room for a response of {self.settings.rollout.max_response_tokens} tokens "
            "(evaluation.max_response_tokens): their rollouts are not sampled and count as truncated and wrong"
        )

    async def _open_environment(self, stack: AsyncExitStack) -> Environment:
        if self.environment is not None:
            return self.environment
        from agentrl.evaluation.engines import (
            build_evaluation_environment,
        )  # heavy, so only after the problems are checked

        environment = build_evaluation_environment(self.settings)
        stack.push_async_callback(environment.close)
        await environment.open()
        return environment

    async def _open_engine(self, stack: AsyncExitStack) -> OpenedEngine:
        if self.engine is not None:
            return self.engine
        from agentrl.evaluation.engines import open_engine

        engine = await open_engine(self.settings, self.output)
        stack.push_async_callback(engine.close)
        return engine

    async def _play_missing(
        self, engine: OpenedEngine, environment: Environment, log: RolloutLog, index: RolloutIndex
    ) -> None:
        """Sample the missing rollouts, and retry infrastructure failures up to ``rollout.retries`` times."""
        n = self.settings.evaluation.samples
        total = n * sum(len(one.problems) for one in self.sets)
        display = _Display(self.console, index, total)
        # The limit exceeds the concurrency, because one server failure can end all rollouts in flight.
        failure_limit = _FailureLimit(max(_FAILURES_IN_A_ROW, 2 * engine.concurrency), log.path)
        falsified = {one.name for one in self.sets if one.falsified}
        with display:
            for attempt in range(self.settings.rollout.retries + 1):
                missing = index.samples_to_run(self.sets, n)
                if attempt and missing:
                    # Wait for a failed sandbox or server to recover.
                    await asyncio.sleep(min(2.0 ** (attempt - 1), 30.0))
                # Falsified problems need a different environment, so they are sampled separately.
                for falsify in (False, True):
                    part = [sample for sample in missing if (sample.benchmark in falsified) is falsify]
                    if not part:
                        continue
                    shown = FalsifiedEnvironment(environment, self.settings.seed) if falsify else environment
                    async with aclosing(engine.rollout_runner(shown).run(part)) as played:
                        async for transcript in played:
                            log.append(transcript)
                            index.add(transcript)
                            display.update(transcript)
                            failure_limit.see(transcript)


class _FailureLimit:
    """Stops an evaluation after many consecutive failures, because the sandbox or engine is probably down."""

    def __init__(self, most: int, path: Path) -> None:
        self._most = most
        self._path = path
        self._failures = 0

    def see(self, transcript: Transcript) -> None:
        self._failures = self._failures + 1 if transcript.ended is Ended.INFRASTRUCTURE_FAILURE else 0
        if self._failures >= self._most:
            raise WorldError(
                f"{self._failures} consecutive rollouts failed for reasons outside the policy, the last because of: "
                f"{transcript.failure or 'a failure of the sandbox or grader, see the log above'}. Finished rollouts "
                f"are kept in {self._path}; run the same command to continue"
            )


class _Display:
    """Progress display of an evaluation, updated at intervals."""

    def __init__(self, console: Console, index: RolloutIndex, total: int) -> None:
        self._index = index
        self._total = total
        self._every = _DISPLAY_EVERY[0] if console.live else _DISPLAY_EVERY[1]
        self._progress = console.progress(total, index.finished_count, unit="rollout")
        self._began = self._shown = time.monotonic()
        self._tokens = 0
        self._done = index.finished_count

    def __enter__(self) -> _Display:
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
        if self._index.data:
            figures["eval/correct"] = self._index.correct / self._index.data
            figures["rollout/turns_mean"] = self._index.turns / self._index.data
        self._progress.update(self._done, figures)


def write_results(
    directory: EvaluationDirectory,
    settings: EvaluationSections,
    sets: Sequence[ProblemSet],
    request: EvaluationRequest,
    console: Console,
    write_report: WriteReport,
) -> Results:
    """Compute, write and print the results of a complete evaluation."""
    index = RolloutIndex()
    for transcript in directory.transcripts():
        index.add(transcript)
    ks = request.ks or default_pass_ks(settings.evaluation.samples)
    results = asyncio.run(_results(directory, settings, sets, index, ks))
    directory.write_json(directory.results_file, results)
    tables = result_tables(results)
    directory.write_text("table.md", "\n".join(table.markdown() for table in tables))
    if settings.telemetry.plots:
        draw_results(results, directory.plots)
    write_report(directory.path, directory.report, conversations=request.conversations)
    for table in tables:
        console.table(f"{table.title} ({results['provenance']['model']['name']})", table.columns, table.rows)
    _warn_of_unreadable_golds(results, console)
    plots = "plots/, " if settings.telemetry.plots else ""
    track_results(directory, results, settings.telemetry, console)
    console.note(f"results are in {directory.path}: results.json, table.md, report.html, {plots}rollouts.jsonl.zst")
    return results


def _warn_of_unreadable_golds(results: Results, console: Console) -> None:
    for name, one in results["benchmarks"].items():
        unreadable = one["excluded"].get(Verdict.UNPARSABLE_GOLD.value, 0)
        if unreadable:
            console.warning(
                f"{name}: {unreadable} rollouts are excluded because their reference answers cannot be parsed, "
                "which is an error in the data: list them with agentrl eval --check-data"
            )


async def _results(
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


def default_output(settings: EvaluationSections, sets: Sequence[ProblemSet]) -> Path:
    """Return ``evaluations/MODEL-DIGEST`` with a digest of everything that affects the results.

    The same command therefore continues in the same directory, and a different command uses a new directory.
    """
    endpoint = settings.evaluation.endpoint
    named = endpoint.model or "endpoint" if endpoint.url is not None else str(settings.model.path)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(Path(named).parts[-2:])).strip("-.")
    content = repr(
        build_provenance(
            settings, sets, model={"name": named}, engine=configured_engine_record(settings), environment=()
        )
    )
    return Path("evaluations") / f"{stem}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"


def _first_named(problems: Iterable[tuple[str, str]]) -> str:
    names = [name for _, name in problems]
    return ", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])])


async def _prompts(sets: Sequence[ProblemSet], environment: Environment) -> dict[tuple[str, str], str]:
    prompts = {}
    for one in sets:
        for problem in one.problems:
            episode = environment.episode(problem)
            try:
                prompts[one.name, problem.id] = await episode.start()
            finally:
                await episode.close()
    return prompts


def track_results(
    directory: EvaluationDirectory, results: Results, telemetry: TelemetrySettings, console: Console
) -> None:
    """Log provenance, scores, a sample of rollouts and the plots to every tracker, as a separate run.

    Finishing the same evaluation again updates the same run.
    """
    if not telemetry.trackers:
        return
    trackers = Trackers(telemetry, RunDirectory(directory.path), notify=console.note, warn=console.warning)
    trackers.start(dict(results["provenance"]), step=_STEP, resumed=True)
    trackers.log_metrics({"step": _STEP, **tracked_metrics(results)})
    sample = itertools.islice(directory.transcripts(), telemetry.tracker_rows)
    trackers.log_samples(SampleTable(step=_STEP, columns=_TRACKED_COLUMNS, rows=[_cells(one) for one in sample]))
    trackers.log_plots()
    trackers.close()


def tracked_metrics(results: Results) -> dict[str, float]:
    """Return the figures of every benchmark as metrics named ``eval/BENCHMARK/FIGURE``."""
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
    yield "excluded", one["excluded"]["total"]


def _cells(one: Transcript) -> tuple[Cell, ...]:
    conversation = "\n".join(f"--- {turn.origin}\n{turn.text}" for turn in one.turns)
    verdict = None if one.verdict is None else one.verdict.value
    return (
        *(one.benchmark, one.problem, one.sample, one.reward, one.ended.value, verdict, one.answer),
        *(one.model_turns, sum(turn.tokens for turn in one.turns if turn.origin == "model")),
        conversation[:LONGEST_CELL],
    )
