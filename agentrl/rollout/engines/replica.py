"""The HTTP client for one server of an engine.

A plug-in derives a class from :class:`ServerClient` and implements its server's protocol. All other methods have
defaults. No other module of the trainer imports the HTTP library. Failed calls raise::

    ServerCallError
    ├── UnreachableError      the connection failed or broke: the server is down or not yet up
    ├── TooSlowError          no response within the deadline
    ├── StatusError           an error response, with its ``status`` and message
    └── InvalidResponseError  a response with unexpected content
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import msgspec

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion, Sampling


class ServerCallError(Exception):
    """Raised if a call returns no usable response."""


class UnreachableError(ServerCallError):
    """Raised if the connection fails or breaks."""


class TooSlowError(ServerCallError):
    """Raised if there is no response within the deadline."""


class StatusError(ServerCallError):
    """Raised for a response with a status of 400 or above."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class InvalidResponseError(ServerCallError):
    """Raised for a response with unexpected content."""


Response = httpx.Response
Transport = httpx.AsyncBaseTransport

# Maximum number of characters of a response that are quoted in an error.
_MAX_QUOTED = 300
_JSON = {"content-type": "application/json"}


class JSONClient:
    """JSON client for one address. Cancelling a call closes its connection, so that the server aborts the request."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.address,
            timeout=None,  # each call sets its own deadline or none, because a slow server may still respond
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def get(self, path: str, expected: Any = Any, *, seconds: float) -> Any:
        """Return the JSON at ``path`` as the type ``expected``. Raises InvalidResponseError for any other content."""
        return self._decode(path, await self._request("GET", path, None, seconds), expected)

    async def get_text(self, path: str, *, seconds: float) -> str:
        """Return the text at ``path``."""
        return (await self._request("GET", path, None, seconds)).decode(errors="replace")

    async def post(self, path: str, body: object = None, expected: Any = None, *, seconds: float | None) -> Any:
        """Post ``body`` and return the JSON of the response as the type ``expected``; None: ignore the response.

        ``seconds``: the deadline; None: wait while the connection is open. Raises InvalidResponseError for any other
        content.
        """
        content = await self._request("POST", path, body, seconds)
        return None if expected is None else self._decode(path, content, expected)

    async def close(self) -> None:
        await self._client.aclose()

    def _decode(self, path: str, content: bytes, expected: Any) -> Any:
        try:
            return msgspec.json.decode(content, type=expected)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidResponseError(f"{self.address}{path}: {error}; the response is {_excerpt(content)}") from None

    async def _request(self, method: str, path: str, body: object, seconds: float | None) -> bytes:
        # A long prompt is sent again with every turn, and msgspec encodes its tokens ten times faster than json.
        sent = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(seconds):
                response = await self._client.request(method, path, content=sent, headers=_JSON if sent else None)
        except TimeoutError:
            raise TooSlowError(f"{self.address}{path} did not respond within {seconds:g} s") from None
        except (httpx.TransportError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(f"{self.address}{path} cannot be reached: {reason}") from error
        except httpx.HTTPError as error:
            raise InvalidResponseError(f"{self.address}{path} returned invalid HTTP: {error}") from error
        if response.status_code >= 400:
            raise StatusError(response.status_code, _read_error_message(response.content))
        return response.content


class StreamClient:
    """Client for an endpoint with streamed responses. The caller checks the status of responses.

    The duration of a response is not limited, but each piece must arrive within ``read_timeout`` seconds.
    """

    def __init__(
        self, url: str, *, key: str | None, read_timeout: float, connections: int, transport: Transport | None = None
    ) -> None:
        """Create a client without connecting. ``transport``: replaces the network in tests."""
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(read_timeout, connect=min(30.0, read_timeout), pool=None),
            limits=httpx.Limits(max_connections=connections),
            transport=transport,
        )

    async def get(self, path: str) -> Response:
        """Return the complete response. Raises UnreachableError if the connection fails or breaks."""
        async with self._connection_errors():
            return await self._client.get(path)

    @asynccontextmanager
    async def post(self, path: str, body: object) -> AsyncIterator[Response]:
        """Yield the unread response; the connection closes on exit.

        Raises UnreachableError if the connection fails, or breaks while the response is read.
        """
        async with self._connection_errors(), self._client.stream("POST", path, json=body) as response:
            yield response

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _connection_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error


def _read_error_message(content: bytes) -> str:
    """Return the message of an error response, in vLLM's format or as plain text."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _excerpt(content)


def _excerpt(content: bytes) -> str:
    text = content[: _MAX_QUOTED + 1].decode(errors="replace").strip()
    return repr(text[:_MAX_QUOTED] + "..." if len(text) > _MAX_QUOTED else text)


