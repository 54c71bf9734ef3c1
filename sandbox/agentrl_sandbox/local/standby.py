"""The fork server that runs programs, and a warm standby that takes over when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import replace

from agentrl_sandbox.errors import StartError
from agentrl_sandbox.local.fork_server import ForkServerProcess, ServerGoneError
from agentrl_sandbox.runner.config import RunnerConfig
from agentrl_sandbox.settings import SandboxSettings

# Users that most likely nobody else has: a limit on processes counts all of a user's on a host, also in other
# containers, so two runners must not share users.
_RANGE = range(1_879_048_192, 2_147_483_648)  # unused in systemd's table of users and groups
_SMALL_RANGE = range(20_000, 60_000)  # for containers that know 65,536 users
_STEP = 2048  # the most workers and sessions that a runner has


class ForkServers:
    """The current server and its standby. ``follow`` is called with each server that becomes the current one."""

    def __init__(
        self,
        settings: SandboxSettings,
        config: RunnerConfig,
        server: ForkServerProcess,
        follow: Callable[[ForkServerProcess], None],
    ) -> None:
        self._settings = settings
        self._config = config
        self._server = server
        self._follow = follow
        self._standby: asyncio.Task[ForkServerProcess] | None = None
        self._starts = 1
        self._endings: set[asyncio.Task[None]] = set()
        self._restarting = asyncio.Lock()
        self._closed = False
        follow(server)

    @property
    def layers(self) -> dict[str, int]:
        return self._server.layers

    async def living(self) -> ForkServerProcess:
        """The current server, restarted if it is gone. Raises ServerGoneError once closed, and StartError."""
        async with self._restarting:
            if self._closed:
                raise ServerGoneError("the sandbox was closed")
            if self._server.gone:
                await self._succeed(self._server)
            return self._server

    def keep_standby(self, ending: asyncio.Task[None] | None = None) -> None:
        """Start a second server in the background if the settings say so."""
        if self._settings.standby:
            self._standby = asyncio.get_running_loop().create_task(self._start(ending))

    async def close(self) -> None:
        self._closed = True
        async with self._restarting:
            await self._server.close()
            await self._close_standby()
            await asyncio.gather(*self._endings)

    async def _succeed(self, dead: ForkServerProcess) -> None:
        """Have the standby take over from a dead server, or start another. Raises StartError."""
        ending = asyncio.get_running_loop().create_task(dead.close())
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)
        standby, self._standby = self._standby, None
        server: ForkServerProcess | None = None
        if standby is not None:
            with contextlib.suppress(StartError):
                server = await standby
        if server is not None and server.gone:
            await server.close()
            server = None
        self._server = server or await self._start(ending)
        self._follow(self._server)
        self.keep_standby(ending)

    async def _start(self, ending: asyncio.Task[None] | None) -> ForkServerProcess:
        """Start a warm server. Servers that run side by side never share users. Raises StartError.

        It waits for ``ending``, the end of the previous server, whose users it may take over.
        """
        if ending is not None:
            await asyncio.shield(ending)
        turn, self._starts = self._starts, self._starts + 1
        try:
            users = first_user(self._settings, turn)
        except OSError as error:
            raise StartError(f"no users could be drawn for the sandbox's server: {error}") from error
        server = await ForkServerProcess.start(replace(self._config, first_user=users))
        try:
            await server.warm()
        except asyncio.CancelledError:
            await server.close()
            raise
        return server

    async def _close_standby(self) -> None:
        standby, self._standby = self._standby, None
        if standby is None:
            return
        standby.cancel()
        try:
            server = await standby
        except (asyncio.CancelledError, StartError):
            return
        await server.close()


def first_user(settings: SandboxSettings, turn: int) -> int:
    """The first user of the ``turn``-th server: alternating halves of the configured users, or random ones."""
    if settings.first_user is None:
        return free_users()
    return settings.first_user + (settings.slots if settings.standby and turn % 2 else 0)


def free_users() -> int:
    """The first of ``_STEP`` users that most likely nobody else has; drawn at random on each call."""
    numbers = _RANGE if _is_mapped(_RANGE.stop - 1) else _SMALL_RANGE
    return random.SystemRandom().randrange(numbers.start, numbers.stop - _STEP, _STEP)


def _is_mapped(user: int) -> bool:
    """Whether the user namespace of this process has such a user (and group: they are mapped alike in practice)."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        spans = [tuple(map(int, line.split())) for line in file]
    return any(first <= user < first + length for first, _, length in spans)
