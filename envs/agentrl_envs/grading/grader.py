"""The grader: a coroutine that compares an answer with the gold answer and returns a `Verdict`."""

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
from agentrl_envs.grading.expressions import LEADING, ROUNDED, ROUNDED_PLACES
from agentrl_envs.grading.spelling import respelled, squeezed, words_in
from agentrl_envs.registry import PluginError, describe_error, import_attribute
from agentrl_envs.settings import GraderSettings
from agentrl_envs.threads import BlockingCalls
from agentrl_envs.types import Problem, Verdict

_THREADS = 8


class CustomGrader:
    """Calls ``function(answer, problem)``, in a thread, for a score from 0 to 1."""

    def __init__(self, path: str) -> None:
        """Raises PluginError if ``path`` (``module:function``) names no function."""
        found = import_attribute(path, "grader.function")
        if not callable(found):
            raise PluginError(f"grader.function {path!r} is a {type(found).__name__}, expected a function")
        self._path = path
        self._function: Callable[[str, Problem], SupportsFloat] = found
        self._threads = BlockingCalls(_THREADS, name="grader")

    async def grade(self, answer: str, problem: Problem) -> tuple[Verdict, float]:
        """The verdict, correct at a score of 1, and the score.

        Raises EnvironmentContractError if the function raises, or returns something else than a number from 0 to 1.
        """
        try:
            value = await self._threads.run(lambda: self._function(answer, problem))
        except Exception as error:
            raise EnvironmentContractError(self._say(problem, f"raised {describe_error(error)}")) from error
        score = float(value) if hasattr(cast(object, value), "__float__") else math.nan
        if not 0.0 <= score <= 1.0:
            raise EnvironmentContractError(self._say(problem, f"returned {value!r:.100}; valid: a number from 0 to 1"))
        return Verdict.CORRECT if score == 1.0 else Verdict.INCORRECT, score

    def describe(self) -> str:
        """One line for the console."""
        return f"by {self._path}"

    def _say(self, problem: Problem, what: str) -> str:
        return f"the grader {self._path} {what} (problem {problem.id})"


_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")  # no secrets, no HOME


class GraderError(AgentRLEnvError):
    """A grading process cannot be started; nothing is known about the answer."""


class NoVerdictError(Exception):
    """No verdict; unless a subclass says otherwise, the wall-clock deadline passed. The process must be killed."""


class OutOfTimeError(NoVerdictError):
    """The comparison exceeded its CPU time."""


class WorkerDiedError(NoVerdictError):
    """The process ended during a comparison: out of memory, a crash in C code or a signal."""


