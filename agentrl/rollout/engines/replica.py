"""The client of one server of an engine, over HTTP.

A plug-in derives a class from :class:`Replica` and implements its server's protocol. Every other method has a default.
No other module of the trainer imports the HTTP library. Failed calls raise::

    ServerCallError
    ├── UnreachableError   no connection, or it broke: the server is gone or not yet up
    ├── TooSlowError       no answer within the deadline
    ├── StatusError        an error answer, with its ``status`` and message
    └── GarbageError       an answer with unexpected content
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar

import httpx
import msgspec

from agentrl.errors import SettingsError
from agentrl.models.tokenizer import TextCodec
from agentrl.rollout.engines.base import CacheUse, Completion, Sampling


class ServerCallError(Exception):
    """A call that gave no usable answer."""


class UnreachableError(ServerCallError):
    """No connection, or it broke."""


class TooSlowError(ServerCallError):
    """No answer within the deadline."""


class StatusError(ServerCallError):
    """An answer with a status of 400 or above."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status
        self.message = message


class GarbageError(ServerCallError):
    """An answer with unexpected content."""


Response = httpx.Response
Transport = httpx.AsyncBaseTransport

# Maximum number of characters of an answer that an error quotes.
_QUOTED = 300
_JSON = {"content-type": "application/json"}


class JSONClient:
    """Calls to one address. Cancelling a call closes its connection; by that the server learns of it."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.address,
            timeout=None,  # each call sets its own deadline, or none, because a slow server is not a dead one
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def get(self, path: str, *, seconds: float) -> object:
        """The JSON at ``path``; None for an empty answer."""
        return await self._call("GET", path, None, seconds)

    async def text(self, path: str, *, seconds: float) -> str:
        return (await self._content("GET", path, None, seconds)).decode(errors="replace")

    async def post(self, path: str, body: object = None, *, seconds: float | None) -> object:
        """The JSON answer of ``path`` to ``body``; None for an empty answer.

        With ``seconds`` None, wait as long as the connection is open.
        """
        return await self._call("POST", path, body, seconds)

    async def command(self, path: str, body: object, *, seconds: float | None) -> None:
        """Post a command whose answer has no content."""
        await self._content("POST", path, body, seconds)

    async def content(self, path: str, body: object, *, seconds: float | None) -> bytes:
        """As :meth:`post`, for an answer that the caller decodes."""
        return await self._content("POST", path, body, seconds)

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: object, seconds: float | None) -> object:
        content = await self._content(method, path, body, seconds)
        try:
            return json.loads(content) if content else None
        except ValueError:
            raise GarbageError(f"{self.address}{path} returned invalid JSON: {_quoted(content)}") from None

    async def _content(self, method: str, path: str, body: object, seconds: float | None) -> bytes:
        # A long prompt is sent again with every turn: msgspec encodes its tokens ten times faster than json.
        sent = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.request(method, path, content=sent, headers=_JSON if sent else None)
        except TimeoutError:
            raise TooSlowError(f"{self.address}{path} did not respond within {seconds:g} s") from None
        except (httpx.TransportError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise UnreachableError(f"{self.address}{path} cannot be reached: {reason}") from error
        except httpx.HTTPError as error:
            raise GarbageError(f"{self.address}{path} returned invalid HTTP: {error}") from error
        if answer.status_code >= 400:
            raise StatusError(answer.status_code, _message(answer.content))
        return answer.content


class StreamClient:
    """Requests to one endpoint with streamed answers; the caller reads their status.

    An answer may last as long as pieces arrive, each within ``read_timeout`` seconds.
    """

    def __init__(
        self, url: str, *, key: str | None, read_timeout: float, connections: int, transport: Transport | None = None
    ) -> None:
        """``transport`` is for tests."""
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/") + "/",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(read_timeout, connect=min(30.0, read_timeout), pool=None),
            limits=httpx.Limits(max_connections=connections),
            transport=transport,
        )

    async def get(self, path: str) -> Response:
        """The whole answer. Raises UnreachableError."""
        async with self._reached():
            return await self._client.get(path)

    @asynccontextmanager
    async def post(self, path: str, body: object) -> AsyncIterator[Response]:
        """The answer, not yet read. Leaving the context closes the connection. Raises UnreachableError, also inside."""
        async with self._reached(), self._client.stream("POST", path, json=body) as response:
            yield response

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _reached(self) -> AsyncIterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            raise UnreachableError(str(error) or type(error).__name__) from error


def _message(content: bytes) -> str:
    """The message of an error answer: in vLLM's format, or the plain text."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return _quoted(content)


def _quoted(content: bytes) -> str:
    text = content[: _QUOTED + 1].decode(errors="replace").strip()
    return repr(text[:_QUOTED] + "..." if len(text) > _QUOTED else text)


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
    """The requirements of a run: its tokenizer, the policy's number of tokens, and its longest sequence in tokens.

    ``head_dtype``: the dtype that the policy's config.json requests for logits, if it does; "model" for its weights'.
    """

    codec: TextCodec
    vocabulary: int
    max_tokens: int
    head_dtype: str = "model"

    @classmethod
    def of(cls, policy_path: str, codec: TextCodec, *, max_tokens: int) -> ServerNeeds:
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
        """Return each worker's checksums (:func:`agentrl.weights.verify.checksums`) of its share of each parameter.

        Called only if ``has_checksums`` is true.
        """
        raise NotImplementedError

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
