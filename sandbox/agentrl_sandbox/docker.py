"""``docker://IMAGE``: programs run in a container of this client. Only this module uses the Docker SDK.

The container has no network. It shares only the directory of its socket with this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, ImageNotFound, NotFound

from agentrl_sandbox.call import Call
from agentrl_sandbox.service.pool import RunnerPool
from agentrl_sandbox.settings import LIMITS, SandboxSettings
from agentrl_sandbox.types import BusyError, ClosedError, Execution, StartError, UnisolatedError, infrastructure_failure

_SOCKETS = "/run/agentrl"
_START_SECONDS = 120.0
_LINGER_SECONDS = 30  # after this time, the container of a killed client stops and is removed
_QUEUE_LIMIT = 1_000_000  # large, because calls of this process wait instead of being rejected
_MEGABYTE = 1 << 20
_OVERHEAD_MB = 1024  # memory of the warm interpreters
_OVERHEAD_PIDS = 64
_PIDS_PER_SESSION = 4  # processes of an idle session

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID")
"""Capabilities that a runner needs for a separate user per slot and for cleanup, as in compose.yaml."""


class DockerSandbox(RunnerPool):
    """A sandbox in a container. Replaces a container that exits. Created by ``open_docker``."""

    def __init__(self, settings: SandboxSettings, client: docker.DockerClient) -> None:
        self._settings = settings
        self._client = client
        self._image = settings.url.removeprefix("docker://")
        # The parent directory admits only this user, because the mounted directory may briefly belong to root.
        self._directory = Path(tempfile.mkdtemp(prefix="agentrl-sandbox-"))
        self._sockets = self._directory / "sockets"
        self._sockets.mkdir(mode=0o700)
        super().__init__(self._sockets, queue_limit=_QUEUE_LIMIT, queue_seconds=settings.retry_deadline)
        self._container: Any = None
        self._replacing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the container and wait for its runner.

        Raises StartError if no runner connects, and UnisolatedError if a property is missing (unless
        ``allow_unisolated``).
        """
        self.open()
        await asyncio.to_thread(self._start_container)
        waiting = asyncio.ensure_future(self.registry.wait_for_runner(_START_SECONDS))
        ending = asyncio.ensure_future(asyncio.to_thread(self._wait_for_container_end))
        try:
            await asyncio.wait((waiting, ending), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done() or not waiting.result():
                why = ending.result() if ending.done() else f"its runner did not connect within {_START_SECONDS:g} s"
                raise StartError(f"the container of {self._image} did not start: {why}")
            missing = self.isolation.missing
            if missing and not self._settings.allow_unisolated:
                why = "Set allow_unisolated=true to run programs without these properties"
                raise UnisolatedError(f"{self._image} does not isolate programs", missing, why)
        except BaseException:
            ending.cancel()  # its thread ends with the container
            raise
        finally:
            waiting.cancel()
        self._replacing = asyncio.create_task(self._replace_ended_containers(ending))

    async def run(self, call: Call, request_id: str | None = None) -> Execution:
        if self._closed:
            raise ClosedError("the sandbox was closed")
        started = time.monotonic()
        try:
            return await super().run(call, request_id)
        except (BusyError, ClosedError) as error:  # the sandbox may be closed while the call waits
            return infrastructure_failure(str(error), started)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        await super().close()
        await asyncio.to_thread(self._remove_container)

    async def _replace_ended_containers(self, ending: asyncio.Future[str]) -> None:
        """Start a new container whenever the current container ends."""
        while True:
            await ending
            while True:
                try:
                    await asyncio.to_thread(self._start_container)
                    break
                except StartError:
                    await asyncio.sleep(1.0)  # the engine may be restarting; calls wait up to retry_deadline
            ending = asyncio.ensure_future(asyncio.to_thread(self._wait_for_container_end))

    def _start_container(self) -> None:
        settings = self._settings
        environment = {
            f"SANDBOX_{name.upper()}": str(getattr(settings, name)) for name in ("timeout", "allow_unisolated", *LIMITS)
        }
        environment["SANDBOX_WORKERS"] = str(settings.concurrency)
        memory = (settings.memory_mb + settings.scratch_mb) * settings.concurrency + _OVERHEAD_MB
        try:
            container = self._client.containers.create(
                self._image,
                ["runner", "--sockets", _SOCKETS, "--linger", str(_LINGER_SECONDS)],
                auto_remove=True,
                init=True,
                network_mode="none",
                read_only=True,
                tmpfs={"/tmp": "mode=1777,nosuid,nodev,size=2g,nr_inodes=131072"},
                cap_drop=["ALL"],
                cap_add=list(CAPABILITIES),
                security_opt=["no-new-privileges"],
                pids_limit=settings.max_processes * settings.concurrency
                + _PIDS_PER_SESSION * settings.max_sessions
                + _OVERHEAD_PIDS,
                mem_limit=memory * _MEGABYTE,
                runtime=os.environ.get("SANDBOX_RUNTIME", "runc"),
                environment=environment,
                volumes={str(self._sockets): {"bind": _SOCKETS, "mode": "rw"}},
                labels={"agentrl-sandbox": "docker"},
            )
            try:
                container.start()
            except DockerException:
                container.remove(force=True)  # auto_remove applies only to containers that ran
                raise
            self._container = container
        except ImageNotFound as error:
            why = f"no image {self._image!r}: build it with docker build -t {self._image} sandbox"
            raise StartError(why) from error
        except DockerException as error:
            raise StartError(f"Docker did not start {self._image!r}: {error}") from error

    def _wait_for_container_end(self) -> str:
        """Read the container's log until the container ends. Returns the last lines."""
        last: deque[bytes] = deque(maxlen=8)
        with contextlib.suppress(DockerException):
            last.extend(self._container.logs(stream=True, follow=True))
        return b"".join(last).decode("utf-8", "replace").strip() or "it logged nothing"

    def _remove_container(self) -> None:
        if self._container is not None:
            with contextlib.suppress(NotFound):
                self._container.remove(force=True)
        self._client.close()
        shutil.rmtree(self._directory, ignore_errors=True)


async def open_docker(settings: SandboxSettings) -> DockerSandbox:
    """Start a container.

    Raises StartError if it does not start, and UnisolatedError if a property is missing (unless ``allow_unisolated``).
    """
    try:
        client = await asyncio.to_thread(docker.from_env)
    except DockerException as error:
        raise StartError(f"Docker does not respond ({error}): start Docker, or set url=local://") from error
    sandbox = DockerSandbox(settings, client)
    try:
        await sandbox.start()
    except BaseException:
        await sandbox.close()
        raise
    return sandbox