# Deadline in seconds for cheap calls.
QUICK_TIMEOUT = 30.0
# Deadline in seconds for calls that transfer or hash all weights.
LONG_TIMEOUT = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """Request for one turn.

    ``eos_ids``: the only tokens that may end the turn. ``salt``: only requests with equal salts may share cached keys
    and values. ``adapter``: the name of the adapter to sample from; None for the base model.
    """

    token_ids: tuple[int, ...]
    sampling: Sampling
    request_id: str
    seed: int
    eos_ids: frozenset[int]
    salt: str
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRequirements:
    """Requirements of a run for its servers: tokenizer, vocabulary size and longest sequence in tokens.

    ``head_dtype``: the dtype of logits according to the policy's config.json; "model" for the dtype of the weights.
    """

    codec: TextCodec
    vocabulary: int
    max_tokens: int
    head_dtype: str = "model"

    @classmethod
    def from_policy(cls, policy_path: str, codec: TextCodec, *, max_tokens: int) -> ServerRequirements:
        """Read the requirements of the policy at ``policy_path`` (a directory or a Hugging Face id)."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(policy_path)
        return cls(
            codec=codec,
            vocabulary=config.get_text_config().vocab_size,
            max_tokens=max_tokens,
            head_dtype=str(getattr(config, "head_dtype", None) or "model"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerIdentity:
    """Properties reported by a server.

    ``release``: the release of the server's software. ``version``: the result of :meth:`ServerClient.version`.
    ``workers``: the number of the server's GPU processes. ``note``: a text for the console, such as the dtype of its
    logits.
    """

    release: str
    version: str | None
    workers: int = 1
    note: str = ""


class ServerClient(ABC):
    """A client for one server. Every call raises ServerCallError if it gets no valid response."""

    title: ClassVar[str]
    """The name of the server's software, for messages."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self.http = JSONClient(self.address)
        self.has_checksums = False
        """Whether the server supports :meth:`checksums`; set by :meth:`identify`."""
        self.adapter: str | None = None
        """The adapter used by :meth:`score`; None for the base model."""

    async def close(self) -> None:
        await self.http.close()

    # -- required -------------------------------------------------------------------------------------------------

    @abstractmethod
    async def identify(self, needs: ServerRequirements) -> ServerIdentity:
        """Check that the server can serve the run. Raises :meth:`unusable_server_error` if it cannot."""

    @abstractmethod
    async def generate(self, request: TurnRequest) -> Completion:
        """Sample one turn, without a time limit. Cancelling the call must abort the request."""

    @abstractmethod
    async def score(self, token_ids: tuple[int, ...], *, salt: str) -> tuple[float, ...]:
        """Return the log-probabilities at temperature 1 of ``token_ids[1:]``."""

    @abstractmethod
    async def version_label(self) -> str | None:
        """Return the label of the server's weights; None until :meth:`set_version_label` sets a label."""

    @abstractmethod
    async def set_version_label(self, version: int) -> None:
        """Set the label of the server's weights. Tokens sampled after the call have this label as their version."""

    @abstractmethod
    async def load(self, directory: str) -> None:
        """Load all weights from the safetensors files in a directory that the server can read."""

    # -- optional -------------------------------------------------------------------------------------------------

    async def check_health(self) -> None:
        """Check that the server responds."""
        await self.http.get_text("/health", seconds=QUICK_TIMEOUT)

    async def checksums(self) -> list[dict[str, tuple[int, int]]]:
        """Return each worker's checksums (:func:`agentrl.weights.verify.checksums`) of its shard of each parameter.

        Called only if ``has_checksums`` is true.
        """
        raise NotImplementedError

    async def count_computed_tokens(self) -> int | None:
        """Return the number of tokens computed since the server started. None (unknown) disables stall detection."""
        return None

    async def cache_use(self) -> CacheUse | None:
        """Return the usage of the KV cache; None if not reported."""
        return None

    async def pause(self) -> None:
        """Pause every request until :meth:`resume`. The default does nothing: requests run while the weights change."""

    async def resume(self) -> None: ...

    async def drop_cached_prefixes(self, *, recompute_running: bool) -> None:
        """Drop cached prefixes. With ``recompute_running``, running requests also recompute their keys and values."""

    async def sleep(self, *, keep_weights: bool) -> None:
        """Release GPU memory to the trainer. Called only if ``EngineFacts.shares_gpus`` is set."""
        raise NotImplementedError

    async def wake(self, tag: str) -> None:
        """Reallocate the memory for ``tag``: ``weights`` or ``kv_cache``."""
        raise NotImplementedError

    async def adapters(self) -> frozenset[str]:
        """Return the names of the loaded adapters. Called only if servers load adapters in place of weights."""
        raise NotImplementedError

    async def load_adapter(self, name: str, directory: str) -> None:
        """Load an adapter from a directory that the server can read."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter that no running request uses."""
        raise NotImplementedError

    def unusable_server_error(self, problem: str) -> SettingsError:
        """Return the error for a server that cannot serve the run."""
        return SettingsError(f"the {self.title} server {self.address} cannot be used: {problem}")