class GradingProcess:
    """A running worker. Create it with `start`. Handles one comparison at a time."""

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes], settings: GraderSettings) -> None:
        self._process = process
        self._errors = errors
        self._settings = settings

    @classmethod
    async def start(cls, settings: GraderSettings) -> GradingProcess:
        """Start a process and wait until its libraries are imported. Raises `GraderError`."""
        errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        command = (sys.executable, "-P", "-m", "agentrl_envs.grading.worker")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *map(str, (settings.deadline, settings.start_deadline, settings.hang_deadline, settings.memory_mb)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=_environment(os.environ),
            )
        except OSError as error:
            errors.close()
            raise GraderError(f"cannot start a grading process: {error}") from error
        worker = cls(process, errors, settings)
        try:
            await worker._read(settings.start_deadline + settings.hang_deadline)
        except BaseException as error:
            reason = worker._last_error() or str(error)
            if isinstance(error, OutOfTimeError):
                reason = f"not ready within start_deadline={settings.start_deadline:g} s of processor time"
            await worker.kill()
            if isinstance(error, NoVerdictError):
                raise GraderError(f"a grading process did not start: {reason}") from error
            raise
        return worker

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def compare(self, answer: str | None, gold: str) -> Verdict:
        """Compare; if the answer is None, check the gold answer. Raises `NoVerdictError`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"answer": answer, "gold": gold}).encode() + b"\n")
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError) as error:
            raise WorkerDiedError(str(error)) from error
        return Verdict((await self._read(self._settings.hang_deadline))["verdict"])

    async def kill(self) -> None:
        """Kill the process and reap it."""
        if self._process.returncode is None:
            self._process.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._errors.close()

    async def _read(self, seconds: float) -> dict[str, str]:
        """Read the next message within ``seconds`` of wall-clock time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
                if not line and await self._process.wait() == -signal.SIGPROF:
                    raise OutOfTimeError(f"grading process {self.pid} was out of time")
        except TimeoutError as error:
            raise NoVerdictError(f"grading process {self.pid} said nothing for {seconds:g} s") from error
        if not line:
            raise WorkerDiedError(f"grading process {self.pid} ended with {self._process.returncode}")
        message: dict[str, str] = json.loads(line)
        return message

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a worker: a single thread, and the same hashes in every run."""
    kept = {name: environment[name] for name in _KEPT if name in environment}
    return kept | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


_FRACTION = re.compile(r"([+-]?)\\frac(?:\{(-?[0-9]+)\}\{([0-9]+)\}| *([0-9])([0-9]))")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.0*)?|[0-9]*\.[0-9]+|[0-9]+/0*[1-9][0-9]*)")
_LONGEST_NUMBER = 4000  # characters; Python reads no integer of more than 4300 digits
_BRACKETS = re.compile(r"[()\[\]{}]")


def quick_verdict(answer: str, gold: str) -> Verdict | None:
    """The verdict if it is certain without algebra, otherwise None.

    Equal spellings are correct. Integers and ratios are compared exactly, a decimal to six decimal places, two decimals
    to the places of the shorter one. Numbers may have a sign, leading zeros and thousands separators. Words are
    compared by their letters.
    """
    if answer == gold and gold.strip():
        return Verdict.CORRECT
    answer, gold = respelled(answer), respelled(gold)
    if gold and squeezed(answer) == squeezed(gold):
        return Verdict.CORRECT
    return _by_value(answer, gold) or _by_words(answer, gold)


def within_bounds(text: str, *, max_length: int, max_depth: int) -> bool:
    """Whether a text is short and flat enough for a parser. Counts brackets, balanced or not."""
    if len(text) > max_length:
        return False
    depth = deepest = 0
    for bracket in _BRACKETS.finditer(text):
        depth += 1 if bracket.group() in "([{" else -1
        deepest = max(deepest, depth)
    return deepest <= max_depth


def is_plain_number(text: str) -> bool:
    """Whether a text is an integer, a decimal or a ratio in plain notation."""
    return _number(respelled(text)) is not None


def _by_value(answer: str, gold: str) -> Verdict | None:
    answer_value, gold_value = _number(answer), _number(gold)
    if answer_value is None or gold_value is None:
        return None
    if answer_value == gold_value:
        return Verdict.CORRECT
    apart = abs(answer_value - gold_value)
    places = [len(text.partition(".")[2]) for text in (answer, gold) if "." in text]
    if len(places) == 2 and apart > Fraction(1, 2 * 10 ** min(places)):
        return Verdict.INCORRECT  # neither is the other, rounded
    near = apart < ROUNDED and apart <= LEADING * max(abs(answer_value), abs(gold_value))
    return Verdict.CORRECT if near and max(places, default=0) >= ROUNDED_PLACES else Verdict.INCORRECT


def _by_words(answer: str, gold: str) -> Verdict | None:
    answer_words, gold_words = words_in(answer), words_in(gold)
    if answer_words is None or gold_words is None:
        return None
    if answer_words == gold_words:
        return Verdict.CORRECT
    numbers = any(character.isdigit() for character in answer_words + gold_words)
    return None if numbers else Verdict.INCORRECT


def _number(text: str) -> Fraction | None:
    """The value of an integer, a decimal or a ratio in plain notation."""
    fraction = _FRACTION.fullmatch(text)
    plain = text if fraction is None else fraction.expand(r"\1\2\4/\3\5")
    if len(plain) > _LONGEST_NUMBER or _NUMBER.fullmatch(plain) is None:
        return None
    return Fraction(plain.replace(",", ""))


_Question = tuple[str, str | None]  # gold and answer; without an answer, is the gold one readable?

logger = logging.getLogger(__name__)


class Grader:
    """Grades answers. Thousands of calls may be in flight. Belongs to one event loop.

    Equal strings and plain numbers are decided here, all others by value in up to ``settings.workers`` processes. A
    comparison that exceeds its CPU time ends its process and is `Verdict.ANSWER_TIMEOUT`, which counts as wrong:
    otherwise a policy could escape the data with slow answers. The same holds if the process dies twice (out of memory,
    a crash in C code). If the gold answer alone fails, or a process hangs without computing, nothing is known about the
    answer: `Verdict.GRADER_TIMEOUT`.

    Not guaranteed: that every pair of equal answers is recognised; equality of expressions is undecidable in general.
    """

    def __init__(self, settings: GraderSettings) -> None:
        """Raises `PluginError` if ``settings.function`` names no function."""
        self._settings = settings
        self._custom = None if settings.function is None else CustomGrader(settings.function)
        self._verdicts: OrderedDict[_Question, Verdict] = OrderedDict()
        self._in_flight: dict[_Question, asyncio.Task[Verdict]] = {}
        self._idle: list[GradingProcess] = []
        self._slots = asyncio.Semaphore(settings.workers)
        self._closed = False

    @property
    def needs_no_reference(self) -> bool:
        """Whether a user's function grades, which need not look at a gold answer."""
        return self._custom is not None

    async def score(self, answer: str, problem: Problem) -> tuple[Verdict, float]:
        """The verdict on an answer, and what it is worth: the score of a user's function, or 1 for a correct answer.

        Raises `GraderError`, and `EnvironmentContractError` for a user's function that fails.
        """
        if self._custom is not None:
            return await self._custom.grade(answer, problem)
        verdict = await self.grade(answer, problem.answer or "")
        return verdict, float(verdict is Verdict.CORRECT)

    async def grade(self, answer: str | None, gold: str) -> Verdict:
        """Compare an answer with the gold answer. Raises `GraderError` when no grading process can be started."""
        if self._closed:
            raise GraderError("the grader is closed")
        if answer is None or not answer.strip():
            return Verdict.NO_ANSWER
        verdict = self._out_of_bounds(answer, gold) or quick_verdict(answer, gold)
        return verdict if verdict is not None else await self._by_algebra(gold, answer)

    async def check_gold(self, gold: str) -> Verdict:
        """`Verdict.CORRECT` if the gold answer can be read and equals itself, otherwise the reason why not."""
        if self._closed:
            raise GraderError("the grader is closed")
        unusable = self._out_of_bounds("", gold)
        if unusable is not None:
            return unusable
        return Verdict.CORRECT if is_plain_number(gold) else await self._by_algebra(gold, None)

    async def close(self) -> None:
        """Cancel the comparisons in flight and end every process. May be called more than once."""
        self._closed = True
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        idle, self._idle = self._idle, []
        for process in idle:
            await process.kill()

    def describe(self) -> str:
        """One line for the console."""
        if self._custom is not None:
            return self._custom.describe()
        settings = self._settings
        return f"by value in up to {settings.workers} processes, {settings.deadline:g} s of processor time each"

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the idle workers."""
        return tuple(process.pid for process in self._idle)

    def _out_of_bounds(self, answer: str, gold: str) -> Verdict | None:
        bounds = {"max_length": self._settings.max_length, "max_depth": self._settings.max_depth}
        if not gold.strip() or not within_bounds(gold, **bounds):
            return Verdict.UNPARSABLE_GOLD
        return None if within_bounds(answer, **bounds) else Verdict.UNPARSABLE_ANSWER

    async def _by_algebra(self, gold: str, answer: str | None) -> Verdict:
        key = (gold, answer)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        task = self._in_flight.get(key)
        if task is None:
            task = self._in_flight[key] = asyncio.create_task(self._compare(key))
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)  # a caller that is cancelled takes no other caller's verdict with it

    def _forget(self, key: _Question, done: asyncio.Task[Verdict]) -> None:
        del self._in_flight[key]
        if not done.cancelled():
            done.exception()  # marks it as seen: every caller may be gone by now

    async def _compare(self, key: _Question) -> Verdict:
        gold, answer = key
        try:
            async with self._slots:
                verdict = await self._attempt(answer, gold)
        except NoVerdictError as error:
            logger.warning("grading %.80r for %.80r: %s", answer, gold, error)
            verdict = await self._blame(error, key)
            if not isinstance(error, OutOfTimeError):  # the machine may have been at fault: not to be remembered
                return verdict
        self._verdicts[key] = verdict
        if len(self._verdicts) > self._settings.cache_size:
            self._verdicts.popitem(last=False)
        return verdict

    async def _blame(self, error: NoVerdictError, key: _Question) -> Verdict:
        """The answer is at fault if the process was computing and the gold answer alone gets a verdict."""
        gold, answer = key
        computed = isinstance(error, (OutOfTimeError, WorkerDiedError))
        if answer is None or not computed or await self.check_gold(gold) is Verdict.GRADER_TIMEOUT:
            return Verdict.GRADER_TIMEOUT
        return Verdict.ANSWER_TIMEOUT

    async def _attempt(self, answer: str | None, gold: str) -> Verdict:
        """One comparison, repeated in a second process if the first one dies. Raises `NoVerdictError`."""
        try:
            return await self._in_process(answer, gold)
        except WorkerDiedError as error:
            logger.warning("grading %.80r: %s", answer, error)
            return await self._in_process(answer, gold)

    async def _in_process(self, answer: str | None, gold: str) -> Verdict:
        """Compare in an idle or a new process; a process that does not answer is ended."""
        process = self._idle.pop() if self._idle else await GradingProcess.start(self._settings)
        try:
            verdict = await process.compare(answer, gold)
        except BaseException:
            await process.kill()
            raise
        self._idle.append(process)
        return verdict
