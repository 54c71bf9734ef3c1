"""The grader: a coroutine that compares an answer with the gold answer and returns a `Verdict`."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from agentrl_envs.grading.comparing.fast import is_plain_number, quick_verdict, within_bounds
from agentrl_envs.grading.custom import CustomGrader
from agentrl_envs.grading.process import GraderError, GradingProcess, NoVerdictError, OutOfTimeError, WorkerDiedError
from agentrl_envs.grading.settings import GraderSettings
from agentrl_envs.types import Problem, Verdict

__all__ = ["Grader", "GraderError"]

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
    def needs_no_gold(self) -> bool:
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
