"""The engine over vLLM servers: balances requests, retries them on other servers and changes weights on all servers.

Servers exchange tokens over HTTP. They are separate processes, started here or external. A server that fails gets no
requests until it has proved that it works and holds the weights of the current version.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import WorldError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion, EngineError, Sampling
from agentrl.rollout.engines.http import GarbageError, ServerCallError, StatusError, TooSlowError
from agentrl.rollout.engines.vllm.balancer import Balancer
from agentrl.rollout.engines.vllm.pulse import Pulse
from agentrl.rollout.engines.vllm.replica import Identity, Replica
from agentrl.rollout.engines.vllm.server import ServerProcess, says_out_of_memory
from agentrl.rollout.settings import RolloutSettings

logger = logging.getLogger(__name__)

# Seconds between checks of a server that is starting or down: the first interval and the longest.
_LOOK = 0.5
_LONGEST_LOOK = 5.0
_FIRST_BACKOFF = 0.1


@dataclass(eq=False, slots=True)
class Member:
    """A server of the engine. ``stale``: it answers, but waits for weights that only a transfer can supply."""

    replica: Replica
    server: ServerProcess | None = None
    identity: Identity | None = None
    stale: bool = False
    failure: str = ""
    reviving: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def lost(self) -> str:
        return f"{self.replica.address} ({self.failure or 'no error yet'})"


Check = Callable[[Replica], Awaitable[str | None]]
"""Checks a server: returns the problem with its weights, or None. Raises ServerCallError."""


class VLLMEngine:
    """An :class:`~agentrl.rollout.engines.base.Engine` over vLLM servers. Used from one event loop.

    If a server dies, its requests restart on another server from the trajectory's exact tokens and with the same seed.
    Earlier turns are never sampled again.
    """

    def __init__(
        self,
        servers: Sequence[ServerProcess | str],
        codec: TextCodec,
        settings: RolloutSettings,
        *,
        vocabulary: int,
        max_tokens: int,
        version: int = 0,
        label: bool = True,
    ) -> None:
        """``servers`` are processes to start or addresses. ``vocabulary`` is the policy's number of tokens,
        ``max_tokens`` the length of the longest sequence that will be requested.

        ``label``: label the weights of servers that have no version with ``version``; otherwise they keep ``default``.
        """
        self._codec = codec
        self._label = label
        self._settings = settings
        self._vllm = settings.vllm
        self._vocabulary = vocabulary
        self._max_tokens = max_tokens
        self._version = version
        self._eos_ids = codec.end_ids
        self._members = [
            Member(replica=Replica(item))
            if isinstance(item, str)
            else Member(replica=Replica(item.plan.address), server=item)
            for item in servers
        ]
        self._balancer = Balancer(len(self._members))
        self._directory: Path | None = None  # the weights of the current version, if they are transferred by files
        self._untouched = True  # the servers hold the weights they were started with
        self._gate = asyncio.Event()  # closed while weights change
        self._pulses = [
            Pulse(
                member.replica.address,
                member.replica.tokens_so_far,
                self._gate,
                stall_deadline=self._vllm.stall_deadline,
            )
            for member in self._members
        ]
        self._asleep = False
        self._nobody_since: float | None = None
        self._nonce = secrets.token_hex(4)
        self._check: Check | None = None

    # -- start and end --------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Start the servers to be started and check every server. Raises SettingsError or WorldError."""
        for member in self._members:
            if member.server is not None:
                member.server.start()
        await asyncio.gather(*(self._open(member) for member in self._members))
        self._gate.set()

    async def close(self) -> None:
        """Disconnect from the servers and end those that were started here."""
        tasks = [member.reviving for member in self._members if member.reviving is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pulse, member in zip(self._pulses, self._members, strict=True):
            await pulse.close()
            await member.replica.close()
        mine = [member.server for member in self._members if member.server is not None]
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in mine))

    async def _open(self, member: Member) -> None:
        await self._await_start(member)
        try:
            member.identity = await member.replica.identify(
                self._codec,
                vocabulary=self._vocabulary,
                needed=self._max_tokens,
                seeded=self._vllm.seeded,
            )
            if member.identity.version != "default":
                self._untouched = False
            elif self._label:
                await member.replica.label(self._version)
        except ServerCallError as error:
            raise WorldError(
                f"the vLLM server {member.replica.address} failed while it was being checked: {error}"
            ) from error

    async def _await_start(self, member: Member) -> None:
        """Return when a server answers. An external server must answer soon; a starting one gets ``start_deadline``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._vllm.start_deadline
        pause = _LOOK
        while True:
            try:
                await member.replica.healthy()
                return
            except ServerCallError as error:
                said = str(error)
            if member.server is not None and member.server.ended:
                raise WorldError(
                    f"the vLLM server {member.replica.address} ended while it started (its log: {member.server.log}). "
                    f"The end of its log:\n{member.server.last_words()}"
                )
            if loop.time() >= deadline:
                hint = "" if member.server is None else f"; the end of its log:\n{member.server.last_words()}"
                raise WorldError(
                    f"no answer within rollout.vllm.start_deadline={self._vllm.start_deadline:g} s from the vLLM "
                    f"server {member.replica.address}: {said}{hint}"
                )
            await asyncio.sleep(pause)
            pause = min(_LONGEST_LOOK, 2 * pause)

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
            place = await self._place(trajectory_id, len(token_ids), frozenset(avoid))
            limit = self._balancer.loads[place].limit
            try:
                return await self._ask(place, token_ids, sampling, trajectory_id, request_id, seed)
            except ServerCallError as error:
                failures.append(f"{self._members[place].replica.address}: {error}")
                if says_out_of_memory(str(error)) and self._balancer.loads[place].limit == limit:
                    self._less(place)  # once for all requests that the same shortage made fail
                if not self._note_failure(place, error) or len(failures) > self._vllm.request_retries:
                    raise EngineError(f"request {request_id} failed {len(failures)} times: {failures[-1]}") from error
                avoid.add(place)
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(_LONGEST_LOOK, _FIRST_BACKOFF * 2 ** len(failures)))

    async def _ask(
        self,
        place: int,
        token_ids: tuple[int, ...],
        sampling: Sampling,
        trajectory_id: str,
        request_id: str,
        seed: int,
    ) -> Completion:
        version = self._version
        size = {"context": len(token_ids), "reserved": sampling.max_tokens}
        self._balancer.take(place, trajectory_id, **size)
        try:
            async with self._pulses[place].watched():
                completion = await self._members[place].replica.generate(
                    token_ids,
                    sampling,
                    request_id=f"{request_id}-{secrets.token_hex(3)}",  # a server rejects an id that it still holds
                    seed=seed if self._vllm.seeded else None,
                    eos_ids=self._eos_ids,
                    salt=self._salt(version),
                )
        finally:
            self._balancer.give_back(place, trajectory_id, **size)
        versions = [item for item, _ in completion.version_spans]
        if not all(version <= item <= self._version for item in versions):
            raise GarbageError(
                f"tokens of versions {sorted(set(versions))} to a request of version {version} (now {self._version})"
            )
        return completion

    async def _place(self, trajectory_id: str, context: int, avoid: frozenset[int]) -> int:
        """Choose a server for a request; waits while weights change and while all servers are full or down."""
        loop = asyncio.get_running_loop()
        while True:
            await self._gate.wait()
            place = self._balancer.choose(trajectory_id, context=context, avoid=avoid)
            if place is not None:
                self._nobody_since = None
                return place
            if self._balancer.up():
                await self._balancer.changed()
                continue
            if self._nobody_since is None:
                self._nobody_since = loop.time()
            left = self._nobody_since + self._vllm.outage_deadline - loop.time()
            if left <= 0 or self._hopeless():
                raise WorldError(
                    f"no vLLM server works (waited {loop.time() - self._nobody_since:.0f} s of "
                    f"rollout.vllm.outage_deadline={self._vllm.outage_deadline:g}): "
                    + "; ".join(member.lost for member in self._members)
                )
            try:
                async with asyncio.timeout(left):
                    await self._balancer.changed()
            except TimeoutError:
                continue

    def release(self, trajectory_id: str) -> None:
        """Forget a trajectory, because no further request will follow."""
        self._balancer.release(trajectory_id)

    async def score(self, token_ids: tuple[int, ...]) -> tuple[float, ...]:
        """Log-probabilities at temperature 1 of ``token_ids[1:]``, by the first server that is up."""
        for place in self._balancer.up():
            try:
                return await self._members[place].replica.score(token_ids, salt=self._salt(self._version))
            except ServerCallError as error:
                self._note_failure(place, error)
        raise EngineError("no vLLM server works: " + "; ".join(member.lost for member in self._members))

    async def cache_use(self) -> CacheUse | None:
        """The total cache of all servers that are up, with the usage of the fullest; None while none reports it."""
        asked = (self._members[place].replica.cache_use() for place in self._balancer.up())
        known: list[CacheUse] = []
        for said in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(said, CacheUse):
                known.append(said)
            elif not isinstance(said, ServerCallError):
                raise said
        if not known:
            return None
        return CacheUse(
            tokens=sum(item.tokens for item in known),
            used=max(item.used for item in known),
            preemptions=sum(item.preemptions for item in known),
        )

    # -- failures -------------------------------------------------------------------------------------------------

    def _note_failure(self, place: int, error: ServerCallError) -> bool:
        """Note a server's failure, and take it out of service if needed. Returns whether to retry the request."""
        member, load = self._members[place], self._balancer.loads[place]
        member.failure = str(error)
        if isinstance(error, StatusError):
            if says_out_of_memory(error.message):
                return True
            if error.status < 500:
                return False
        if load.up:
            logger.warning("the vLLM server %s gets no more requests for now: %s", member.replica.address, error)
            load.up = False
            self._balancer.forget_prefixes(place)
        if member.reviving is None or member.reviving.done():
            member.reviving = asyncio.create_task(self._revive(place), name=f"revive {member.replica.address}")
            member.reviving.add_done_callback(self._revived)
        return True

    def _less(self, place: int) -> None:
        limit = self._balancer.loads[place].halve()
        logger.warning(
            "the vLLM server %s ran out of memory: from now on at most %d requests at a time",
            self._members[place].replica.address, limit,
        )  # fmt: skip

    def _hopeless(self) -> bool:
        return all(member.reviving is None or member.reviving.done() for member in self._members)

    def _revived(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            logger.error("giving up on a vLLM server: %s", task.exception())
        self._balancer.wake()

    async def _revive(self, place: int) -> None:
        """Bring a server back: restart it if it was started here, and prove by a score that it has current weights."""
        member = self._members[place]
        pause = _LOOK
        while True:
            await self._gate.wait()
            version = self._version
            if member.server is not None and member.server.ended:
                self._restart(place, member.server)
            try:
                await member.replica.healthy()
                if not await self._has_weights(member):
                    member.stale = True  # the next transfer brings it back
                    return
                await self._prove(member)
                if self._gate.is_set() and version == self._version:
                    break
            except ServerCallError as error:
                member.failure = str(error)
            await asyncio.sleep(pause)
            pause = min(_LONGEST_LOOK, 2 * pause)
        logger.warning("the vLLM server %s is back", member.replica.address)
        self._balancer.loads[place].up = True

    async def _prove(self, member: Member) -> None:
        """Check a server that comes back. Raises ServerCallError if it does not hold the current policy."""
        check = self._check if self._check is not None else self._answers
        try:
            async with asyncio.timeout(self._vllm.stall_deadline):
                problem = await check(member.replica)
        except TimeoutError:
            raise TooSlowError(f"its weights were not proved within {self._vllm.stall_deadline:g} s") from None
        if problem is not None:
            if self._directory is not None:
                await self._install(member.replica, self._directory, self._version)
            raise GarbageError(f"after its return {problem}")

    def _restart(self, place: int, server: ServerProcess) -> None:
        said = server.last_words()
        if says_out_of_memory(said) and server.starts:
            self._less(place)
        if server.starts > self._vllm.restarts:
            raise WorldError(
                f"the vLLM server {server.plan.address} ended {server.starts} times "
                f"(rollout.vllm.restarts={self._vllm.restarts}); the end of its log:\n{said}"
            )
        logger.warning("the vLLM server %s has ended and is started again", server.plan.address)
        server.start()

    async def _has_weights(self, member: Member) -> bool:
        """Whether a server holds the current version, after loading it from files if possible."""
        label = await member.replica.version()
        if label == str(self._version):
            return True
        if label == "default" and self._untouched:
            await member.replica.label(self._version)
            return True
        if self._directory is None:
            return False
        await self._install(member.replica, self._directory, self._version)
        return True

    # -- weights --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The policy version of the weights."""
        return self._version

    @property
    def untouched(self) -> bool:
        """Whether the servers hold the weights they were started with."""
        return self._untouched

    def targets(self) -> list[tuple[str, int]]:
        """The address and the number of GPU workers of every server that answers."""
        return [
            (member.replica.address, member.identity.workers if member.identity is not None else 1)
            for place, member in enumerate(self._members)
            if self._balancer.loads[place].up or member.stale
        ]

    async def pause(self) -> None:
        """Pause all requests, running and new, so that weights can change. Sleeping servers get room for weights."""
        self._gate.clear()
        if self._asleep:
            await self._on_all(lambda replica: replica.wake("weights"))
        else:
            await self._on_all(lambda replica: replica.pause())

    async def install(self, directory: Path | None, version: int) -> None:
        """Install the weights of ``version``: from ``directory``, or (None) those already transferred to the servers.

        Call :meth:`pause` first. Running requests continue; new ones wait for :meth:`resume`.
        """
        self._version, self._directory, self._untouched = version, directory, False
        asleep, self._asleep = self._asleep, False

        async def take(replica: Replica) -> None:
            if asleep:
                await replica.wake("kv_cache")
            await self._install(replica, directory, version)
            await replica.resume()

        await self._on_all(take)
        self._balancer.forget_prefixes()

    async def _answers(self, replica: Replica) -> str | None:
        await replica.score((0, 1), salt=self._fresh_salt())
        return None

    async def _install(self, replica: Replica, directory: Path | None, version: int) -> None:
        if directory is not None:
            await replica.load(str(directory))
        await replica.label(version)
        await replica.forget_prefixes(running_too=self._settings.kv_on_update == "recomputed")

    async def problems(self, check: Check) -> list[str]:
        """The problems that ``check`` finds with the servers that answer."""
        found: list[str] = []

        async def look(replica: Replica) -> None:
            problem = await check(replica)
            if problem is not None:
                found.append(problem)

        await self._on_all(look)
        return found

    async def zero_weights(self, *, all_of_them: bool) -> None:
        """Set parameters to zero before a transfer, so that missing parameters are detected.

        ``all_of_them``: on all servers, otherwise only on those without checksums.
        """

        async def zero(replica: Replica) -> None:
            if all_of_them or not replica.tells_checksums:
                await replica.zero_weights()

        await self._on_all(zero)

    def resume(self, check: Check | None = None) -> None:
        """Allow new requests. A server that comes back must pass ``check``."""
        self._check = check
        for place, member in enumerate(self._members):
            if member.stale:
                member.stale, self._balancer.loads[place].up = False, True
        self._gate.set()
        self._balancer.wake()

    async def adopt(self) -> None:
        """Label the servers' weights as the current version, whatever their label, and treat them as start weights."""
        await self._on_all(lambda replica: replica.label(self._version))
        self._untouched = True

    async def sleep(self) -> None:
        """Release the GPUs to the trainer; the weights are lost until the next :meth:`install`."""
        self._gate.clear()
        self._asleep = True
        self._balancer.forget_prefixes()
        await self._on_all(lambda replica: replica.sleep())

    async def _on_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Call every server that answers; mark those that fail as down. Raises WorldError if none is left."""
        places = [place for place, member in enumerate(self._members) if self._balancer.loads[place].up or member.stale]
        outcomes = await asyncio.gather(
            *(call(self._members[place].replica) for place in places), return_exceptions=True
        )
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, ServerCallError):
                self._members[place].stale = False
                self._note_failure(place, outcome)
                self._balancer.loads[place].up = False
            elif isinstance(outcome, BaseException):
                raise outcome
        failed = sum(isinstance(outcome, ServerCallError) for outcome in outcomes)
        if failed == len(places):
            raise WorldError(
                "no vLLM server is left to take the weights: " + "; ".join(member.lost for member in self._members)
            )

    # -- about ----------------------------------------------------------------------------------------------------

    def releases(self) -> list[str]:
        """The vLLM releases that the servers run."""
        return sorted({member.identity.vllm for member in self._members if member.identity is not None})

    def fingerprint(self) -> str:
        """A digest of tokenizer, vocabulary and version. It does not prove equal weights; probes do."""
        text = f"{self._codec.encode('0 1 2 print()')} {self._vocabulary} {self._version}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    async def health(self) -> str:
        up = self._balancer.up()
        if not up:
            raise EngineError("no vLLM server works: " + "; ".join(member.lost for member in self._members))
        identity = self._members[up[0]].identity
        addresses = ", ".join(self._members[place].replica.address for place in up)
        about = f"vLLM {identity.vllm}" if identity is not None else "vLLM"
        down = f", {len(self._members) - len(up)} down" if len(up) < len(self._members) else ""
        return f"{about}, {len(up)} servers{down}: {addresses}; version {self._version}"

    def _salt(self, version: int) -> str:
        """The salt that separates this version's cached prefixes from all others, even those of running requests."""
        return f"{self._nonce}-{version}"

    def _fresh_salt(self) -> str:
        return f"{self._nonce}-probe-{secrets.token_hex(4)}"
