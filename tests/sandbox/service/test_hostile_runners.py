"""Invalid messages of runners. The gateway disconnects such a runner and continues to serve requests."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl_sandbox.call import FrameBuffer, FrameError, pack_frame
from agentrl_sandbox.client import SandboxSettings
from agentrl_sandbox.service import links
from agentrl_sandbox.types import PROPERTIES, Isolation

pytestmark = pytest.mark.slow

HELLO = links.hello_header(SandboxSettings(workers=4), Isolation(layers=dict.fromkeys(PROPERTIES, "x"), mode="root"))
DONE = {"op": "execution", "outcome": "ok", "exit_code": 0, "seconds": 0.1, "truncated": False, "files": []}
DONE |= {"session_ended": False}

Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted_runner(path: Path, reply: Reply, hello: bytes | None = None) -> AsyncIterator[list[int]]:
    """Run a runner that answers each request with ``reply``. Yields a list with one entry per connection."""
    connections: list[int] = []

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        connections.append(1)
        writer.write(pack_frame(HELLO) if hello is None else hello)
        frames = FrameBuffer()
        try:
            while data := await reader.read(65536):
                for header, _ in frames.feed(data):
                    await reply(header, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield connections
    finally:
        server.close()
        await asyncio.gather(*(task for task in serving if task is not None))


def answer(**changes: object) -> Callable[[dict[str, Any]], bytes]:
    return lambda request: pack_frame({**DONE, "id": request["id"], **changes}, b"out", b"err")


def raw(header: bytes, body: bytes = b"") -> Callable[[dict[str, Any]], bytes]:
    return lambda request: struct.pack("!II", len(header) + len(body), len(header)) + header + body


BREACHES: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "a frame larger than any may be": lambda request: struct.pack("!II", 1 << 30, 10),
    "a header longer than its frame": lambda request: struct.pack("!II", 4, 400) + b"{}{}",
    "no JSON": raw(b"{nonsense"),
    "no object": raw(b"[1, 2]"),
    "nesting without end": raw(b"[" * 100_000),
    "sizes that do not add up": raw(json.dumps({**DONE, "id": 1, "blobs": [5, 5]}).encode(), b"12345"),
    "sizes below zero": raw(json.dumps({**DONE, "id": 1, "blobs": [-5, 10]}).encode(), b"12345"),
    "an unknown kind of message": answer(op="exec"),
    "an unknown outcome": answer(outcome="won"),
    "an exit code for a failure of the sandbox": answer(outcome="infrastructure_failure"),
    "no exit code for a program": answer(exit_code=None),
    "an exit code that no process has": answer(exit_code=1 << 40),
    "seconds that are no number": raw(b'{"op":"execution","id":1,"seconds":NaN}'),
    "text where a truth value belongs": answer(truncated="yes"),
    "a field too many": answer(reward=1),
    "files without contents": answer(files=["a"]),
    "an answer that nobody asked for": lambda request: answer()({"id": request["id"] + 7}),
    "two answers": lambda request: answer()(request) * 2,
    "a second hello": lambda request: pack_frame(HELLO),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_a_runner_that_violates_the_protocol_is_disconnected_and_others_serve(
    sockets, start_runner, running_gateway, until, breach
):
    async def reply(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(BREACHES[breach](request))

    async with scripted_runner(sockets / "bad.sock", reply) as connections, running_gateway(sockets) as gateway:
        first = (await gateway.run("p")).json()
        assert first["outcome"] == ("ok" if breach == "two answers" else "infrastructure_failure")
        await until(lambda: len(connections) > 1)  # it was dropped, and may try again
        await start_runner("good", workers=64)
        await until(lambda: any(link.name == "good.sock" for link in gateway.pool.registry.links.values()))
        calls = await asyncio.gather(*(gateway.run(f"p{i}") for i in range(8)))
        assert sum(call.json()["outcome"] == "ok" for call in calls) >= 4


@pytest.mark.parametrize(
    "hello",
    [
        pack_frame({**HELLO, "workers": 0}),
        pack_frame({**HELLO, "workers": 10**9}),
        pack_frame({**HELLO, "layers": "all"}),
        pack_frame({**HELLO, "limits": {"timeout": "1"}}),
        pack_frame({"op": "stopping"}),
        b"SSH-2.0-OpenSSH\r\n" * 10,
    ],
)
async def test_a_runner_without_hello_gets_no_programs(sockets, start_runner, running_gateway, hello):
    asked: list[object] = []

    async def reply(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(request)

    await start_runner("good")
    async with scripted_runner(sockets / "bad.sock", reply, hello), running_gateway(sockets) as gateway:
        assert [(await gateway.run("p")).json()["stdout"] for _ in range(3)] == ["p"] * 3
        assert list(gateway.pool.registry.links) == ["good.sock"]
    assert asked == []


async def test_a_runner_that_takes_a_program_and_goes_away_fails_it_once(sockets, running_gateway):
    asked: list[object] = []

    async def reply(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        asked.append(request)
        writer.transport.abort()

    async with scripted_runner(sockets / "bad.sock", reply), running_gateway(sockets) as gateway:
        assert (await gateway.run("p")).json()["outcome"] == "infrastructure_failure"
    assert len(asked) == 1


async def test_other_files_in_the_directory_are_ignored(sockets, start_runner, running_gateway):
    (sockets / "file.sock").write_text("x")
    (sockets / "link.sock").symlink_to("/run/other.sock")
    (sockets / "folder.sock").mkdir()
    await start_runner("good")
    async with running_gateway(sockets) as gateway:
        assert (await gateway.run("p")).json()["stdout"] == "p"
        assert list(gateway.pool.registry.links) == ["good.sock"]


async def test_a_socket_left_behind_is_passed_over_and_can_be_taken_again(sockets, start_runner, running_gateway):
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sockets / "one.sock"))
    async with running_gateway(sockets, runners=0) as gateway:
        await start_runner("one")
        assert (await gateway.run("p")).json()["stdout"] == "p"


async def test_output_that_is_no_text_is_replaced(sockets, running_gateway):
    async def reply(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(pack_frame({**DONE, "id": request["id"]}, b"\xff\xfe", b"\x00"))

    async with scripted_runner(sockets / "odd.sock", reply), running_gateway(sockets) as gateway:
        ran = (await gateway.run("p")).json()
    assert (ran["stdout"], ran["stderr"]) == ("\ufffd\ufffd", "\x00")


def test_frames_are_bounded_by_the_reader():
    with pytest.raises(FrameError):
        FrameBuffer(10).feed(pack_frame({"id": 1}, b"x" * 10))
