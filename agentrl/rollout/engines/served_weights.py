"""The weights that every server must have: their installation, and the verification of recovered servers."""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from agentrl.rollout.engines.base import Completion
from agentrl.rollout.engines.replica import InvalidResponseError, ServerClient

Check = Callable[[ServerClient], Awaitable[str | None]]
"""Returns the problem with a server's weights, or None. Raises ServerCallError if a call to the server fails."""


class ServedWeights:
    """The weights that every server must have.

    ``directory``: the files of this ``version``, if weights are transferred as files. ``has_initial_weights``: the
    servers have the weights with which they started. ``check``: the check that a recovered server must pass; without a
    check, the server only has to respond to a request.
    """

    updates_in_place = True
    """True if a new version replaces the old version in place, even for running requests."""

    def __init__(self, version: int, *, recompute: bool) -> None:
        """Set the initial version.

        ``recompute``: running requests recompute their keys and values after a weight update.
        """
        self.version = version
        self.directory: Path | None = None
        self.has_initial_weights = True
        self.check: Check | None = None
        self._recompute = recompute
        self._run_id = secrets.token_hex(4)

    @asynccontextmanager
    async def adapter_in_use(self, replica: ServerClient, version: int) -> AsyncIterator[str | None]:
        """Yield the adapter for a request of ``version``, or None for the base model.

        The adapter stays loaded until the request ends.
        """
        yield None

    def label_versions(self, completion: Completion, version: int) -> Completion:
        """Return ``completion`` with the version of each token. ``version`` is the version of its request."""
        return completion

    def cache_salt(self, version: int) -> str:
        """Return the salt for cached prefixes, which prevents a version from reusing prefixes of another version."""
        return f"{self._run_id}-{version}"

    def set_version(self, directory: Path | None, version: int) -> None:
        """Set the current version, which servers load from ``directory``. None: servers already have the weights."""
        self.version, self.directory, self.has_initial_weights = version, directory, False
        self.check = None  # the old check is for the old weights; a new check is set after verification

    async def install(self, replica: ServerClient) -> None:
        """Install the current version on a server. Raises ServerCallError if a call to the server fails."""
        if self.directory is not None:
            await replica.load(str(self.directory))
        await replica.set_version_label(self.version)
        await replica.drop_cached_prefixes(recompute_running=self._recompute)

    async def ensure_installed(self, replica: ServerClient) -> bool:
        """Install the current version on a server, if necessary. Returns False if this requires a transfer."""
        label = await replica.version_label()
        if label is None and self.has_initial_weights:
            await replica.set_version_label(self.version)
        elif label != str(self.version):
            if self.directory is None:
                return False
            await self.install(replica)
        return True

    async def require_current_weights(self, replica: ServerClient) -> None:
        """Raise InvalidResponseError if a recovered server does not have the weights of the current version."""
        if self.check is None:
            await replica.score((0, 1), salt=f"{self._run_id}-probe-{secrets.token_hex(4)}")
            return
        problem = await self.check(replica)
        if problem is not None:
            if self.directory is not None:
                await self.install(replica)
            raise InvalidResponseError(f"after recovery: {problem}")


class ServedAdapters(ServedWeights):
    """The weights of each version as an adapter with a unique name, on a frozen base model.

    A request uses the same adapter from start to end. An adapter is unloaded when a newer adapter exists and no running
    request uses it. The first version is the base model itself, because its adapters are zero.
    """

    updates_in_place = False

    def __init__(self, version: int, *, recompute: bool) -> None:
        super().__init__(version, recompute=recompute)
        self._running: Counter[tuple[str, str]] = Counter()  # requests by server address and adapter
        self._names: dict[int, str] = {}  # adapters by version
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def adapter_in_use(self, replica: ServerClient, version: int) -> AsyncIterator[str | None]:
        name = self._names.get(version)
        if name is None:
            yield None
            return
        self._running[replica.address, name] += 1
        try:
            yield name
        finally:
            self._running[replica.address, name] -= 1

    def label_versions(self, completion: Completion, version: int) -> Completion:
        """Attribute all tokens to the request's adapter, because the server's label is for the base model."""
        return replace(completion, version_spans=((version, len(completion.token_ids)),))

    def set_version(self, directory: Path | None, version: int) -> None:
        super().set_version(directory, version)
        # A resent version gets a new name, because a server keeps the adapter that is loaded under a name.
        self._names[version] = f"{self._adapter_name_prefix}{version}-{next(self._numbers)}"

    async def install(self, replica: ServerClient) -> None:
        """Load the current version's adapter, and unload the adapters that no request uses."""
        name = self._names.get(self.version)
        if name is None:
            return
        loaded = await replica.adapters()
        if name not in loaded:
            await replica.load_adapter(name, str(self.directory))
        replica.adapter = name
        for old in loaded - {name}:
            if old.startswith(self._adapter_name_prefix) and not self._running[replica.address, old]:
                await replica.unload_adapter(old)

    async def ensure_installed(self, replica: ServerClient) -> bool:
        if await replica.version_label() is None:
            await replica.set_version_label(self.version)
        await self.install(replica)
        return True

    @property
    def _adapter_name_prefix(self) -> str:
        return f"policy-{self._run_id}-"
