"""The engine over vLLM servers: requests balanced, retried and resumed elsewhere; weights changed on all of them.

Servers speak tokens over HTTP and are processes of their own, started here or running elsewhere. A server that fails
gets no requests until it has proved that it works and holds the weights of the present version.
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

# Seconds between looks at a server that is starting or down: the first and the longest.
_LOOK = 0.5
_LONGEST_LOOK = 5.0
_FIRST_BACKOFF = 0.1


@dataclass(eq=False, slots=True)
class Member:
    """A server of the engine. ``stale``: it answers and waits for weights that only a transfer brings."""

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
"""Looks at a server: None, or what is wrong with its weights. Raises ServerCallError."""


class VLLMEngine:
    """An :class:`~agentrl.rollout.engines.base.Engine` over vLLM servers. Used from one event loop.

    Where a server dies, its requests start again on another one from the trajectory's exact tokens and with the same
    seed; what was sampled in turns before is never sampled again.
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
        """``servers`` are processes to start or addresses; ``vocabulary`` is the policy's number of tokens,
        ``max_tokens`` the length of the longest sequence that will be asked for.

        ``label``: tell servers without a version that theirs is ``version``; else they go on saying ``default``.
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
        self._directory: Path | None = None  # the weights of the present version, where they travel by files
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
        """Start what is to be started, and look at every server. Raises SettingsError or WorldError."""
        for member in self._members:
            if member.server is not None:
                member.server.start()
        await asyncio.gather(*(self._open(member) for member in self._members))
        self._gate.set()

    async def close(self) -> None:
        """Let go of the servers, and end those that were started here."""
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
                f"the vLLM server {member.replica.address} failed while it was looked at: {error}"
            ) from error

    async def _await_start(self, member: Member) -> None:
        """Return when a server answers. An external one must do so soon, one that is starting takes its time."""
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
                    f"Its last words:\n{member.server.last_words()}"
                )
            if loop.time() >= deadline:
                hint = "" if member.server is None else f"; its last words:\n{member.server.last_words()}"
                raise WorldError(
                    f"waited rollout.vllm.start_deadline={self._vllm.start_deadline:g} s in vain for the vLLM server "
                    f"{member.replica.address}: {said}{hint}"
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
                    self._less(place)  # once for all the requests that one shortage failed
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
                    request_id=f"{request_id}-{secrets.token_hex(3)}",  # a server refuses an id that it still knows
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
        """A server for a request; waits while weights change, while all are full and while all are down."""
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
        """Nothing more will be asked for a trajectory."""
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
        """Of all servers that are up together, as full as the fullest; None while none of them says."""
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
        """Draw the consequences for a server; whether asking again makes sense."""
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
            logger.error("a vLLM server is given up: %s", task.exception())
        self._balancer.wake()

    async def _revive(self, place: int) -> None:
        """Bring a server back: started again where it was started here, with the present weights, proved by a score."""
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
        """Look at a server that comes back. Raises ServerCallError if it is not the present policy."""
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
                f"(rollout.vllm.restarts={self._vllm.restarts}); its last words:\n{said}"
            )
        logger.warning("the vLLM server %s has ended and is started again", server.plan.address)
        server.start()

    async def _has_weights(self, member: Member) -> bool:
        """Whether a server holds the present version, after giving it what can be given."""
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
        """Address and number of GPU workers of every server that answers."""
        return [
            (member.replica.address, member.identity.workers if member.identity is not None else 1)
            for place, member in enumerate(self._members)
            if self._balancer.loads[place].up or member.stale
        ]

    async def pause(self) -> None:
        """Let no request begin or go on, so that weights can change. Sleeping servers get room for weights."""
        self._gate.clear()
        if self._asleep:
            await self._on_all(lambda replica: replica.wake("weights"))
        else:
            await self._on_all(lambda replica: replica.pause())

    async def install(self, directory: Path | None, version: int) -> None:
        """The weights of ``version`` lie in ``directory``, or (None) have arrived at the servers; :meth:`pause` first.

        Running requests go on; new ones wait for :meth:`resume`.
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
        """What ``check`` finds wrong with the servers that answer."""
        found: list[str] = []

        async def look(replica: Replica) -> None:
            problem = await check(replica)
            if problem is not None:
                found.append(problem)

        await self._on_all(look)
        return found

    async def zero_weights(self, *, all_of_them: bool) -> None:
        """Set parameters to zero before a transfer, so that what does not arrive shows.

        Of all servers, or only of those that tell no checksums.
        """

        async def zero(replica: Replica) -> None:
            if all_of_them or not replica.tells_checksums:
                await replica.zero_weights()

        await self._on_all(zero)

    def resume(self, check: Check | None = None) -> None:
        """New requests may begin. A server that comes back must be one that ``check`` finds nothing wrong with."""
        self._check = check
        for place, member in enumerate(self._members):
            if member.stale:
                member.stale, self._balancer.loads[place].up = False, True
        self._gate.set()
        self._balancer.wake()

    async def adopt(self) -> None:
        """Take the servers' weights, whatever they are labelled, for those of the present version, and start ones."""
        await self._on_all(lambda replica: replica.label(self._version))
        self._untouched = True

    async def sleep(self) -> None:
        """Give the GPUs to the trainer; the weights are lost until the next :meth:`install`."""
        self._gate.clear()
        self._asleep = True
        self._balancer.forget_prefixes()
        await self._on_all(lambda replica: replica.sleep())

    async def _on_all(self, call: Callable[[Replica], Awaitable[None]]) -> None:
        """Call every server that answers; those that fail are down. Raises WorldError where none is left."""
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
        """The releases of vLLM that serve."""
        return sorted({member.identity.vllm for member in self._members if member.identity is not None})

    def fingerprint(self) -> str:
        """A digest of tokenizer, vocabulary and version; equal weights are proved by probes, not by this."""
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
        """What separates this version's cached prefixes from those of all others, kept ones of running requests too."""
        return f"{self._nonce}-{version}"

    def _fresh_salt(self) -> str:
        return f"{self._nonce}-probe-{secrets.token_hex(4)}"
