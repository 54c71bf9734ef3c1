"""Checks of requests: token, Host, Origin, content type, size."""

from __future__ import annotations

import asyncio
import contextlib
import stat
from pathlib import Path

import pytest

from agentrl_sandbox.service.gateway import read_or_create_token
from agentrl_sandbox.settings import GatewaySettings, SandboxSettings, ServiceSettingsError, read_settings

JSON = {"Content-Type": "application/json"}
BODY = b'{"program": "p"}'


async def post(gateway, **headers):
    wanted = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gateway.client.post("/v1/execute", content=BODY, headers={**JSON, **wanted})


async def test_the_right_token_is_accepted(gateway):
    assert (await post(gateway)).status_code == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "the-token", "bearer the-token", "Bearer the-token "])
async def test_a_wrong_token_is_401_and_nothing_runs(gateway, runner, header):
    answer = await post(gateway, Authorization=header.rstrip() + ("x" if header.endswith(" ") else ""))
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert runner.sandbox.started == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/execute"),
        ("POST", "/v1/sessions"),
        ("POST", "/v1/sessions/x/execute"),
        ("POST", "/v1/sessions/x/fork"),
        ("DELETE", "/v1/sessions/x"),
        ("POST", "/run_code"),
        ("GET", "/metrics"),
        ("POST", "//v1/execute"),
        ("POST", "/health/../v1/execute"),
    ],
)
async def test_every_endpoint_that_does_something_asks_for_the_token(gateway, runner, method, path):
    answer = await gateway.client.request(method, path, content=BODY, headers={**JSON, "Authorization": ""})
    assert answer.status_code == 401
    assert runner.sandbox.started == []


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "[::2]:80"])
async def test_a_foreign_host_is_refused(gateway, runner, host):
    assert (await post(gateway, Host=host)).status_code == 421
    assert runner.sandbox.started == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1:1"])
async def test_requests_to_allowed_hosts_are_served(gateway, host):
    assert (await post(gateway, Host=host)).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1"])
async def test_a_request_of_another_site_is_refused(gateway, runner, origin):
    assert (await post(gateway, Host="127.0.0.1:8080", Origin=origin)).status_code == 403
    assert runner.sandbox.started == []


async def test_a_request_of_our_own_page_is_served(gateway):
    assert (await post(gateway, Host="localhost:8080", Origin="http://localhost:8080")).status_code == 200


async def test_a_browser_that_says_cross_site_is_refused(gateway):
    assert (await post(gateway, Sec_Fetch_Site="cross-site")).status_code == 403


async def test_a_preflight_is_not_granted(gateway):
    headers = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    answer = await gateway.client.options("/v1/execute", headers=headers)
    assert answer.status_code in (403, 415)
    assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_only_json_is_taken(gateway, runner, kind):
    assert (await post(gateway, Content_Type=kind)).status_code == 415
    assert runner.sandbox.started == []


async def test_a_body_too_large_is_413_by_its_length_and_by_what_comes(gateway):
    big = b'{"program": "' + b"x" * 100_000 + b'"}'
    assert (await gateway.client.post("/v1/execute", content=big, headers=JSON)).status_code == 413

    async def pieces():
        for _ in range(20):
            yield big[:10_000]

    assert (await gateway.client.post("/v1/execute", content=pieces(), headers=JSON)).status_code == 413


