"""The gateway's answers and queue, and the loss of runners and clients."""

from __future__ import annotations

import asyncio
import base64

import pytest

from agentrl_sandbox.bookkeeping import SharedRuns
from agentrl_sandbox.call import Call
from agentrl_sandbox.client import ClosedError, Execution, Outcome
from agentrl_sandbox.service.links import NotSentError, RunnerLink
from agentrl_sandbox.service.pool import RunnerPool


async def test_a_program_goes_to_a_runner_and_its_end_comes_back(gateway):
    answer = await gateway.run(
        "hello ", stdin="you", files={"a": base64.b64encode(b"\x00").decode()}, fetch_files=["a"]
    )
    assert answer.status_code == 200
    assert answer.json() == {
        "outcome": "ok",
        "stdout": "hello you",
        "stderr": "",
        "exit_code": 0,
        "seconds": 0.5,
        "truncated": False,
        "files": {"a": "AA=="},
        "session_ended": False,
    }


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"program": 1},
        {"program": "p", "timeout": 0},
        {"program": "p", "timeout": 3601},
        {"program": "p", "files": {"a": "!"}},
        {"program": "p", "tiemout": 1},
        {"program": "p", "request_id": ""},
        {"program": "impossible"},
    ],
)
async def test_impossible_arguments_are_422(gateway, body):
    assert (await gateway.client.post("/v1/execute", json=body)).status_code == 422


@pytest.mark.parametrize("path", ["/v1/execute", "/run_code"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "-1e999"])
async def test_times_that_are_no_numbers_are_422(gateway, runner, path, value):
    names = {"/v1/execute": ("program", "timeout"), "/run_code": ("code", "run_timeout")}
    text, seconds = names[path]
    body = f'{{"{text}": "p", "language": "python", "{seconds}": {value}}}'
    if path == "/v1/execute":
        body = body.replace('"language": "python", ', "")
    answer = await gateway.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert seconds in answer.json()["detail"][-1]["loc"]
    assert runner.sandbox.started == []


@pytest.mark.parametrize("path", ["/v1/execute", "/run_code"])
@pytest.mark.parametrize(
    "fields",
    [r'"files": {"\ud800": ""}', r'"files": {"\ud800": 1}', r'"fetch_files": ["\ud800"]', '"files": {"a": NaN}'],
)
async def test_names_that_no_encoding_has_are_422(gateway, runner, path, fields):
    program = '"program": "p"' if path == "/v1/execute" else '"code": "p", "language": "python"'
    body = f"{{{program}, {fields}}}"
    answer = await gateway.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert runner.sandbox.started == []


async def test_bodies_that_break_parsers_are_refused(gateway):
    for body in (b"[" * 50_000, b'{"timeout": ' + b"9" * 10_000 + b"}", b"\xff", b""):
        answer = await gateway.client.post("/v1/execute", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), body[:20]


async def test_text_that_no_encoding_has_reaches_the_runner(gateway, runner):
    content = b'{"program": "\\ud800"}'
    headers = {"Content-Type": "application/json"}
    assert (await gateway.client.post("/v1/execute", content=content, headers=headers)).status_code == 200
    assert runner.sandbox.started == ["\ud800"]


async def test_equal_requests_with_one_id_share_one_run_while_it_runs_and_after(gateway, runner, until):
    calls = [asyncio.ensure_future(gateway.run("wait", request_id="x")) for _ in range(3)]
    await until(lambda: gateway.gateway.calls == 3)
    runner.sandbox.release.set()
    answers = [(await call).json() for call in calls] + [(await gateway.run("wait", request_id="x")).json()]
    assert answers == [answers[0]] * 4
    assert runner.sandbox.started == ["wait"]


async def test_one_id_for_two_programs_mixes_nothing_up(gateway):
    answers = [(await gateway.run(program, request_id="x")).json()["stdout"] for program in ("a", "b")]
    assert answers == ["a", "b"]


async def test_an_error_of_a_runner_is_answered_immediately(gateway, runner):
    answer = (await gateway.run("bug")).json()
    assert answer["outcome"] == "infrastructure_failure"
    assert "RuntimeError: nobody thought of this" in answer["stderr"]
    assert (await gateway.run("p")).json()["outcome"] == "ok"
    assert gateway.pool.registry.in_flight == 0


async def test_an_infrastructure_failure_is_not_remembered(gateway, runner):
    for _ in range(2):
        assert (await gateway.run("broken", request_id="x")).json()["outcome"] == "infrastructure_failure"
    assert runner.sandbox.started == ["broken"] * 2


