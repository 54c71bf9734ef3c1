"""Client of an OpenAI-compatible endpoint: requests, ends of turns, retries, and errors of the user."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest

from agentrl.errors import SettingsError, WorldError
from agentrl.evaluation.endpoint import (
    ContextFullError,
    RequestRefusedError,
    TextCompletion,
    TextEngine,
    TextSampling,
)
from agentrl.evaluation.settings import EndpointSettings
from agentrl.rollout.engines.base import EngineError

Answer = httpx.Response | Exception


class Pieces(httpx.AsyncByteStream):
    """Stream of server-sent events. An exception in it breaks the connection."""

    def __init__(self, parts: Sequence[dict[str, Any] | str | Exception]) -> None:
        self._parts = parts
        self.sent = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            self.sent += 1
            yield f"data: {part if isinstance(part, str) else json.dumps(part)}\n\n".encode()


class Raw(httpx.AsyncByteStream):
    """Stream of exactly these bytes."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def said(*texts: str, reason: str | None = "stop", usage: int | None = None, api: str = "chat") -> Pieces:
    """Return the events that an endpoint streams for these chunks of one turn."""
    events: list[Any] = [
        {"choices": [{"delta": {"content": text}} if api == "chat" else {"text": text}]} for text in texts
    ]
    if reason is not None:
        events.append({"choices": [{"delta": {}, "finish_reason": reason}]})
    if usage is not None:
        events.append({"choices": [], "usage": {"completion_tokens": usage, "prompt_tokens": 9}})
    return Pieces([*events, "[DONE]"])


def stream(pieces: Pieces) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=pieces)


def refused(status: int, message: str = "no", **headers: str) -> httpx.Response:
    return httpx.Response(status, headers=headers, json={"error": {"message": message}})


class Endpoint:
    """Endpoint that returns the next of ``answers`` for each request. Records requests and waiting times."""

    def __init__(self, *answers: Answer, models: Sequence[str] = ("m",), **settings: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.slept: list[float] = []
        self.now = 100.0
        self._models = models
        values = {"url": "http://host/v1", "model": "m", "retry_deadline": 30.0, **settings}
        self.engine = TextEngine(
            EndpointSettings(**values),
            transport=httpx.MockTransport(self._answer),
            sleep=self._sleep,
            clock=lambda: self.now,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.paths.append(request.url.path)
        self.keys.append(request.headers.get("authorization"))
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": name} for name in self._models]})
        self.bodies.append(json.loads(request.content))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask(self, *conversation: str, **changes: Any) -> TextCompletion:
        return await self.engine.generate(conversation or ("P",), sampling(**changes))


def sampling(
    stop: tuple[str, ...] = ("```",), complete: Callable[[str], bool] = lambda text: text.count("```") >= 2
) -> TextSampling:
    return TextSampling(max_tokens=50, temperature=0.7, top_p=0.9, seed=5, stop=stop, is_complete=complete)


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def test_a_chat_is_sent_as_alternating_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    endpoint = Endpoint(stream(said("a", "b", usage=7)))
    assert await endpoint.ask("prompt", "turn", "shown") == TextCompletion(
        text="ab", tokens=7, prompt_tokens=9, finish_reason="eos"
    )
    (body,) = endpoint.bodies
    assert [(one["role"], one["content"]) for one in body.pop("messages")] == [
        ("user", "prompt"),
        ("assistant", "turn"),
        ("user", "shown"),
    ]
    assert body == {
        "model": "m",
        "max_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (endpoint.paths, endpoint.keys) == (["/v1/chat/completions"], ["Bearer k"])


async def test_completions_are_one_growing_text() -> None:
    endpoint = Endpoint(stream(said("x", "y", reason="length", api="completions")), api="completions")
    assert await endpoint.ask("P", "T", "O") == TextCompletion(
        text="xy", tokens=2, prompt_tokens=None, finish_reason="length"
    )
    assert (endpoint.bodies[0]["prompt"], endpoint.paths) == ("PTO", ["/v1/completions"])


async def test_a_stream_is_left_where_the_turn_is_complete() -> None:
    pieces = said("Code: `", "``py\n1\n`", "``\nmore ", "never read")
    done = await Endpoint(stream(pieces)).ask()
    assert done == TextCompletion(text="Code: ```py\n1\n```", tokens=3, prompt_tokens=None, finish_reason="stop")
    assert pieces.sent == 3


@pytest.mark.parametrize("message", [{"message": {"content": "```\n1\n```\nmore"}}, {"text": "```\n1\n```\nmore"}])
async def test_an_answer_in_one_piece_is_cut_there(message: dict[str, Any]) -> None:
    answer = httpx.Response(200, json={"choices": [{**message, "finish_reason": "stop"}]})
    assert (await Endpoint(answer).ask()).text == "```\n1\n```"


async def test_thoughts_that_are_kept_apart_count_and_are_no_text() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm", "content": None}}]}
    ended = {"choices": [{"delta": {"content": "4"}, "finish_reason": "stop"}]}
    done = await Endpoint(stream(Pieces([thought, ended, "[DONE]"]))).ask()
    assert (done.text, done.tokens) == ("4", 2)


async def test_thoughts_are_kept_beside_the_text() -> None:
    events = [{"choices": [{"delta": {"reasoning_content": text}}]} for text in ("two and", " two")]
    ended = {"choices": [{"delta": {"content": "4"}, "finish_reason": "stop"}]}
    assert (await Endpoint(stream(Pieces([*events, ended, "[DONE]"]))).ask()).reasoning == "two and two"
    whole = {"message": {"content": "4", "reasoning": "hm"}, "finish_reason": "stop"}
    assert (await Endpoint(httpx.Response(200, json={"choices": [whole]})).ask()).reasoning == "hm"


EMOJI = "\U0001f600"


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (['"a \\ud83d"', '"\\ude00 b"'], f"a {EMOJI} b"),  # a pair of escapes in two events
        (['"a \\ud83d"', '" b"'], "a \ufffd b"),
        (['"\\ude00"', '"\\ud83d"'], "\ufffd\ufffd"),
        (['"\\ud83d"'], "\ufffd"),
        ([b'"a \xf0\x9f"', b'"\x98\x80 b"'], f"a {EMOJI} b"),  # bytes of one character in two events
        ([b'"a \xf0\x9f"', b'" b"'], "a \ufffd b"),
        ([f'"line\u2028{EMOJI}\u0085"'], f"line\u2028{EMOJI}\u0085"),  # which break lines for Unicode, not for events
    ],
)
async def test_characters_that_come_in_halves(pieces: list[str | bytes], text: str) -> None:
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    for field in (b"content", b"reasoning_content"):
        events = [b'data: {"choices": [{"delta": {"' + field + b'": ' + piece + b"}}]}\r\n\r\n" for piece in raw]
        data = b"".join(events) + b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
        cut = [data[place : place + 3] for place in range(0, len(data), 3)]  # as a network may cut it
        answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Raw(cut))
        done = await Endpoint(answer).ask()
        assert (done.text, done.reasoning) == ((text, "") if field == b"content" else ("", text))


