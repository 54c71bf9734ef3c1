"""Simulation of rollouts in virtual time: an event loop with a jumping clock, an engine, and tools of random latency.

Only the engine and the tools are simulated; the driver, its records and the schedules are real. Nothing waits in real
time, so figures are exact and the same on every machine.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from agentrl.models.loading import train_tokenizer
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import Completion, Sampling
from agentrl_envs.episode import Environment
from agentrl_envs.types import Ended, Problem, Step

T = TypeVar("T")
Latency = Callable[[random.Random], float]


class _JumpingSelector(selectors.SelectSelector):
    """Selector that advances the clock of the loop instead of sleeping."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("all tasks wait and no timer is set, so the loop would never end")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop that advances its clock to the next timer if no task is ready.

    Supports only coroutines that wait for timers and for each other. For threads, sockets and processes, the clock
    would run far ahead.
    """

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like ``asyncio.run``, but in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


def train_codec() -> TextCodec:
    """Train a tokenizer for placeholder texts."""
    codec = TextCodec(train_tokenizer(["aaaa bbbb"] * 4, vocabulary_size=300))
    codec.decode(())
    return codec


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Capacity of the engine: tokens per second of all requests together and of one request, and tokens of KV cache."""

    tokens_per_second: float
    request_tokens_per_second: float
    kv_tokens: int


