"""The image in a real Docker engine: compose with two runners, and ``docker://``.

AGENTRL_SANDBOX_IMAGE names the image. Without an engine or an image these tests are skipped, with CI=true they fail.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import httpx
import pytest
import pytest_asyncio
from docker.errors import DockerException
from ranks import free_port

import agentrl_sandbox
from agentrl_sandbox.check.case import Case
from agentrl_sandbox.check.suite import CASES, run_case, run_suite
from agentrl_sandbox.client import Outcome, Sandbox, SandboxSettings, StartError, open_sandbox
from agentrl_sandbox.docker import DockerSandbox

COMPOSE_FILE = Path(agentrl_sandbox.__file__).parents[1] / "compose.yaml"

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


def missing(why: str) -> None:
    """Skip the test, or fail it in CI, which provides an engine."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


@pytest.fixture(scope="module")
def engine() -> Iterator[docker.DockerClient]:
    try:
        client = docker.from_env()
    except DockerException as error:
        missing(f"no Docker engine answers: {error}")
    yield client
    client.close()


@pytest.fixture(scope="module")
def image(engine: docker.DockerClient) -> str:
    name = os.environ.get("AGENTRL_SANDBOX_IMAGE")
    if name is None:
        missing("AGENTRL_SANDBOX_IMAGE names no image; `. .ci/docker.sh` builds one")
    assert name is not None
    return name


