"""Sessions over HTTP: each belongs to one runner, runs one program at a time, and ends with the runner."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.slow


async def opened(gateway) -> str:
    answer = await gateway.client.post("/v1/sessions", json={})
    assert answer.status_code == 201
    return answer.json()["session"]


async def ran(gateway, session: str, program: str):
    return await gateway.client.post(f"/v1/sessions/{session}/execute", json={"program": program})


async def test_a_session_keeps_its_state(gateway):
    session = await opened(gateway)
    assert [(await ran(gateway, session, p)).json()["stdout"] for p in "ab"] == ["a", "a|b"]


async def test_a_fork_has_the_state_and_goes_its_own_way(gateway):
    session = await opened(gateway)
    await ran(gateway, session, "a")
    fork = (await gateway.client.post(f"/v1/sessions/{session}/fork", json={})).json()["session"]
    assert (await ran(gateway, fork, "b")).json()["stdout"] == "a|b"
    assert (await ran(gateway, session, "c")).json()["stdout"] == "a|c"


async def test_sessions_are_not_to_be_guessed(gateway):
    session = await opened(gateway)
    assert len(session) >= 20
    assert (await ran(gateway, "s1", "a")).status_code == 404


async def test_a_closed_session_is_gone_and_may_be_closed_again(gateway, runner):
    session = await opened(gateway)
    for _ in range(2):
        assert (await gateway.client.delete(f"/v1/sessions/{session}")).status_code == 204
    assert runner.sandbox.sessions == {}
    answer = await ran(gateway, session, "a")
    assert (answer.status_code, answer.json()["error"]) == (404, "UnknownSessionError")


async def test_a_session_that_was_never_opened_cannot_be_closed(gateway):
    assert (await gateway.client.delete("/v1/sessions/never")).status_code == 404


async def test_a_session_stays_at_its_runner(sockets, start_runner, running_gateway, until):
    runners = [await start_runner(name, workers=4) for name in ("a", "b")]
    async with running_gateway(sockets) as gateway:
        await until(lambda: gateway.pool.registry.runner_count == 2)
        session = await opened(gateway)
        home = next(runner for runner in runners if runner.sandbox.sessions)
        waiting = [asyncio.ensure_future(gateway.run("wait")) for _ in range(4)]
        await until(lambda: gateway.pool.registry.in_flight == 4)
        assert (await ran(gateway, session, "here")).json()["stdout"] == "here"
        assert "here" in home.sandbox.started
        for runner in runners:
            runner.sandbox.release.set()
        await asyncio.gather(*waiting)


async def test_programs_of_one_session_run_one_after_the_other(gateway, runner, until):
    session = await opened(gateway)
    calls = [asyncio.ensure_future(ran(gateway, session, "wait")), asyncio.ensure_future(ran(gateway, session, "b"))]
    await until(lambda: gateway.gateway.calls == 2)
    assert runner.sandbox.started == ["wait"]
    runner.sandbox.release.set()
    assert [(await call).json()["stdout"] for call in calls] == ["wait", "wait|b"]


async def test_it_ends_with_its_runner(sockets, start_runner, running_gateway, until):
    runner = await start_runner("a")
    async with running_gateway(sockets) as gateway:
        session = await opened(gateway)
        await runner.kill()
        await until(lambda: not gateway.pool.registry.links)
        assert (await ran(gateway, session, "a")).status_code == 404


async def test_runners_end_the_sessions_of_a_gateway_that_goes(sockets, runner, running_gateway, until):
    async with running_gateway(sockets) as gateway:
        await opened(gateway)
        assert len(runner.sandbox.sessions) == 1
    await until(lambda: runner.sandbox.sessions == {})