async def test_an_error_with_half_a_character_can_be_printed() -> None:
    with pytest.raises(RequestRefusedError) as caught:
        await Endpoint(httpx.Response(400, text='{"error": {"message": "bad \\ud83d"}}')).ask()
    assert str(caught.value).endswith("bad \ufffd")


async def test_refusals_are_told_apart() -> None:
    filtered = await Endpoint(stream(said("I", reason="content_filter"))).ask()
    assert (filtered.text, filtered.finish_reason) == ("I", "refused")
    events = [{"choices": [{"delta": {"refusal": "I can't."}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
    in_words = await Endpoint(stream(Pieces([*events, "[DONE]"]))).ask()
    assert (in_words.text, in_words.finish_reason) == ("I can't.", "refused")
    whole = {"message": {"content": None}, "finish_reason": "content_filter"}
    assert (await Endpoint(httpx.Response(200, json={"choices": [whole]})).ask()).finish_reason == "refused"


async def test_what_an_endpoint_is_asked_beside_the_usual() -> None:
    endpoint = Endpoint(
        stream(said("a")),
        system_prompt="Be brief.",
        top_k=20,
        min_p=0.05,
        limit_field="max_completion_tokens",
        extra_body={"reasoning_effort": "low"},
    )
    await endpoint.ask("P")
    (body,) = endpoint.bodies
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "P"}]
    assert (body["top_k"], body["min_p"], body["reasoning_effort"]) == (20, 0.05, "low")
    assert (body["max_completion_tokens"], "max_tokens" in body) == (50, False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"url": None, "top_k": 5}, r"top_k requires an endpoint"),
        ({"api": "completions", "system_prompt": "x"}, r"system_prompt and .* require api=chat"),
        ({"api": "completions", "limit_field": "max_completion_tokens"}, r"require api=chat"),
        ({"extra_body": {"messages": [], "n": 2}}, r"extra_body must not contain messages, n: other settings"),
    ],
)
def test_requests_that_make_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EndpointSettings(**{"url": "http://host/v1", **values})


async def test_trouble_is_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    busy = [refused(503, "busy"), refused(429, "slow down", **{"retry-after": "7"}), httpx.ConnectError("refused")]
    endpoint = Endpoint(*busy, stream(said("a")), refused(429, "slow down", **{"retry-after": "40"}), stream(said("b")))
    await endpoint.ask()
    endpoint.now += 60
    await endpoint.ask()
    told = [record.getMessage() for record in caplog.records if record.name == "agentrl.evaluation.endpoint"]
    deadline = "each request for up to 30 s (evaluation.endpoint.retry_deadline)"
    name = "the endpoint http://host/v1"
    assert told == [
        f"{name}: 503 Service Unavailable: busy; retrying, {deadline}",
        f"{name}: 429 Too Many Requests: slow down; retrying in 40 s, as the endpoint requested, {deadline}",
    ]


