"""The connected runners, found by their sockets in one directory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from agentrl_sandbox.service.pool.link import RunnerLink
from agentrl_sandbox.types import PROPERTIES, Isolation

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.2  # between two scans of the directory
_MOST_RUNNERS = 1024


class RunnerRegistry:
    """Keeps a link to every runner in a directory; ``on_change`` is called when one may have capacity or is gone."""

    def __init__(self, directory: Path, on_change: Callable[[RunnerLink], None]) -> None:
        self._directory = directory
        self._on_change = on_change
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self.links: dict[str, RunnerLink] = {}

    def open(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look())

    async def close(self) -> None:
        tasks = [*self._connecting.values(), *([self._looking] if self._looking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = list(self.links.values())
        for link in links:
            link.abort("the sandbox was closed")
        await asyncio.gather(*(link.closed for link in links))

    @property
    def runners(self) -> int:
        return sum(not link.leaving for link in self.links.values())

    @property
    def running(self) -> int:
        return sum(link.in_flight for link in self.links.values())

    @property
    def workers(self) -> int:
        return sum(link.hello.result().workers for link in self.links.values() if not link.leaving)

    @property
    def limits(self) -> dict[str, float]:
        """For each limit the smallest value of all runners."""
        hellos = [link.hello.result() for link in self.links.values()]
        names = {name for hello in hellos for name in hello.limits}
        return {name: min(hello.limits.get(name, 0.0) for hello in hellos) for name in sorted(names)}

    @property
    def isolation(self) -> Isolation:
        """The isolation of all runners: a property that one lacks is missing; without runners all are missing."""
        found = [link.hello.result().isolation for link in self.links.values()]
        layers: dict[str, str | None] = {}
        for name in dict.fromkeys([*PROPERTIES, *(name for isolation in found for name in isolation.layers)]):
            held = [isolation.layers.get(name) for isolation in found]
            known = dict.fromkeys(layer for layer in held if layer is not None)
            layers[name] = " or ".join(known) if held and None not in held else None
        return Isolation(layers=layers, mode=" or ".join(sorted({isolation.mode for isolation in found})) or "none")

    async def wait_for_runner(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.runners:
                    await asyncio.sleep(_LOOK_SECONDS / 4)
        return self.runners > 0

    async def _look(self) -> None:
        while True:
            for name in self._listed():
                if name not in self.links and name not in self._connecting:
                    self._connecting[name] = asyncio.get_running_loop().create_task(self._connect(name))
            await asyncio.sleep(_LOOK_SECONDS)

    def _listed(self) -> list[str]:
        try:
            with os.scandir(self._directory) as entries:
                names = [entry.name for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        except OSError:
            return []  # it does not exist yet or is changing: scan again
        return [name for name in sorted(names)[:_MOST_RUNNERS] if name.endswith(".sock")]

    async def _connect(self, name: str) -> None:
        try:
            link = await RunnerLink.connect(str(self._directory / name), name, self._changed)
        except (OSError, TimeoutError):  # the socket of a killed runner, or a runner that sent no hello
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            if not link.gone:
                self.links[name] = link
                _log.info("runner %s connected: %s", name, link.hello.result().isolation.describe())
                self._on_change(link)
        finally:
            del self._connecting[name]

    def _changed(self, link: RunnerLink) -> None:
        if link.gone and self.links.get(link.name) is link:
            del self.links[link.name]
            _log.warning("runner %s disconnected: %s", link.name, link.why_gone)
        self._on_change(link)
