"""The client of ``http://`` with real gateways and controlled or real runners."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agentrl_sandbox.client import (
    ClosedError,
    Outcome,
    RefusedError,
    SandboxSettings,
    StartError,
    UnisolatedError,
    UnknownSessionError,
    open_sandbox,
)

pytestmark = pytest.mark.slow


def settings(gateway, **fields: object) -> SandboxSettings:
    return SandboxSettings(**{"url": gateway.url, "token": "the-token", "retry_deadline": 30.0, **fields})


@asynccontextmanager
async def opened(gateway, **fields: object) -> AsyncIterator:
    sandbox = await open_sandbox(settings(gateway, **fields))
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def test_it_runs_programs_and_knows_the_isolation(gateway):
    async with opened(gateway) as sandbox:
        ran = await sandbox.execute("p", stdin="in", files={"a": b"\x00\xff"}, fetch_files=["a", "b"])
        assert (ran.outcome, ran.stdout, ran.exit_code, ran.files) == (Outcome.OK, "pin", 0, {"a": b"\x00\xff"})
        assert sandbox.isolation.missing == ()


async def test_the_token_comes_from_the_environment_too(gateway, monkeypatch):
    monkeypatch.setenv("SANDBOX_TOKEN", "the-token")
    async with opened(gateway, token=None) as sandbox:
        assert (await sandbox.execute("p")).stdout == "p"


@pytest.mark.parametrize("token", ["wrong", "none"])
async def test_a_wrong_token_is_refused_when_it_opens(gateway, token):
    with pytest.raises(RefusedError, match="SANDBOX_TOKEN"):
        await open_sandbox(settings(gateway, token=token))


async def test_the_token_is_not_written_out():
    held = SandboxSettings(url="http://localhost:1", token="secret-token")
    assert "secret-token" not in repr(held) + held.model_dump_json()


async def test_a_property_that_a_runner_lacks_is_refused_unless_allowed(gateway, runner, until):
    layers = dict(gateway.pool.isolation.layers)
    runner.hello["layers"] = {**layers, "no_network": None}
    for connection in list(runner.service.gateways):
        connection.close()
    await until(lambda: gateway.pool.registry.runner_count and gateway.pool.isolation.missing)
    with pytest.raises(UnisolatedError, match="no_network"):
        await open_sandbox(settings(gateway))
    async with opened(gateway, allow_unisolated=True) as sandbox:
        assert sandbox.isolation.missing == ("no_network",)


async def test_a_limit_that_is_not_the_services_is_refused(gateway):
    async with opened(gateway, memory_mb=512):
        pass
    with pytest.raises(StartError, match="memory_mb=512, not 100"):
        await open_sandbox(settings(gateway, memory_mb=100))


async def test_an_address_without_a_service_is_named():
    with pytest.raises(StartError, match="no sandbox is ready"):
        await open_sandbox(SandboxSettings(url="http://127.0.0.1:9", retry_deadline=0.2))


async def test_sessions(gateway):
    async with opened(gateway) as sandbox:
        session = await sandbox.open_session()
        await sandbox.execute("a", session=session)
        fork = await sandbox.fork_session(session)
        assert (await sandbox.execute("b", session=fork)).stdout == "a|b"
        await sandbox.close_session(session)
        await sandbox.close_session(session)
        with pytest.raises(UnknownSessionError):
            await sandbox.execute("c", session=session)


@pytest.mark.parametrize("wrong", [{"timeout": 0}, {"timeout": 4000}, {"files": {"a" * 5000: b""}}])
async def test_impossible_arguments_raise(gateway, wrong):
    async with opened(gateway) as sandbox:
        with pytest.raises(ValueError, match=r"timeout|422"):
            await sandbox.execute("p", **wrong)


async def test_cancelling_a_call_kills_its_program(gateway, runner, until):
    async with opened(gateway) as sandbox:
        call = asyncio.ensure_future(sandbox.execute("wait"))
        await until(lambda: "wait" in runner.sandbox.started)
        call.cancel()
        await until(lambda: runner.sandbox.cancelled == ["wait"])


async def test_a_full_queue_is_waited_out(sockets, runner, running_gateway, until):
    async with running_gateway(sockets, queue_limit=0) as gateway, opened(gateway) as sandbox:
        first = [asyncio.ensure_future(sandbox.execute("wait")) for _ in range(2)]
        await until(lambda: runner.sandbox.started.count("wait") == 2)
        late = asyncio.ensure_future(sandbox.execute("late"))
        await until(lambda: b'refused_total{status="429"}' in gateway.gateway.metrics.render())
        runner.sandbox.release.set()
        assert [(await call).outcome for call in (*first, late)] == [Outcome.OK] * 3
        assert runner.sandbox.started.count("late") == 1


async def test_a_queue_that_stays_full_is_an_infrastructure_failure(sockets, runner, running_gateway, until):
    async with running_gateway(sockets, queue_limit=0) as gateway, opened(gateway, retry_deadline=1.0) as sandbox:
        first = [asyncio.ensure_future(sandbox.execute("wait", timeout=0.1)) for _ in range(2)]
        await until(lambda: runner.sandbox.started.count("wait") == 2)
        ran = await sandbox.execute("late", timeout=0.1)
        assert (ran.outcome, ran.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, None)
        assert "429" in ran.stderr
        runner.sandbox.release.set()
        await asyncio.gather(*first)
    assert "late" not in runner.sandbox.started


async def test_an_absent_service_is_named_at_once_and_once(sockets, runner, running_gateway, until, caplog):
    async with running_gateway(sockets) as gateway:
        sandbox = await open_sandbox(settings(gateway))

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "agentrl_sandbox.http"]

    calls = [asyncio.ensure_future(sandbox.execute("p")) for _ in range(5)]
    await until(said)
    assert [call.done() for call in calls] == [False] * 5
    await sandbox.close()
    assert {(await call).outcome for call in calls} == {Outcome.INFRASTRUCTURE_FAILURE}
    assert [f"{gateway.url} does not respond" in text for text in said()] == [True]


async def test_calls_survive_a_gateway_that_is_replaced(sockets, runner, running_gateway, until):
    """The first gateway ends while calls run and wait. Its successor has the same address."""

    relaying: set[asyncio.Task | None] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relaying.add(asyncio.current_task())
        try:
            there, out = await asyncio.open_connection("127.0.0.1", ports[-1])
        except OSError:
            writer.transport.abort()
            return

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while data := await source.read(65536):
                    target.write(data)
            except OSError:
                pass
            finally:
                target.transport.abort()

        await asyncio.gather(copy(reader, out), copy(there, writer))

    ports: list[int] = []
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with running_gateway(sockets) as first:
        ports.append(first.port)
        sandbox = await open_sandbox(settings(first, url=url))
        calls = [asyncio.ensure_future(sandbox.execute(f"wait{i}")) for i in range(5)]
        await until(lambda: len(runner.sandbox.started) == 3)  # `pass` and two of these
    runner.sandbox.release.set()
    async with running_gateway(sockets) as second:
        ports.append(second.port)
        done = await asyncio.gather(*calls)
        assert sorted(d.stdout for d in done) == [f"wait{i}" for i in range(5)]
        await sandbox.close()
    server.close()
    await asyncio.gather(*(task for task in relaying if task is not None))


GOOD = {"outcome": "ok", "stdout": "x", "stderr": "", "exit_code": 0, "seconds": 0, "truncated": False, "files": {}}
READY = {"isolation": {"mode": "root", "layers": {}}, "limits": {}}


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Run a service that answers requests with these bodies in order. Yields its address and the received bodies."""
    left = list(answers)
    asked: list[bytes] = []
    serving: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving[writer] = asyncio.current_task()
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head.lower())
                asked.append(await reader.readexactly(int(length[1]) if length else 0))
                body = left.pop(0)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
    finally:
        server.close()
        for writer in serving:
            writer.close()
        await asyncio.gather(*(task for task in serving.values() if task is not None))


