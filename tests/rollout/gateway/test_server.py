"""The gateway over HTTP, spoken to by the openai package."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from rollout.gateway.agents import client
from rollout.gateway.chat import ADD, IM_END, chat_codec, rollout, speaking

from agentrl.errors import SettingsError
from agentrl.rollout.engines.base import EngineError
from agentrl.rollout.gateway import server
from agentrl.rollout.gateway.rollout import AgentRollout
from agentrl.rollout.gateway.server import AgentGateway
from agentrl.rollout.gateway.settings import AgentGatewaySettings
from agentrl.rollout.gateway.wire import GatewayAccess
from agentrl.rollout.settings import RolloutSettings
from agentrl_envs.types import Ended

HELLO: Any = [{"role": "user", "content": "hello"}]
CALL = '<think>so</think>Wait.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@asynccontextmanager
async def served(one: AgentRollout, **settings: Any) -> AsyncIterator[tuple[AgentGateway, GatewayAccess]]:
    gateway = AgentGateway(AgentGatewaySettings(**settings))
    await gateway.open()
    try:
        gateway.register_rollout(one)
        yield gateway, one.access
    finally:
        await one.reject_further_requests()
        await gateway.close()


@asynccontextmanager
async def talking(one: AgentRollout, **settings: Any) -> AsyncIterator[Any]:
    async with served(one, **settings) as (_, access), client(access.base_url, access.api_key, max_retries=0) as policy:
        yield policy


def engine(*texts: str) -> Any:
    return speaking(chat_codec()[1], lambda number: texts[number % len(texts)])


async def test_a_client_is_told_what_was_sampled() -> None:
    one = rollout(engine("hi"))
    async with talking(one) as policy:
        reply = await policy.chat.completions.create(model="policy", messages=HELLO, logprobs=True)
        models = [model.id async for model in policy.models.list()]
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hi", "stop")
    assert (reply.usage.completion_tokens, len(choice.logprobs.content)) == (3, 3)
    assert [part.logprob for part in choice.logprobs.content] == [-0.001] * 3
    assert models == ["policy", "policy:frozen"]


async def test_a_streamed_reply_is_the_same_as_a_whole_one() -> None:
    one = rollout(engine(CALL))
    async with talking(one) as policy:
        asked: Any = {"model": "policy", "messages": HELLO, "tools": [ADD]}
        whole = await policy.chat.completions.create(**asked)
        async with policy.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            streamed = await stream.get_final_completion()
    first, second = whole.choices[0], streamed.choices[0]
    assert first.message.content == second.message.content == "Wait."
    assert first.message.reasoning_content == second.message.reasoning_content == "so"
    assert first.finish_reason == second.finish_reason == "tool_calls"
    assert [call.function.name for call in second.message.tool_calls] == ["add"]
    assert json.loads(second.message.tool_calls[0].function.arguments) == {"a": 1}
    assert second.message.tool_calls[0].id == "call_1_0"
    assert whole.usage == streamed.usage
    assert all(one.is_trained for one in one.tree.generations)


async def test_a_marked_repetition_is_replayed_and_an_unmarked_one_is_a_sibling() -> None:
    one = rollout(engine("a", "b", "c"))
    async with talking(one) as policy:

        async def ask(**headers: str) -> str:
            reply = await policy.chat.completions.create(model="policy", messages=HELLO, extra_headers=headers)
            return str(reply.choices[0].message.content)

        assert await ask() == "a"
        assert await ask(**{"x-stainless-retry-count": "1"}) == "a"
        assert await ask() == "b"
        assert await ask(**{"Idempotency-Key": "one"}) == "c"
        assert await ask(**{"Idempotency-Key": "one"}) == "c"
    assert (one.counts["replayed"], len(one.tree.generations)) == (2, 3)


async def test_a_header_or_the_frozen_model_excludes_a_call_from_training() -> None:
    one = rollout(engine("a", "b", "c"))
    async with talking(one) as policy:
        await policy.chat.completions.create(model="policy", messages=HELLO, extra_headers={"X-Agentrl-Train": "0"})
        await policy.chat.completions.create(model="policy:frozen", messages=HELLO)
        await policy.chat.completions.create(model="policy", messages=HELLO)
    assert [each.is_trained for each in one.tree.generations] == [False, False, True]


async def test_stop_strings_and_max_tokens_are_honoured() -> None:
    fake = engine("x")
    async with talking(rollout(fake)) as policy:
        await policy.chat.completions.create(model="policy", messages=HELLO, max_tokens=7, stop=["END"])
        await policy.chat.completions.create(model="policy", messages=HELLO, temperature=0.3, top_p=0.5, seed=4)
    samplings = [sampling for _, _, sampling, _ in fake.requests]
    assert (samplings[0].max_tokens, samplings[0].stop) == (7, ("END",))
    assert (samplings[1].temperature, samplings[1].top_p) == (1.0, 1.0)  # sampling belongs to the run


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt-4o"}, "this gateway serves 'policy', not 'gpt-4o'"),
    ({"n": 2}, "n=2: Input should be 1"),
    ({"response_format": {"type": "xml"}}, 'response_format.type="xml"'),
    ({"tool_choice": "always", "tools": [ADD]}, "tool_choice=\"always\": Input should be 'auto', 'none' or 'required'"),
    ({"frequency_penalty": 0.5}, "the field frequency_penalty is not supported"),
    ({"logit_bias": {"5": 1}}, "the field logit_bias is not supported"),
    ({"extra_body": {"prompt_token_ids": [1, 2]}}, "the field prompt_token_ids is not supported"),
    ({"extra_body": {"top_k": 5}}, "the field top_k is not supported"),
    ({"top_logprobs": 5}, "top_logprobs requires logprobs=true"),
    (
        {"max_tokens": 7, "max_completion_tokens": 8},
        "max_tokens=7 and max_completion_tokens=8 set the same limit: send only one of them",
    ),
    ({"max_tokens": 0}, "max_tokens=0: Input should be greater than or equal to 1"),
    ({"messages": []}, "messages=[]: must contain at least one entry"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 'messages[0].role="robot"'),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "contains a part of type image_url, but the model supports text only",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name: required, but missing"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.name: required, but missing",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:40] for _, message in BAD])
async def test_a_request_that_cannot_be_answered_gets_one_clear_error(change: dict[str, Any], message: str) -> None:
    one = rollout(engine("x"))
    async with talking(one) as policy:
        with pytest.raises(openai.BadRequestError) as raised:
            await policy.chat.completions.create(**{"model": "policy", "messages": HELLO, **change})
    assert message in raised.value.message
    assert one.tree.generations == []


def asked(field: bytes) -> bytes:
    return b'{"model": "policy", "messages": [{"role": "user"}], ' + field + b"}"


DEEP = b'{"a":' * 1000 + b"1" + b"}" * 1000
GARBAGE: list[tuple[bytes, str]] = [
    (b"", "messages: required, but missing"),
    (b'{"model": "policy"', "the body is not valid JSON"),
    (b"\xff\xfe\xfa", "the body is not valid JSON"),
    (b"[" * 100_000, "the body is not valid JSON"),
    (b'["policy"]', 'the body=["policy"]: must be a JSON object'),
    (b'{"model": "policy", "messages": "hello"}', 'messages="hello": must be a list'),
    (b'{"model": "policy", "messages": ["hello"]}', 'messages[0]="hello": must be a JSON object'),
    (b'{"model": "policy", "messages": [{"role": "user", "content": [1, 2]}]}', "the model supports text only"),
    (b'{"model": "policy", "messages": [{"role": ["user"]}]}', 'messages[0].role=["user"]'),
    (b'{"model": ["policy"], "messages": [{"role": "user"}]}', 'model=["policy"]: Input should be a valid string'),
    (b'{"model": "policy", "messages": [{"role": "user"}], "tools": {"a": 1}}', 'tools={"a": 1}: must be a list'),
    (b'{"model": "policy", "messages": [{"role": "user"}], "stop": 5}', "stop=5: must be a list"),
    (b'{"model": "policy", "messages": [{"role": "user"}], "n": {"a": []}}', "n="),
    (
        asked(b'"tools": [{"type": "function", "function": {"name": "f", "parameters": ' + DEEP + b"}}]"),
        "recursion limit exceeded",
    ),
    (asked(b'"chat_template_kwargs": ' + DEEP), "recursion limit exceeded"),
]


@pytest.mark.parametrize(("body", "message"), GARBAGE, ids=[str(place) for place in range(len(GARBAGE))])
async def test_garbage_gets_one_clear_error(body: bytes, message: str) -> None:
    one = rollout(engine("x"))
    async with served(one) as (_, access):
        status, said = await post(f"{access.base_url}/chat/completions", body, access.api_key)
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")
    assert message in said["error"]["message"]
    assert one.tree.generations == []


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 404), ("/v1/embeddings", 404), ("/v1/models", 405), ("/elsewhere", 404)]
)
async def test_what_is_not_served_is_said_as_openai_says_it(path: str, status: int) -> None:
    async with served(rollout(engine("x"))) as (_, access):
        found, said = await post(access.base_url.removesuffix("/v1") + path, b"{}", access.api_key)
    assert found == status
    assert "it serves POST /v1/chat/completions" in said["error"]["message"]


async def test_ten_megabytes_that_the_gateway_may_read_pass_the_limit_of_tokens() -> None:
    short = RolloutSettings(max_prompt_tokens=1000, max_response_tokens=1000)
    one = rollout(engine("x"), settings=short)
    async with talking(one, max_request_bytes=2**25) as policy:
        with pytest.raises(openai.BadRequestError, match="leaves no room for a reply") as raised:
            await policy.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x" * 10_000_000}]
            )
    assert (raised.value.type, raised.value.code) == ("rollout_stopped", "token_limit")
    assert one.stopped is Ended.TOKEN_LIMIT


@pytest.mark.parametrize("key", ["", "guessed", "\u00fc"])
async def test_a_wrong_key_is_refused(key: str) -> None:
    one = rollout(engine("x"))
    async with served(one) as (_, access):
        body = json.dumps({"model": "policy", "messages": HELLO}).encode()
        status, said = await post(f"{access.base_url}/chat/completions", body, key)
    assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    assert one.tree.generations == []


async def test_half_a_character_in_a_message_is_refused() -> None:
    async with served(rollout(engine("x"))) as (_, access):
        body = b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'
        status, said = await post(f"{access.base_url}/chat/completions", body, access.api_key)
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")
    assert "the body is not valid JSON: unexpected end of hex escape" in said["error"]["message"]


async def post(url: str, body: bytes, key: str, method: str = "POST", **headers: str) -> tuple[int, Any]:
    """A request without a client library."""
    host, _, path = url.removeprefix("http://").partition("/")
    reader, writer = await asyncio.open_connection(*host.split(":"))
    lines = [f"{method} /{path} HTTP/1.1", f"host: {host}", f"authorization: Bearer {key}", "connection: close"]
    lines += [f"content-length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items())]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), json.loads(rest or "null")


async def test_a_client_that_goes_before_its_request_is_whole_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    one = rollout(engine("x"))
    async with served(one) as (_, access):
        host, _, path = access.base_url.removeprefix("http://").partition("/")
        _, writer = await asyncio.open_connection(*host.split(":"))
        head = [f"POST /{path}/chat/completions HTTP/1.1", f"host: {host}", f"authorization: Bearer {access.api_key}"]
        writer.write("\r\n".join([*head, "content-length: 1000", "", '{"model"']).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await post(f"{access.base_url}/models", b"", access.api_key, "GET"))[0] == 200
    assert one.tree.generations == []
    assert not caplog.records


async def test_without_the_setting_no_reward_is_taken_from_outside() -> None:
    one = rollout(engine("x"))
    async with served(one) as (gateway, access):
        for key in (access.api_key, gateway.key):
            status, said = await post(f"{access.base_url.removesuffix('/v1')}/reward", b'{"reward": 1}', key)
            assert (status, said["error"]["code"]) == (403, "reward_not_accepted")
    assert one.reward is None


async def test_keys_names_rewards_and_the_end() -> None:
    one = rollout(engine("x"))
    async with served(one, agent_rewards=True) as (gateway, access):
        url = access.base_url.removesuffix("/v1")
        assert (await post(f"{access.base_url}/models", b"", "guessed", "GET"))[0] == 401
        assert (await post(f"{url}x", b"", access.api_key, "GET"))[0] == 404
        assert await post(f"{url}/reward", b'{"reward": 0.5}', access.api_key) == (200, {"reward": 0.5})
        for body in (b'{"reward": NaN}', b'{"reward": 1e308}', b'{"reward": "much"}', b"", b"[1]", b"[" * 100_000):
            assert (await post(f"{url}/reward", body, access.api_key))[0] == 400
        root = url.split("/rollouts/")[0]
        name = url.rsplit("/", 1)[1]
        body = json.dumps({"model": "policy", "messages": HELLO}).encode()
        multiplexed = f"{root}/v1/chat/completions"
        assert (await post(multiplexed, body, access.api_key, **{"X-Session-ID": name}))[0] == 200
        assert (await post(f"{url}/finish", b"", access.api_key))[0] == 403
        status, state = await post(f"{url}/finish", b"", gateway.key)
        assert (status, state["generations"], state["finished"], state["reward"]) == (200, 1, True, 0.5)
        status, said = await post(f"{access.base_url}/chat/completions", body, access.api_key)
        assert (status, said["error"]["code"]) == (409, "rollout_finished")
        assert (await post(f"{url}/reward", b'{"reward": 1}', access.api_key))[0] == 409
        gateway.unregister_rollout(one)
        status, said = await post(f"{access.base_url}/chat/completions", body, access.api_key)
        assert (status, said["error"]["code"]) == (404, "rollout_not_found")
        assert said["error"]["message"] == f"the rollout '{access.name}' does not exist or has ended"


async def test_workers_are_handed_rollouts_by_the_key_of_the_gateway() -> None:
    one = rollout(engine("x"))
    async with served(one, agent_rewards=True) as (gateway, access):
        waiting = f"{gateway.url}/rollouts"
        assert (await post(waiting, b"", access.api_key))[0] == 401
        assert (await post(waiting, b"soon", gateway.key))[0] == 400
        assert (await post(waiting, b"", gateway.key))[0] == 204
        asking = asyncio.create_task(post(waiting, b'{"wait": 50}', gateway.key))
        offered = asyncio.create_task(gateway.offer_to_workers(one))
        status, told = await asking
        await offered
        assert (status, told["base_url"], told["api_key"], told["model"]) == (
            200,
            access.base_url,
            access.api_key,
            "policy",
        )
        assert (told["rollout_id"], told["group"]) == (access.name, 0)
        assert (told["problem"]["statement"], told["problem"].get("answer")) == ("2 + 3?", None)
        body = json.dumps({"model": "policy", "messages": HELLO}).encode()
        assert (await post(f"{told['base_url']}/chat/completions", body, gateway.key))[0] == 200
        place = f"{waiting}/{told['rollout_id']}"
        assert (await post(f"{place}/reward", b'{"reward": 1}', gateway.key))[0] == 200
        assert (await post(f"{place}/finish", b"[]", gateway.key))[0] == 400
        assert (await post(f"{place}/finish", b'{"error": "no tool"}', gateway.key))[0] == 200
        await one.finished_event.wait()
    assert (one.reward, one.abandon_reason) == (1.0, "the agent failed: no tool")


async def test_a_worker_that_waits_is_sent_away_at_the_end() -> None:
    async with served(rollout(engine("x"))) as (gateway, _):
        asking = asyncio.create_task(post(f"{gateway.url}/rollouts", b'{"wait": 50}', gateway.key))
        await asyncio.sleep(0)
        assert (await post(f"{gateway.url}/rollouts", b"", gateway.key))[0] == 204
    assert (await asking)[0] == 204


async def test_the_end_cancels_calls_under_way() -> None:
    started = asyncio.Event()

    async def never() -> None:
        started.set()
        await asyncio.Event().wait()

    fake = engine("x")
    fake._script = lambda trajectory_id, number: never()
    one = rollout(fake)
    async with talking(one) as policy:
        asking = asyncio.create_task(policy.chat.completions.create(model="policy", messages=HELLO))
        await started.wait()
        await one.reject_further_requests()
        with pytest.raises(openai.ConflictError):
            await asking
    assert fake.running == 0


async def test_limits_stop_a_rollout_with_a_reason() -> None:
    limits = RolloutSettings(max_turn_tokens=50, max_prompt_tokens=60, max_response_tokens=60)
    one = rollout(engine("x"), settings=limits, generations=1)
    async with talking(one) as policy:
        with pytest.raises(openai.BadRequestError) as raised:
            await policy.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 100}])
        assert (raised.value.type, raised.value.code) == ("rollout_stopped", "token_limit")
        await policy.chat.completions.create(model="policy", messages=HELLO)
        with pytest.raises(openai.BadRequestError) as raised:
            await policy.chat.completions.create(model="policy", messages=HELLO)
        assert (raised.value.type, raised.value.code) == ("rollout_stopped", "turn_limit")
    assert one.stopped is Ended.TURN_LIMIT


async def test_engine_trouble_is_to_be_tried_again() -> None:
    fake = engine("x")
    fake._script = lambda trajectory_id, number: EngineError("out of order")
    async with talking(rollout(fake)) as policy:
        with pytest.raises(openai.InternalServerError, match="out of order") as raised:
            await policy.chat.completions.create(model="policy", messages=HELLO)
    assert raised.value.status_code == 503


async def test_a_reply_whose_client_is_gone_is_not_delivered() -> None:
    release, started = asyncio.Event(), asyncio.Event()
    codec = chat_codec()[1]
    ready = speaking(codec, lambda number: "x", end=IM_END)._script

    async def late() -> Any:
        started.set()
        await release.wait()
        return ready("", 0)

    fake = engine("x")
    fake._script = lambda trajectory_id, number: late()
    one = rollout(fake)
    async with talking(one) as policy:
        asking = asyncio.create_task(policy.chat.completions.create(model="policy", messages=HELLO))
        await started.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        release.set()
        while not one.tree.generations or one.tree.generations[0].delivered is None:
            await asyncio.sleep(0.01)
        assert one.build_trajectories(Ended.ANSWERED)[0].is_excluded
        again = {"x-stainless-retry-count": "1"}
        await policy.chat.completions.create(model="policy", messages=HELLO, extra_headers=again)
    assert not one.build_trajectories(Ended.ANSWERED)[0].is_excluded  # the repetition got it
    assert (one.counts["replayed"], len(one.tree.generations)) == (1, 1)


async def test_an_address_that_is_taken_is_one_message() -> None:
    async with served(rollout(engine("x"))) as (_, access):
        port = int(access.base_url.split(":")[2].split("/")[0])
        with pytest.raises(SettingsError, match=f"cannot listen on .*gateway.port={port}"):
            await AgentGateway(AgentGatewaySettings(port=port)).open()


async def test_connections_are_limited_and_end_if_no_request_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(rollout(engine("hi")), max_connections=2) as (gateway, access):
        address = gateway.url.removeprefix("http://").split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(2)]
        refused, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionResetError):
            assert await refused.read() == b""
        for _, one in [*silent, (refused, writer)]:
            one.close()
        monkeypatch.setattr(server, "_IDLE_SECONDS", 0.05)
        reader, slow = await asyncio.open_connection(*address)
        slow.write(b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ")
        assert await reader.read() == b""
        slow.close()
        async with client(access.base_url, access.api_key, max_retries=2) as policy:
            reply = await policy.chat.completions.create(model="policy", messages=HELLO)
    assert reply.choices[0].message.content == "hi"


@pytest.mark.parametrize(
    "start",
    [
        b"GET /rollouts/x HTTP/1.1\r\nx-long: ",
        b"GET /",
        b"POST /rollouts/x/reward HTTP/1.1\r\nhost: gateway\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-long: ",
    ],
)
async def test_a_head_or_trailer_of_any_length_is_not_kept_in_memory(start: bytes) -> None:
    async with served(rollout(engine("hi")), max_request_bytes=2**20) as (gateway, _):
        _, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        writer.write(start)

        async def send_on() -> None:
            while True:
                writer.write(b"a" * 2**20)
                await writer.drain()

        with pytest.raises(ConnectionError):
            await asyncio.wait_for(send_on(), 20)
        writer.close()


async def test_a_client_that_does_not_read_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_SECONDS", 0.2)
    async with served(rollout(engine("hi"))) as (gateway, _):
        _, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"), limit=1)
        assert gateway._server is not None
        connections = gateway._server.server_state.connections
        head = b"POST /v1/messages HTTP/1.1\r\nhost: gateway\r\nx-session-id: " + b"\xe4" * 60_000
        request = head + b"\r\ncontent-length: 0\r\n\r\n"
        async with asyncio.timeout(20):
            for _ in range(150):  # the replies, which quote the id, are larger than the buffers of the connection
                writer.write(request)
            while not connections:
                await asyncio.sleep(0)
            while connections:
                await asyncio.sleep(0.05)
        writer.close()


async def test_a_connection_is_kept_after_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IDLE_SECONDS", 1.0)
    async with served(rollout(engine("hi"))) as (gateway, _):
        reader, writer = await asyncio.open_connection(*gateway.url.removeprefix("http://").split(":"))
        for _ in range(3):  # longer than a silent connection is kept, but not since the last reply
            await asyncio.sleep(0.6)
            writer.write(b"GET /rollouts/x HTTP/1.1\r\nhost: gateway\r\n\r\n")
            assert (await reader.read(4096)).startswith(b"HTTP/1.1 404")
        writer.close()
