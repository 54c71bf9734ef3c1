"""One server of an engine: its client, its load, its process (if the run started it) and the detection of stalls.

A request is sent to the server with the least work, including the prefix that the server would have to recompute.

A server is stalled if it has requests but computes no tokens. A slow server is not treated as stalled. A time limit for
requests would instead drop long turns on a busy server and keep short turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from agentrl.errors import WorldError, mentions_out_of_memory
from agentrl.rollout.engines.base import ServerSettings
from agentrl.rollout.engines.processes import ServerProcess
from agentrl.rollout.engines.replica import (
    ServerCallError,
    ServerClient,
    ServerIdentity,
    ServerRequirements,
    TooSlowError,
)
from agentrl.rollout.engines.served_weights import ServedWeights

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class ServerLoad:
    """The load of one server, which gets requests only if ``is_up``. ``limit``: maximum number in flight."""

    is_up: bool = True
    tokens: int = 0
    requests: int = 0
    limit: int | None = None
    cached: dict[str, int] = field(default_factory=dict)  # trajectory -> tokens of its context processed by this server

    @property
    def is_full(self) -> bool:
        return self.limit is not None and self.requests >= self.limit

    @contextmanager
    def count_request(self, trajectory_id: str, *, context: int, reserved: int) -> Iterator[None]:
        """Count a request with ``context`` tokens and up to ``reserved`` new tokens until the block ends."""
        self.tokens += context + reserved
        self.requests += 1
        self.cached[trajectory_id] = context
        try:
            yield
        finally:
            self.tokens -= context + reserved
            self.requests -= 1

    def halve_limit(self) -> int:
        """Limit the server to half its requests in flight, including the failed request. Returns the new limit."""
        in_flight = self.requests + 1
        self.limit = max(1, (in_flight if self.limit is None else min(self.limit, in_flight)) // 2)
        return self.limit

    def placement_cost(self, trajectory_id: str, context: int) -> int:
        """Return the cost of placing a request on the server: tokens in flight plus tokens to prefill."""
        parent = trajectory_id.rpartition(".")[0]  # the id of a branch is its parent's id, a dot and a number
        cached = self.cached.get(trajectory_id, self.cached.get(parent, 0))
        return self.tokens + context - min(context, cached)


def choose_server(
    loads: Sequence[ServerLoad], trajectory_id: str, *, context: int, failed_servers: frozenset[int] = frozenset()
) -> int | None:
    """Return the index of the server with the lowest cost for a request, or None if all servers are full or down.

    A trajectory therefore stays on the server that holds its prefix, until the load of another server is lower by more
    than the cost of the prefix. In the same way, the branches of a forked rollout stay on the server of their parent.
    ``failed_servers`` are chosen only if no other server is up.

    >>> loads = [ServerLoad(), ServerLoad()]
    >>> with loads[0].count_request("t", context=100, reserved=50):
    ...     choose_server(loads, "t", context=160), choose_server(loads, "u", context=160)
    (1, 1)
    >>> choose_server(loads, "t", context=160), choose_server(loads, "t.3", context=160)
    (0, 0)
    """
    up = [index for index, load in enumerate(loads) if load.is_up]
    usable = [index for index in up if index not in failed_servers] or up
    free = [index for index in usable if not loads[index].is_full]
    return min(free, key=lambda index: (loads[index].placement_cost(trajectory_id, context), index), default=None)


# The first and the longest interval, in seconds, between checks of a server that is starting or down.
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 5.0
# Seconds between polls of a server with requests.
_POLL_SECONDS = 15.0
_NO_COUNT_YET = -1


class StallDetector:
    """Ends the requests to a server that computes no token for ``stall_deadline`` seconds.

    ``tokens`` is polled while there are requests. It returns the number of computed tokens, or None if unknown.

    A server that does not report tokens never counts as stalled. If it dies, its connections break, and a separate
    deadline limits the rollouts of a step. The server does not count as stalled while ``gate`` is closed, because it
    then computes no tokens.
    """

    def __init__(
        self, address: str, tokens: Callable[[], Awaitable[int | None]], gate: asyncio.Event, *, stall_deadline: float
    ) -> None:
        self._address = address
        self._count_tokens = tokens
        self._gate = gate
        self._stall_deadline = stall_deadline
        self._stall_message = f"computed no token for {stall_deadline:g} s"
        self._request_timeouts: set[asyncio.Timeout] = set()
        self._polling: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch_request(self) -> AsyncIterator[None]:
        """Watch the server during a request. Raises TooSlowError if the server stalls."""
        try:
            async with asyncio.timeout(None) as limit:
                self._request_timeouts.add(limit)
                if self._polling is None:
                    self._polling = asyncio.create_task(self._poll_until_stalled(), name=f"watch {self._address}")
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            if self._polling is not None and self._polling.done():
                self._polling.result()  # raises if polling failed because of a bug
            raise TooSlowError(f"{self._address} {self._stall_message}") from None
        finally:
            self._request_timeouts.discard(limit)
            if not self._request_timeouts and self._polling is not None:
                self._polling.cancel()
                self._polling = None

    async def _poll_until_stalled(self) -> None:
        try:
            while True:
                await self._wait_until_stalled()
                self._end_requests()
        except Exception:  # a bug: end every watched request, which then raises this exception
            self._end_requests()
            raise

    async def _wait_until_stalled(self) -> None:
        """Wait until the gate has been open for ``stall_deadline`` seconds without a computed token."""
        loop = asyncio.get_running_loop()
        last_count: int | None = _NO_COUNT_YET
        changed_at = loop.time()
        while last_count is None or loop.time() - changed_at < self._stall_deadline:
            await asyncio.sleep(min(_POLL_SECONDS, self._stall_deadline / 4))
            was_closed = not self._gate.is_set()
            await self._gate.wait()
            try:
                tokens = await self._count_tokens()
            except ServerCallError:  # a failed call counts as no progress
                tokens = _NO_COUNT_YET if last_count is None else last_count
            if tokens is None or tokens != last_count or was_closed:
                last_count, changed_at = tokens, loop.time()

    async def close(self) -> None:
        """Stop polling without ending running requests."""
        if self._polling is not None:
            task, self._polling = self._polling, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def fail_requests(self) -> None:
        """End running requests at once, because the server's process has exited or its machine is lost."""
        self._stall_message = "has exited"
        self._end_requests()

    def _end_requests(self) -> None:
        for limit in self._request_timeouts:
            if not limit.expired():
                limit.reschedule(0.0)


