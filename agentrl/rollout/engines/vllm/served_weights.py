"""The weights that every server must hold: how a server takes them, and the proof that it has them."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from agentrl.rollout.engines.http import GarbageError
from agentrl.rollout.engines.vllm.replica import Replica

Check = Callable[[Replica], Awaitable[str | None]]
"""Checks a server: returns the problem with its weights, or None. Raises ServerCallError."""


class ServedWeights:
    """``directory``: the files of this ``version``, if they are transferred by files.

    ``untouched``: the servers hold the weights they were started with. ``check``: what a server must pass that comes
    back; before the first one it must answer.
    """

    def __init__(self, version: int, *, recompute: bool) -> None:
        """``recompute``: running requests recompute their keys and values with new weights."""
        self.version = version
        self.directory: Path | None = None
        self.untouched = True
        self.check: Check | None = None
        self._recompute = recompute
        self._nonce = secrets.token_hex(4)

    def salt(self, version: int) -> str:
        """The salt that separates a version's cached prefixes from all others, even those of running requests."""
        return f"{self._nonce}-{version}"

    def replace(self, directory: Path | None, version: int) -> None:
        """Note the weights of ``version``, which servers load from ``directory`` or (None) have already received."""
        self.version, self.directory, self.untouched = version, directory, False

    async def install(self, replica: Replica) -> None:
        """Make a server hold the current version. Raises ServerCallError."""
        if self.directory is not None:
            await replica.load(str(self.directory))
        await replica.label(self.version)
        await replica.forget_prefixes(running_too=self._recompute)

    async def held_by(self, replica: Replica) -> bool:
        """Whether a server holds the current version, after loading it from files if possible."""
        label = await replica.version()
        if label == "default" and self.untouched:
            await replica.label(self.version)
        elif label != str(self.version):
            if self.directory is None:
                return False
            await self.install(replica)
        return True

    async def prove(self, replica: Replica) -> None:
        """Check a server that comes back. Raises GarbageError if it does not hold the current version."""
        if self.check is None:
            await replica.score((0, 1), salt=f"{self._nonce}-probe-{secrets.token_hex(4)}")
            return
        problem = await self.check(replica)
        if problem is not None:
            if self.directory is not None:
                await self.install(replica)
            raise GarbageError(f"after its return {problem}")