async def closed(reader: asyncio.StreamReader) -> bytes:
    """Read until the gateway closes the connection."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("start", [b"", b"POST /v1/ex", b"\r\n"])
async def test_a_head_that_does_not_arrive_closes_its_connection(sockets, runner, running_gateway, start):
    async with running_gateway(sockets, receive_seconds=0.2) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(start)
        assert await asyncio.wait_for(closed(reader), 30) == b""
        writer.close()


@pytest.mark.parametrize("token", [b"the-token", b"wrong"])
async def test_a_body_that_does_not_arrive_closes_its_connection(sockets, runner, running_gateway, token, until):
    async with running_gateway(sockets, receive_seconds=0.2) as gateway:
        waiting = asyncio.ensure_future(gateway.run("wait"))  # a program may take longer than its request
        await until(lambda: runner.sandbox.started)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = b"POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(head + b"Authorization: Bearer " + token + b"\r\nContent-Length: 99\r\n\r\n{")
        answer = await asyncio.wait_for(closed(reader), 30)
        assert answer.startswith(b"HTTP/1.1 401") if token == b"wrong" else answer == b""
        writer.close()
        runner.sandbox.release.set()
        assert (await waiting).json()["stdout"] == "wait"
    assert runner.sandbox.started == ["wait"]


async def test_bytes_behind_a_request_do_not_end_its_answer(sockets, runner, running_gateway, until):
    body = b'{"program": "wait"}'
    head = b"POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += b"Authorization: Bearer the-token\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with running_gateway(sockets, receive_seconds=0.2) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head + body)
        await until(lambda: runner.sandbox.started)
        writer.write(b"\r\n")
        await writer.drain()
        later, silent = await asyncio.open_connection("127.0.0.1", gateway.port)
        assert await asyncio.wait_for(closed(later), 30) == b""  # the limit has passed for both connections
        silent.close()
        runner.sandbox.release.set()
        assert (await asyncio.wait_for(closed(reader), 30)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("part", [b"GET /" + b"x" * 65_536, b"GET / HTTP/1.1\r\nA: " + b"x" * 65_536])
async def test_a_head_without_an_end_is_not_kept(gateway, part):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    sent = 0
    with contextlib.suppress(ConnectionError):
        writer.write(part)
        while sent < 30 << 20:
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 65_536
    assert sent < 16 << 20  # what the two sockets hold
    assert await closed(reader) == b""
    writer.close()


async def test_two_hosts_in_one_request_are_refused(gateway, runner):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = (
        "POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nAuthorization: Bearer the-token\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + BODY)
    status = (await reader.read()).split()[1]
    writer.close()
    assert status == b"400"
    assert runner.sandbox.started == []


async def test_a_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(gateway, runner):
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = "POST /v1/execute HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer the-token\r\n"
    writer.write((head + "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{").encode())
    await writer.drain()
    writer.close()
    assert (await gateway.run("p")).json()["stdout"] == "p"
    assert runner.sandbox.started == ["p"]


def test_only_the_owner_can_read_a_generated_token(tmp_path):
    file = tmp_path / "token"
    token = read_or_create_token(file)
    assert len(token) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_or_create_token(file) == token


def test_without_a_file_every_start_has_another_token():
    assert read_or_create_token(None) != read_or_create_token(None)


def test_compose_yaml_stores_the_token_in_a_file():
    """compose.yaml sets this variable, and its users read the token from the file."""
    assert read_settings(GatewaySettings, {"SANDBOX_TOKEN_FILE": "/run/token"}, []).token_file == Path("/run/token")


def test_the_default_address_is_local():
    assert GatewaySettings().host == "127.0.0.1"


def test_hosts_are_those_named_and_this_machine():
    named = GatewaySettings(allowed_hosts="Sandbox.example, gateway")
    assert named.hosts == {"127.0.0.1", "localhost", "::1", "sandbox.example", "gateway"}
    assert "0.0.0.0" not in GatewaySettings(host="0.0.0.0").hosts


def test_settings_come_from_variables_and_arguments_which_win():
    environment = {"SANDBOX_PORT": "1", "SANDBOX_QUEUE_LIMIT": "2", "SANDBOX_HOST": "", "SANDBOX_MEMORY_MB": "3"}
    read = read_settings(GatewaySettings, environment, ["port=7"])
    assert (read.port, read.queue_limit, read.host) == (7, 2, "127.0.0.1")


@pytest.mark.parametrize("argument", ["prot=1", "port=x", "port=70000", "port"])
def test_wrong_settings_are_named(argument):
    with pytest.raises(ServiceSettingsError, match=argument.split("=")[0]):
        read_settings(GatewaySettings, {}, [argument])


def test_the_old_name_of_a_setting_is_refused_with_the_new_one():
    with pytest.raises(ServiceSettingsError, match=r"patience .* was renamed to retry_deadline"):
        read_settings(SandboxSettings, {}, ["patience=1"])
    with pytest.raises(ServiceSettingsError, match=r"standby .* was removed"):
        read_settings(SandboxSettings, {"SANDBOX_STANDBY": "true"}, [])
    with pytest.raises(ServiceSettingsError, match=r"batch_limit .* was removed"):
        read_settings(GatewaySettings, {}, ["batch_limit=7"])
    with pytest.raises(ServiceSettingsError, match=r"SANDBOX_PATIENCE\) was renamed to retry_deadline"):
        read_settings(SandboxSettings, {"SANDBOX_PATIENCE": "1"}, [])