class PooledServer:
    """One server of an engine, with its client, load and process.

    ``lacks_weights``: the server responds, but needs weights that only a transfer can supply.
    """

    def __init__(
        self,
        process_or_address: ServerProcess | str,
        index: int,
        gate: asyncio.Event,
        connect: Callable[[str], ServerClient],
        settings: ServerSettings,
    ) -> None:
        """Configure the server without starting it.

        ``process_or_address``: a process to start, or the address of an external server. ``connect``: creates the
        client for an address. ``gate``: closed while weights change.
        """
        self.index = index
        self.load = ServerLoad()
        self.process = None if isinstance(process_or_address, str) else process_or_address
        self.identity: ServerIdentity | None = None
        self.lacks_weights = False
        self.failure = ""
        self.reviving: asyncio.Task[None] | None = None
        self._gate = gate
        self._create_client = connect
        self._settings = settings
        self._connect(process_or_address if isinstance(process_or_address, str) else process_or_address.plan.address)

    def _connect(self, address: str) -> None:
        self.replica = self._create_client(address)
        self.address = self.replica.address
        self.name = f"the {self.replica.title} server {self.address}"
        self.stalls = StallDetector(
            self.address, self.replica.count_computed_tokens, self._gate, stall_deadline=self._settings.stall_deadline
        )

    async def start(self) -> None:
        """Start the server's process, if any. The address may change. Raises WorldError if the start fails."""
        if self.process is None:
            return
        loop = asyncio.get_running_loop()
        self.process.on_exit = lambda: loop.call_soon_threadsafe(self.stalls.fail_requests)
        await asyncio.to_thread(self.process.launch)
        if self.process.plan.address != self.address:
            has_checksums = self.replica.has_checksums
            await self.stalls.close()
            await self.replica.close()
            self._connect(self.process.plan.address)
            self.replica.has_checksums = has_checksums

    @property
    def responds(self) -> bool:
        return self.load.is_up or self.lacks_weights

    async def wait_until_usable(self, needs: ServerRequirements) -> ServerIdentity:
        """Wait until the server responds, and check that it can serve the run.

        Raises WorldError if the server does not respond, and SettingsError if it cannot serve the run.
        """
        await self._wait_until_healthy()
        try:
            self.identity = await self.replica.identify(needs)
        except ServerCallError as error:
            raise WorldError(f"{self.name} failed its startup check: {error}") from error
        return self.identity

    async def close(self) -> None:
        """Disconnect, and stop the server if the run started it."""
        if self.reviving is not None:
            self.reviving.cancel()
            await asyncio.gather(self.reviving, return_exceptions=True)
        await self.stalls.close()
        await self.replica.close()
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)

    async def _wait_until_healthy(self) -> None:
        """Wait until the server responds. Raises WorldError after ``start_deadline`` or if its process exits."""
        loop = asyncio.get_running_loop()
        seconds = self._settings.start_deadline
        deadline = loop.time() + seconds
        pause = FIRST_PAUSE
        while True:
            try:
                await self.replica.check_health()
                return
            except ServerCallError as error:
                problem = str(error)
            if self.process is not None and self.process.has_exited:
                raise WorldError(
                    f"{self.name} exited during startup (log: {self.process.log}). "
                    f"End of the log:\n{self.process.log_excerpt()}"
                )
            if loop.time() >= deadline:
                hint = "" if self.process is None else f"; end of its log:\n{self.process.log_excerpt()}"
                raise WorldError(
                    f"no response within {self._settings.prefix}.start_deadline={seconds:g} s from {self.name}: "
                    f"{problem}{hint}"
                )
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def recover(self, weights: ServedWeights, may_recover: asyncio.Event) -> None:
        """Recover the server: restart it if the run started it, and verify that it holds the current weights.

        ``may_recover``: closed while other servers receive new weights. If only a transfer can supply the current
        weights, sets ``lacks_weights``. Raises WorldError after too many restarts.
        """
        pause = FIRST_PAUSE
        while True:
            await may_recover.wait()
            version = weights.version
            try:
                if self.process is not None and self.process.has_exited:
                    await self._restart(self.process)
                await self.replica.check_health()
                if not await weights.ensure_installed(self.replica):
                    self.lacks_weights = True
                    return
                await self._verify_weights(weights)
                if may_recover.is_set() and version == weights.version:
                    break
            except ServerCallError as error:
                self.failure = str(error)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        logger.warning("%s is available again", self.name)
        self.load.is_up = True

    def halve_request_limit(self) -> None:
        """Halve the limit on the server's concurrent requests."""
        logger.warning(
            "%s ran out of memory: limiting it to %d concurrent requests", self.name, self.load.halve_limit()
        )  # fmt: skip

    async def _verify_weights(self, weights: ServedWeights) -> None:
        seconds = self._settings.stall_deadline
        try:
            async with asyncio.timeout(seconds):
                await weights.require_current_weights(self.replica)
        except TimeoutError:
            raise TooSlowError(f"its weights could not be verified within {seconds:g} s") from None

    async def _restart(self, process: ServerProcess) -> None:
        log = process.log_excerpt()
        if mentions_out_of_memory(log) and process.launch_count:
            self.halve_request_limit()
        if process.launch_count > self._settings.restarts:
            raise WorldError(
                f"{self.name} exited {process.launch_count} times "
                f"({self._settings.prefix}.restarts={self._settings.restarts}); end of its log:\n{log}"
            )
        old_name = self.name  # the address may change
        try:
            await self.start()
        except WorldError as error:  # no node currently has room for the server
            raise ServerCallError(f"its process exited and cannot be restarted: {error}") from error
        logger.warning("%s exited; restarting it", old_name)