async def test_a_full_queue_is_429_with_retry_after(sockets, runner, running_gateway, until):
    async with running_gateway(sockets, queue_limit=1) as gateway:
        calls = [asyncio.ensure_future(gateway.run("wait")) for _ in range(3)]  # two run, one waits
        await until(lambda: len(gateway.pool.queue) == 1)
        refused = await gateway.run("one too many")
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        runner.sandbox.release.set()
        assert [(await call).status_code for call in calls] == [200] * 3
        assert (await gateway.run("now there is room")).status_code == 200
    assert "one too many" not in runner.sandbox.started


async def test_a_client_that_leaves_kills_its_program(gateway, runner, until):
    call = asyncio.ensure_future(gateway.run("wait"))
    await until(lambda: runner.sandbox.started)
    call.cancel()
    await until(lambda: runner.sandbox.cancelled == ["wait"])
    await until(lambda: gateway.pool.registry.in_flight == 0)


async def test_a_client_that_leaves_while_waiting_never_starts_its_program(gateway, runner, until):
    running = [asyncio.ensure_future(gateway.run("wait")) for _ in range(2)]
    await until(lambda: len(runner.sandbox.started) == 2)
    leaving = asyncio.ensure_future(gateway.run("never"))
    await until(lambda: len(gateway.pool.queue) == 1)
    leaving.cancel()
    await until(lambda: len(gateway.pool.queue) == 0)
    runner.sandbox.release.set()
    assert [(await call).status_code for call in running] == [200] * 2
    assert (await gateway.run("next")).status_code == 200
    assert runner.sandbox.started == ["wait", "wait", "next"]


async def test_one_of_two_calls_that_share_a_run_may_be_cancelled(gateway, runner, until):
    staying, leaving = (asyncio.ensure_future(gateway.run("wait", request_id="x")) for _ in range(2))
    await until(lambda: gateway.gateway.calls == 2)
    leaving.cancel()
    await until(lambda: gateway.gateway.calls == 1)
    runner.sandbox.release.set()
    assert (await staying).json()["stdout"] == "wait"
    assert runner.sandbox.cancelled == []


async def test_programs_go_to_the_runner_with_the_fewest_in_flight(sockets, start_runner, running_gateway, until):
    runners = [await start_runner(name, workers=4) for name in ("a", "b")]
    async with running_gateway(sockets) as gateway:
        await until(lambda: gateway.pool.registry.runner_count == 2)
        calls = [asyncio.ensure_future(gateway.run("wait")) for _ in range(4)]
        await until(lambda: sum(len(runner.sandbox.started) for runner in runners) == 4)
        assert [len(runner.sandbox.started) for runner in runners] == [2, 2]
        for runner in runners:
            runner.sandbox.release.set()
        await asyncio.gather(*calls)


async def test_a_runner_that_dies_fails_what_ran_there_and_the_queue_goes_on(
    sockets, start_runner, running_gateway, until
):
    first = await start_runner("a", workers=2)
    async with running_gateway(sockets) as gateway:
        running = [asyncio.ensure_future(gateway.run("wait", request_id=f"r{i}")) for i in range(2)]
        await until(lambda: len(first.sandbox.started) == 2)
        queued = [asyncio.ensure_future(gateway.run(f"q{i}", request_id=f"q{i}")) for i in range(3)]
        await until(lambda: len(gateway.pool.queue) == 3)
        await first.kill()
        assert [(await call).json()["outcome"] for call in running] == ["infrastructure_failure"] * 2
        second = await start_runner("b", workers=2)
        assert [(await call).json()["stdout"] for call in queued] == ["q0", "q1", "q2"]
    assert first.sandbox.started == ["wait", "wait"]
    assert sorted(second.sandbox.started) == ["q0", "q1", "q2"]


async def test_a_stopping_runner_finishes_its_programs_and_gets_no_more(sockets, start_runner, running_gateway, until):
    old, new = await start_runner("old"), await start_runner("new")
    async with running_gateway(sockets) as gateway:
        await until(lambda: gateway.pool.registry.runner_count == 2)
        calls = [asyncio.ensure_future(gateway.run("wait")) for _ in range(4)]
        await until(lambda: gateway.pool.registry.in_flight == 4)
        draining = asyncio.ensure_future(old.service.drain())
        await until(lambda: gateway.pool.registry.runner_count == 1)
        old.sandbox.release.set()
        await draining
        new.sandbox.release.set()
        assert [(await call).json()["outcome"] for call in calls] == ["ok"] * 4
        assert (await gateway.run("later")).json()["stdout"] == "later"
    assert "later" in new.sandbox.started


