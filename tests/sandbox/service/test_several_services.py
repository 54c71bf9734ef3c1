"""Several services as one sandbox: real gateways with controlled runners, some of which end during calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from agentrl_envs.episode import UnavailableError
from agentrl_envs.execution import EpisodeSandbox
from agentrl_envs.settings import ExecutionSettings
from agentrl_sandbox.client import (
    BusyError,
    Outcome,
    Sandbox,
    SandboxSettings,
    StartError,
    UnisolatedError,
    UnknownSessionError,
    open_sandbox,
)
from agentrl_sandbox.several import SeveralSandboxes

from .conftest import RunningGateway, RunningRunner, running_gateway

pytestmark = pytest.mark.slow


class ReplaceableGateway:
    """A gateway with a runner. The address remains the same when the gateway is replaced."""

    def __init__(self, folder: Path, workers: int) -> None:
        folder.mkdir(mode=0o700)
        self.folder = folder
        self.runner = RunningRunner(folder, "one", workers)
        self.gateway: RunningGateway | None = None
        self.silent = False
        self._stack = AsyncExitStack()
        self._serving: set[asyncio.Task[None]] = set()
        self._doors: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        await self.runner.start()
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        await self.start()

    async def start(self) -> None:
        self.gateway = await self._stack.enter_async_context(running_gateway(self.folder))

    async def kill(self) -> None:
        """Abort all connections and accept no new ones."""
        self.gateway, gone = None, self._stack
        self._stack = AsyncExitStack()
        for door in list(self._doors):
            door.transport.abort()
        await gone.aclose()

    async def close(self) -> None:
        await self.kill()
        self._server.close()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self.runner.kill()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        if self.gateway is None:
            writer.transport.abort()
            return
        self._doors.add(writer)
        there, out = await asyncio.open_connection("127.0.0.1", self.gateway.port)
        await asyncio.gather(self._copy(reader, out), self._copy(there, writer))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                if not self.silent:
                    target.write(data)
        except OSError:
            pass
        finally:
            target.transport.abort()


@pytest.fixture(autouse=True)
def _frequent_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("_CHECK_EVERY", "_RECHECK_EVERY"):
        monkeypatch.setattr(f"agentrl_sandbox.several.{pause}", 0.2)


@pytest_asyncio.fixture
async def places(tmp_path: Path) -> AsyncIterator[list[ReplaceableGateway]]:
    made = [ReplaceableGateway(tmp_path / name, workers) for name, workers in (("a", 2), ("b", 6))]
    try:
        for place in made:
            await place.open()
        yield made
    finally:
        for place in made:
            place.runner.sandbox.release.set()
            await place.close()


def settings(places: list[ReplaceableGateway], **fields: object) -> SandboxSettings:
    own = {
        "url": [place.url for place in places],
        "token": "the-token",
        "retry_deadline": 30.0,
        "service_deadline": 0.3,
    }
    return SandboxSettings(**{**own, **fields})


@asynccontextmanager
async def opened(places: list[ReplaceableGateway], **fields: object) -> AsyncIterator[Sandbox]:
    sandbox = await open_sandbox(settings(places, **fields))
    try:
        yield sandbox
    finally:
        await sandbox.close()


def ran(place: ReplaceableGateway) -> list[str]:
    return [program for program in place.runner.sandbox.started if program != "pass"]


async def test_programs_are_shared_by_what_each_service_runs_at_once(places, until):
    first, second = places
    async with opened(places) as sandbox:
        assert isinstance(sandbox, SeveralSandboxes)
        assert sandbox.isolation.missing == ()
        calls = [asyncio.ensure_future(sandbox.execute(f"wait{i}")) for i in range(8)]
        await until(lambda: len(ran(first)) + len(ran(second)) == 8)
        assert [len(ran(place)) for place in places] == [2, 6]
        for place in places:
            place.runner.sandbox.release.set()
        assert sorted([(await call).stdout for call in calls]) == [f"wait{i}" for i in range(8)]


async def test_programs_of_a_lost_service_run_at_another(places, until):
    """Every program gets its result, and none fails."""
    first, second = places
    second.runner.sandbox.release.set()
    async with opened(places) as sandbox:
        calls = [asyncio.ensure_future(sandbox.execute(f"wait{i}")) for i in range(16)]
        await until(lambda: ran(first))
        await first.kill()
        done = await asyncio.gather(*calls)
        assert [one.stdout for one in done] == [f"wait{i}" for i in range(16)]
        assert {one.outcome for one in done} == {Outcome.OK}
        assert set(ran(first)) < set(ran(second))
        assert (await sandbox.execute("later")).stdout == "later"


async def test_a_recovered_service_is_checked_and_used_again(places, until, caplog):
    first, second = places
    async with opened(places) as sandbox:
        await first.kill()
        await until(lambda: f"the sandbox at {first.url} and its sessions were lost" in caplog.text)
        await sandbox.execute("alone")
        assert "alone" in ran(second)
        await first.start()
        await until(lambda: f"the sandbox at {first.url} has recovered" in caplog.text)
        assert first.runner.sandbox.started.count("pass") == 2
        held = [asyncio.ensure_future(sandbox.execute(f"wait{i}")) for i in range(8)]
        await until(lambda: len(ran(first)) == 2)
        for place in places:
            place.runner.sandbox.release.set()
        assert {(await call).outcome for call in held} == {Outcome.OK}


async def test_a_session_ends_with_its_service_and_is_no_result_of_the_policy(places, until):
    first, _ = places
    async with opened(places) as sandbox:
        sessions = [await sandbox.open_session() for _ in range(8)]
        for number, session in enumerate(sessions):
            await sandbox.execute(f"s{number}", session=session)
        there = {number for number in range(8) if f"s{number}" in ran(first)}
        assert 0 < len(there) < 8
        await first.kill()
        for number, session in enumerate(sessions):
            if number in there:
                with pytest.raises(UnknownSessionError, match=f"its service, {first.url}, was lost"):
                    await sandbox.execute("again", session=session)
            else:
                fork = await sandbox.fork_session(session)
                assert (await sandbox.execute("again", session=fork)).stdout == f"s{number}|again"
        await sandbox.close_session(sessions[min(there)])
        with pytest.raises(UnknownSessionError, match="never opened"):
            await sandbox.execute("p", session="no such one")


async def test_an_episode_whose_session_is_lost_is_unavailable(places, until):
    first, _ = places
    execution = ExecutionSettings(interpreter="session", sandbox_deadline=60.0)
    async with opened(places) as sandbox:
        episodes = [EpisodeSandbox(sandbox, execution) for _ in range(8)]
        for number, episode in enumerate(episodes):
            await episode.execute(f"e{number}")
        lost = [number for number in range(8) if f"e{number}" in ran(first)]
        assert 0 < len(lost) < 8
        await first.kill()
        for number, episode in enumerate(episodes):
            if number in lost:
                with pytest.raises(UnavailableError, match="the interpreter's session was lost"):
                    await episode.execute("more")
            else:
                assert (await episode.execute("more")).stdout == f"e{number}|more"
            await episode.close()


async def test_a_partition_is_noticed_by_a_deadline(places, until):
    """Connections stay open, but no data arrives."""
    first, second = places
    second.runner.sandbox.release.set()
    async with opened(places) as sandbox:
        calls = [asyncio.ensure_future(sandbox.execute(f"wait{i}")) for i in range(8)]
        await until(lambda: ran(first))
        first.silent = True
        done = await asyncio.gather(*calls)
        assert [one.stdout for one in done] == [f"wait{i}" for i in range(8)]
        assert len(ran(second)) == 8
        first.silent = False


async def test_when_all_are_gone_the_failure_names_each_within_the_deadline(places):
    async with opened(places, retry_deadline=0.5) as sandbox:
        for place in places:
            await place.kill()
        done = await sandbox.execute("p", timeout=0.1)
        assert (done.outcome, done.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, None)
        assert all(place.url in done.stderr for place in places)
        with pytest.raises(BusyError, match=r"no response within 0\.5 s: no sandbox is usable"):
            await sandbox.open_session()


async def test_calls_wait_for_the_first_service_that_comes_back(places):
    async with opened(places) as sandbox:
        for place in places:
            await place.kill()
        calls = [asyncio.ensure_future(sandbox.execute(f"p{i}")) for i in range(4)]
        await places[1].start()
        assert [(await call).stdout for call in calls] == [f"p{i}" for i in range(4)]


async def test_a_program_is_given_up_after_three_lost_services(places, until):
    """It ran three times at services that were lost, and does not run a fourth time."""
    async with opened(places) as sandbox:
        call = asyncio.ensure_future(sandbox.execute("wait"))
        for _ in range(3):
            await until(lambda: any(ran(place) for place in places))
            (place,) = [place for place in places if ran(place)]
            place.runner.sandbox.started.clear()
            await place.kill()
            await place.start()
        done = await call
        assert done.outcome is Outcome.INFRASTRUCTURE_FAILURE
        assert "gave up after 3 services were lost while running the program" in done.stderr
        assert (await sandbox.execute("p")).stdout == "p"


async def test_a_service_that_is_absent_at_the_start_may_join_later(places, until):
    first, second = places
    await first.kill()
    async with opened(places) as sandbox:
        await sandbox.execute("p")
        assert ran(second) == ["p"]
        await first.start()
        await until(lambda: first.runner.sandbox.started == ["pass"])


async def test_opening_fails_without_any_service(places):
    for place in places:
        await place.kill()
    with pytest.raises(StartError, match=r"no sandbox is ready at .*: http://\S+ \(.*\); http://\S+ \(.*\)"):
        await open_sandbox(settings(places, retry_deadline=0.3))


async def test_a_service_without_isolation_is_refused(places, until):
    first, _ = places
    assert first.gateway is not None
    registry = first.gateway.pool.registry
    first.runner.hello["layers"] = {**registry.isolation.layers, "no_network": None}
    for connection in list(first.runner.service.gateways):
        connection.close()
    await until(lambda: registry.runner_count and registry.isolation.missing)
    with pytest.raises(UnisolatedError, match="no_network"):
        await open_sandbox(settings(places))
    async with opened(places, allow_unisolated=True) as sandbox:
        assert sandbox.isolation.missing == ("no_network",)


async def test_closing_ends_running_and_waiting_calls(places, until):
    sandbox = await open_sandbox(settings(places))
    calls = [asyncio.ensure_future(sandbox.execute(f"wait{i}")) for i in range(3)]
    await until(lambda: sum(len(ran(place)) for place in places) == 3)
    await sandbox.close()
    assert [(await call).outcome for call in calls] == [Outcome.INFRASTRUCTURE_FAILURE] * 3


def test_addresses_are_a_list_or_one_text():
    held = SandboxSettings(url=["http://a:1", "http://b:2"])
    assert held == SandboxSettings(url="http://a:1, http://b:2")
    assert held.url == "http://a:1,http://b:2"
    assert held.addresses == ["http://a:1", "http://b:2"]


@pytest.mark.parametrize("url", ["http://a:1,local://", "http://a:1,", "http://a:1,http://a:1", "ray://,ray://"])
def test_lists_of_anything_else_are_refused(url):
    with pytest.raises(ValueError, match="http"):
        SandboxSettings(url=url)


async def test_ray_urls_are_refused_outside_of_runs_on_ray():
    with pytest.raises(StartError, match="agentrl train cluster=ray"):
        await open_sandbox(SandboxSettings(url="ray://"))