@pytest.mark.parametrize("unreadable", [b'{"outcome": "won"}', b"no JSON", b'"\xff"'])
async def test_a_request_is_repeated_after_an_unreadable_answer(unreadable):
    ready, good = json.dumps(READY).encode(), json.dumps(GOOD).encode()
    async with answering(ready, good, unreadable, good) as (url, asked):
        sandbox = await open_sandbox(SandboxSettings(url=url, allow_unisolated=True))
        assert (await sandbox.execute("p", request_id="x")).stdout == "x"
        assert [json.loads(body)["request_id"] for body in asked[2:]] == ["x", "x"]
        await sandbox.close()


async def test_a_limit_that_the_service_does_not_tell_is_refused():
    async with answering(json.dumps(READY).encode()) as (url, _):
        with pytest.raises(StartError, match=r"does not report memory_mb \(required: 100\)"):
            await open_sandbox(SandboxSettings(url=url, allow_unisolated=True, memory_mb=100))


async def test_a_closed_sandbox_says_so(gateway):
    sandbox = await open_sandbox(settings(gateway))
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(ClosedError):
        await sandbox.execute("p")


async def test_closing_ends_what_runs_as_infrastructure_failures(gateway, runner, until):
    sandbox = await open_sandbox(settings(gateway))
    calls = [asyncio.ensure_future(sandbox.execute("wait")) for _ in range(3)]
    await until(lambda: runner.sandbox.started.count("wait") == 2)
    await sandbox.close()
    assert [(await call).outcome for call in calls] == [Outcome.INFRASTRUCTURE_FAILURE] * 3
    await until(lambda: runner.sandbox.cancelled == ["wait"] * 2)


async def test_thousands_of_calls_in_flight(sockets, start_runner, running_gateway):
    await start_runner("many", workers=16)
    async with running_gateway(sockets, queue_limit=200) as gateway, opened(gateway) as sandbox:
        done = await asyncio.gather(*(sandbox.execute(f"p{i}") for i in range(1500)))
    assert [d.stdout for d in done] == [f"p{i}" for i in range(1500)]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "docker://", "local:/", "http://host/path", "127.0.0.1:80"])
def test_other_addresses_are_refused_with_the_valid_ones(url):
    with pytest.raises(ValueError, match="valid: local://, docker://IMAGE, http://HOST:PORT"):
        SandboxSettings(url=url)
