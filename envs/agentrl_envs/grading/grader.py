"""The grader: a coroutine that compares an answer with the reference answer and returns a `Verdict`.

Comparisons that need no algebra are decided in this process (`quick_verdict`): equal spellings, plain numbers and plain
words. All other comparisons run in worker processes (`agentrl_envs.grading.worker`). Workers exchange JSON lines with
this process and are killed at their deadlines. ``grader.function`` replaces the comparison with a custom function.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import signal
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import IO, SupportsFloat, cast

from agentrl_envs.episode import AgentRLEnvError, EnvironmentContractError
from agentrl_envs.grading.expressions import LEADING_DIGITS_TOLERANCE, MIN_ROUNDED_PLACES, ROUNDING_TOLERANCE
from agentrl_envs.grading.spelling import normalize_spelling, plain_words, remove_spaces_at_signs
from agentrl_envs.registry import PluginError, describe_error, import_attribute
from agentrl_envs.settings import GraderSettings
from agentrl_envs.threads import BlockingCallPool
from agentrl_envs.types import Problem, Verdict

_MAX_THREADS = 8


class CustomGrader:
    """A custom grader (``grader.function=module:function``). Replaces the comparison with the reference answer.

    Calls ``function(answer, problem)`` in a thread and expects a score from 0 to 1.
    """

    def __init__(self, path: str) -> None:
        """Import the function at ``path`` (``module:function``). Raises PluginError if it is not callable."""
        function = import_attribute(path, "grader.function")
        if not callable(function):
            raise PluginError(f"grader.function {path!r} is a {type(function).__name__}, but must be a function")
        self._path = path
        self._function: Callable[[str, Problem], SupportsFloat] = function
        self._threads = BlockingCallPool(_MAX_THREADS, name="grader")

    async def grade(self, answer: str, problem: Problem) -> tuple[Verdict, float]:
        """Return the verdict and the score. The verdict is correct if the score is 1.

        Raises EnvironmentContractError if the function raises an exception or does not return a number from 0 to 1.
        """
        try:
            value = await self._threads.run(lambda: self._function(answer, problem))
        except Exception as error:
            raise EnvironmentContractError(self._error_message(problem, f"raised {describe_error(error)}")) from error
        score = float(value) if hasattr(cast(object, value), "__float__") else math.nan
        if not 0.0 <= score <= 1.0:
            raise EnvironmentContractError(
                self._error_message(problem, f"returned {value!r:.100}; valid: a number from 0 to 1")
            )
        return Verdict.CORRECT if score == 1.0 else Verdict.INCORRECT, score

    def describe(self) -> str:
        """Return one line for the console."""
        return f"by {self._path}"

    def _error_message(self, problem: Problem, what: str) -> str:
        return f"the grader {self._path} {what} (problem {problem.id})"


# Environment variables of a worker. The list excludes secrets and HOME.
_INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")


class GraderError(AgentRLEnvError):
    """A grading process cannot be started, so the answer remains ungraded."""


class NoVerdictError(Exception):
    """The process returned no verdict before the wall-clock deadline. Subclasses define other reasons.

    The process must be killed.
    """


class ComparisonTimeoutError(NoVerdictError):
    """The comparison exceeded its CPU time limit."""


class WorkerDiedError(NoVerdictError):
    """The process ended during a comparison: out of memory, a crash in C code or a signal."""


class GradingProcess:
    """A running worker process. Create it with `start`. Handles one comparison at a time."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes], settings: GraderSettings) -> None:
        self._process = process
        self._errors = errors
        self._settings = settings

    @classmethod
    async def start(cls, settings: GraderSettings) -> GradingProcess:
        """Start a process and wait until it has imported its libraries. Raises GraderError if this fails."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        # -P: a file in the working directory, such as a user's sympy.py, must not shadow a library of the worker.
        command = (sys.executable, "-P", "-m", "agentrl_envs.grading.worker")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, (settings.deadline, settings.start_deadline, settings.hang_deadline, settings.memory_mb)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=_worker_environment(os.environ),
            )
        except OSError as error:
            errors.close()
            raise GraderError(f"cannot start a grading process: {error}") from error
        worker = cls(process, errors, settings)
        try:
            await worker._read_message(settings.start_deadline + settings.hang_deadline)
        except BaseException as error:
            reason = worker._last_stderr_line() or str(error)
            if isinstance(error, ComparisonTimeoutError):
                reason = f"not ready within start_deadline={settings.start_deadline:g} s of CPU time"
            await worker.kill()
            if isinstance(error, NoVerdictError):
                raise GraderError(f"a grading process did not start: {reason}") from error
            raise
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def compare(self, answer: str | None, reference: str) -> Verdict:
        """Compare an answer with the reference answer, or only check the reference answer if the answer is None.

        Raises NoVerdictError if the process returns no verdict.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"answer": answer, "reference": reference}).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDiedError(str(error)) from error
        return Verdict((await self._read_message(self._settings.hang_deadline))["verdict"])

    async def kill(self) -> None:
        """Kill the process and wait for its exit."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._errors.close()

    async def _read_message(self, seconds: float) -> dict[str, str]:
        """Read the next message within ``seconds`` of wall-clock time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
                if not line and await self._process.wait() == -signal.SIGPROF:
                    raise ComparisonTimeoutError(f"grading process {self.pid} exceeded its CPU time limit")
        except TimeoutError as error:
            raise NoVerdictError(f"grading process {self.pid} did not respond for {seconds:g} s") from error
        if not line:
            raise WorkerDiedError(f"grading process {self.pid} exited with code {self._process.returncode}")
        message: dict[str, str] = json.loads(line)
        return message

    def _last_stderr_line(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the worker's environment variables: one thread, a fixed hash seed, and some of ``environment``."""
    kept = {name: environment[name] for name in _INHERITED_VARIABLES if name in environment}
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


_FRACTION = re.compile(r"([+-]?)\\frac(?:\{(-?[0-9]+)\}\{([0-9]+)\}| *([0-9])([0-9]))")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?|[0-9]*\.[0-9]+|[0-9]+/0*[1-9][0-9]*)")
_MAX_NUMBER_CHARACTERS = 4000  # characters; Python converts at most 4300 digits to an integer
_BRACKETS = re.compile(r"[()\[\]{}]")


