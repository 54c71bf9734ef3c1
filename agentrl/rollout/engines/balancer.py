"""Load balancing: a request goes to the server with the least work, including the prefix it would have to recompute."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Load:
    """The load of one server. ``limit`` bounds its requests in flight; a server that is not ``up`` gets none."""

    up: bool = True
    tokens: int = 0
    requests: int = 0
    limit: int | None = None
    cached: dict[str, int] = field(default_factory=dict)  # trajectory -> tokens of its context processed here

    @property
    def full(self) -> bool:
        return self.limit is not None and self.requests >= self.limit

    def halve(self) -> int:
        """Admit half as many requests as were in flight, including the one that just failed. Returns the new limit."""
        in_flight = self.requests + 1
        self.limit = max(1, (in_flight if self.limit is None else min(self.limit, in_flight)) // 2)
        return self.limit


class Balancer:
    """Sends each request to the server with the smallest sum of tokens in flight and tokens to prefill for it.

    A trajectory therefore stays with the server that holds its prefix, until another server is less loaded by more than
    the cost of the prefix.

    >>> balancer = Balancer(2)
    >>> balancer.take(0, "t", context=100, reserved=50)
    >>> balancer.choose("t", context=160), balancer.choose("u", context=160)
    (1, 1)
    >>> balancer.give_back(0, "t", context=100, reserved=50)
    >>> balancer.choose("t", context=160)
    0
    """

    def __init__(self, servers: int) -> None:
        self.loads = [Load() for _ in range(servers)]
        self._changed: asyncio.Event = asyncio.Event()

    def choose(self, trajectory_id: str, *, context: int, avoid: frozenset[int] = frozenset()) -> int | None:
        """The server for a request; None while no server can accept it. ``avoid`` is used only if no other is up."""
        up = [index for index, load in enumerate(self.loads) if load.up]
        usable = [index for index in up if index not in avoid] or up
        free = [index for index in usable if not self.loads[index].full]
        return min(free, key=lambda index: self._cost(index, trajectory_id, context), default=None)

    def take(self, index: int, trajectory_id: str, *, context: int, reserved: int) -> None:
        """Count a request with ``context`` tokens and room for ``reserved`` more as sent to a server."""
        load = self.loads[index]
        load.tokens += context + reserved
        load.requests += 1
        load.cached[trajectory_id] = context

    def give_back(self, index: int, trajectory_id: str, *, context: int, reserved: int) -> None:
        """Count that request as ended."""
        load = self.loads[index]
        load.tokens -= context + reserved
        load.requests -= 1
        self.wake()

    def release(self, trajectory_id: str) -> None:
        for load in self.loads:
            load.cached.pop(trajectory_id, None)

    def forget_prefixes(self, index: int | None = None) -> None:
        """Note that a server (None: every server) has lost its cached prefixes."""
        for load in self.loads if index is None else [self.loads[index]]:
            load.cached.clear()

    def wake(self) -> None:
        """Wake all callers of :meth:`changed`."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return when a request has ended or a server has changed."""
        await self._changed.wait()

    def _cost(self, index: int, trajectory_id: str, context: int) -> tuple[int, int]:
        load = self.loads[index]
        return load.tokens + context - min(context, load.cached.get(trajectory_id, 0)), index