async def test_a_request_in_transit_to_a_stopping_runner_is_answered(sockets, start_runner):
    runner = await start_runner("old")
    link = await RunnerLink.connect(str(sockets / "old.sock"), "old", lambda link: None)
    header, blobs = Call(program="on its way").frame()
    call = asyncio.ensure_future(link.request({"op": "execute", **header}, blobs, timeout=5.0))
    await asyncio.sleep(0)  # it is written, and the runner has not read it
    assert not runner.sandbox.started
    await runner.service.drain()
    assert runner.sandbox.started == ["on its way"]
    assert (await call).outcome == "ok"
    with pytest.raises(NotSentError, match="it stopped"):
        await link.request({"op": "execute", **header}, blobs, timeout=5.0)


async def test_draining_finishes_running_calls_and_refuses_others(gateway, runner, until):
    call = asyncio.ensure_future(gateway.run("wait"))
    await until(lambda: runner.sandbox.started)
    gateway.server.handle_exit(15, None)
    await until(lambda: gateway.gateway.draining)
    refused = await gateway.run("late")
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert (await gateway.client.get("/ready")).status_code == 503
    assert (await gateway.client.get("/health")).status_code == 200
    runner.sandbox.release.set()
    assert (await call).json()["stdout"] == "wait"
    await until(lambda: gateway.server.should_exit)


async def test_ready_tells_isolation_and_limits_of_all_runners(sockets, start_runner, running_gateway, until):
    await start_runner("good")
    weak = await start_runner("weak")
    weak.hello["layers"] = {**weak.hello["layers"], "no_network": None}
    weak.hello["limits"] = {**weak.hello["limits"], "memory_mb": 100.0}
    async with running_gateway(sockets) as gateway:
        await until(lambda: gateway.pool.registry.runner_count == 2)
        state = (await gateway.client.get("/ready")).json()
    assert (state["ready"], state["runners"], state["workers"]) == (True, 2, 4)
    assert state["isolation"]["layers"]["no_network"] is None
    assert state["isolation"]["layers"]["bounded_time"] == "a layer"
    assert state["limits"]["memory_mb"] == 100.0


async def test_a_gateway_without_runners_is_healthy_but_not_ready(sockets, running_gateway):
    async with running_gateway(sockets, runners=0) as gateway:
        assert (await gateway.client.get("/health")).status_code == 200
        assert (await gateway.client.get("/ready")).status_code == 503


async def test_closing_a_pool_fails_waiting_calls(sockets):
    pool = RunnerPool(sockets, queue_limit=4, queue_seconds=60.0)
    pool.open()
    waiting = asyncio.ensure_future(pool.execute("p"))
    await asyncio.sleep(0)
    assert len(pool.queue) == 1
    await pool.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await pool.execute("p")


async def test_metrics_count(gateway):
    await gateway.run("p")
    await gateway.run("broken")
    text = (await gateway.client.get("/metrics")).text
    assert 'agentrl_sandbox_executions_total{outcome="ok"} 1.0' in text
    assert 'agentrl_sandbox_executions_total{outcome="infrastructure_failure"} 1.0' in text
    for line in ("queue_length 0.0", "running 0.0", "runners 1.0", "workers 2.0", "sessions 0.0"):
        assert f"agentrl_sandbox_{line}" in text
    assert "agentrl_sandbox_execution_seconds_count 2.0" in text


async def test_the_interface_describes_itself(gateway):
    paths = (await gateway.client.get("/openapi.json")).json()["paths"]
    assert {"/v1/execute", "/v1/sessions", "/run_code", "/ready"} <= set(paths)
    assert (await gateway.client.get("/docs")).status_code == 200


async def test_cached_results_are_limited_by_size():
    once, runs = SharedRuns(cache_bytes=5000), []

    async def run(key):
        runs.append(key)
        return Execution(
            outcome=Outcome.OK, stdout="x" * 1000, stderr="", exit_code=0, seconds=0.0, truncated=False, files={}
        )

    for key in "abcab":
        await once.run_or_join(key, lambda key=key: run(key))
    assert runs == ["a", "b", "c", "a", "b"]


def test_calls_that_differ_in_anything_have_different_digests():
    plain = Call(program="p", timeout=1.0)
    others = [
        Call(program="q", timeout=1.0),
        Call(program="p", timeout=2.0),
        Call(program="p", timeout=1.0, stdin="s"),
        Call(program="p", timeout=1.0, session="s"),
        Call(program="p", timeout=1.0, files={"a": b""}),
        Call(program="p", timeout=1.0, files={"a": b"x"}),
        Call(program="p", timeout=1.0, fetch_files=("a",)),
    ]
    assert len({call.digest() for call in (plain, *others)}) == 8
    assert plain.digest() == Call(program="p", timeout=1.0).digest()
