"""Client for text-only rollouts with an OpenAI-compatible endpoint.

Turns are streamed. The connection is closed as soon as the protocol considers the turn complete, a condition that stop
strings cannot express. Failed requests are retried for ``retry_deadline`` seconds.

Not guaranteed: exact token counts. If the turn was not cut and the endpoint reports usage, its counts are used.
Otherwise the received chunks are counted, and a chunk may contain several tokens.

The module imports no heavy library, so that a wrong endpoint is reported within a second.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeVar

import stamina

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.endpoint_messages import (
    MessageDelta,
    RetryableError,
    extract_error_message,
    find_usage,
    first_choice,
    parse_json_object,
    parse_model_list_response,
    parse_retry_after,
    parse_server_sent_events,
)
from agentrl.evaluation.formats import JSONObject
from agentrl.evaluation.settings import EndpointSettings
from agentrl.evaluation.transcripts import replace_lone_surrogates
from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.engines.replica import Response, StreamClient, Transport, UnreachableError

_RETRIED_STATUSES = frozenset({408, 409, 425, 429, *range(500, 600)})
_LONGEST_WAIT = 60.0
_LOG_EVERY = 30.0  # seconds between two log messages
# Endpoints have no common error codes for a full context or a missing chat template, so their messages are searched.
_CONTEXT_FULL_PHRASES = ("context length", "context_length", "maximum context", "max_model_len", "longest sequence")
FinishReason = Literal["eos", "stop", "length", "refused"]
_FINISH_REASONS: Mapping[str, FinishReason] = {"length": "length", "content_filter": "refused"}
_TEMPLATE_PHRASES = ("chat template", "chat_template")
_Result = TypeVar("_Result")
logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[object]]


class ContextFullError(EngineError):
    """Raised if the conversation exceeds the context of the endpoint's model."""


class RequestRefusedError(EngineError):
    """Raised if the endpoint rejects a request that would fail again if retried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCompletion:
    """One turn sampled from an endpoint.

    ``finish_reason`` is ``eos`` if the model ended the turn, ``stop`` if the protocol considers it complete, ``length``
    at the token limit, and ``refused`` if a content filter ended the turn or the model refused. ``reasoning`` is the
    text that the endpoint reports separately. Surrogate halves in both texts are joined or replaced.
    """

    text: str
    tokens: int
    prompt_tokens: int | None
    finish_reason: FinishReason
    reasoning: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSampling:
    """Sampling options of a turn. A string in ``stop`` ends the turn only if ``is_complete`` accepts the text."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    is_complete: Callable[[str], bool]


