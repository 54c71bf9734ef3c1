"""Engine backed by a pool of servers. Balances requests, retries them on other servers and updates all weights."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from agentrl.errors import WorldError, mentions_out_of_memory
from agentrl.rollout.engines.base import CacheUse, Completion, EngineError, Sampling, ServerSettings
from agentrl.rollout.engines.pooled_server import LONGEST_PAUSE, PooledServer, choose_server
from agentrl.rollout.engines.processes import ServerProcess
from agentrl.rollout.engines.replica import (
    InvalidResponseError,
    ServerCallError,
    ServerClient,
    ServerRequirements,
    StatusError,
    TurnRequest,
)
from agentrl.rollout.engines.served_weights import Check, ServedWeights
from agentrl.telemetry.trace import trace_service_call

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FIRST_BACKOFF = 0.1  # seconds; the shortest wait before a retry


class ServerEngine:
    """An :class:`~agentrl.rollout.engines.base.Engine` over servers. Must be used from a single event loop.

    If a server dies, its requests restart on another server from the trajectory's exact tokens and with the same seed.
    Earlier turns are never sampled again.
    """

    def __init__(
        self,
        servers: Sequence[ServerProcess | str],
        connect: Callable[[str], ServerClient],
        needs: ServerRequirements,
        settings: ServerSettings,
        *,
        weights: ServedWeights,
        label: bool = True,
    ) -> None:
        """Configure the engine without starting servers.

        ``servers``: processes to start, or addresses. ``connect``: creates the client for an address. ``label``: label
        the weights of servers that have no version.
        """
        self._needs = needs
        self._settings = settings
        self._weights = weights
        self._label = label
        self._gate = asyncio.Event()  # closed while weights change
        self._may_recover = asyncio.Event()  # closed while weights change, unless no server is up to receive them
        self._servers = [
            PooledServer(process_or_address, index, self._gate, connect, settings)
            for index, process_or_address in enumerate(servers)
        ]
        self._changed = asyncio.Event()  # replaced by each change, which wakes all waiters
        self._is_asleep = False
        self._outage_since: float | None = None

    # -- start and end --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the run's servers, and check all servers.

        Raises WorldError if a server does not start or respond, and SettingsError if it cannot serve the run.
        """
        await asyncio.gather(*(server.start() for server in self._servers))
        await asyncio.gather(*(self._wait_until_usable_and_label(server) for server in self._servers))
        self._open_gate()

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))

    async def _wait_until_usable_and_label(self, server: PooledServer) -> None:
        identity = await server.wait_until_usable(self._needs)
        if identity.version is not None:
            self._weights.has_initial_weights = False
        elif self._label:
            await server.replica.set_version_label(self.version)

    # -- sampling -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        """Sample one turn after ``token_ids``; see :class:`~agentrl.rollout.engines.base.Engine`."""
        failed_servers: set[int] = set()
        failures: list[str] = []
        while True:
            server = await self._choose_server(trajectory_id, len(token_ids), frozenset(failed_servers))
            limit = server.load.limit
            try:
                return await self._generate_on(server, token_ids, sampling, trajectory_id, request_id, seed)
            except ServerCallError as error:
                failures.append(f"{server.address}: {error}")
                if mentions_out_of_memory(str(error)) and server.load.limit == limit:
                    server.halve_request_limit()  # only once if several requests fail because of the same shortage
                if (
                    not self._record_failure_and_may_retry(server, error)
                    or len(failures) > self._settings.request_retries
                ):
                    raise EngineError(f"request {request_id} failed {len(failures)} times: {failures[-1]}") from error
                failed_servers.add(server.index)
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, _FIRST_BACKOFF * 2 ** len(failures)))

    async def _generate_on(
        self,
        server: PooledServer,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        version, context = self.version, len(token_ids)
        try:
            async with self._weights.adapter_in_use(server.replica, version) as adapter, server.stalls.watch_request():
                with (
                    server.load.count_request(trajectory_id, context=context, reserved=sampling.max_tokens),
                    trace_service_call(f"server {server.index}", "request", context=context),
                ):
                    completion = await server.replica.generate(
                        TurnRequest(
                            token_ids=token_ids,
                            sampling=sampling,
                            # A server may reject an id that is still in use.
                            request_id=f"{request_id}-{secrets.token_hex(3)}",
                            seed=seed,
                            eos_ids=self._needs.codec.end_ids,
                            salt=self._weights.cache_salt(version),
                            adapter=adapter,
                        )
                    )
        finally:
            self._wake_waiting_requests()
        completion = self._weights.label_versions(completion, version)
        versions = {item for item, _ in completion.version_spans}
        if not all(version <= item <= self.version for item in versions):
            raise InvalidResponseError(
                f"tokens have versions {sorted(versions)}, but the request has version {version} "
                f"(current version: {self.version})"
            )
        return completion

    async def _choose_server(self, trajectory_id: str, context: int, failed_servers: frozenset[int]) -> PooledServer:
        """Choose a server for a request. Waits while weights change and while all servers are full or down."""
        while True:
            await self._gate.wait()
            loads = [server.load for server in self._servers]
            index = choose_server(loads, trajectory_id, context=context, failed_servers=failed_servers)
            if index is not None:
                self._outage_since = None
                return self._servers[index]
            if self._servers_up:
                await self._changed.wait()
            else:
                await self._wait_for_change_in_outage()

    async def _wait_for_change_in_outage(self) -> None:
        """Wait for a change while no server is up.

        Raises WorldError ``outage_deadline`` seconds after the outage began, or at once if no server can recover.
        """
        loop = asyncio.get_running_loop()
        if self._outage_since is None:
            self._outage_since = loop.time()
        seconds_left = self._outage_since + self._settings.outage_deadline - loop.time()
        none_recovers = all(server.reviving is None or server.reviving.done() for server in self._servers)
        if seconds_left <= 0 or none_recovers:
            raise WorldError(
                f"no {self._server_software} server is available (waited {loop.time() - self._outage_since:.0f} s of "
                f"{self._settings.prefix}.outage_deadline={self._settings.outage_deadline:g}): {self._failure_messages}"
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_left):
                await self._changed.wait()

    def _wake_waiting_requests(self) -> None:
        """Wake the requests that wait for a server, after a request has ended or a server has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def release(self, trajectory_id: str) -> None:
        for server in self._servers:
            server.load.cached.pop(trajectory_id, None)

    async def cache_use(self) -> CacheUse | None:
        """Return the total capacity of the running servers and the usage of the fullest server; None if unknown."""
        uses: list[CacheUse] = []
        calls = (server.replica.cache_use() for server in self._servers_up)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, CacheUse):
                uses.append(answer)
            elif isinstance(answer, BaseException) and not isinstance(answer, ServerCallError):
                raise answer
        if not uses:
            return None
        return CacheUse(
            tokens=sum(item.tokens for item in uses),
            used=max(item.used for item in uses),
            preemptions=sum(item.preemptions for item in uses),
        )

    # -- failures -------------------------------------------------------------------------------------------------

    def _record_failure_and_may_retry(self, server: PooledServer, error: ServerCallError) -> bool:
        """Record a server's failure, and mark the server as down if necessary. Returns True if a retry may succeed."""
        server.failure = str(error)
        if isinstance(error, StatusError):
            if mentions_out_of_memory(error.message):
                return True
            if error.status < 500:
                return False
        if server.load.is_up:
            logger.warning("%s is removed from rotation: %s", server.name, error)
            server.load.is_up = False
            server.load.cached.clear()
        if server.reviving is None or server.reviving.done():
            work = server.recover(self._weights, self._may_recover)
            server.reviving = asyncio.create_task(work, name=f"revive {server.address}")
            server.reviving.add_done_callback(self._on_recovery_end)
        return True

    def _on_recovery_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("giving up on a server: %s", task.exception())
        self._wake_waiting_requests()

    # -- weights --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def has_initial_weights(self) -> bool:
        """True if the servers hold their initial weights."""
        return self._weights.has_initial_weights

    @property
    def responding_servers(self) -> list[PooledServer]:
        """The servers that respond, including servers that lack weights."""
        return [server for server in self._servers if server.responds]

    async def pause(self) -> None:
        """Pause all running and new requests, so that weights can change. Sleeping servers reallocate weight memory.

        If servers load adapters, running requests continue, because each request keeps its adapter.
        """
        self._close_gate()
        if self._is_asleep:
            await self._call_servers(lambda replica: replica.wake("weights"))
        elif self._weights.updates_in_place:
            await self._call_servers(lambda replica: replica.pause())

    async def install(self, directory: Path | None, version: int) -> None:
        """Install the weights of ``version`` from ``directory``; None: the servers already have the weights.

        Call :meth:`pause` first. Running requests continue; new requests wait for :meth:`resume`.
        """
        self._weights.set_version(directory, version)
        asleep, self._is_asleep = self._is_asleep, False

        async def install_on(replica: ServerClient) -> None:
            if asleep:
                await replica.wake("kv_cache")
            await self._weights.install(replica)
            if self._weights.updates_in_place:
                await replica.resume()

        await self._call_servers(install_on)
        self._forget_cached_prefixes()

    async def find_problems(self, check: Check) -> list[str]:
        """Return the problems that ``check`` reports for the responding servers."""
        return [problem for problem in await self._call_servers(check) if problem is not None]

    def resume(self, check: Check | None = None) -> None:
        """Allow new requests. A recovered server must pass ``check``."""
        self._weights.check = check
        for server in self._servers:
            if server.lacks_weights:
                server.lacks_weights, server.load.is_up = False, True
        self._open_gate()
        self._wake_waiting_requests()

    async def label_weights_as_initial(self) -> None:
        """Label the servers' weights as the current version, regardless of their label, and treat them as initial."""
        await self._call_servers(lambda replica: replica.set_version_label(self.version))
        self._weights.has_initial_weights = True

    async def sleep(self) -> None:
        """Release the GPUs to the trainer until :meth:`install`, and drop the weights that the install replaces."""
        self._close_gate()
        self._is_asleep = True
        self._forget_cached_prefixes()
        await self._call_servers(lambda replica: replica.sleep(keep_weights=not self._weights.updates_in_place))

    def _forget_cached_prefixes(self) -> None:
        for server in self._servers:
            server.load.cached.clear()

    def _open_gate(self) -> None:
        self._gate.set()
        self._may_recover.set()

    def _close_gate(self) -> None:
        self._gate.clear()
        self._may_recover.clear()

    async def _call_servers(self, call: Callable[[ServerClient], Awaitable[_Result]]) -> list[_Result]:
        """Call every responding server. Servers that fail are marked as down.

        If no server responds, wait until a server recovers, and call that server. Raises WorldError if no server
        recovers in time.
        """
        while not (results := await self._call_responding_servers(call)):
            await self._wait_for_recovery()
        return results

    async def _wait_for_recovery(self) -> None:
        """Wait until a server responds. Servers may recover while weights change.

        Raises WorldError after ``outage_deadline``.
        """
        logger.warning(
            "no %s server is available to receive the weights: waiting for one, at most %g s (%s.outage_deadline)",
            self._server_software, self._settings.outage_deadline, self._settings.prefix,
        )  # fmt: skip
        self._may_recover.set()
        try:
            while not self.responding_servers:
                await self._wait_for_change_in_outage()
        finally:
            if not self._gate.is_set():
                self._may_recover.clear()
        self._outage_since = None

    async def _call_responding_servers(self, call: Callable[[ServerClient], Awaitable[_Result]]) -> list[_Result]:
        responding = self.responding_servers
        outcomes = await asyncio.gather(*(call(server.replica) for server in responding), return_exceptions=True)
        results: list[_Result] = []
        for server, outcome in zip(responding, outcomes, strict=True):
            if isinstance(outcome, ServerCallError):
                server.lacks_weights = False
                self._record_failure_and_may_retry(server, outcome)
                server.load.is_up = False
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        return results

    # -- status ---------------------------------------------------------------------------------------------------

    @property
    def _servers_up(self) -> list[PooledServer]:
        return [server for server in self._servers if server.load.is_up]

    @property
    def _server_software(self) -> str:
        return self._servers[0].replica.title

    @property
    def _failure_messages(self) -> str:
        return "; ".join(f"{server.address} ({server.failure or 'no error yet'})" for server in self._servers)

    def software_releases(self) -> list[str]:
        return sorted({server.identity.release for server in self._servers if server.identity is not None})

    async def health(self) -> str:
        up = self._servers_up
        if not up:
            raise EngineError(f"no {self._server_software} server is available: {self._failure_messages}")
        identities = [server.identity for server in up if server.identity is not None]
        about = " ".join([self._server_software, *sorted({one.release for one in identities})])
        notes = "".join(f"; {note}" for note in sorted({one.note for one in identities if one.note}))
        down = f", {len(self._servers) - len(up)} down" if len(up) < len(self._servers) else ""
        addresses = ", ".join(server.address for server in up)
        return f"{about}, {len(up)} servers{down}: {addresses}{notes}; version {self.version}"