def quick_verdict(answer: str, reference: str) -> Verdict | None:
    r"""Return the verdict if it is certain without algebra, otherwise None.

    Equal spellings are correct. Integers and ratios are compared exactly. A decimal is compared to six decimal places,
    and two decimals to the places of the shorter decimal. Numbers may have a sign, leading zeros and thousands
    separators. Words are compared by their letters.

    >>> quick_verdict("025", "25"), quick_verdict("1,234", "1234"), quick_verdict("0.5", r"\dfrac{1}{2}")
    (<Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>, <Verdict.CORRECT: 'correct'>)
    >>> quick_verdict("26", "27.0"), quick_verdict("2/3", r"\frac{3}{4}"), quick_verdict("odd", r"\text{even}")
    (<Verdict.INCORRECT: 'incorrect'>, <Verdict.INCORRECT: 'incorrect'>, None)
    >>> quick_verdict("0.333333", r"\frac{1}{3}"), quick_verdict("0.3333", r"\frac{1}{3}")
    (<Verdict.CORRECT: 'correct'>, <Verdict.INCORRECT: 'incorrect'>)
    """
    if answer == reference and reference.strip():
        return Verdict.CORRECT
    answer, reference = normalize_spelling(answer), normalize_spelling(reference)
    if reference and remove_spaces_at_signs(answer) == remove_spaces_at_signs(reference):
        return Verdict.CORRECT
    return _verdict_by_value(answer, reference) or _verdict_by_words(answer, reference)


def is_within_limits(text: str, *, max_length: int, max_depth: int) -> bool:
    """Return True if a text is short and flat enough for the parser. Counts brackets, balanced or not."""
    if len(text) > max_length:
        return False
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= max_depth


def is_plain_number(text: str) -> bool:
    """Return True if a text is an integer, a decimal or a ratio in plain notation."""
    return _value_of_plain_number(normalize_spelling(text)) is not None