async def test_retry_after_holds_every_request_back() -> None:
    endpoint = Endpoint(refused(429, "slow down", **{"retry-after": "7"}), stream(said("a")), stream(said("b")))
    assert (await endpoint.ask()).text == "a"
    assert endpoint.slept == [7.0]
    assert endpoint.engine.retries == 1
    await endpoint.ask()
    assert endpoint.slept == [7.0]


@pytest.mark.parametrize(
    "failure",
    [
        refused(503),
        refused(500),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("silent"),
        stream(Pieces([{"choices": [{"delta": {"content": "half"}}]}, httpx.RemoteProtocolError("gone")])),
        stream(said("no end", reason=None)),
        stream(Pieces(["{not json"])),
        stream(Pieces([{"error": {"message": "engine died"}}])),
        httpx.Response(200, text="<html>proxy</html>"),
        httpx.Response(200, json={"choices": []}),
    ],
)
async def test_what_is_down_or_broken_is_tried_again_whole(failure: Answer) -> None:
    endpoint = Endpoint(failure, stream(said("whole")))
    assert (await endpoint.ask()).text == "whole"
    assert len(endpoint.bodies) == 2


async def test_after_its_retry_deadline_it_is_an_engine_error() -> None:
    endpoint = Endpoint(*[refused(503, "overloaded")] * 20, retry_deadline=0.01)
    with pytest.raises(EngineError, match=r"503 .*overloaded.*retry_deadline=0\.01 s"):
        await endpoint.ask()


async def test_requests_keep_their_rate() -> None:
    endpoint = Endpoint(*[stream(said("a")) for _ in range(3)], requests_per_minute=30)
    for _ in range(3):
        await endpoint.ask()
    assert endpoint.slept == [2.0, 2.0]


async def test_an_endpoint_that_does_not_know_stream_options_is_asked_without() -> None:
    endpoint = Endpoint(refused(400, "unknown field stream_options"), stream(said("a")), stream(said("b")))
    assert (await endpoint.ask()).text == "a"
    await endpoint.ask()
    assert ["stream_options" in body for body in endpoint.bodies] == [True, False, False]


async def test_the_other_refusals_are_typed() -> None:
    with pytest.raises(ContextFullError):
        await Endpoint(refused(400, "This model's maximum context length is 4096 tokens")).ask()
    with pytest.raises(RequestRefusedError, match="content filter"):
        await Endpoint(refused(400, "content filter")).ask()
    with pytest.raises(SettingsError, match=r"no chat template.*evaluation\.endpoint\.api=completions"):
        await Endpoint(refused(400, "As of v4.44, default chat template is no longer allowed")).ask()
    with pytest.raises(SettingsError, match=r"requires a key in \$OPENAI_API_KEY: 401"):
        await Endpoint(refused(401, "missing key")).ask()
    with pytest.raises(SettingsError, match=r"limit_field=max_completion_tokens"):
        await Endpoint(refused(400, "'max_tokens' is not supported: use 'max_completion_tokens' instead")).ask()
    with pytest.raises(SettingsError, match=r"does not have this path or model: 404 .* and --model .* \(current: m\)"):
        await Endpoint(refused(404, "model x")).ask()


async def test_opening_finds_the_only_model_and_samples_a_token() -> None:
    endpoint = Endpoint(stream(said("x")), model=None, models=["served"])
    await endpoint.engine.choose_and_test_model()
    assert endpoint.engine.model == "served"
    assert (endpoint.bodies[0]["max_tokens"], endpoint.bodies[0]["model"]) == (1, "served")
    assert endpoint.engine.fingerprint() == "not reported by the endpoint"


async def test_what_the_user_must_mend_is_said_at_opening() -> None:
    with pytest.raises(SettingsError, match=r"serves 2 models \(a, b\): choose one with --model"):
        await Endpoint(model=None, models=["a", "b"]).engine.choose_and_test_model()
    with pytest.raises(SettingsError, match="does not serve 'm'; it serves: a, b"):
        await Endpoint(models=["a", "b"]).engine.choose_and_test_model()
    with pytest.raises(SettingsError, match="rejects the request: 400 Bad Request: temperature"):
        await Endpoint(refused(400, "temperature")).engine.choose_and_test_model()
    with pytest.raises(WorldError, match="is not available: refused"):
        await Endpoint(*[httpx.ConnectError("refused")] * 9, retry_deadline=0.01).engine.choose_and_test_model()


async def test_the_fingerprint_is_what_the_endpoint_tells() -> None:
    event = {"system_fingerprint": "fp_1", "choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]}
    endpoint = Endpoint(stream(Pieces([event, "[DONE]"])))
    await endpoint.engine.choose_and_test_model()
    assert endpoint.engine.fingerprint() == "system_fingerprint fp_1"