class TextEngine:
    """Client of one endpoint. Supports thousands of concurrent calls; the caller must limit their number."""

    def __init__(
        self,
        settings: EndpointSettings,
        *,
        transport: Transport | None = None,
        sleep: Sleep = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a client without connecting. Raises SettingsError if ``settings.url`` is not set.

        ``transport``, ``sleep`` and ``clock`` are replaced in tests.
        """
        if settings.url is None:
            raise SettingsError("evaluation.endpoint.url is not set: set it with --base-url")
        key = os.environ.get(settings.key_variable)
        self._settings = settings
        self._client = StreamClient(
            settings.url,
            key=key,
            read_timeout=settings.read_timeout,
            connections=settings.concurrency + 4,
            transport=transport,
        )
        self._sleep, self._clock = sleep, clock
        self._not_before = self._next_log = 0.0  # readings of `clock`
        self._sends_stream_options = True
        self._model: str | None = settings.model
        self._served_model: Mapping[str, str] = {}
        self._fingerprints: set[str] = set()
        self.retries = 0

    async def choose_and_test_model(self) -> None:
        """Choose the model and sample one token as a test.

        ``evaluation.endpoint.model`` is required if the endpoint does not list its models. Raises SettingsError for
        invalid settings and WorldError if the endpoint is not available.
        """
        try:
            await self._find_model()
            await self.generate(
                ["Hello"],
                TextSampling(max_tokens=1, temperature=1.0, top_p=1.0, seed=0, stop=(), is_complete=lambda text: False),
            )
        except RequestRefusedError as error:
            raise SettingsError(f"the endpoint {self._settings.url} rejects the request: {error}") from error
        except EngineError as error:
            raise WorldError(f"the endpoint {self._settings.url} is not available: {error}") from error

    @property
    def model(self) -> str:
        if self._model is None:
            raise SettingsError("the endpoint's model is unknown: open the engine, or set evaluation.endpoint.model")
        return self._model

    def fingerprint(self) -> str:
        """Return the identity of the model as reported by the endpoint. This identity rarely distinguishes versions."""
        reported = [f"system_fingerprint {name}" for name in sorted(self._fingerprints)]
        root = self._served_model.get("root")
        reported += [f"root {root}"] if root is not None and root != self._model else []
        return ", ".join(reported) or "not reported by the endpoint"

    async def generate(self, conversation: Sequence[str], sampling: TextSampling) -> TextCompletion:
        """Sample the next turn of ``conversation``: the prompt, then alternating turns and observations.

        Raises ContextFullError, RequestRefusedError or SettingsError if the endpoint rejects the request, and
        EngineError if retries fail for ``retry_deadline`` seconds.
        """
        body = self._request_body(conversation, sampling)
        return await self._with_retries(lambda: self._request_turn(body, sampling))

    async def close(self) -> None:
        await self._client.close()

    # -- requests -------------------------------------------------------------------------------------------------

    def _request_body(self, conversation: Sequence[str], sampling: TextSampling) -> JSONObject:
        if self._settings.api == "chat":
            roles = ("user", "assistant")
            system = self._settings.system_prompt
            first = [] if system is None else [{"role": "system", "content": system}]
            body: JSONObject = {
                "messages": first
                + [{"role": roles[index % 2], "content": text} for index, text in enumerate(conversation)]
            }
        else:
            body = {"prompt": "".join(conversation)}
        body |= {
            "model": self.model,
            self._settings.limit_field: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            "stream": True,
        }
        further = self._settings.model_dump(include={"top_k", "min_p"}, exclude_none=True)
        return body | further | self._settings.extra_body

    async def _find_model(self) -> None:
        async def once() -> list[dict[str, str]]:
            await self._wait_for_rate_limit()
            response = await self._client.get("models")
            if response.status_code in (404, 405) and self._model is not None:
                return []
            await self._check_status(response)
            return parse_model_list_response(response.text)

        served = await self._with_retries(once)
        names = [entry["id"] for entry in served]
        if self._model is None:
            if len(names) != 1:
                raise SettingsError(
                    f"the endpoint {self._settings.url} serves {len(names)} models ({', '.join(names) or 'none'}): "
                    "choose one with --model"
                )
            self._model = names[0]
        elif served and self._model not in names:
            raise SettingsError(
                f"the endpoint {self._settings.url} does not serve {self._model!r}; it serves: {', '.join(names)}"
            )
        self._served_model = next((entry for entry in served if entry["id"] == self._model), {})

    async def _with_retries(self, once: Callable[[], Awaitable[_Result]]) -> _Result:
        """Call ``once`` until it succeeds, for up to ``retry_deadline`` seconds."""
        try:
            async for attempt in stamina.retry_context(
                on=_decide_retry_or_delay,
                attempts=None,
                timeout=self._settings.retry_deadline,
                wait_initial=0.1,
                wait_max=_LONGEST_WAIT,
                wait_jitter=0.2,
            ):
                with attempt:
                    self.retries += attempt.num > 1
                    try:
                        return await once()
                    except (RetryableError, UnreachableError) as error:
                        if isinstance(error, RetryableError) and error.wait is not None:
                            self._not_before = max(self._not_before, self._clock() + error.wait)
                        self._log_failure(error)
                        raise
        except (RetryableError, UnreachableError) as error:
            message = str(error) or type(error).__name__
            raise EngineError(
                f"{message} (retried for evaluation.endpoint.retry_deadline={self._settings.retry_deadline:g} s)"
            ) from error
        raise AssertionError("a retry neither succeeded nor failed")

    def _log_failure(self, error: Exception) -> None:
        """Log an endpoint failure, at most once per interval, because thousands of requests may fail together."""
        if self._clock() < self._next_log:
            return
        self._next_log = self._clock() + _LOG_EVERY
        wait = self._not_before - self._clock()
        logger.warning(
            "the endpoint %s: %s; retrying%s, each request for up to %g s (evaluation.endpoint.retry_deadline)",
            self._settings.url,
            str(error) or type(error).__name__,
            f" in {wait:.0f} s, as the endpoint requested" if wait >= 1 else "",
            self._settings.retry_deadline,
        )

    async def _wait_for_rate_limit(self) -> None:
        """Wait until ``Retry-After`` and ``requests_per_minute`` allow the next request."""
        rate = self._settings.requests_per_minute
        while (wait := self._not_before - self._clock()) > 0:
            await self._sleep(wait)
        if rate is not None:
            self._not_before = max(self._not_before, self._clock()) + 60.0 / rate

    async def _request_turn(self, body: JSONObject, sampling: TextSampling) -> TextCompletion:
        path = "chat/completions" if self._settings.api == "chat" else "completions"
        if self._sends_stream_options:
            body = body | {"stream_options": {"include_usage": True}}
        await self._wait_for_rate_limit()
        async with self._client.post(path, body) as response:
            await self._check_status(response)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                await response.aread()
                return self._parse_response(parse_json_object(response.text), sampling)
            return await self._read_stream(parse_server_sent_events(response.aiter_bytes()), sampling)

    async def _check_status(self, response: Response) -> None:
        """Raise the exception for a response's status, unless the status is 200."""
        status = response.status_code
        if status == 200:
            return
        await response.aread()
        message = f"{status} {response.reason_phrase}: {extract_error_message(response.text)}"
        if status in _RETRIED_STATUSES:
            raise RetryableError(message, parse_retry_after(response.headers.get("retry-after")))
        if status in (401, 403):
            variable = self._settings.key_variable
            problem = "rejects the key in" if os.environ.get(variable) else "requires a key in"
            raise SettingsError(f"the endpoint {self._settings.url} {problem} ${variable}: {message}")
        if status == 404:
            raise SettingsError(
                f"the endpoint {self._settings.url} does not have this path or model: {message}; set --base-url to its "
                f"address, usually ending in /v1, and --model to the name of a model at the endpoint "
                f"(current: {self._model or 'not set'})"
            )
        self._raise_rejection(response.text.lower(), message)

    def _raise_rejection(self, text: str, message: str) -> NoReturn:
        # Some servers reject stream_options. Retry without it, and count streamed chunks instead of tokens.
        if self._sends_stream_options and "stream_options" in text:
            self._sends_stream_options = False
            raise RetryableError(message, 0.0)
        if any(words in text for words in _CONTEXT_FULL_PHRASES):
            raise ContextFullError(message)
        if "max_completion_tokens" in text and self._settings.limit_field == "max_tokens":
            raise SettingsError(
                f"the endpoint {self._settings.url} does not accept max_tokens: {message}; set "
                "evaluation.endpoint.limit_field=max_completion_tokens"
            )
        if any(words in text for words in _TEMPLATE_PHRASES):
            raise SettingsError(
                f"the endpoint {self._settings.url} has no chat template for {self._model}: {message}; for a base "
                "model, set evaluation.endpoint.api=completions"
            )
        raise RequestRefusedError(message)

    # -- responses ------------------------------------------------------------------------------------------------

    async def _read_stream(self, events: AsyncIterator[JSONObject], sampling: TextSampling) -> TextCompletion:
        text, reasoning, chunks, reason = "", "", 0, None
        usage: JSONObject = {}
        async for event in events:
            self._add_fingerprint(event)
            usage = find_usage(event) or usage
            choice = first_choice(event)
            if choice is None:
                continue
            delta = MessageDelta.from_choice(choice)
            chunks += bool(delta.text or delta.reasoning)
            reason = delta.reason if reason is None else reason
            before, text, reasoning = len(text), text + delta.text, reasoning + delta.reasoning
            cut = _find_turn_end(text, before, sampling)
            if cut is not None:
                return _make_completion(text[:cut], reasoning, chunks, usage, "stop")
        if reason is None:
            raise RetryableError("the stream ended early")
        return _make_completion(text, reasoning, chunks, usage, _FINISH_REASONS.get(reason, "eos"))

    def _parse_response(self, answer: JSONObject, sampling: TextSampling) -> TextCompletion:
        self._add_fingerprint(answer)
        choice = first_choice(answer)
        if choice is None:
            raise RetryableError(f"the response contains no choices: {json.dumps(answer)[:200]}")
        delta = MessageDelta.from_choice(choice)
        cut = _find_turn_end(delta.text, 0, sampling)
        reason = _FINISH_REASONS.get(delta.reason or "", "eos") if cut is None else "stop"
        return _make_completion(delta.text[:cut], delta.reasoning, 0, find_usage(answer), reason)

    def _add_fingerprint(self, event: JSONObject) -> None:
        fingerprint = event.get("system_fingerprint")
        if isinstance(fingerprint, str):
            self._fingerprints.add(replace_lone_surrogates(fingerprint))


def _decide_retry_or_delay(error: Exception) -> bool | float:
    """Return False for no retry, True for a retry with backoff, or 0 for an immediate retry.

    After a ``Retry-After`` no backoff is needed, because `_wait_for_rate_limit` waits.
    """
    if isinstance(error, RetryableError):
        return True if error.wait is None else 0.0
    return isinstance(error, UnreachableError)


def _find_turn_end(text: str, before: int, sampling: TextSampling) -> int | None:
    """Return the position after ``before`` at which the turn is complete, or None if it is incomplete."""
    longest = max(map(len, sampling.stop), default=0)
    # A stop string may begin in text that was searched earlier.
    start = max(0, before - longest + 1)
    ends = set()
    for stop in sampling.stop:
        end = text.find(stop, start)
        while end >= 0:
            ends.add(end + len(stop))
            end = text.find(stop, end + 1)
    return next((end for end in sorted(ends) if end > before and sampling.is_complete(text[:end])), None)


def _make_completion(text: str, reasoning: str, chunks: int, usage: JSONObject, reason: FinishReason) -> TextCompletion:
    completion_tokens, prompt = usage.get("completion_tokens"), usage.get("prompt_tokens")
    return TextCompletion(
        text=replace_lone_surrogates(text),
        tokens=completion_tokens if isinstance(completion_tokens, int) else chunks,
        prompt_tokens=prompt if isinstance(prompt, int) else None,
        finish_reason=reason,
        reasoning=replace_lone_surrogates(reasoning),
    )
