"""One server of the vLLM engine: its client, its load, and its process if it was started here."""

from __future__ import annotations

import asyncio
import logging

from agentrl.errors import WorldError, says_out_of_memory
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.http import ServerCallError, TooSlowError
from agentrl.rollout.engines.vllm.balancer import Load
from agentrl.rollout.engines.vllm.pulse import Pulse
from agentrl.rollout.engines.vllm.replica import Identity, Replica
from agentrl.rollout.engines.vllm.served_weights import ServedWeights
from agentrl.rollout.engines.vllm.server import ServerProcess
from agentrl.rollout.settings import VLLMSettings

logger = logging.getLogger(__name__)

# Seconds between checks of a server that is starting or down: the first interval and the longest.
FIRST_LOOK = 0.5
LONGEST_LOOK = 5.0


class Member:
    """A server. ``stale``: it answers, but waits for weights that only a transfer can supply."""

    def __init__(
        self, served: ServerProcess | str, place: int, load: Load, gate: asyncio.Event, settings: VLLMSettings
    ) -> None:
        """``served``: a process to start, or an address. ``gate``: closed while weights change."""
        self.place = place
        self.load = load
        self.server = None if isinstance(served, str) else served
        self.identity: Identity | None = None
        self.stale = False
        self.failure = ""
        self.reviving: asyncio.Task[None] | None = None
        self._gate = gate  # of the heartbeats: nothing is computed while it is closed
        self._settings = settings
        self._reach(served if isinstance(served, str) else served.plan.address)

    def _reach(self, address: str) -> None:
        """Speak with the server at this address."""
        self.replica = Replica(address)
        self.address = self.replica.address
        seconds = self._settings.stall_deadline
        self.pulse = Pulse(self.address, self.replica.tokens_so_far, self._gate, stall_deadline=seconds)

    async def start(self) -> None:
        """Start the server's process, if it has one, perhaps at another address. Raises WorldError if it cannot."""
        if self.server is None:
            return
        loop = asyncio.get_running_loop()
        self.server.when_ended = lambda: loop.call_soon_threadsafe(self.pulse.cut)
        await asyncio.to_thread(self.server.start)
        if self.server.plan.address != self.address:
            told = self.replica.tells_checksums
            await self.pulse.close()
            await self.replica.close()
            self._reach(self.server.plan.address)
            self.replica.tells_checksums = told

    @property
    def answers(self) -> bool:
        return self.load.up or self.stale

    @property
    def lost(self) -> str:
        return f"{self.address} ({self.failure or 'no error yet'})"

    async def open(self, codec: TextCodec, *, vocabulary: int, needed: int, rank: int = 0) -> Identity:
        """Wait until the server answers, and check it. Raises SettingsError or WorldError."""
        await self._await_start()
        try:
            self.identity = await self.replica.identify(
                codec, vocabulary=vocabulary, needed=needed, seeded=self._settings.seeded, rank=rank
            )
        except ServerCallError as error:
            raise WorldError(f"the vLLM server {self.address} failed while it was being checked: {error}") from error
        return self.identity

    async def close(self) -> None:
        """Disconnect. A server that was started here is ended."""
        if self.reviving is not None:
            self.reviving.cancel()
            await asyncio.gather(self.reviving, return_exceptions=True)
        await self.pulse.close()
        await self.replica.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.stop)

    async def _await_start(self) -> None:
        """Return when the server answers. Raises WorldError after ``start_deadline``, or when its process has ended."""
        loop = asyncio.get_running_loop()
        seconds = self._settings.start_deadline
        deadline = loop.time() + seconds
        pause = FIRST_LOOK
        while True:
            try:
                await self.replica.healthy()
                return
            except ServerCallError as error:
                said = str(error)
            if self.server is not None and self.server.ended:
                raise WorldError(
                    f"the vLLM server {self.address} ended while it started (its log: {self.server.log}). "
                    f"The end of its log:\n{self.server.last_words()}"
                )
            if loop.time() >= deadline:
                hint = "" if self.server is None else f"; the end of its log:\n{self.server.last_words()}"
                raise WorldError(
                    f"no answer within rollout.vllm.start_deadline={seconds:g} s from the vLLM server {self.address}: "
                    f"{said}{hint}"
                )
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK, 2 * pause)

    async def revive(self, weights: ServedWeights, allowed: asyncio.Event) -> None:
        """Bring the server back: restart it if it was started here, and prove that it holds the current weights.

        ``allowed`` is closed while weights change that other servers take. If only a transfer can supply the current
        weights, the server is stale from now on. Raises WorldError after too many restarts.
        """
        pause = FIRST_LOOK
        while True:
            await allowed.wait()
            version = weights.version
            try:
                if self.server is not None and self.server.ended:
                    await self._restart(self.server)
                await self.replica.healthy()
                if not await weights.held_by(self.replica):
                    self.stale = True
                    return
                await self._prove(weights)
                if allowed.is_set() and version == weights.version:
                    break
            except ServerCallError as error:
                self.failure = str(error)
            await asyncio.sleep(pause)
            pause = min(LONGEST_LOOK, 2 * pause)
        logger.warning("the vLLM server %s is back", self.address)
        self.load.up = True

    def admit_less(self) -> None:
        """Halve the number of requests that the server is given at a time."""
        logger.warning(
            "the vLLM server %s ran out of memory: from now on at most %d requests at a time",
            self.address, self.load.halve(),
        )  # fmt: skip

    async def _prove(self, weights: ServedWeights) -> None:
        seconds = self._settings.stall_deadline
        try:
            async with asyncio.timeout(seconds):
                await weights.prove(self.replica)
        except TimeoutError:
            raise TooSlowError(f"its weights were not proved within {seconds:g} s") from None

    async def _restart(self, server: ServerProcess) -> None:
        said = server.last_words()
        if says_out_of_memory(said) and server.starts:
            self.admit_less()
        if server.starts > self._settings.restarts:
            raise WorldError(
                f"the vLLM server {self.address} ended {server.starts} times "
                f"(rollout.vllm.restarts={self._settings.restarts}); the end of its log:\n{said}"
            )
        ended = self.address
        try:
            await self.start()
        except WorldError as error:  # no node has room for it now
            raise ServerCallError(f"it has ended and cannot be started: {error}") from error
        logger.warning("the vLLM server %s has ended and is started again", ended)