def _verdict_by_value(answer: str, reference: str) -> Verdict | None:
    answer_value, reference_value = _value_of_plain_number(answer), _value_of_plain_number(reference)
    if answer_value is None or reference_value is None:
        return None
    if answer_value == reference_value:
        return Verdict.CORRECT
    apart = abs(answer_value - reference_value)
    places = [len(text.partition(".")[2]) for text in (answer, reference) if "." in text]
    if len(places) == 2 and apart > Fraction(1, 2 * 10 ** min(places)):
        return Verdict.INCORRECT  # neither is a rounded form of the other
    near = apart < ROUNDING_TOLERANCE and apart <= LEADING_DIGITS_TOLERANCE * max(
        abs(answer_value), abs(reference_value)
    )
    return Verdict.CORRECT if near and max(places, default=0) >= MIN_ROUNDED_PLACES else Verdict.INCORRECT


def _verdict_by_words(answer: str, reference: str) -> Verdict | None:
    answer_words, reference_words = plain_words(answer), plain_words(reference)
    if answer_words is None or reference_words is None:
        return None
    if answer_words == reference_words:
        return Verdict.CORRECT
    numbers = any(character.isdigit() for character in answer_words + reference_words)
    return None if numbers else Verdict.INCORRECT


def _value_of_plain_number(text: str) -> Fraction | None:
    """Return the value of an integer, a decimal or a ratio in plain notation, or None."""
    fraction = _FRACTION.fullmatch(text)
    plain = text if fraction is None else fraction.expand(r"\1\2\4/\3\5")
    if len(plain) > _MAX_NUMBER_CHARACTERS or _NUMBER.fullmatch(plain) is None:
        return None
    return Fraction(plain.replace(",", ""))


_Comparison = tuple[str, str | None]  # reference and answer. Without an answer, the reference answer is checked.

logger = logging.getLogger(__name__)