class Compose:
    """A running project of the compose file."""

    def __init__(self, image: str) -> None:
        self.port = free_port()
        self.project = f"agentrl-test-{uuid.uuid4().hex[:8]}"
        self._environment = {
            **os.environ,
            "SANDBOX_IMAGE": image,
            "SANDBOX_PORT": str(self.port),
            "SANDBOX_TOKEN": "tok",
            "SANDBOX_WORKERS": "2",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def run(self, *arguments: str) -> str:
        command = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        command += ["-p", self.project, "-f", str(COMPOSE_FILE), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def containers(self, engine: docker.DockerClient, service: str) -> list:
        labels = [f"com.docker.compose.project={self.project}", f"com.docker.compose.service={service}"]
        return engine.containers.list(filters={"label": labels})


@pytest.fixture(scope="module")
def compose(image: str) -> Iterator[Compose]:
    project = Compose(image)
    try:
        project.run("up", "-d", "--no-build", "--scale", "runner=2")
        yield project
    finally:
        project.run("down", "-v", "-t", "5")


async def until_runners(compose: Compose, count: int) -> None:
    async with httpx.AsyncClient() as client, asyncio.timeout(120):
        while True:
            try:
                if (await client.get(f"{compose.url}/ready")).json()["runners"] == count:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(compose: Compose) -> AsyncIterator[Sandbox]:
    await until_runners(compose, 2)
    sandbox = await open_sandbox(SandboxSettings(url=compose.url, token="tok"))
    assert sandbox.isolation.missing == ()
    yield sandbox
    await sandbox.close()


async def test_compose_runs_real_programs(service):
    programs = {
        "print(6 * 7)": (Outcome.OK, "42\n"),
        "import sympy; print(sympy.factorint(360))": (Outcome.OK, "{2: 3, 3: 2, 5: 1}\n"),
        "import numpy, scipy, mpmath, networkx, pandas; print(scipy.linalg.det([[2]]))": (Outcome.OK, "2.0\n"),
        "1 / 0": (Outcome.ERROR, ""),
        "print(open('in').read())": (Outcome.OK, "file\n"),
    }
    done = await asyncio.gather(*(service.execute(one, files={"in": b"file"}, timeout=120.0) for one in programs))
    assert [(d.outcome, d.stdout) for d in done] == list(programs.values())
    assert (await service.execute("while True: pass", timeout=0.5)).outcome is Outcome.TIMEOUT


async def test_the_warm_interpreters_objects_are_immortal(service):
    program = "import sys, sympy\nprint(len({sys.getrefcount(one) for one in (None, sympy, sympy.Symbol.__new__)}))"
    assert (await service.execute(program)).stdout == "1\n"


async def test_runners_have_no_network_few_capabilities_and_a_read_only_root(service, compose, engine):
    runners = compose.containers(engine, "runner")
    assert len(runners) == 2
    for runner in runners:
        host = runner.attrs["HostConfig"]
        assert host["NetworkMode"] == "none"
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert set(host["CapAdd"]) == {"CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"}
        assert any("no-new-privileges" in option for option in host["SecurityOpt"])
        assert host["PidsLimit"] > 0
        assert host["Memory"] > 0
    (gateway,) = compose.containers(engine, "gateway")
    assert (gateway.attrs["HostConfig"]["CapDrop"], gateway.attrs["HostConfig"]["CapAdd"]) == (["ALL"], None)
    assert gateway.attrs["HostConfig"]["PortBindings"]["8080/tcp"][0]["HostIp"] == "127.0.0.1"


async def test_programs_reach_neither_the_sockets_nor_each_others_users(service):
    program = """
import os
try:
    print(os.listdir("/run/agentrl"))
except OSError as error:
    print("kept out")
print(os.getuid() != 0)
"""
    assert (await service.execute(program)).stdout == "kept out\nTrue\n"


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
async def test_attacks_are_withstood_in_containers(service, case: Case):
    finding = await run_case(service, case)
    assert finding.passed, finding.why


async def test_programs_at_once_are_kept_apart_in_containers(service):
    findings = [finding async for finding in run_suite(service, cases=())]
    assert [finding.why for finding in findings if not finding.passed] == []


async def test_sessions_in_compose(service):
    session = await service.open_session()
    await service.execute("x = 20", session=session)
    fork = await service.fork_session(session)
    assert (await service.execute("print(x + 1)", session=fork)).stdout == "21\n"
    await service.close_session(session)


async def test_exhausted_pids_are_typed_and_recovered(service, compose, engine):
    def limit_pids(count: int) -> None:
        for runner in compose.containers(engine, "runner"):
            subprocess.run(["docker", "update", f"--pids-limit={count}", runner.id], check=True, capture_output=True)

    limit_pids(1)
    try:
        done = await asyncio.gather(*(service.execute("print(1)", timeout=5.0) for _ in range(6)))
    finally:
        limit_pids(4096)
    assert {d.outcome for d in done} == {Outcome.INFRASTRUCTURE_FAILURE}
    await until_runners(compose, 2)
    assert (await service.execute("print(1)")).stdout == "1\n"


async def test_a_full_scratch_disk_is_the_programs_error_and_is_emptied(service):
    fill = "with open('big', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))"
    done = await asyncio.gather(*(service.execute(fill) for _ in range(4)))
    assert {d.outcome for d in done} == {Outcome.ERROR}
    assert all("OSError" in d.stderr for d in done)
    after = await asyncio.gather(*(service.execute("open('small', 'w').write('x'); print(1)") for _ in range(4)))
    assert [d.stdout for d in after] == ["1\n"] * 4


async def test_a_runner_killed_under_load_loses_nothing(service, compose, engine):
    calls = [
        asyncio.ensure_future(service.execute(f"import time; time.sleep(0.05); print({i})", request_id=f"load-{i}"))
        for i in range(150)
    ]
    while sum(call.done() for call in calls) < 20:
        await asyncio.sleep(0.02)
    compose.containers(engine, "runner")[0].kill()
    done = await asyncio.gather(*calls)
    failed = [d for d in done if d.outcome is Outcome.INFRASTRUCTURE_FAILURE]
    assert len(failed) <= 2  # what the killed runner had: it has two workers
    assert all(d.stdout == f"{i}\n" for i, d in enumerate(done) if d not in failed)


async def test_the_gateway_is_replaced_and_clients_go_on(service, compose, engine):
    calls = [asyncio.ensure_future(service.execute(f"import time; time.sleep(0.2); print({i})")) for i in range(20)]
    while not any(call.done() for call in calls):  # then the others are under way or wait
        await asyncio.sleep(0.02)
    (gateway,) = compose.containers(engine, "gateway")
    await asyncio.to_thread(gateway.restart, timeout=0)
    assert [(await call).stdout for call in calls] == [f"{i}\n" for i in range(20)]


@pytest.mark.parametrize("name", ["gateway", "runner"])
async def test_a_container_that_crashes_under_load_is_started_again(service, compose, engine, name):
    runners = len(compose.containers(engine, "runner"))
    calls = [asyncio.ensure_future(service.execute(f"import time; time.sleep(0.05); print({i})")) for i in range(150)]
    while sum(call.done() for call in calls) < 20:
        await asyncio.sleep(0.02)
    container = compose.containers(engine, name)[0]
    starts = container.attrs["RestartCount"]
    os.kill(container.attrs["State"]["Pid"], signal.SIGKILL)  # as a crash: what `docker kill` ends stays ended
    done = await asyncio.gather(*calls)
    failed = [d for d in done if d.outcome is Outcome.INFRASTRUCTURE_FAILURE]
    assert len(failed) <= (2 if name == "runner" else 0)  # what a runner had: it has two workers
    assert all(d.stdout == f"{i}\n" for i, d in enumerate(done) if d not in failed)
    await until_runners(compose, runners)
    container.reload()
    assert (container.status, container.attrs["RestartCount"]) == ("running", starts + 1)


async def test_scratch_is_bounded_in_the_image(service):
    bytes_bomb = "for n in range(2048):\n    with open(str(n), 'wb') as f: f.write(bytes(1 << 20))"
    inodes_bomb = "for n in range(130_000):\n    open(str(n), 'w').close()"
    for bomb in (bytes_bomb, inodes_bomb):
        done = await service.execute(f"{bomb}\nimport time; time.sleep(60)", timeout=60.0)
        assert done.outcome is Outcome.OUTPUT_LIMIT


async def test_docker_url_starts_a_container_and_removes_it(image, engine):
    def ours() -> set[str]:
        return {one.id for one in engine.containers.list(all=True, filters={"label": "agentrl-sandbox=docker"})}

    before = ours()
    settings = SandboxSettings(url=f"docker://{image}", workers=2, memory_mb=256)
    sandbox = await open_sandbox(settings)
    assert isinstance(sandbox, DockerSandbox)
    (container,) = ours() - before
    try:
        assert (await sandbox.execute("import numpy; print(numpy.ones(3).sum())")).stdout == "3.0\n"
        assert (await sandbox.execute("bytearray(1 << 30)")).outcome is Outcome.MEMORY_LIMIT
        session = await sandbox.open_session()
        assert (await sandbox.execute("print(1 + 1)", session=session)).stdout == "2\n"

        running = asyncio.ensure_future(sandbox.execute("import time; time.sleep(9)"))
        while not sandbox.registry.in_flight:  # requests that the container has
            await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.containers.get(container).kill)
        assert (await running).outcome is Outcome.INFRASTRUCTURE_FAILURE
        assert (await sandbox.execute("print('back')")).stdout == "back\n"
    finally:
        await sandbox.close()
    assert ours() == before


async def test_an_image_that_is_not_there_is_named(engine):
    with pytest.raises(StartError, match="no image 'no-such-image:here'"):
        await open_sandbox(SandboxSettings(url="docker://no-such-image:here"))
