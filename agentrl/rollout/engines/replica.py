"""The client of one server of an engine.

A plug-in derives a class from :class:`Replica` and writes what its server's HTTP needs. All else has a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion, Sampling
from agentrl.rollout.engines.http import JSONClient

# Seconds for cheap calls, and for calls that move or hash all weights.
QUICK = 30.0
LONG = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """One turn to sample.

    ``eos_ids``: the tokens that end a turn; the server must not end it at any others. ``salt``: only requests with
    equal salts may share cached keys and values. ``adapter``: the name of the adapter that samples; None for the model.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    request_id: str
    seed: int
    eos_ids: frozenset[int]
    salt: str
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerNeeds:
    """The requirements of a run: its tokenizer, the policy's number of tokens, and its longest sequence in tokens."""

    codec: TextCodec
    vocabulary: int
    max_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """A server's description of itself.

    ``release``: of its software. ``version``: as :meth:`Replica.version` returns it. ``workers``: its GPU processes.
    ``note``: a further fact for the console, such as the dtype of its logits.
    """

    release: str
    version: str | None
    workers: int = 1
    note: str = ""


class Replica(ABC):
    """A client of one server. Every call raises ServerCallError if the server does not answer as it should."""

    title: ClassVar[str]
    """The name of the server's software, for messages."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.http = JSONClient(self.address)
        self.has_checksums = False
        """Whether :meth:`checksums` works; set by :meth:`identify`."""
        self.adapter: str | None = None
        """The adapter whose scores :meth:`score` returns; None for the model's."""

    async def close(self) -> None:
        await self.http.close()

    # -- required -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def identify(self, needs: ServerNeeds) -> Identity:
        """Check that the server can serve the run. Raises SettingsError (:meth:`wrong`) with the difference."""

    @abstractmethod
    async def generate(self, request: TurnRequest) -> Completion:
        """Sample one turn, without a time limit. Cancelling the call must abort the request."""

    @abstractmethod
    async def score(self, token_ids: tuple[int, ...], *, salt: str) -> tuple[float, ...]:
        """Return the log-probabilities at temperature 1 of ``token_ids[1:]``."""

    @abstractmethod
    async def version(self) -> str | None:
        """Return the label of the server's weights; None until :meth:`label` sets one."""

    @abstractmethod
    async def label(self, version: int) -> None:
        """Set the label of the server's weights, which is also the version of the tokens sampled from now on."""

    @abstractmethod
    async def load(self, directory: str) -> None:
        """Load all weights from a directory with safetensors files that the server can read."""

    # -- optional -------------------------------------------------------------------------------------------------

    async def healthy(self) -> None:
        """Return if the server responds."""
        await self.http.get("/health", seconds=QUICK)

    async def checksums(self) -> list[dict[str, tuple[int, int]]]:
        """Return each worker's checksums (:func:`agentrl.weights.checksums.checksums`) of its share of each parameter.

        Called only if ``has_checksums`` is true.
        """
        raise NotImplementedError

    async def zero_weights(self) -> None:
        """Set every parameter to zero, so that parameters missing from a transfer are detected.

        Called before each transfer to a server without checksums. By default nothing is set to zero; then the probe
        alone verifies a transfer.
        """

    async def tokens_so_far(self) -> int | None:
        """Return the number of tokens computed since the start. None if not reported: it never counts as stalled."""
        return None

    async def cache_use(self) -> CacheUse | None:
        """Return the usage of the KV cache; None if not reported."""
        return None

    async def pause(self) -> None:
        """Pause every request until :meth:`resume`. By default they go on while the weights change."""

    async def resume(self) -> None: ...

    async def forget_prefixes(self, *, running_too: bool) -> None:
        """Drop cached prefixes; with ``running_too``, running requests drop and recompute theirs too."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """Release GPU memory to the trainer. Called only if ``EngineFacts.shares_gpus`` is set."""
        raise NotImplementedError

    async def wake(self, tag: str) -> None:
        """Allocate the memory for ``weights`` or the ``kv_cache`` again."""
        raise NotImplementedError

    async def adapters(self) -> frozenset[str]:
        """Return the names of the loaded adapters. Called only if servers load adapters in place of weights."""
        raise NotImplementedError

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load an adapter from a directory that the server can read."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        """Drop an adapter. No running request names it."""
        raise NotImplementedError

    def wrong(self, what: str) -> SettingsError:
        """Return the error for a server that does not fit the run."""
        return SettingsError(f"the {self.title} server {self.address} cannot be used: {what}")
