"""The engine over servers: balances requests, retries them on other servers and updates the weights of all servers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from agentrl.errors import WorldError, mentions_out_of_memory
from agentrl.rollout.engines.base import CacheUse, Completion, EngineError, Sampling, ServerSettings
from agentrl.rollout.engines.member import LONGEST_PAUSE, Balancer, PooledServer
from agentrl.rollout.engines.processes import ServerProcess
from agentrl.rollout.engines.replica import (
    InvalidResponseError,
    Replica,
    ServerCallError,
    ServerRequirements,
    StatusError,
    TurnRequest,
)
from agentrl.rollout.engines.served_weights import Check, ServedWeights
from agentrl.telemetry.trace import traced_service_call

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_FIRST_BACKOFF = 0.1  # seconds


class ServerEngine:
    """An :class:`~agentrl.rollout.engines.base.Engine` over servers. Must be used from a single event loop.

    If a server dies, its requests restart on another server from the trajectory's exact tokens and with the same seed.
    Earlier turns are never sampled again.
    """

    def __init__(
        self,
        servers: Sequence[ServerProcess | str],
        connect: Callable[[str], Replica],
        needs: ServerRequirements,
        settings: ServerSettings,
        *,
        weights: ServedWeights,
        label: bool = True,
    ) -> None:
        """Configure the engine without starting servers.

        ``servers``: processes to start, or addresses. ``connect``: creates the client for an address.

        ``label``: whether to label the weights of servers that have no version.
        """
        self._needs = needs
        self._settings = settings
        self._weights = weights
        self._label = label
        self._balancer = Balancer(len(servers))
        self._gate = asyncio.Event()  # closed while weights change
        self._revival = asyncio.Event()  # likewise, but open if no server is left to receive them
        self._members = [
            PooledServer(served, index, load, self._gate, connect, settings)
            for index, (served, load) in enumerate(zip(servers, self._balancer.loads, strict=True))
        ]
        self._asleep = False
        self._outage_since: float | None = None

    # -- start and end --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the run's servers, and check all servers. Raises SettingsError or WorldError."""
        await asyncio.gather(*(member.start() for member in self._members))
        await asyncio.gather(*(self._open(member) for member in self._members))
        self._open_gate()

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members))

    async def _open(self, member: PooledServer) -> None:
        identity = await member.open(self._needs)
        if identity.version is not None:
            self._weights.has_initial_weights = False
        elif self._label:
            await member.replica.set_version_label(self.version)

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
        avoid: set[int] = set()
        failures: list[str] = []
        while True:
            member = await self._member_for(trajectory_id, len(token_ids), frozenset(avoid))
            limit = member.load.limit
            try:
                return await self._ask(member, token_ids, sampling, trajectory_id, request_id, seed)
            except ServerCallError as error:
                failures.append(f"{member.address}: {error}")
                if mentions_out_of_memory(str(error)) and member.load.limit == limit:
                    member.halve_request_limit()  # once for all requests that failed because of the same shortage
                if not self._note_failure(member, error) or len(failures) > self._settings.request_retries:
                    raise EngineError(f"request {request_id} failed {len(failures)} times: {failures[-1]}") from error
                avoid.add(member.index)
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(LONGEST_PAUSE, _FIRST_BACKOFF * 2 ** len(failures)))

    async def _ask(
        self,
        member: PooledServer,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        version = self.version
        size = {"context": len(token_ids), "reserved": sampling.max_tokens}
        self._balancer.add_request(member.index, trajectory_id, **size)
        try:
            async with self._weights.adapter_in_use(member.replica, version) as adapter, member.stalls.watch_request():
                with traced_service_call(f"server {member.index}", "request", context=len(token_ids)):
                    completion = await member.replica.generate(
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
            self._balancer.remove_request(member.index, trajectory_id, **size)
        completion = self._weights.label_versions(completion, version)
        versions = {item for item, _ in completion.version_spans}
        if not all(version <= item <= self.version for item in versions):
            raise InvalidResponseError(
                f"tokens have versions {sorted(versions)}, but the request has version {version} (now {self.version})"
            )
        return completion

    async def _member_for(self, trajectory_id: str, context: int, failed_servers: frozenset[int]) -> PooledServer:
        """Choose a server for a request. Waits while weights change and while all servers are full or down."""
        while True:
            await self._gate.wait()
            index = self._balancer.choose_server(trajectory_id, context=context, failed_servers=failed_servers)
            if index is not None:
                self._outage_since = None
                return self._members[index]
            if self._up:
                await self._balancer.wait_for_change()
            else:
                await self._wait_in_outage()

    async def _wait_in_outage(self) -> None:
        """Wait for a change while no server is available.

        Raises WorldError ``outage_deadline`` seconds after the outage began, or at once if no server can recover.
        """
        loop = asyncio.get_running_loop()
        if self._outage_since is None:
            self._outage_since = loop.time()
        left = self._outage_since + self._settings.outage_deadline - loop.time()
        hopeless = all(member.reviving is None or member.reviving.done() for member in self._members)
        if left <= 0 or hopeless:
            raise WorldError(
                f"no {self._title} server is available (waited {loop.time() - self._outage_since:.0f} s of "
                f"{self._settings.prefix}.outage_deadline={self._settings.outage_deadline:g}): {self._lost}"
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._balancer.wait_for_change()

    def release(self, trajectory_id: str) -> None:
        self._balancer.release(trajectory_id)

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Return the log-probabilities at temperature 1 of ``token_ids[1:]`` from the first server that is up."""
        for member in self._up:
            try:
                return await member.replica.score(token_ids, salt=self._weights.cache_salt(self.version))
            except ServerCallError as error:
                self._note_failure(member, error)
        raise EngineError(f"no {self._title} server is available: {self._lost}")

    async def cache_use(self) -> CacheUse | None:
        """Return the total cache of the servers that are up and the usage of the fullest. None if unreported."""
        known: list[CacheUse] = []
        calls = (member.replica.cache_use() for member in self._up)
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, CacheUse):
                known.append(answer)
            elif isinstance(answer, BaseException) and not isinstance(answer, ServerCallError):
                raise answer
        if not known:
            return None
        return CacheUse(
            tokens=sum(item.tokens for item in known),
            used=max(item.used for item in known),
            preemptions=sum(item.preemptions for item in known),
        )

    # -- failures -------------------------------------------------------------------------------------------------

    def _note_failure(self, member: PooledServer, error: ServerCallError) -> bool:
        """Record a server's failure, and mark the server as down if necessary. Returns True to retry the request."""
        member.failure = str(error)
        if isinstance(error, StatusError):
            if mentions_out_of_memory(error.message):
                return True
            if error.status < 500:
                return False
        if member.load.is_up:
            logger.warning("%s is removed from rotation: %s", member.name, error)
            member.load.is_up = False
            self._balancer.forget_prefixes(member.index)
        if member.reviving is None or member.reviving.done():
            work = member.revive(self._weights, self._revival)
            member.reviving = asyncio.create_task(work, name=f"revive {member.address}")
            member.reviving.add_done_callback(self._revived)
        return True

    def _revived(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("giving up on a server: %s", task.exception())
        self._balancer.notify()

    # -- weights --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        return self._weights.version

    @property
    def has_initial_weights(self) -> bool:
        """Whether the servers hold their initial weights."""
        return self._weights.has_initial_weights

    def transfer_addresses(self) -> list[tuple[str, int, int]]:
        """Return the address, the number of GPU workers and the number of starts of every responding server."""
        return [
            (
                member.address,
                member.identity.workers if member.identity is not None else 1,
                member.server.launch_count if member.server is not None else 0,
            )
            for member in self._members
            if member.responds
        ]

    async def pause(self) -> None:
        """Pause all running and new requests, so that weights can change. Sleeping servers allocate memory for weights.

        If servers load adapters, running requests continue, because each request keeps its adapter.
        """
        self._close_gate()
        if self._asleep:
            await self._on_all(lambda replica: replica.wake("weights"))
        elif self._weights.replaced:
            await self._on_all(lambda replica: replica.pause())

    async def install(self, directory: Path | None, version: int) -> None:
        """Install the weights of ``version`` from ``directory``; None: they have been transferred to the servers.

        Call :meth:`pause` first. Running requests continue; new ones wait for :meth:`resume`.
        """
        self._weights.set_version(directory, version)
        asleep, self._asleep = self._asleep, False

        async def take(replica: Replica) -> None:
            if asleep:
                await replica.wake("kv_cache")
            await self._weights.install(replica)
            if self._weights.replaced:
                await replica.resume()

        await self._on_all(take)
        self._balancer.forget_prefixes()

    async def find_problems(self, check: Check) -> list[str]:
        """Return the problems that ``check`` finds with the responding servers."""
        return [problem for problem in await self._on_all(check) if problem is not None]

    def resume(self, check: Check | None = None) -> None:
        """Allow new requests. A recovered server must pass ``check``."""
        self._weights.check = check
        for member in self._members:
            if member.lacks_weights:
                member.lacks_weights, member.load.is_up = False, True
        self._open_gate()
        self._balancer.notify()

    async def label_weights_as_initial(self) -> None:
        """Label the servers' weights as the current version, regardless of their label, and treat them as initial."""
        await self._on_all(lambda replica: replica.set_version_label(self.version))
        self._weights.has_initial_weights = True

    async def sleep(self) -> None:
        """Release the GPUs to the trainer until the next :meth:`install`. Drop weights that the install replaces."""
        self._close_gate()
        self._asleep = True
        self._balancer.forget_prefixes()
        await self._on_all(lambda replica: replica.sleep(keep_weights=not self._weights.replaced))

    def _open_gate(self) -> None:
        self._gate.set()
        self._revival.set()

    def _close_gate(self) -> None:
        self._gate.clear()
        self._revival.clear()

    async def _on_all(self, call: Callable[[Replica], Awaitable[_Result]]) -> list[_Result]:
        """Call every responding server, and mark the others as down.

        If no server is left, wait for one to recover and call it. Raises WorldError if none recovers in time.
        """
        while not (results := await self._on_answering(call)):
            await self._await_return()
        return results

    async def _await_return(self) -> None:
        """Wait until a server responds, even while weights change. Raises WorldError after ``outage_deadline``."""
        logger.warning(
            "no %s server is available to receive the weights: waiting for one, at most %g s (%s.outage_deadline)",
            self._title, self._settings.outage_deadline, self._settings.prefix,
        )  # fmt: skip
        self._revival.set()
        try:
            while not any(member.responds for member in self._members):
                await self._wait_in_outage()
        finally:
            if not self._gate.is_set():
                self._revival.clear()
        self._outage_since = None

    async def _on_answering(self, call: Callable[[Replica], Awaitable[_Result]]) -> list[_Result]:
        asked = [member for member in self._members if member.responds]
        outcomes = await asyncio.gather(*(call(member.replica) for member in asked), return_exceptions=True)
        results: list[_Result] = []
        for member, outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, ServerCallError):
                member.lacks_weights = False
                self._note_failure(member, outcome)
                member.load.is_up = False
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results.append(outcome)
        return results

    # -- status ---------------------------------------------------------------------------------------------------

    @property
    def _up(self) -> list[PooledServer]:
        return [member for member in self._members if member.load.is_up]

    @property
    def _title(self) -> str:
        return self._members[0].replica.title

    @property
    def _lost(self) -> str:
        return "; ".join(member.loss_message for member in self._members)

    def releases(self) -> list[str]:
        return sorted({member.identity.release for member in self._members if member.identity is not None})

    def fingerprint(self) -> str:
        """Return a digest of tokenizer, vocabulary and version. Equal digests do not prove equal weights; probes do."""
        text = f"{self._needs.codec.encode('0 1 2 print()')} {self._needs.vocabulary} {self.version}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    async def health(self) -> str:
        up = self._up
        if not up:
            raise EngineError(f"no {self._title} server is available: {self._lost}")
        identities = [member.identity for member in up if member.identity is not None]
        about = " ".join([self._title, *sorted({one.release for one in identities})])
        notes = "".join(f"; {note}" for note in sorted({one.note for one in identities if one.note}))
        down = f", {len(self._members) - len(up)} down" if len(up) < len(self._members) else ""
        addresses = ", ".join(member.address for member in up)
        return f"{about}, {len(up)} servers{down}: {addresses}{notes}; version {self.version}"