class Grader:
    """Grades answers. Supports thousands of concurrent calls. Belongs to one event loop.

    Equal strings and plain numbers are decided in this process, and other answers by value, in up to
    ``settings.workers`` processes. If a comparison exceeds its CPU time, its process ends and the verdict is
    `Verdict.ANSWER_TIMEOUT`. This verdict counts as wrong, because otherwise a policy could exclude rollouts with slow
    answers. The verdict is the same if the process dies twice (out of memory, a crash in C code). If the reference
    answer alone fails, or a process hangs without computing, the verdict is `Verdict.GRADER_TIMEOUT`, which excludes
    the rollout.

    Not guaranteed: recognition of every pair of equal answers. Equality of expressions is undecidable in general.
    """

    def __init__(self, settings: GraderSettings) -> None:
        """Create a grader without starting a process. Raises PluginError if ``settings.function`` is not a function."""
        self._settings = settings
        self._custom = None if settings.function is None else CustomGrader(settings.function)
        self._verdicts: OrderedDict[_Comparison, Verdict] = OrderedDict()
        self._in_flight: dict[_Comparison, asyncio.Task[Verdict]] = {}
        self._idle: list[GradingProcess] = []
        self._slots = asyncio.Semaphore(settings.workers)
        self._closed = False

    @property
    def needs_no_reference(self) -> bool:
        """True for a custom function, because it can grade without a reference answer."""
        return self._custom is not None

    async def score(self, answer: str, problem: Problem) -> tuple[Verdict, float]:
        """Return the verdict and the reward: the score of a custom function, or else 1 for a correct answer.

        Raises GraderError if no grading process can be started, and EnvironmentContractError if a custom function
        fails.
        """
        if self._custom is not None:
            return await self._custom.grade(answer, problem)
        verdict = await self.grade(answer, problem.answer or "")
        return verdict, float(verdict is Verdict.CORRECT)

    async def grade(self, answer: str | None, reference: str) -> Verdict:
        """Compare an answer with the reference answer. Raises GraderError if no grading process can be started."""
        if self._closed:
            raise GraderError("the grader is closed")
        if answer is None or not answer.strip():
            return Verdict.NO_ANSWER
        verdict = self._verdict_for_oversized(answer, reference) or quick_verdict(answer, reference)
        return verdict if verdict is not None else await self._verdict_from_worker(reference, answer)

    async def check_reference(self, reference: str) -> Verdict:
        """Return `Verdict.CORRECT` if the reference answer can be parsed and equals itself, otherwise the reason."""
        if self._closed:
            raise GraderError("the grader is closed")
        unusable = self._verdict_for_oversized("", reference)
        if unusable is not None:
            return unusable
        return Verdict.CORRECT if is_plain_number(reference) else await self._verdict_from_worker(reference, None)

    async def close(self) -> None:
        """Cancel the running comparisons and end all processes. May be called more than once."""
        self._closed = True
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        idle, self._idle = self._idle, []
        for process in idle:
            await process.kill()

    def describe(self) -> str:
        """Return one line for the console."""
        if self._custom is not None:
            return self._custom.describe()
        settings = self._settings
        return f"by value in up to {settings.workers} processes, {settings.deadline:g} s of CPU time per comparison"

    @property
    def idle_worker_pids(self) -> tuple[int, ...]:
        """Process ids of the idle workers."""
        return tuple(process.pid for process in self._idle)

    def _verdict_for_oversized(self, answer: str, reference: str) -> Verdict | None:
        bounds = {"max_length": self._settings.max_length, "max_depth": self._settings.max_depth}
        if not reference.strip() or not is_within_limits(reference, **bounds):
            return Verdict.UNPARSABLE_GOLD
        return None if is_within_limits(answer, **bounds) else Verdict.UNPARSABLE_ANSWER

    async def _verdict_from_worker(self, reference: str, answer: str | None) -> Verdict:
        key = (reference, answer)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        task = self._in_flight.get(key)
        if task is None:
            task = self._in_flight[key] = asyncio.create_task(self._compare(key))
            task.add_done_callback(lambda done: self._finish_comparison(key, done))
        return await asyncio.shield(task)  # a cancelled caller must not cancel the comparison for other callers

    def _finish_comparison(self, key: _Comparison, done: asyncio.Task[Verdict]) -> None:
        del self._in_flight[key]
        if not done.cancelled():
            done.exception()  # mark the exception as retrieved, because all callers may have been cancelled

    async def _compare(self, key: _Comparison) -> Verdict:
        reference, answer = key
        try:
            async with self._slots:
                verdict = await self._compare_with_retry(answer, reference)
        except NoVerdictError as error:
            logger.warning("grading %.80r against %.80r failed: %s", answer, reference, error)
            verdict = await self._verdict_after_failure(error, key)
            if not isinstance(error, ComparisonTimeoutError):  # do not cache: the machine may have been at fault
                return verdict
        self._verdicts[key] = verdict
        if len(self._verdicts) > self._settings.cache_size:
            self._verdicts.popitem(last=False)
        return verdict

    async def _verdict_after_failure(self, error: NoVerdictError, key: _Comparison) -> Verdict:
        """Return the verdict after a failed comparison.

        The answer caused the failure if the process was computing and the reference answer alone succeeds.
        """
        reference, answer = key
        computed = isinstance(error, (ComparisonTimeoutError, WorkerDiedError))
        if answer is None or not computed or await self.check_reference(reference) is Verdict.GRADER_TIMEOUT:
            return Verdict.GRADER_TIMEOUT
        return Verdict.ANSWER_TIMEOUT

    async def _compare_with_retry(self, answer: str | None, reference: str) -> Verdict:
        """Compare, and repeat in a second process if the first process dies.

        Raises NoVerdictError if the last process returns no verdict.
        """
        try:
            return await self._compare_in_worker(answer, reference)
        except WorkerDiedError as error:
            logger.warning("grading %.80r failed and will be repeated: %s", answer, error)
            return await self._compare_in_worker(answer, reference)

    async def _compare_in_worker(self, answer: str | None, reference: str) -> Verdict:
        """Compare in an idle or a new process. Kills the process if it returns no verdict."""
        process = self._idle.pop() if self._idle else await GradingProcess.start(self._settings)
        try:
            verdict = await process.compare(answer, reference)
        except BaseException:
            await process.kill()
            raise
        self._idle.append(process)
        return verdict
