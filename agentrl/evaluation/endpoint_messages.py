"""Parsers for responses of an OpenAI-compatible endpoint: event streams, choices and error messages."""

from __future__ import annotations

import email.utils
import json
import re
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

from agentrl.evaluation.formats import JSONObject
from agentrl.evaluation.transcripts import replace_lone_surrogates

_LINE_END = re.compile(rb"\r\n|\r|\n")


class RetryableError(Exception):
    """Raised for a failure that is retried. ``wait`` is the delay in seconds if the endpoint specifies it."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageDelta:
    """A piece of a turn: its text, its reasoning if the endpoint separates them, and its finish reason."""

    text: str
    reasoning: str
    reason: str | None

    @classmethod
    def from_choice(cls, choice: JSONObject) -> MessageDelta:
        """Parse a choice, streamed or complete. A refusal is used as text if there is no other content."""
        part = choice.get("delta") or choice.get("message")
        message = part if isinstance(part, dict) else choice
        text = message.get("content") if "content" in message else message.get("text")
        refusal = _text_or_empty(message.get("refusal"))
        reason = choice.get("finish_reason")
        return cls(
            text=_text_or_empty(text) or refusal,
            reasoning=_text_or_empty(message.get("reasoning_content")) or _text_or_empty(message.get("reasoning")),
            reason="content_filter" if refusal else reason if isinstance(reason, str) else None,
        )


async def parse_server_sent_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[JSONObject]:
    """Yield the JSON objects of a server-sent event stream until ``[DONE]``.

    Lines end only at the standard's line ends, not at other Unicode line breaks. A character that is split between two
    events is returned as halves, which :func:`replace_lone_surrogates` joins. Raises RetryableError if the
    stream reports an error.
    """
    rest = b""
    async for chunk in chunks:
        *lines, rest = _LINE_END.split(rest + chunk)
        for line in lines:
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip().decode(errors="surrogateescape")
                if data == "[DONE]":
                    return
                event = parse_json_object(data)
                if "error" in event:
                    raise RetryableError(f"the stream reported an error: {extract_error_message(data)}")
                yield event


def parse_json_object(text: str) -> JSONObject:
    """Parse a JSON object. Raises RetryableError if ``text`` is not a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RetryableError(f"the response is not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise RetryableError(f"the response is not a JSON object: {text[:200]!r}")
    return value


def parse_model_list_response(text: str) -> list[dict[str, str]]:
    """Parse a list of models into ``id`` and, if present, ``root``. Raises RetryableError if ``text`` is not a list."""
    listed = parse_json_object(text).get("data")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "id" in entry for entry in listed):
        raise RetryableError(f"the response is not a list of models: {text[:200]!r}")
    return [
        {name: replace_lone_surrogates(str(entry[name])) for name in ("id", "root") if entry.get(name) is not None}
        for entry in listed
    ]


def first_choice(answer: JSONObject) -> JSONObject | None:
    """Return the first choice of a response, or None if it has none."""
    choices = answer.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None


def find_usage(answer: JSONObject) -> JSONObject:
    """Return the token counts in a response, or an empty object."""
    usage = answer.get("usage")
    return usage if isinstance(usage, dict) else {}


def extract_error_message(text: str) -> str:
    """Extract the error message from a response of any format."""
    try:
        value = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:300]
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return replace_lone_surrogates(str(message))[:300]


def parse_retry_after(value: str | None) -> float | None:
    """Parse a ``Retry-After`` header into seconds. Returns None if ``value`` is neither a number nor a date.

    >>> parse_retry_after("1.5"), parse_retry_after("soon"), parse_retry_after("Wed, 21 Oct 2015 07:28:00 GMT")
    (1.5, None, 0.0)
    """
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _text_or_empty(value: object) -> str:
    return value if isinstance(value, str) else ""