@dataclass(eq=False)
class _Request:
    tokens: int
    held: int  # tokens in the KV cache when the request ends
    done: asyncio.Future[None]
    began: list[tuple[int, float]] = field(default_factory=list)  # versions, and the _service at which each began

    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return the versions with the number of tokens that each sampled."""
        first = self.began[0][1]
        starts = [round(service - first) for _, service in self.began] + [self.tokens]
        lengths = [after - before for before, after in pairwise(starts)]
        return tuple((version, length) for (version, _), length in zip(self.began, lengths, strict=True) if length)


class SimulatedEngine:
    """Shares ``hardware`` evenly among running requests. Requests that do not fit into the KV cache are queued.

    ``length`` returns the number of tokens of a turn from the request's seed. Prompts cost no time, as if all prefixes
    were cached. While the engine is paused, no request receives tokens.
    """

    def __init__(self, hardware: Hardware, length: Callable[[int], int]) -> None:
        self._hardware = hardware
        self._length = length
        self._running: list[tuple[float, int, _Request]] = []  # heap, ordered by the _service at which a request ends
        self._waiting: deque[_Request] = deque()
        self._service = 0.0  # tokens that a request running from the start would have by now
        self._since = 0.0
        self._order = 0
        self._held = False
        self._timer: asyncio.TimerHandle | None = None
        self.version = 0
        self.kv_used = 0
        self.sampled = 0
        self.most_queued = 0

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        tokens = min(sampling.max_tokens, self._length(seed))
        request = _Request(tokens=tokens, held=len(token_ids) + tokens, done=asyncio.get_running_loop().create_future())
        if request.held > self._hardware.kv_tokens:
            raise ValueError(f"{request.held} tokens never fit into a KV cache of {self._hardware.kv_tokens} tokens")
        self._waiting.append(request)
        self._settle()
        try:
            await request.done
        finally:
            if not request.done.done() or request.done.cancelled():
                self._drop(request)
        self.sampled += tokens
        return Completion(
            token_ids=(1,) * tokens,
            log_probs=(-0.5,) * tokens,
            finish_reason="stop",
            version_spans=request.spans(),
        )

    # -- weights --------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Stop sampling until :meth:`resume`."""
        self._settle()
        self._held = True
        self._settle()

    def resume(self, version: int) -> None:
        """Continue with the weights of ``version``."""
        self._settle()
        for _, _, request in self._running:
            request.began.append((version, self._service))
        self.version, self._held = version, False
        self._settle()

    # -- serving --------------------------------------------------------------------------------------------------

    def _rate(self) -> float:
        if self._held or not self._running:
            return 0.0
        return min(self._hardware.request_tokens_per_second, self._hardware.tokens_per_second / len(self._running))

    def _settle(self) -> None:
        """Account for the elapsed time, remove complete requests, admit requests that fit, and set the next timer."""
        loop = asyncio.get_running_loop()
        self._service += self._rate() * (loop.time() - self._since)
        self._since = loop.time()
        while self._running and self._running[0][0] <= self._service + 1e-6:
            request = heapq.heappop(self._running)[2]
            self.kv_used -= request.held
            request.done.set_result(None)
        while self._waiting and not self._held and self.kv_used + self._waiting[0].held <= self._hardware.kv_tokens:
            request = self._waiting.popleft()
            self.kv_used += request.held
            request.began.append((self.version, self._service))
            self._order += 1
            heapq.heappush(self._running, (self._service + request.tokens, self._order, request))
        self.most_queued = max(self.most_queued, len(self._waiting))
        if self._timer is not None:
            self._timer.cancel()
        rate = self._rate()
        self._timer = (
            loop.call_later(max(0.0, self._running[0][0] - self._service) / rate, self._settle) if rate else None
        )

    def _drop(self, request: _Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._running = [item for item in self._running if item[2] is not request]
            heapq.heapify(self._running)
            self.kv_used -= request.held
        self._settle()

    # -- the rest of an engine ------------------------------------------------------------------------------------

    def release(self, trajectory_id: str) -> None:
        pass

    async def cache_use(self) -> None:
        return None

    async def health(self) -> str:
        return "simulated"

    async def close(self) -> None:
        pass


class LockStep:
    """Barrier that opens when all current members have reached it."""

    def __init__(self) -> None:
        self._players = 0
        self._arrived: list[asyncio.Future[None]] = []

    def join(self) -> None:
        self._players += 1

    async def wait(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arrived.append(future)
        self._look()
        await future

    def leave(self) -> None:
        self._players -= 1
        self._look()

    def _look(self) -> None:
        if self._arrived and len(self._arrived) >= self._players:
            arrived, self._arrived = self._arrived, []
            for future in arrived:
                future.set_result(None)


class SimulatedEpisode:
    """Episode of ``turns`` turns, each with a tool call. ``barrier`` precedes every call and every further turn."""

    stop_strings = ("b",)

    def __init__(
        self,
        problem: Problem,
        numbers: random.Random,
        *,
        turns: int,
        latency: Latency,
        observation: str,
        barrier: LockStep | None,
    ) -> None:
        self._problem = problem
        self._numbers = numbers
        self._turn_count = turns
        self._latency = latency
        self._observation = observation
        self._barrier = barrier
        self._taken = 0

    def turn_complete(self, text: str) -> bool:
        return True

    async def start(self) -> str:
        if self._barrier is not None:
            self._barrier.join()
        return self._problem.statement

    async def step(self, action: str) -> Step:
        if self._barrier is not None:
            await self._barrier.wait()
        await asyncio.sleep(self._latency(self._numbers))
        self._taken += 1
        if self._taken == self._turn_count:
            return Step(observation="", reward=float(self._numbers.random() < 0.5), ended=Ended.ANSWERED)
        if self._barrier is not None:
            await self._barrier.wait()
        return Step(observation=self._observation, reward=0.0, ended=None)

    async def fork(self) -> SimulatedEpisode:
        raise RuntimeError("no benchmark forks a simulated episode")

    async def close(self) -> None:
        if self._barrier is not None:
            self._barrier.leave()


class SimulatedEnvironment(Environment):
    """Creates the episodes. Their latencies depend on ``seed``, the problem and the number of its episodes so far."""

    def __init__(
        self,
        *,
        turns: int,
        latency: Latency,
        seed: int,
        observation: str = "aaaa",
        barrier: LockStep | None = None,
    ) -> None:
        self._turn_count = turns
        self._latency = latency
        self._seed = seed
        self._observation = observation
        self._barrier = barrier
        self._made: Counter[str] = Counter()

    async def open(self) -> None:
        pass

    def episode(self, problem: Problem) -> SimulatedEpisode:
        self._made[problem.id] += 1
        numbers = random.Random(f"{self._seed} {problem.id} {self._made[problem.id]}")
        return SimulatedEpisode(
            problem,
            numbers,
            turns=self._turn_count,
            latency=self._latency,
            observation=self._observation,
            barrier=self._barrier,
        )

    async def close(self) -> None:
        pass

    def describe(self) -> list[str]:
        return ["simulated"]
